"""FedHCA²: merger, attention and learned shares against naive versions and torch's SGD, and what crosses."""

from __future__ import annotations

import math
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbench.errors import UserError
from fedbench_baselines.fedhca2 import (
    AggregationWeights,
    FedHCA2,
    attended,
    conflict_averse,
    cross_attention,
    same_shapes,
    simplex_weights,
)

sys.path.append(str(Path(__file__).parent))
from shared_architecture import (
    ALIKE,
    TWINS,
    Cell,
    R,
    call,
    changed,
    check_resume,
    exchanges,
    five_users,
    of_part,
    same,
    sizes,
)
from spies import verbs
from tiny import WriteSuite, program

C = 0.4
ROUND = ["fit", "upload_update", "add_update"]
MATCHING = ["user1", "user3", "user4"]
"""Whose heads have ten classes, whatever their task."""


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    return five_users(write_suite)


def randoms(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def objective(gram: np.ndarray[Any, Any], w: np.ndarray[Any, Any], c: float) -> float:
    """1/N·1ᵀA w + c·√(mean of A)·√(wᵀA w), number by number."""
    count = len(gram)
    linear = sum(gram[i][j] * w[j] / count for i in range(count) for j in range(count))
    square = sum(gram[i][j] * w[i] * w[j] for i in range(count) for j in range(count))
    mean = sum(gram[i][j] for i in range(count) for j in range(count)) / count**2
    return float(linear + c * math.sqrt(mean) * math.sqrt(max(square, 0.0)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e4])
def test_the_simplex_problem_is_solved(seed: int, scale: float) -> None:
    updates = randoms(3, 4, seed=seed) * scale
    gram = (updates @ updates.T).numpy()
    w = simplex_weights(gram, C)
    assert w.sum() == pytest.approx(1) and (w >= 0).all()
    grid = np.linspace(0, 1, 81)
    points = [np.array([a, b, 1 - a - b]) for a, b in product(grid, grid) if a + b <= 1]
    best = min(objective(gram, point, C) for point in points)
    slack = abs(objective(gram, np.full(3, 1 / 3), C))
    assert objective(gram, w, C) <= best + 1e-9 * slack
    assert objective(gram, w, C) >= best - 0.01 * slack


def test_the_merger_is_its_formula() -> None:
    updates = randoms(3, 5, seed=1)
    gram = updates @ updates.T
    w = torch.from_numpy(simplex_weights(gram.numpy(), C))
    mean = sum(updates[n] for n in range(3)) / 3
    g = sum(w[n] * updates[n] for n in range(3))
    radius = C * (sum(gram[i, j] for i in range(3) for j in range(3)) / 9).sqrt()
    assert torch.allclose(radius, C * mean.norm())  # type: ignore[union-attr, arg-type]
    expected = (mean + radius * g / g.norm()) / (1 + C**2)  # type: ignore[union-attr, operator]
    assert torch.allclose(conflict_averse(updates, C), expected, atol=1e-12)


def test_the_merger_serves_the_worst_off_better_than_the_mean() -> None:
    updates = torch.tensor([[3.0, 0.2], [3.0, 0.1], [-1.0, 0.5]], dtype=torch.float64)
    mean, merged = updates.mean(0), conflict_averse(updates, C) * (1 + C**2)
    assert (updates @ mean).min() < (updates @ merged).min()
    assert (merged - mean).norm() == pytest.approx(C * float(mean.norm()))


def test_equal_updates_and_none_at_all_merge_into_themselves() -> None:
    one = randoms(4)
    merged = conflict_averse(torch.stack([one, one]), C)
    assert torch.allclose(merged, one * (1 + C) / (1 + C**2), atol=1e-9)
    assert not conflict_averse(torch.zeros(3, 4, dtype=torch.float64), C).any()
    opposed = conflict_averse(torch.stack([one, -one]), C)
    assert opposed.isfinite().all() and opposed.norm() < 1e-6


def test_cross_attention_is_its_formula() -> None:
    changes = randoms(3, 4, seed=2)
    found = cross_attention(changes)
    for k in range(3):
        scores = [math.exp(float((changes[k] * changes[j]).sum()) / math.sqrt(4)) for j in range(3)]
        naive = sum(scores[j] / sum(scores) * changes[j] for j in range(3))
        assert torch.allclose(found[k], naive, atol=1e-12)  # type: ignore[arg-type]


def test_heads_attend_tensor_by_tensor() -> None:
    states = [
        {"head.weight": randoms(2, 3, seed=n).float(), "head.bias": randoms(2, seed=n + 9).float()} for n in (0, 1)
    ]
    found = attended(states)
    for name in states[0]:
        rows = cross_attention(torch.stack([state[name].double().flatten() for state in states]))
        for k in (0, 1):
            assert found[k][name].shape == states[k][name].shape
            assert torch.allclose(found[k][name], rows[k].view_as(found[k][name]).float(), atol=1e-7)


def test_only_equal_shapes_go_together() -> None:
    ten, other = {"head.weight": torch.ones(10, 4)}, {"head.weight": torch.ones(9, 4)}
    assert same_shapes({"a": ten, "b": other, "c": ten, "d": {}, "e": {}}) == [["a", "c"]]


@pytest.mark.parametrize("start", [0.1, 0.05, 0.95])
def test_shares_are_learned_as_torchs_sgd_learns_them(start: float) -> None:
    rate = 0.05
    weights = AggregationWeights({"body": start, "head": start / 2}, rate)
    alpha, beta = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (start, start / 2))
    optimizer = torch.optim.SGD([alpha, beta], lr=rate, momentum=0.9, weight_decay=1e-4)
    names = {"backbone.a": alpha, "backbone.b": alpha, "head.weight": beta, "head.bias": beta}
    for turn in range(6):
        directions = {name: randoms(3, seed=turn * 7 + n) for n, name in enumerate(names)}
        merged = weights.scaled("user1", directions)
        update = {name: randoms(3, seed=turn * 7 + n + 100) for n, name in enumerate(names)}
        outputs = [share.clamp(0, 1) * directions[name] for name, share in names.items()]
        for output, name in zip(outputs, names, strict=True):
            assert torch.allclose(merged[name], output.detach(), atol=1e-12)
        optimizer.zero_grad()
        torch.autograd.backward(outputs, [-update[name] for name in names])
        optimizer.step()
        weights.learn("user1", update)
        assert weights.value("user1", "body") == pytest.approx(alpha.item(), abs=1e-12)
        assert weights.value("user1", "head") == pytest.approx(beta.item(), abs=1e-12)
    assert weights.value("user2", "body") == start


@pytest.mark.parametrize(("start", "moves"), [(0.0, True), (1.0, True), (-0.01, False), (1.01, False)])
def test_a_share_learns_from_its_ends_but_not_beyond_them(start: float, moves: bool) -> None:
    weights = AggregationWeights({"body": start, "head": 0.1}, 1.0)
    direction = {"backbone.a": torch.tensor([1.0])}
    weights.scaled("user1", direction)
    weights.learn("user1", direction)
    assert weights.value("user1", "body") == pytest.approx(start * (1 - 1e-4) + moves)


def test_a_share_grows_where_training_goes_on_in_the_mergers_direction() -> None:
    weights = AggregationWeights({"body": 0.1, "head": 0.1}, 0.01)
    direction = {"backbone.a": torch.tensor([1.0, 2.0])}
    for user, sign in (("user1", 1), ("user2", -1)):
        weights.scaled(user, direction)
        weights.learn(user, {"backbone.a": sign * direction["backbone.a"]})
    assert weights.value("user1", "body") > 0.1 > weights.value("user2", "body")
    weights.learn("user1", direction)  # without a merger in between there is nothing to learn from
    assert weights.value("user1", "body") == pytest.approx(0.1 + 0.01 * (5 - 1e-5))


def test_a_round_sends_changes_and_returns_personal_mergers(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "fedhca2", tmp_path)
    assert verbs(memory) == ["upload", "download", *ROUND * R, "fit"]
    assert result["touched"] == ALIKE
    assert list(memory[0].sent) == ["user1"] and list(memory[1].sent) == ALIKE
    assert not of_part(memory[0].replies["user1"], "head")
    for number, (update, merged) in enumerate(zip(memory[3::3], memory[4::3], strict=True)):
        assert list(update.sent) == list(merged.sent) == ALIKE
        alphas = result["rounds"][number]["log"]["alpha"]
        assert list(alphas) == ALIKE and (set(alphas.values()) == {0.1}) == (number == 0)
        bodies = {user: of_part(update.replies[user], "body") for user in ALIKE}
        flat = {user: torch.cat([v.double().flatten() for v in body.values()]) for user, body in bodies.items()}
        common = conflict_averse(torch.stack(list(flat.values())), C)
        for user in ALIKE:
            own = sum(flat[twin] for twin in TWINS) / 2 if user in TWINS else flat[user]
            got = torch.cat([value.double().flatten() for value in of_part(merged.sent[user], "body").values()])
            share = min(1.0, max(0.0, alphas[user]))
            assert torch.allclose(got, own + share * common, atol=1e-6)
            assert bool(of_part(merged.sent[user], "head")) == (user in MATCHING)
        if number == 0:
            heads = [of_part(update.replies[user], "head") for user in MATCHING]
            for user, head, attention in zip(MATCHING, heads, attended(heads), strict=True):
                for name, value in head.items():
                    assert torch.allclose(merged.sent[user][name], value + 0.1 * attention[name], atol=1e-7)


def test_bytes_are_those_of_the_models(path: Path, tmp_path: Path) -> None:
    _, result = exchanges(path, "fedhca2", tmp_path)
    body, ten = sizes(program(path))
    hundred = sizes(program(path, name="user5"))[1]
    assert result["bytes"]["tensor_up"] == len(ALIKE) * body + 3 * ten + hundred + body // R
    assert result["bytes"]["tensor_down"] == len(ALIKE) * body + 3 * ten + len(ALIKE) * body // R


def test_bodies_become_personal_and_unmatched_heads_stay_as_trained(path: Path) -> None:
    cell = Cell(path, "fedhca2")
    cell.play(0)
    bodies = [call(cell.hosts[user], "upload", parts=["body"]) for user in ALIKE]
    assert same(bodies[0], bodies[2]) and not same(bodies[0], bodies[1])  # twins have taken equal shares so far
    plain = Cell(path, "fedbone")
    plain.play(0)
    heads = [call(one.hosts["user5"], "upload", parts=["head"]) for one in (cell, plain)]
    assert same(*heads)
    heads = [call(one.hosts["user3"], "upload", parts=["head"]) for one in (cell, plain)]
    assert not same(*heads)


def test_users_without_a_partner_train_locally(path: Path, tmp_path: Path) -> None:
    assert changed(path, "fedhca2", tmp_path) == ALIKE


def test_a_user_left_alone_trains_on(path: Path) -> None:
    cell = Cell(path, "fedhca2", users=["user1", "user2", "user3"])
    cell.play(0)
    cell.federation.alive.remove("user3")
    before = call(cell.hosts["user1"], "upload", parts=["body"])
    cell.play(1)
    assert not same(before, call(cell.hosts["user1"], "upload", parts=["body"]))


def test_a_restored_cell_goes_on_bit_for_bit(write_suite: WriteSuite) -> None:
    path = five_users(write_suite, ("rounds = 2", "rounds = 3"))  # momenta are first used in the third round
    check_resume(path, "fedhca2", hyper_rate=0.1)


@pytest.mark.parametrize(
    "options", [{"c": 0.0}, {"c": 1.0}, {"alpha": -0.1}, {"beta": 1.5}, {"hyper_rate": 0.0}, {"alpha": float("nan")}]
)
def test_options_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"'{next(iter(options))}' of fedhca2"):
        FedHCA2(**options)
