"""Centralised training: one body, and with pooled labels one model, in every phase, against plain joint training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedbench_baselines.centralised import Centralised

sys.path.append(str(Path(__file__).parent))
from shared_architecture import (
    ALIKE,
    STEPS,
    TWINS,
    USERS,
    Cell,
    R,
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

PHASE = ["joint_step"] * STEPS + ["fit"]


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    return five_users(write_suite)


def pooled(path: Path, heads: str) -> dict[str, dict[str, Tensor]]:
    """Every user's weights after one optimizer in one place has trained one body, and one head a task, on all data."""
    programs = {user: program(path, name=user) for user in ALIKE}
    body = programs["user1"].representation.backbone
    for one in programs.values():
        one.representation.backbone = body
    if heads == "task":
        programs["user4"].head = programs["user1"].head
    kept = {id(p): p for one in programs.values() for p in (*body.parameters(), *one.head.parameters())}
    protocol = programs["user1"].protocol
    optimizer = torch.optim.AdamW(kept.values(), lr=2e-3, weight_decay=protocol.weight_decay)
    for group in optimizer.param_groups:
        group["rate"] = 2e-3
    phases = protocol.rounds + 1
    for step in range(phases * STEPS):
        programs["user1"].schedule(optimizer, step / STEPS, phases)
        loss = sum(one.private_loss(*one.private_batch()) for one in programs.values())
        programs["user1"].step(optimizer, loss)  # type: ignore[arg-type]
    return {
        user: {f"backbone.{name}": value.detach() for name, value in body.named_parameters()}
        | {f"head.{name}": value.detach() for name, value in one.head.named_parameters()}
        for user, one in programs.items()
    }


@pytest.mark.parametrize("heads", ["own", "task"])
def test_it_is_training_in_one_place_from_the_first_step_to_the_last(path: Path, heads: str) -> None:
    cell = Cell(path, "centralised", heads=heads)
    for r in range(R + 1):
        cell.play(r)
    expected = pooled(path, heads)
    for user in ALIKE:
        weights = cell.program(user).weights(["body", "head"])
        assert weights.keys() == expected[user].keys()
        for name, value in expected[user].items():
            assert torch.allclose(weights[name], value, atol=1e-4), (user, name)
    bodies = [cell.program(user).weights(["body"]) for user in ALIKE]
    assert all(same(bodies[0], body) for body in bodies)
    assert same(*(cell.program(user).weights(["head"]) for user in TWINS)) == (heads == "task")
    assert {cell.program(user).fits for user in USERS} == {R + 1}


@pytest.mark.parametrize("heads", ["own", "task"])
def test_every_phase_is_joint_and_nothing_private_crosses(path: Path, tmp_path: Path, heads: str) -> None:
    memory, result = exchanges(path, "centralised", tmp_path, heads=heads)
    start = ["upload"] * (1 if heads == "own" else 2) + ["download", "join"]
    assert verbs(memory) == [*start, *PHASE * (R + 1)]
    assert result["touched"] == ALIKE
    rates = memory[len(start) - 1].sent
    for user in ALIKE:
        assert rates[user] == ({"body": 2e-3, "head": 2e-3} if (user, heads) in PAIRS else {"body": 2e-3})
    names = set(program(path, "centralised").upload(parts=["body", "head"]))  # type: ignore[attr-defined]
    for exchange in memory[len(start) :]:
        for user, message in (*exchange.sent.items(), *exchange.replies.items()):
            tensors = {name for name, value in message.items() if isinstance(value, Tensor)}
            assert tensors <= names
            assert not of_part(message, "head") or (user, heads) in PAIRS
    body, head = sizes(program(path))
    a_round = STEPS * (len(ALIKE) * body + (2 * head if heads == "task" else 0))
    assert result["bytes"]["tensor_up"] == a_round + (body + (head if heads == "task" else 0)) // R


PAIRS = {(user, "task") for user in TWINS}


def test_it_is_marked_as_a_reference() -> None:
    assert Centralised.reference is True


def test_users_without_a_partner_train_locally(path: Path, tmp_path: Path) -> None:
    assert changed(path, "centralised", tmp_path) == ALIKE
    users = Cell(path, "centralised").suite.users
    assert Centralised().touches([user for user in users if user.name in ("user1", "user2")]) == []


@pytest.mark.parametrize("heads", ["own", "task"])
def test_a_restored_cell_goes_on_bit_for_bit(path: Path, heads: str) -> None:
    check_resume(path, "centralised", heads=heads)
