"""FedProto: prototypes, their means and the pull towards them against naive versions, and what crosses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbench import messages
from fedbench.errors import UserError
from fedbench_baselines.fedproto import FedProto, mean_prototypes
from fedbench_baselines.prototypes import PrototypeUser, class_means, memberships, squared_distance

sys.path.append(str(Path(__file__).parent))
from public_exchange import ALONE, CLASSES, GROUPS, PARTNERS, TASKS, D, R, call, changed, exchanges, five_users
from shared_architecture import check_resume
from spies import verbs
from tiny import WriteSuite, cell_of, host, program, run

METHODS = ["fedproto", "fedtgp"]


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    return five_users(write_suite)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def message_of(user: Any, seed: int = 3) -> dict[str, Tensor]:
    """Global prototypes of every other class of a user."""
    classes = torch.arange(CLASSES[TASKS[user.name]]) % 2 == 0
    rows = nn.functional.normalize(numbers(int(classes.sum()), D, seed=seed).float(), dim=1)
    return {"prototypes": rows, "classes": classes}


def naive_distance(z: Tensor, prototypes: dict[int, Tensor], has: list[list[int]]) -> Tensor:
    """Mean over items of the mean over their classes with a prototype, or 0 where they have none."""
    total = torch.zeros((), dtype=z.dtype)
    for row, classes in zip(z, has, strict=True):
        known = [k for k in classes if k in prototypes]
        for k in known:
            total = total + sum((row[i] - prototypes[k][i]) ** 2 for i in range(len(row))) / len(known)
    return total / len(z)


# -- equations


def test_memberships_of_class_numbers_and_of_labels() -> None:
    assert memberships(torch.tensor([2, 0]), 3).tolist() == [[0, 0, 1], [1, 0, 0]]
    labels = torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.uint8)
    members = memberships(labels, 3)
    assert members.dtype == torch.float32 and members.tolist() == labels.tolist()


def test_a_prototype_is_the_mean_over_the_items_that_have_the_class() -> None:
    z = numbers(5, 3)
    has = [[0, 3], [3], [], [1], [0, 1, 3]]
    members = torch.tensor([[float(k in classes) for k in range(4)] for classes in has], dtype=torch.float64)
    prototypes, counts = class_means(z, members)
    assert counts.tolist() == [2, 2, 0, 3]
    for row, k in zip(prototypes, (0, 1, 3), strict=True):
        items = [z[b] for b in range(5) if k in has[b]]
        assert torch.allclose(row, sum(items) / len(items), atol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "has", [[[0], [2], [1], [0]], [[0, 2], [1, 3], [], [0, 1, 2, 3]]], ids=["one class each", "any number"]
)
def test_the_distance_and_its_gradient(has: list[list[int]]) -> None:
    prototypes = {0: numbers(3, seed=1), 2: numbers(3, seed=2), 3: numbers(3, seed=3)}
    z, same = (numbers(4, 3).requires_grad_() for _ in range(2))
    members = torch.tensor([[float(k in classes) for k in prototypes] for classes in has], dtype=torch.float64)
    loss = squared_distance(z, torch.stack(list(prototypes.values())), members)
    expected = naive_distance(same, prototypes, has)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    loss.backward()
    expected.backward()
    assert torch.allclose(z.grad, same.grad, atol=1e-12)  # type: ignore[arg-type]


def test_nobody_is_drawn_anywhere_without_prototypes_of_its_classes() -> None:
    z = numbers(4, 3).requires_grad_()
    for count in (0, 2):
        loss = squared_distance(z, numbers(count, 3), torch.zeros(4, count, dtype=torch.float64))
        loss.backward()
        assert loss.item() == 0 and not z.grad.any()  # type: ignore[union-attr]


def test_the_distance_is_the_mean_square_of_rows_whose_numbers_are_about_one() -> None:
    z, prototypes = (nn.functional.normalize(numbers(6, D, seed=seed), dim=1) for seed in (0, 1))
    own = prototypes[:2]
    members = torch.tensor([[1.0, 0.0], [0.0, 1.0]] * 3, dtype=torch.float64)
    scaled = nn.functional.mse_loss(D**0.5 * z, D**0.5 * own.repeat(3, 1))
    assert squared_distance(z, own, members).item() == pytest.approx(scaled.item(), rel=1e-12)


@pytest.mark.parametrize("counts", [[[1.0, 1.0], [1.0, 1.0], [1.0]], [[3.0, 1.0], [1.0, 5.0], [4.0]]])
def test_a_global_prototype_is_the_mean_over_the_users_that_have_the_class(counts: list[list[float]]) -> None:
    owned = [[0, 2], [2, 3], [2]]
    sent = [
        {"prototypes": numbers(len(has), 3, seed=n), "classes": torch.tensor([k in has for k in range(5)])}
        for n, has in enumerate(owned)
    ]
    found = mean_prototypes(sent, [torch.tensor(one) for one in counts])
    assert found["classes"].tolist() == [True, False, True, True, False]
    for row, k in zip(found["prototypes"], (0, 2, 3), strict=True):
        total, weights = torch.zeros(3, dtype=torch.float64), 0.0
        for n, has in enumerate(owned):
            if k in has:
                weight = counts[n][has.index(k)]
                total, weights = total + weight * sent[n]["prototypes"][has.index(k)], weights + weight
        assert torch.allclose(row, total / weights, atol=1e-12)


# -- the user


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", ["features", "embedding"])
@pytest.mark.parametrize("name", ["user1", "user3"])
def test_local_training_adds_the_weighted_distance(write_suite: WriteSuite, method: str, place: str, name: str) -> None:
    path = five_users(write_suite, ("[protocol]", f'[protocol]\nhead = "{place}"'))
    user: Any = program(path, method, name=name, pull=0.5)
    local: Any = program(path, "local", name=name)
    x, targets = user.private_batch()
    assert torch.equal(user.private_loss(x, targets), local.private_loss(x, targets))
    sent = message_of(user)
    user._prototypes, user._classes = sent["prototypes"], sent["classes"]
    known = sent["classes"].nonzero().flatten().tolist()
    prototypes = dict(zip(known, sent["prototypes"], strict=True))
    has = [[int(row)] if targets.ndim == 1 else row.nonzero().flatten().tolist() for row in targets]
    distance = naive_distance(local.representation(x), prototypes, has)
    assert distance > 0
    expected = local.private_loss(x, targets) + 0.5 * distance
    loss = user.private_loss(x, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(
        user.fit_optimizer.param_groups[0]["params"], local.fit_optimizer.param_groups[0]["params"], strict=True
    ):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_prototypes_train_the_projection_and_only_where_they_are_given(path: Path, method: str) -> None:
    user: Any = program(path, method)
    projection = {name: value.clone() for name, value in user.representation.projection.state_dict().items()}
    taken = []
    step = user.step
    user.step = lambda optimizer, loss: (taken.append(optimizer), step(optimizer, loss))

    def kept() -> bool:
        now = user.representation.projection.state_dict()
        return all(torch.equal(now[name], value) for name, value in projection.items())

    assert user.fit().keys() == {"loss"} and kept()
    reply = user.fit(**message_of(user))
    assert reply.keys() == {"loss", "distance"} and not kept()
    assert taken == [user.fit_optimizer] * 4
    assert user._prototypes is None  # the next phase has those that it is given
    assert user.fit().keys() == {"loss"}


def test_the_reply_tells_the_mean_distance(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user: Any = program(path, "fedproto", name="user3", pull=2.0)
    losses, tasks = [], []
    step, task_loss = user.step, user.task.loss
    monkeypatch.setattr(
        user, "step", lambda optimizer, loss: (losses.append(float(loss.detach())), step(optimizer, loss))
    )

    def remembered(outputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = task_loss(outputs, targets)
        tasks.append(float(loss.detach()))
        return loss

    monkeypatch.setattr(user.task, "loss", remembered)
    reply = user.fit(**message_of(user))
    assert len(losses) == len(tasks) == 2
    assert reply["distance"] == pytest.approx((sum(losses) - sum(tasks)) / 2 / 2.0, rel=1e-4)


@pytest.mark.parametrize("name", ["user1", "user3"])
def test_a_user_tells_the_mean_embeddings_of_the_classes_that_it_has(path: Path, name: str) -> None:
    user: Any = program(path, "fedproto", name=name)
    user.fit()
    data, order = user.participant.train, user.fit_generator.get_state()
    modes: list[bool] = []
    hook = user.representation.register_forward_hook(lambda module, *_: modes.append(module.training))
    found = user.summarise()
    hook.remove()
    assert modes == [False]
    assert user.representation.training and torch.equal(user.fit_generator.get_state(), order)
    z = user.representation(data.rows(torch.arange(len(data)), 0)).detach()
    targets = data.targets(torch.arange(len(data)))
    wanted = {}
    for k in range(CLASSES[TASKS[name]]):
        items = (targets[:, k] if targets.ndim == 2 else targets == k).nonzero().flatten()
        if len(items):
            wanted[k] = (len(items), z[items].mean(0))
    assert found.keys() == {"prototypes", "classes"}
    assert found["classes"].nonzero().flatten().tolist() == list(wanted)
    assert found["prototypes"].shape == (len(wanted), D)
    for row, (_, mean) in zip(found["prototypes"], wanted.values(), strict=True):
        assert torch.allclose(row, mean, atol=1e-5)
    assert user.summarise(counts=True)["counts"].tolist() == [count for count, _ in wanted.values()]


def test_prototypes_do_not_depend_on_the_evaluation_batch(write_suite: WriteSuite) -> None:
    found = []
    for size in (7, 1000):
        user: Any = program(five_users(write_suite, ("eval_batch = 50", f"eval_batch = {size}")), "fedproto")
        found.append(user.summarise()["prototypes"])
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_restored_user_goes_on_bit_for_bit(path: Path, method: str) -> None:
    hosts = [host(path, method) for _ in range(2)]
    sent = message_of(hosts[0].program)

    def round_of(user: Any) -> dict[str, Any]:
        call(user, "fit", **sent)
        return call(user, "summarise")

    round_of(hosts[0])
    state = hosts[0].save()
    hosts[1].restore(state)
    assert hosts[1].save() == state
    one, two = (round_of(user) for user in hosts)
    assert torch.equal(one["prototypes"], two["prototypes"])
    assert hosts[0].save() == hosts[1].save() != state


# -- the exchange


@pytest.mark.parametrize("method", METHODS)
def test_a_round_is_a_local_phase_with_the_last_prototypes_and_new_ones(
    path: Path, tmp_path: Path, method: str
) -> None:
    memory, result = exchanges(path, method, tmp_path, **({"epochs": 2} if method == "fedtgp" else {}))
    assert verbs(memory) == ["fit", "summarise"] * R + ["fit"]
    assert result["touched"] == PARTNERS
    for fit in memory[::2]:
        assert list(fit.sent) == list(TASKS)
        assert fit.sent[ALONE] == {}
    assert all(sent == {} for sent in memory[0].sent.values())
    assert all("prototype distance" not in record["log"] for record in result["rounds"][:1])
    up = down = 0
    for summarise, fit, record in zip(memory[1::2], memory[2::2], result["rounds"][1:], strict=True):
        assert list(summarise.sent) == list(summarise.replies) == PARTNERS
        assert all(sent == {} for sent in summarise.sent.values())
        for group in GROUPS:
            classes = CLASSES[TASKS[group[0]]]
            replies = [summarise.replies[user] for user in group]
            for reply in replies:
                assert reply.keys() == {"prototypes", "classes"} and reply["classes"].shape == (classes,)
                assert reply["prototypes"].shape == (int(reply["classes"].sum()), D)
                up += reply["prototypes"].numel() * 4 + classes
            either = replies[0]["classes"] | replies[1]["classes"]
            for user in group:
                assert fit.sent[user].keys() == {"prototypes", "classes"}
                assert torch.equal(fit.sent[user]["classes"], either)
                assert torch.equal(fit.sent[user]["prototypes"], fit.sent[group[0]]["prototypes"])
                assert fit.sent[user]["prototypes"].shape == (int(either.sum()), D)
                down += (int(either.sum()) * D * 4 + classes) * (record["round"] < R)
        logged = {user: fit.replies[user]["distance"] for user in PARTNERS}
        assert record["log"]["prototype distance"] == pytest.approx(logged)
    assert result["bytes"]["tensor_up"] == round(up / R)
    assert result["bytes"]["tensor_down"] == round(down / R)
    assert result["bytes"]["paper"] is None


@pytest.mark.parametrize("average", ["users", "items"])
def test_the_server_sends_the_means(path: Path, tmp_path: Path, average: str) -> None:
    memory, _ = exchanges(path, "fedproto", tmp_path, average=average)
    differing = 0
    for summarise, fit in zip(memory[1::2], memory[2::2], strict=True):
        for group in GROUPS:
            assert summarise.sent[group[0]] == ({"counts": True} if average == "items" else {})
            found: dict[int, list[tuple[float, Tensor]]] = {}
            for reply in (summarise.replies[user] for user in group):
                assert ("counts" in reply) == (average == "items")
                counts = reply.get("counts", torch.ones(len(reply["prototypes"]))).tolist()
                owned = reply["classes"].nonzero().flatten().tolist()
                for k, count, row in zip(owned, counts, reply["prototypes"], strict=True):
                    found.setdefault(k, []).append((count, row.double()))
            sent = fit.sent[group[0]]
            known = sent["classes"].nonzero().flatten().tolist()
            assert known == sorted(found)
            for k, row in zip(known, sent["prototypes"], strict=True):
                mean = sum(count * one for count, one in found[k]) / sum(count for count, _ in found[k])
                assert torch.allclose(row.double(), mean, atol=1e-6)  # type: ignore[arg-type]
                differing += len({count for count, _ in found[k]}) > 1
    assert (differing > 0) == (average == "items")


def test_partners_change_and_the_others_are_local_bit_for_bit(path: Path, tmp_path: Path) -> None:
    assert changed(path, "fedproto", tmp_path) == PARTNERS


@pytest.mark.parametrize("average", ["users", "items"])
def test_a_restored_cell_goes_on_bit_for_bit(path: Path, average: str) -> None:
    check_resume(path, "fedproto", average=average)


def test_it_does_not_apply_where_nobody_has_a_partner(write_suite: WriteSuite, tmp_path: Path) -> None:
    cell, registry = cell_of(write_suite(), "fedproto")
    result = run(cell, registry, tmp_path)
    assert result["touched"] == [] and result["status"] not in ("done", "failed")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["fails", "has no class"])
def test_where_one_prototype_sender_is_left_it_trains_locally(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, how: str
) -> None:
    path.write_text(path.read_text().replace("[protocol]", '[protocol]\non_failure = "skip"'))
    summarise: Any = PrototypeUser.summarise

    def failing(self: Any, counts: bool = False) -> dict[str, Any]:
        if self.name == "user2" and self.fits == 2:
            if how == "fails":
                raise RuntimeError("no such luck")
            none = torch.zeros(CLASSES["mlc"], dtype=torch.bool)
            return {"prototypes": torch.empty(0, D), "classes": none}
        return summarise(self, counts)  # type: ignore[no-any-return]

    failing.is_verb = True  # type: ignore[attr-defined]
    monkeypatch.setattr(PrototypeUser, "summarise", failing)
    memory, _ = exchanges(path, method, tmp_path, **({"epochs": 1} if method == "fedtgp" else {}))
    assert memory[2].sent["user1"].keys() == {"prototypes", "classes"}
    assert memory[4].sent["user1"] == {}
    assert memory[4].sent["user3"].keys() == {"prototypes", "classes"}


def test_an_empty_set_of_prototypes_crosses() -> None:
    sent = {"prototypes": torch.empty(0, D), "classes": torch.zeros(3, dtype=torch.bool)}
    found = messages.decode(messages.encode(sent))
    assert found["prototypes"].shape == (0, D) and found["classes"].tolist() == [False] * 3


@pytest.mark.parametrize("pull", [0.0, -1.0, float("nan"), float("inf")])
def test_a_pull_must_be_positive(pull: float) -> None:
    with pytest.raises(UserError, match="the option 'pull' of fedproto"):
        FedProto(pull=pull)
