"""FedKD: its losses, the compressed exchange and its bytes, and that who has no partner trains locally."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbench import messages
from fedbench.errors import UserError
from fedbench.user import UserHost
from fedbench_baselines.fedkd import FedKD, compressed, expanded, rank_of

sys.path.append(str(Path(__file__).parent))
from conftest import USER
from spies import Exchange, spied, verbs
from tiny import WriteSuite, cell_of, host, program, run

R = 2
EVERYONE = ["user1", "user2", "user3", "user4"]
SIZES = {"user1": 40, "user4": 24}
MENTEE = 3 * 16 * 8 + 8 * 9 * 16 + 16 * 9 * 32 + 2 * (8 + 16 + 32) + 32 * 10 + 10
METHOD = "fedkd:width=8,energy_start=0.5,energy_end=0.9"


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    """Users 1 and 4 share a label space, not an architecture; users 2 and 3 are alone in theirs."""
    suite = write_suite()
    fourth = USER.format(name="user4", task="mlc", model="small-resnet").replace("train = 40", "train = 24")
    suite.write_text(suite.read_text() + fourth)
    return suite


def exchanges(path: Path, method: str, runs: Path) -> tuple[list[Exchange], dict[str, Any]]:
    """What a cell exchanged but for scores, and its result."""
    cell, registry = cell_of(path, method)
    memory = spied(registry)
    result = run(cell, registry, runs)
    return [exchange for exchange in memory if exchange.verb != "evaluate"], result


def mentor(path: Path, name: str = "user1", **options: Any) -> Any:
    """A user that has joined."""
    user: Any = program(path, "fedkd", name=name, **{"width": 8, **options})
    user.join()
    return user


# -- compression


@pytest.mark.parametrize(
    ("energy", "rank"), [(0.1, 1), (0.63, 1), (0.65, 2), (0.985, 2), (0.995, 3), (0.9998, 3), (0.99995, 4), (1.0, 4)]
)
def test_the_rank_is_the_least_with_more_than_the_energy(energy: float, rank: int) -> None:
    squares = torch.tensor([0.64, 0.35, 0.0099, 0.0001], dtype=torch.float64)
    assert rank_of(squares.sqrt(), energy) == rank


def test_as_much_as_the_energy_is_not_enough() -> None:
    assert [rank_of(torch.ones(4), energy) for energy in (0.25, 0.5, 0.75)] == [2, 3, 4]


def matrix(rows: int = 20, columns: int = 30) -> Tensor:
    """A matrix whose singular values fall by half."""
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(n, 8, generator=generator).double())[0] for n in (rows, columns))
    return ((left * 0.5 ** torch.arange(8)) @ right.T).float()


@pytest.mark.parametrize("energy", [0.5, 0.9, 0.98, 0.999])
def test_a_compressed_matrix_is_the_truncated_decomposition(energy: float) -> None:
    update = matrix()
    u, s, v = np.linalg.svd(update.double().numpy())
    rank = 1
    while (s[:rank] ** 2).sum() <= energy * (s**2).sum():
        rank += 1
    message = compressed({"weight": update}, energy)
    assert {name: tuple(value.shape) for name, value in message.items()} == {
        "weight:U": (20, rank),
        "weight:S": (rank,),
        "weight:V": (rank, 30),
    }
    assert all(value.dtype == torch.float32 for value in message.values())
    assert messages.tensor_bytes(message) == 4 * rank * (20 + 30 + 1) < 4 * 600
    restored = expanded(message)["weight"]
    wanted = sum(s[k] * np.outer(u[:, k], v[k]) for k in range(rank))
    assert np.allclose(restored.numpy(), wanted, atol=1e-6)
    lost = float((restored - update).double().square().sum() / update.double().square().sum())
    assert lost == pytest.approx(1 - (s[:rank] ** 2).sum() / (s**2).sum(), abs=1e-6) and lost < 1 - energy


def test_a_convolution_is_compressed_as_a_matrix() -> None:
    flat = matrix(20, 36)
    message = compressed({"weight": flat.reshape(20, 4, 3, 3)}, 0.9)
    assert message["weight:V"].shape[1] == 36
    assert torch.equal(expanded(message)["weight"], expanded(compressed({"weight": flat}, 0.9))["weight"])


@pytest.mark.parametrize(
    "update", [torch.eye(12), torch.zeros(6, 5), torch.ones(7), torch.ones(1, 4)], ids=["full", "zero", "vector", "row"]
)
def test_what_factors_would_not_make_smaller_crosses_as_it_is(update: Tensor) -> None:
    message = compressed({"weight": update}, 0.95)
    assert message.keys() == {"weight"} and torch.equal(message["weight"], update)
    assert torch.equal(expanded(message)["weight"], update)


def test_all_of_the_energy_is_all_of_the_matrix() -> None:
    update = matrix()
    assert torch.allclose(expanded(compressed({"weight": update}, 1.0))["weight"], update, atol=1e-6)


def test_the_energy_grows_from_round_to_round() -> None:
    method = FedKD(energy_start=0.9, energy_end=0.98)
    assert [method.energy(r, 4) for r in range(4)] == pytest.approx([0.92, 0.94, 0.96, 0.98])
    assert FedKD().energy(9, 10) == pytest.approx(0.98)


# -- a local step


def kl(student: Tensor, teacher: Tensor, multi_label: bool) -> Tensor:
    """KL(teacher ‖ student), written out."""
    if multi_label:
        p, q = teacher.sigmoid(), student.sigmoid()
        return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    p, q = teacher.softmax(1), student.softmax(1)
    return (p * (p / q).log()).sum(1).mean()


@pytest.mark.parametrize("place", ["features", "embedding"])
@pytest.mark.parametrize("name", ["user1", "user2"])
def test_the_loss_and_its_gradients_are_the_papers(path: Path, name: str, place: str) -> None:
    path.write_text(path.read_text().replace("[protocol]", f'[protocol]\nhead = "{place}"'))
    user = mentor(path, name)
    modules = (user.representation, user.head, user.mentee, user.map)
    for module in modules:
        module.double()
    x, targets = user.private_batch()
    x, multi_label = x.double(), name == "user1"
    pixels = user._pixels.permute(0, 3, 1, 2).double() / 127.5 - 1
    h_t, h_s = user.representation.backbone.net(pixels).mean((2, 3)), user.mentee.body.net(pixels).mean((2, 3))
    mentor_out = user.head(h_t if place == "features" else user.representation.projection(h_t))
    mentee_out = user.mentee.head(h_s)
    task_t, task_s = user.task.loss(mentor_out, targets), user.task.loss(mentee_out, targets)
    hidden = (h_t - h_s @ user.map.weight.T).square().mean()
    loss_t = task_t + (kl(mentor_out, mentee_out, multi_label) + hidden) / (task_t + task_s)
    loss_s = task_s + (kl(mentee_out, mentor_out, multi_label) + hidden) / (task_t + task_s)

    # The nets scale pixels to float32 themselves, so they are handed what they would have made of them.
    def as_double(module: Any) -> None:
        module.forward = lambda x: module.net(pixels).mean((2, 3))

    as_double(user.representation.backbone)
    as_double(user.mentee.body)
    loss = user.private_loss(x, targets)
    assert float(loss.detach()) == pytest.approx(float((loss_t + loss_s).detach()), rel=1e-10)
    for module in modules:
        parameters = list(module.parameters())
        pairs = zip(
            torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True),
            torch.autograd.grad(loss_t + loss_s, parameters, retain_graph=True, allow_unused=True),
            strict=True,
        )
        for found, wanted in pairs:
            assert (found is None) == (wanted is None)
            assert found is None or torch.allclose(found, wanted, atol=1e-10)


def test_a_task_loss_of_0_gives_a_finite_loss(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = mentor(path)
    x, targets = user.private_batch()
    monkeypatch.setattr(user.task, "loss", lambda outputs, targets: 0 * outputs.sum())
    loss = user.private_loss(x, targets)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(value.grad).all() for value in user.mentee.parameters())


def test_mentor_map_and_mentee_are_trained_in_the_protocols_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = mentor(path, mentee_rate=2.0)
    own, shared = user.fit_optimizer.param_groups
    assert (own["rate"], shared["rate"]) == (2e-3, 4e-3)
    modules = (user.representation.backbone, user.head, user.mentee, user.map)
    before = [messages.pack(module.state_dict()) for module in modules]
    taken = []
    step = user.step
    monkeypatch.setattr(user, "step", lambda optimizer, loss: (taken.append(optimizer), step(optimizer, loss)))
    user.fit()
    assert taken == [user.fit_optimizer] * 2
    after = [messages.pack(module.state_dict()) for module in modules]
    assert all(one != two for one, two in zip(before, after, strict=True))


def test_mentees_start_equal_and_maps_are_each_users_own(path: Path) -> None:
    one, two = mentor(path), mentor(path, "user4")
    assert messages.pack(one.mentee.state_dict()) == messages.pack(two.mentee.state_dict())
    assert one.map.weight.shape == (64, 32) and two.map.weight.shape == (32, 32)
    assert not torch.equal(one.map.weight, mentor(path, "user3").map.weight)


# -- the exchange


def test_partners_exchange_compressed_changes(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, METHOD, tmp_path)
    assert verbs(memory) == ["join", *["fit", "upload", "download"] * R, "fit"]
    for exchange in memory:
        assert list(exchange.sent) == (EVERYONE if exchange.verb == "fit" else list(SIZES))
    ups = [exchange for exchange in memory if exchange.verb == "upload"]
    downs = [exchange for exchange in memory if exchange.verb == "download"]
    bytes_up = bytes_down = 0
    for up, down, energy in zip(ups, downs, (0.7, 0.9), strict=True):
        assert all(sent == {"energy": pytest.approx(energy)} for sent in up.sent.values())
        changes = [expanded(up.replies[user]) for user in SIZES]
        mean = {
            name: sum(size / 64 * change[name] for size, change in zip(SIZES.values(), changes, strict=True))
            for name in changes[0]
        }
        assert messages.pack(down.sent["user1"]) == messages.pack(down.sent["user4"])
        wanted = expanded(compressed({name: torch.as_tensor(value) for name, value in mean.items()}, energy))
        returned = expanded(down.sent["user1"])
        assert returned.keys() == wanted.keys()
        assert all(torch.allclose(returned[name], wanted[name], atol=1e-6) for name in wanted)
        assert any(name.endswith(":U") for name in up.replies["user1"])
        bytes_up += sum(messages.tensor_bytes(reply) for reply in up.replies.values())
        bytes_down += sum(messages.tensor_bytes(sent) for sent in down.sent.values())
    assert result["bytes"]["tensor_up"] == round(bytes_up / R)
    assert result["bytes"]["tensor_down"] == round(bytes_down / R)
    assert max(result["bytes"]["tensor_up"], result["bytes"]["tensor_down"]) < 2 * 4 * MENTEE / 2
    assert result["touched"] == list(SIZES)


def test_after_an_exchange_the_mentee_is_the_same_everywhere(path: Path) -> None:
    users = [mentor(path, name) for name in SIZES]
    start = {name: value.detach().clone() for name, value in users[0].mentee.named_parameters()}
    for _ in range(2):
        for user in users:
            user.fit()
        sent = [expanded(user.upload(0.9)) for user in users]
        mean = {name: (sent[0][name] + sent[1][name]) / 2 for name in sent[0]}
        for user in users:
            user.download(**compressed(mean, 1.0))
        for name, value in start.items():
            value += mean[name].reshape(value.shape)
            found = [dict(user.mentee.named_parameters())[name] for user in users]
            assert torch.equal(*found) and torch.allclose(found[0], value, atol=1e-6)


def test_a_change_is_measured_from_the_last_exchange(path: Path) -> None:
    user = mentor(path)
    assert all(not value.any() for value in user.upload(1.0).values())
    before = {name: value.detach().clone() for name, value in user.mentee.named_parameters()}
    user.fit()
    change = expanded(user.upload(1.0))
    for name, value in user.mentee.named_parameters():
        assert torch.allclose(before[name] + change[name].reshape(value.shape), value, atol=1e-6)
    user.download(**compressed(change, 1.0))
    assert all(not value.any() for value in user.upload(1.0).values())


def test_partners_change_and_the_others_are_local_bit_for_bit(path: Path, tmp_path: Path) -> None:
    def curves(method: str) -> dict[str, list[float]]:
        rounds = exchanges(path, method, tmp_path)[1]["rounds"]
        kinds = ("validation", "train_loss")
        return {user: [record[kind][user] for record in rounds for kind in kinds] for user in EVERYONE}

    local, fedkd = curves("local"), curves(METHOD)
    assert [user for user in EVERYONE if local[user] != fedkd[user]] == list(SIZES)


def test_scores_are_those_of_the_mentor(path: Path) -> None:
    user = mentor(path)
    x = user.participant.train.rows(torch.arange(6), 0)
    assert torch.equal(user.outputs(x), program(path, "local").outputs(x))


def test_it_does_not_apply_where_nobody_has_a_partner(write_suite: WriteSuite, tmp_path: Path) -> None:
    _, result = exchanges(write_suite(), "fedkd", tmp_path)
    assert result["touched"] == [] and result["status"] not in ("done", "failed")


def test_where_a_partner_is_skipped_nobody_is_left_to_average_with(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text(path.read_text().replace("[protocol]", '[protocol]\non_failure = "skip"'))
    upload: Any = FedKD.User.upload  # type: ignore[attr-defined]

    def failing(self: Any, energy: float) -> dict[str, Any]:
        if self.name == "user4" and self.fits == 2:
            raise RuntimeError("no such luck")
        return upload(self, energy)  # type: ignore[no-any-return]

    failing.is_verb = True  # type: ignore[attr-defined]
    monkeypatch.setattr(FedKD.User, "upload", failing)
    memory, result = exchanges(path, METHOD, tmp_path)
    assert result["status"] == "done"
    assert [list(exchange.sent) for exchange in memory if exchange.verb == "download"] == [list(SIZES), []]


def test_a_restored_user_goes_on_bit_for_bit(path: Path) -> None:
    hosts = [host(path, "fedkd", width=8) for _ in range(2)]

    def round_of(user: UserHost) -> None:
        user.call("fit", messages.encode({}))
        sent = messages.decode(user.call("upload", messages.encode({"energy": 0.9})))
        user.call("download", messages.encode(sent))

    hosts[0].call("join", messages.encode({}))
    round_of(hosts[0])
    hosts[0].call("fit", messages.encode({}))  # so that the mentee differs from the last exchange's
    state = hosts[0].save()
    hosts[1].restore(state)
    assert hosts[1].save() == state
    for user in hosts:
        round_of(user)
    assert hosts[0].save() == hosts[1].save() != state


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"energy_start": 0.0}, "'energy_start' of fedkd is 0.0"),
        ({"energy_end": 1.01}, "'energy_end' of fedkd is 1.01"),
        ({"width": 4}, "'width' of fedkd is 4"),
        ({"mentee_rate": -1.0}, "'mentee_rate' of fedkd is -1.0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        FedKD(**options)
