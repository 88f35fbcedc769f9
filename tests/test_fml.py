"""FML and the small shared net: its losses, whom it is averaged among, and that who has no partner trains locally."""

from __future__ import annotations

import dataclasses
import math
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
from fedbench_baselines.fml import FML
from fedbench_baselines.mentee import divergence

sys.path.append(str(Path(__file__).parent))
from conftest import USER
from spies import Exchange, spied, verbs
from tiny import WriteSuite, cell_of, host, program, run

R = 2
EVERYONE = ["user1", "user2", "user3", "user4"]
SIZES = {"user1": 40, "user4": 24}
BODY = 3 * 16 * 8 + 8 * 9 * 16 + 16 * 9 * 32 + 2 * (8 + 16 + 32)
HEAD = 32 * 10 + 10


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    """Users 1 and 4 share a label space, not an architecture; users 2 and 3 are alone in theirs."""
    suite = write_suite(("pixels = 16", "pixels = 16\nviews = 2"))
    fourth = USER.format(name="user4", task="mlc", model="small-resnet").replace("train = 40", "train = 24")
    suite.write_text(suite.read_text() + fourth)
    return suite


def exchanges(path: Path, method: str, runs: Path) -> tuple[list[Exchange], dict[str, Any]]:
    """What a cell exchanged but for scores, and its result."""
    cell, registry = cell_of(path, method)
    memory = spied(registry)
    result = run(cell, registry, runs)
    return [exchange for exchange in memory if exchange.verb != "evaluate"], result


def mutual(path: Path, name: str = "user1", **options: Any) -> Any:
    """A user that has joined."""
    user: Any = program(path, "fml", name=name, **{"width": 8, **options})
    user.join()
    return user


# -- the divergence


def logits(classes: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2, 3, classes, generator=generator, dtype=torch.float64)
    return rows[0].requires_grad_(), rows[1].requires_grad_()


def plain_divergence(student: Tensor, teacher: Tensor, multi_label: bool) -> Tensor:
    """The same in loops over items and classes."""
    total = torch.zeros((), dtype=torch.float64)
    for s, t in zip(student, teacher, strict=True):
        if multi_label:
            for a, b in zip(s, t, strict=True):
                q, p = 1 / (1 + (-a).exp()), 1 / (1 + (-b).exp())
                total = total + (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()) / len(s)
        else:
            q, p = s.exp() / s.exp().sum(), t.exp() / t.exp().sum()
            for a, b in zip(q, p, strict=True):
                total = total + b * (b / a).log()
    return total / len(student)


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_divergence_and_its_gradients_are_those_of_the_loops(multi_label: bool) -> None:
    student, teacher = logits()
    value = divergence(student, teacher, multi_label=multi_label)
    wanted = plain_divergence(student, teacher, multi_label)
    assert value.item() == pytest.approx(wanted.item(), rel=1e-12)
    found = torch.autograd.grad(value, (student, teacher))
    expected = torch.autograd.grad(wanted, (student, teacher))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_divergence_is_0_of_equals_and_finite_of_extremes(multi_label: bool) -> None:
    student, teacher = logits()
    assert divergence(student, student, multi_label=multi_label).item() == pytest.approx(0, abs=1e-15)
    value = divergence(student * 1e3, teacher * 1e3, multi_label=multi_label)
    gradients = torch.autograd.grad(value, (student, teacher))
    assert math.isfinite(value.item()) and value.item() > 10
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


# -- a local step


@pytest.mark.parametrize("name", ["user1", "user2"])
@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.3, 0.9), (1.0, 0.0)])
def test_the_losses_are_the_papers(path: Path, name: str, alpha: float, beta: float) -> None:
    user = mutual(path, name, alpha=alpha, beta=beta)
    x, targets = user.private_batch()
    multi_label = name == "user1"
    own, meme = user.outputs(x).double(), user.mentee(user._pixels)[1].double()
    own_loss = alpha * user.task.loss(own, targets) + (1 - alpha) * plain_divergence(own, meme.detach(), multi_label)
    meme_loss = beta * user.task.loss(meme, targets) + (1 - beta) * plain_divergence(meme, own.detach(), multi_label)
    loss = user.private_loss(x, targets)
    assert loss.item() == pytest.approx((own_loss + meme_loss).item(), rel=1e-5)
    # Each net follows its own loss alone: nothing reaches it through the other's targets.
    for module, its_loss in ((user.head, own_loss), (user.representation.backbone, own_loss), (user.mentee, meme_loss)):
        parameters = list(module.parameters())
        found = torch.autograd.grad(loss, parameters, retain_graph=True)
        wanted = torch.autograd.grad(its_loss, parameters, retain_graph=True)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))


def test_both_nets_see_the_batches_of_local_training(path: Path) -> None:
    user, local = mutual(path), program(path, "local")
    for _ in range(12):
        (x, targets), (wanted, labels) = user.private_batch(), local.private_batch()
        assert torch.equal(x, wanted) and torch.equal(targets, labels)
        assert torch.equal(user._pixels.float(), x)  # what this user's own net reads are the pixels too
    assert torch.equal(user.fit_generator.get_state(), local.fit_generator.get_state())


def test_a_local_phase_takes_the_protocols_steps_and_trains_both(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = mutual(path)
    before = {name: value.clone() for name, value in user.mentee.state_dict().items()}
    taken = []
    step = user.step
    monkeypatch.setattr(user, "step", lambda optimizer, loss: (taken.append(optimizer), step(optimizer, loss)))
    user.fit()
    assert taken == [user.fit_optimizer] * 2
    assert not any(torch.equal(value, before[name]) for name, value in user.mentee.state_dict().items())


def test_the_memes_rate_is_the_users_own_times_a_factor(path: Path) -> None:
    user = mutual(path, meme_rate=0.5)
    own, meme = user.fit_optimizer.param_groups
    assert (own["rate"], meme["rate"]) == (2e-3, 1e-3)
    assert {id(value) for value in meme["params"]} == {id(value) for value in user.mentee.parameters()}


def test_scores_are_those_of_the_own_model(path: Path) -> None:
    user = mutual(path)
    x = user.participant.train.rows(torch.arange(6), 0)
    assert torch.equal(user.outputs(x), program(path, "local").outputs(x))


def test_memes_start_equal_in_a_label_space_and_their_bodies_everywhere(path: Path) -> None:
    users = [mutual(path, name) for name in EVERYONE]
    heads = [user.mentee.head.weight.detach() for user in users]
    bodies = [messages.pack(user.mentee.body.state_dict()) for user in users]
    assert torch.equal(heads[0], heads[3]) and not torch.equal(heads[0], heads[2])
    assert len(set(bodies)) == 1
    other: Any = program(path, "fml", seed=1, width=8)
    assert messages.pack(other.mentee.body.state_dict()) != bodies[0]


# -- the exchange


def test_partners_send_their_memes_and_get_the_weighted_mean(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "fml:width=8", tmp_path)
    assert verbs(memory) == ["join", *["fit", "upload", "download"] * R, "fit"]
    for exchange in memory:
        assert list(exchange.sent) == (EVERYONE if exchange.verb == "fit" else list(SIZES))
    ups = [exchange.replies for exchange in memory if exchange.verb == "upload"]
    downs = [exchange.sent for exchange in memory if exchange.verb == "download"]
    for up, down in zip(ups, downs, strict=True):
        names = up["user1"].keys()
        assert names == up["user4"].keys() == down["user1"].keys() == down["user4"].keys()
        for name in names:
            assert not torch.equal(up["user1"][name], up["user4"][name])
            wanted = sum(size / 64 * up[user][name].double() for user, size in SIZES.items())
            for user in SIZES:
                assert torch.allclose(down[user][name].double(), torch.as_tensor(wanted), atol=1e-7)
    assert result["bytes"]["tensor_up"] == result["bytes"]["tensor_down"] == 2 * 4 * (BODY + HEAD)
    assert result["touched"] == list(SIZES)


def test_a_shared_body_is_averaged_among_all_and_heads_stay(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "fml:width=8,share=body", tmp_path)
    assert all(list(exchange.sent) == EVERYONE for exchange in memory)
    up = next(exchange.replies for exchange in memory if exchange.verb == "upload")
    down = next(exchange.sent for exchange in memory if exchange.verb == "download")
    sizes = {"user1": 40, "user2": 40, "user3": 40, "user4": 24}
    for name in up["user1"]:
        wanted = sum(size / 144 * up[user][name].double() for user, size in sizes.items())
        assert all(torch.allclose(down[user][name].double(), torch.as_tensor(wanted), atol=1e-7) for user in EVERYONE)
    assert result["bytes"]["tensor_up"] == result["bytes"]["tensor_down"] == 4 * 4 * BODY
    assert result["touched"] == EVERYONE


@pytest.mark.parametrize("share", ["model", "body"])
def test_a_user_goes_on_from_the_mean(path: Path, share: str) -> None:
    user = mutual(path, share=share)
    head = user.mentee.head.weight.detach().clone()
    mean = {name: value + 1 for name, value in user.upload().items()}
    user.download(**mean)
    assert all(torch.equal(value, mean[name]) for name, value in user.upload().items())
    assert torch.equal(user.mentee.head.weight, head) == (share == "body")


def test_partners_change_and_the_others_are_local_bit_for_bit(path: Path, tmp_path: Path) -> None:
    def curves(method: str) -> dict[str, list[float]]:
        rounds = exchanges(path, method, tmp_path)[1]["rounds"]
        kinds = ("validation", "train_loss")
        return {user: [record[kind][user] for record in rounds for kind in kinds] for user in EVERYONE}

    local, fml = curves("local"), curves("fml:width=8")
    assert [user for user in EVERYONE if local[user] != fml[user]] == list(SIZES)


def test_the_own_model_learns_from_the_meme(path: Path) -> None:
    states = []
    for shift in (0.0, 0.5):
        user = mutual(path)
        user.download(**{name: value + shift for name, value in user.upload().items()})
        user.fit()
        states.append(messages.pack({**user.representation.state_dict(), **user.head.state_dict()}))
    local = program(path, "local")
    local.fit()
    states.append(messages.pack({**local.representation.state_dict(), **local.head.state_dict()}))
    assert len(set(states)) == 3


def test_who_has_no_pictures_stays_local(path: Path) -> None:
    user: Any = program(path, "fml", width=8)
    data = user.participant.train
    data.samples = dataclasses.replace(data.samples, inputs={"text": np.array(["a"] * 40)})
    assert user.join() == {"joined": False} and user.upload() == {}
    local = program(path, "local")
    for one in (user, local):
        one.fit()
    assert messages.pack(user.representation.state_dict()) == messages.pack(local.representation.state_dict())


def test_it_does_not_apply_where_nobody_has_a_partner(write_suite: WriteSuite, tmp_path: Path) -> None:
    _, result = exchanges(write_suite(), "fml", tmp_path)
    assert result["touched"] == [] and result["status"] not in ("done", "failed")


def test_where_a_partner_is_skipped_nobody_is_left_to_average_with(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text(path.read_text().replace("[protocol]", '[protocol]\non_failure = "skip"'))
    upload: Any = FML.User.upload  # type: ignore[attr-defined]

    def failing(self: Any) -> dict[str, Any]:
        if self.name == "user4" and self.fits == 2:
            raise RuntimeError("no such luck")
        return upload(self)  # type: ignore[no-any-return]

    failing.is_verb = True  # type: ignore[attr-defined]
    monkeypatch.setattr(FML.User, "upload", failing)
    memory, result = exchanges(path, "fml:width=8", tmp_path)
    assert result["status"] == "done"
    assert [list(exchange.sent) for exchange in memory if exchange.verb == "download"] == [list(SIZES), []]


def test_a_restored_user_goes_on_bit_for_bit(path: Path) -> None:
    hosts = [host(path, "fml", width=8) for _ in range(2)]

    def round_of(user: UserHost) -> None:
        user.call("fit", messages.encode({}))
        sent = messages.decode(user.call("upload", messages.encode({})))
        user.call("download", messages.encode({name: value / 2 for name, value in sent.items()}))

    hosts[0].call("join", messages.encode({}))
    round_of(hosts[0])
    state = hosts[0].save()
    hosts[1].restore(state)
    assert hosts[1].save() == state
    for user in hosts:
        round_of(user)
    assert hosts[0].save() == hosts[1].save() != state


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alpha": 1.1}, "'alpha' of fml is 1.1"),
        ({"beta": -0.1}, "'beta' of fml is -0.1"),
        ({"width": 12}, "'width' of fml is 12"),
        ({"width": 0}, "'width' of fml is 0"),
        ({"meme_rate": 0.0}, "'meme_rate' of fml is 0.0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        FML(**options)
