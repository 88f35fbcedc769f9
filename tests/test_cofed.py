"""CoFED: votes, pooling and the weighted loss against naive versions, and what crosses."""

from __future__ import annotations

import sys
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbench import messages
from fedbench.discovery import discover
from fedbench.errors import UserError
from fedbench.suite import load
from fedbench_baselines.cofed import (
    CoFED,
    class_votes,
    class_weights,
    pair_votes,
    pooled_classes,
    pooled_pairs,
    weighted_loss,
)

sys.path.append(str(Path(__file__).parent))
from public_exchange import CLASSES, TASKS, B, R, T, call, changed, exchanges, five_users
from spies import verbs
from tiny import WriteSuite, host, program

EVERYONE = list(TASKS)
PUBLIC = 32
GROUPS = [["user1", "user2"], ["user3", "user4"], ["user5"]]


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    return five_users(write_suite)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def drawn(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


# -- equations


def test_a_class_gets_a_vote_where_its_margin_is_large_enough() -> None:
    p = torch.tensor([[0.65, 0.34, 0.01], [0.2, 0.27, 0.53], [0.625, 0.325, 0.05], [0.01, 0.99, 0.0]])
    assert class_votes(p, 0.3).tolist() == [0, -1, -1, 1]  # the margin itself is not enough
    assert class_votes(p, 0.0).tolist() == [0, 2, 0, 1]
    assert class_votes(p, 0.9).tolist() == [-1, -1, -1, 1]
    for classes, dtype in ((128, torch.int8), (129, torch.int16)):
        votes = class_votes(torch.eye(classes), 0.3)
        assert votes.tolist() == list(range(classes)) and votes.dtype == dtype


def test_a_pair_gets_a_yes_a_no_or_nothing() -> None:
    p = torch.tensor([[0.66, 0.64, 0.5, 0.36, 0.34], [0.0, 1.0, 0.649, 0.351, 0.5]])
    assert pair_votes(p, 0.3).tolist() == [[1, -1, -1, -1, 0], [0, 1, -1, -1, -1]]
    assert pair_votes(p, 0.0).tolist() == [[1, 1, -1, 0, 0], [0, 1, 1, 0, -1]]
    assert pair_votes(p, 0.3).dtype == torch.int8


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("users", [1, 2, 3, 5])
def test_classes_are_pooled_as_a_loop_would(users: int, alpha: float) -> None:
    votes = [drawn(-1, 4, 60, seed=seed) for seed in range(users)]
    labels = pooled_classes(votes, alpha)
    for row in range(60):
        accepted = [k for k in range(4) if sum(int(vote[row]) == k for vote in votes) / users > alpha]
        assert int(labels[row]) == (accepted[0] if len(accepted) == 1 else -1)
    assert labels.dtype == torch.int8


def test_who_abstains_owns_the_class_all_the_same_and_overlaps_are_dropped() -> None:
    columns = [[4, -1, -1], [4, -1, -1, -1], [4, 4, 7], [4, 7, -1], [4, 7], [-1, -1]]
    labels = [int(pooled_classes([torch.tensor([vote]) for vote in column], 0.3)) for column in columns]
    assert labels == [4, -1, -1, -1, -1, -1]  # shares 1/3; 1/4; 2/3 and 1/3; 1/3 twice; 1/2 twice; none
    assert int(pooled_classes([torch.tensor([vote]) for vote in (4, 4, 7)], 0.5)) == 4


def test_a_share_of_alpha_itself_is_too_small() -> None:
    votes = [torch.tensor([5 if user < 3 else -1]) for user in range(10)]
    assert int(pooled_classes(votes, 0.3)) == -1
    assert int(pooled_classes(votes[:9], 0.3)) == 5
    pairs = [vote.clamp(max=1).unsqueeze(0) for vote in votes]
    assert int(pooled_pairs(pairs, 0.3)) == -1
    assert int(pooled_pairs(pairs[:9], 0.3)) == 1


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("users", [1, 2, 3, 5])
def test_pairs_are_pooled_as_a_loop_would(users: int, alpha: float) -> None:
    votes = [drawn(-1, 2, 30, 4, seed=seed) for seed in range(users)]
    labels = pooled_pairs(votes, alpha)
    for row in range(30):
        for k in range(4):
            yes, no = (sum(int(vote[row, k]) == answer for vote in votes) / users for answer in (1, 0))
            expected = 1 if yes > alpha and yes > no else 0 if no > alpha and no > yes else -1
            assert int(labels[row, k]) == expected
    assert labels.dtype == torch.int8


def test_an_equal_share_of_yes_and_no_decides_nothing() -> None:
    votes = [torch.tensor([[vote]], dtype=torch.int8) for vote in (1, 0, 1, 0, -1)]
    assert int(pooled_pairs(votes, 0.3)) == -1
    assert int(pooled_pairs(votes[:3], 0.3)) == 1
    assert int(pooled_pairs(votes[1:4], 0.3)) == 0


def test_nobody_confident_means_nothing_accepted() -> None:
    nobody = torch.full((6,), -1, dtype=torch.int8)
    assert pooled_classes([nobody, nobody], 0.0).tolist() == [-1] * 6
    assert pooled_pairs([nobody.reshape(2, 3)], 0.0).tolist() == [[-1] * 3] * 2


def test_class_weights_are_inverse_counts_and_a_missing_class_has_none() -> None:
    assert class_weights(torch.tensor([0, 0, 0, 0, 2, 2, 4]), 5).tolist() == [0.25, 0.0, 0.5, 0.0, 1.0]
    pairs = torch.tensor([[0, 1, 0], [0, -1, 0], [1, 1, -1], [0, 0, 0]])
    weights = class_weights(pairs, 3)
    assert torch.allclose(weights, torch.tensor([[1 / 3, 1.0, 1.0], [1.0, 0.5, 0.0]]))


def test_the_loss_of_classes_is_weighted_cross_entropy() -> None:
    outputs, targets = random(5, 3).requires_grad_(), torch.tensor([0, 2, 2, 1, 0])
    weights = torch.tensor([0.5, 1.0, 0.25])
    naive = sum(
        weights[y].item() * (log(sum(exp(v) for v in row)) - row[y])
        for row, y in zip(outputs.tolist(), targets.tolist(), strict=True)
    )
    loss = weighted_loss(outputs, targets, weights)
    assert loss.item() == pytest.approx(naive / 5, abs=1e-12)
    loss.backward()
    expected = (outputs.softmax(1) - torch.eye(3)[targets]) * weights[targets].unsqueeze(1) / 5
    assert torch.allclose(outputs.grad, expected.detach(), atol=1e-12)  # type: ignore[arg-type]


def test_the_loss_of_pairs_is_weighted_over_decided_ones() -> None:
    outputs = random(4, 3).requires_grad_()
    targets = torch.tensor([[0, 1, -1], [1, -1, -1], [0, 0, 1], [-1, 1, 0]])
    weights = torch.tensor([[0.5, 1.0, 0.25], [1.0, 0.125, 1.0]])
    naive, gradient = 0.0, torch.zeros(4, 3, dtype=torch.float64)
    for b in range(4):
        for k in range(3):
            y, p = int(targets[b, k]), 1 / (1 + exp(-outputs[b, k].item()))
            if y >= 0:
                naive -= weights[y, k].item() * log(p if y else 1 - p) / 8
                gradient[b, k] = weights[y, k].item() * (p - y) / 8
    loss = weighted_loss(outputs, targets, weights)
    assert loss.item() == pytest.approx(naive, abs=1e-12)
    loss.backward()
    assert torch.allclose(outputs.grad, gradient, atol=1e-12)  # type: ignore[arg-type]


# -- the user


def labels_of(task: str, seed: int = 0) -> Tensor:
    if task == "mlc":
        return drawn(-1, 2, PUBLIC, CLASSES[task], seed=seed)
    return drawn(-1, CLASSES[task], PUBLIC, seed=seed)


@pytest.mark.parametrize("name", ["user1", "user3"])
def test_votes_are_those_of_the_model_on_the_whole_plain_public_set(write_suite: WriteSuite, name: str) -> None:
    path = five_users(write_suite, ("eval_batch = 50", "eval_batch = 12"))
    user: Any = program(path, "cofed", name=name, margin=0.0005)
    modes: list[bool] = []
    user.head.register_forward_hook(lambda module, inputs, outputs: modes.append(module.training))
    votes = user.label()["votes"]
    assert modes == [False] * 3
    outputs = user.outputs(user.participant.public.rows(torch.arange(PUBLIC), 0)).detach()
    expected = pair_votes(outputs.sigmoid(), 0.0005) if name == "user1" else class_votes(outputs.softmax(1), 0.0005)
    assert votes.shape == expected.shape and (votes == expected).float().mean() > 0.98
    assert len(set(votes.flatten().tolist())) > 1


@pytest.mark.parametrize("name", ["user1", "user3"])
def test_the_union_is_private_data_and_accepted_rows_each_with_its_own_labels(
    path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    user: Any = program(path, "cofed", name=name)
    user.fit()
    labels = labels_of(TASKS[name])
    labels[3:9] = -1
    own, public = user.participant.train, user.participant.public
    pictures = [
        (own.rows(torch.tensor([n]), view).flatten(), own.targets(torch.tensor([n]))[0].long())
        for n in range(len(own))
        for view in range(own.views)
    ]
    pictures += [
        (public.rows(torch.tensor([n]), 0).flatten(), labels[n].long())
        for n in range(PUBLIC)
        if bool((labels[n] >= 0).any())
    ]
    private, accepted = own.views * len(own), int((labels.reshape(PUBLIC, -1) >= 0).any(1).sum())
    assert len(pictures) == private + accepted
    seen: list[int] = []
    given: list[Tensor] = []
    outputs = user.outputs
    monkeypatch.setattr(user, "outputs", lambda x: (given.append(x), outputs(x))[1])
    phase = sys.modules["fedbench_baselines.cofed"]
    union = torch.cat([own.targets(torch.arange(len(own))).long(), *(y.unsqueeze(0) for _, y in pictures[private:])])

    def check(found: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        assert torch.equal(weights, class_weights(union, CLASSES[TASKS[name]]))
        for x, y in zip(given[-1], targets, strict=True):
            index = next(n for n, (picture, _) in enumerate(pictures) if torch.equal(picture, x.flatten()))
            assert torch.equal(pictures[index][1], y)
            seen.append(index)
        return weighted_loss(found, targets, weights)

    monkeypatch.setattr(phase, "weighted_loss", check)
    for _ in range(4):
        reply = user.cotrain(labels)
    assert reply["accepted"] == accepted
    assert len(seen) == 4 * T * B
    assert min(seen) < private <= max(seen)
    for phase_of in range(4):  # no item twice in a phase shorter than a pass
        part = [n // own.views if n < private else n for n in seen[phase_of * T * B : (phase_of + 1) * T * B]]
        assert len(set(part)) == len(part)


def test_co_training_is_t_steps_of_the_whole_model_and_leaves_local_training_alone(path: Path) -> None:
    user: Any = program(path, "cofed", name="user3")
    user.fit()
    head = user.head.weight.detach().clone()
    backbone = next(user.representation.backbone.parameters()).detach().clone()

    def local() -> bytes:
        state = user.packed()
        return messages.pack([state[name] for name in ("fit_optimizer", "fit_generator", "order", "fits")])

    before = local()
    reply = user.cotrain(labels_of("ic100"))
    assert user.public_steps == T and reply["loss"] > 0
    assert not torch.equal(head, user.head.weight)
    assert not torch.equal(backbone, next(user.representation.backbone.parameters()))
    assert local() == before


@pytest.mark.parametrize("name", ["user1", "user3"])
def test_where_nothing_is_accepted_the_union_is_private_data(path: Path, name: str) -> None:
    user: Any = program(path, "cofed", name=name)
    user.fit()
    reply = user.cotrain(torch.full_like(labels_of(TASKS[name]), -1))
    assert reply["accepted"] == 0 and reply["loss"] > 0 and user.public_steps == T


def test_a_union_smaller_than_a_batch_is_trained_on_whole(write_suite: WriteSuite) -> None:
    path = five_users(write_suite, ("batch = 8", "batch = 8\nfit_batch = 4"), ("fit_batch = 8\n", ""))
    path.write_text(path.read_text().replace("train = 40", "train = 3"))
    user: Any = program(path, "cofed", name="user3")
    user.fit()
    labels = torch.full((PUBLIC,), -1, dtype=torch.int8)
    labels[7] = 2
    assert user.cotrain(labels)["accepted"] == 1


@pytest.mark.parametrize(("name", "oneshot"), [("user1", False), ("user3", False), ("user3", True)])
def test_a_restored_user_goes_on_bit_for_bit(path: Path, name: str, oneshot: bool) -> None:
    hosts = [host(path, "cofed", name=name, oneshot=oneshot) for _ in range(2)]

    def round_of(user: Any, seed: int) -> None:
        call(user, "fit")
        call(user, "label")
        call(user, "cotrain", labels=labels_of(TASKS[name], seed))

    round_of(hosts[0], 0)
    state = hosts[0].save()
    hosts[1].restore(state)
    assert hosts[1].save() == state
    for user in hosts:
        round_of(user, 1)
    assert hosts[0].save() == hosts[1].save() != state
    assert hosts[1].program.public_steps == 2 * T  # type: ignore[attr-defined]


# -- the exchange


def test_a_round_is_fit_label_and_cotrain_with_the_groups_labels(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "cofed", tmp_path, margin=0.0)
    assert verbs(memory) == ["fit", "label", "cotrain"] * R + ["fit"]
    assert result["touched"] == EVERYONE
    assert all(list(exchange.sent) == EVERYONE for exchange in memory)
    for fit, label, cotrain in zip(memory[:-1:3], memory[1::3], memory[2::3], strict=True):
        assert all(not sent for sent in (*fit.sent.values(), *label.sent.values()))
        for group in GROUPS:
            votes = [label.replies[user]["votes"] for user in group]
            pool = pooled_pairs if TASKS[group[0]] == "mlc" else pooled_classes
            for user in group:
                assert cotrain.sent[user].keys() == {"labels"}
                assert torch.equal(cotrain.sent[user]["labels"], pool(votes, 0.3))
        alone = label.replies["user5"]["votes"]
        assert torch.equal(cotrain.sent["user5"]["labels"], alone) and int((alone >= 0).sum()) > 0
        record = result["rounds"][memory.index(fit) // 3]["log"]
        assert record["co-training loss"] == {user: reply["loss"] for user, reply in cotrain.replies.items()}
        assert record["accepted public rows"] == {user: reply["accepted"] for user, reply in cotrain.replies.items()}


def test_it_costs_a_class_number_a_row(path: Path, tmp_path: Path) -> None:
    _, result = exchanges(path, "cofed", tmp_path)
    cost = 2 * PUBLIC * CLASSES["mlc"] + 2 * PUBLIC + PUBLIC
    assert result["bytes"]["tensor_up"] == result["bytes"]["tensor_down"] == cost
    assert result["bytes"]["paper"] is None


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_one_shot_labels_in_the_middle_round_alone(write_suite: WriteSuite, tmp_path: Path, rounds: int) -> None:
    path = five_users(write_suite, ("rounds = 2", f"rounds = {rounds}"))
    memory, _ = exchanges(path, "cofed", tmp_path, oneshot=True)
    expected: list[str] = []
    for r in range(rounds):
        expected += ["fit", "label", "cotrain"] if r == rounds // 2 else ["fit"]
    assert verbs(memory) == [*expected, "fit"]


def test_every_user_trains_otherwise_than_alone(path: Path, tmp_path: Path) -> None:
    assert changed(path, "cofed", tmp_path) == EVERYONE
    assert CoFED().touches(load(str(path)).users) == EVERYONE


def test_before_the_first_exchange_everyone_is_as_in_local_training(path: Path, tmp_path: Path) -> None:
    local, ours = (exchanges(path, method, tmp_path)[1]["rounds"] for method in ("local", "cofed"))
    assert ours[0]["validation"] == local[0]["validation"] and ours[0]["train_loss"] == local[0]["train_loss"]


def test_who_loses_its_partner_votes_alone(
    write_suite: WriteSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = five_users(write_suite, ("others = 2", 'others = 2\non_failure = "skip"'))
    label = CoFED.User.label  # type: ignore[attr-defined]

    def failing(self: Any) -> dict[str, Any]:
        if self.name == "user2":
            raise RuntimeError("no such luck")
        return label(self)  # type: ignore[no-any-return]

    failing.is_verb = True  # type: ignore[attr-defined]
    monkeypatch.setattr(CoFED.User, "label", failing)
    memory, _ = exchanges(path, "cofed", tmp_path)
    left = [user for user in TASKS if user != "user2"]
    assert [list(exchange.sent) for exchange in memory] == [EVERYONE, EVERYONE] + [left] * 5
    assert torch.equal(memory[2].sent["user1"]["labels"], memory[1].replies["user1"]["votes"])


@pytest.mark.parametrize(
    ("option", "value"), [("margin", 1.0), ("margin", -0.1), ("alpha", 1.0), ("alpha", -1.0), ("rate", 0.0)]
)
def test_options_are_checked(option: str, value: float) -> None:
    with pytest.raises(UserError, match=f"'{option}' of cofed"):
        CoFED(**{option: value})  # type: ignore[arg-type]


def test_its_options_can_be_tuned() -> None:
    assert CoFED.tunable.keys() <= discover().create("method", "cofed").__dict__.keys()
