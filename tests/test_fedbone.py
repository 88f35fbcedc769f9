"""FedBone: the projection against a naive version, and what crosses; also how updates are sent and added."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedbench_baselines.fedbone import FedBone, without_conflicts

sys.path.append(str(Path(__file__).parent))
from shared_architecture import (
    ALIKE,
    STEPS,
    USERS,
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
from tiny import WriteSuite, host, program

ROUND = ["fit", "upload_update", "add_update"]


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    return five_users(write_suite)


def naive(updates: list[list[float]]) -> list[list[float]]:
    """Number by number, as the paper's projection is written."""
    found = []
    for n, update in enumerate(updates):
        g = list(update)
        for m, other in enumerate(updates):
            along = sum(a * b for a, b in zip(g, other, strict=True))
            if m != n and along < 0:
                square = sum(b * b for b in other)
                g = [a - along / square * b for a, b in zip(g, other, strict=True)]
        found.append(g)
    return found


def test_conflicts_are_projected_away() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        updates = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        found = torch.stack(without_conflicts(list(updates)))
        assert torch.allclose(found, torch.tensor(naive(updates.tolist()), dtype=torch.float64), atol=1e-12)
        assert not torch.allclose(found, updates)


def test_two_opposed_updates_keep_what_the_other_does_not_mind() -> None:
    one, two = torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 0.0])
    assert [g.tolist() for g in without_conflicts([one, two])] == [[0.0, 1.0], [-0.5, 0.5]]
    assert one.tolist() == [1.0, 1.0] and two.tolist() == [-1.0, 0.0]


def test_updates_that_agree_or_are_zero_or_alone_stay() -> None:
    one, two, nothing = torch.tensor([1.0, 0.5]), torch.tensor([0.0, 2.0]), torch.zeros(2)
    for updates in ([one, two], [one, nothing], [one], []):
        assert all(torch.equal(a, b) for a, b in zip(without_conflicts(updates), updates, strict=True))


def test_a_round_sends_changes_of_bodies_and_returns_their_merger(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "fedbone", tmp_path)
    assert verbs(memory) == ["upload", "download", *ROUND * R, "fit"]
    assert result["touched"] == ALIKE
    assert list(memory[0].sent) == ["user1"] and list(memory[1].sent) == ALIKE
    assert all(same(sent, memory[0].replies["user1"]) for sent in memory[1].sent.values())
    for fit, update, merged in zip(memory[2:-1:3], memory[3::3], memory[4::3], strict=True):
        assert list(fit.sent) == list(USERS) and not any(fit.sent.values())
        assert list(update.sent) == list(merged.sent) == ALIKE
        assert all(not of_part(reply, "head") for reply in update.replies.values())
        flat = [torch.cat([value.double().flatten() for value in update.replies[user].values()]) for user in ALIKE]
        mean = torch.stack(without_conflicts(flat)).mean(0)
        for sent in merged.sent.values():
            assert sent.keys() == update.replies["user1"].keys()
            got = torch.cat([value.double().flatten() for value in sent.values()])
            assert torch.allclose(got, mean, atol=1e-7)


def test_bytes_are_those_of_bodies(path: Path, tmp_path: Path) -> None:
    _, result = exchanges(path, "fedbone", tmp_path)
    body, _ = sizes(program(path))
    assert result["bytes"]["tensor_up"] == len(ALIKE) * body + body // R
    assert result["bytes"]["tensor_down"] == len(ALIKE) * body + len(ALIKE) * body // R


def test_an_update_is_what_training_changed_and_is_added_to_what_was_before(path: Path) -> None:
    user = host(path, "fedbone")
    before = call(user, "upload", parts=["body", "head"])
    assert all(not value.any() for value in call(user, "upload_update", parts=["body", "head"]).values())
    call(user, "fit")
    after = call(user, "upload", parts=["body", "head"])
    update = call(user, "upload_update", parts=["body"])
    assert same(update, {name: after[name] - before[name] for name in of_part(after, "body")})
    assert any(value.any() for value in update.values())
    call(user, "add_update", **{name: value / 2 for name, value in update.items()})
    now = call(user, "upload", parts=["body", "head"])
    assert same(of_part(now, "body"), {name: before[name] + value / 2 for name, value in update.items()})
    assert same(of_part(now, "head"), of_part(after, "head"))  # which nobody merged
    assert all(not value.any() for value in call(user, "upload_update", parts=["body", "head"]).values())


def test_a_restored_user_knows_what_its_weights_were(path: Path) -> None:
    users = [host(path, "fedbone") for _ in range(2)]
    call(users[0], "fit")
    users[1].restore(users[0].save())
    updates = [call(user, "upload_update", parts=["body"]) for user in users]
    assert same(*updates) and any(value.any() for value in updates[0].values())


def test_all_bodies_of_a_group_are_one_after_a_round_and_heads_are_not(path: Path) -> None:
    cell = Cell(path, "fedbone")
    heads: list[dict[str, Tensor]] = []
    for r in range(R):
        cell.play(r)
        bodies = [call(cell.hosts[user], "upload", parts=["body"]) for user in ALIKE]
        assert all(same(bodies[0], body) for body in bodies)
        heads.append(call(cell.hosts["user1"], "upload", parts=["head"]))
        assert not same(heads[-1], call(cell.hosts["user4"], "upload", parts=["head"]))
    assert not same(*heads) and cell.program("user1").fits == R and STEPS > 1


def test_users_without_a_partner_train_locally(path: Path, tmp_path: Path) -> None:
    assert changed(path, "fedbone", tmp_path) == ALIKE
    users = Cell(path, "fedbone").suite.users
    assert FedBone().touches([user for user in users if user.name in ("user1", "user2")]) == []


def test_a_user_left_alone_trains_on(write_suite: WriteSuite) -> None:
    cell = Cell(five_users(write_suite), "fedbone", users=["user1", "user2", "user3"])
    cell.play(0)
    cell.federation.alive.remove("user3")
    before = call(cell.hosts["user1"], "upload", parts=["body"])
    cell.play(1)
    assert not same(before, call(cell.hosts["user1"], "upload", parts=["body"]))


def test_a_restored_cell_goes_on_bit_for_bit(path: Path) -> None:
    check_resume(path, "fedbone")
