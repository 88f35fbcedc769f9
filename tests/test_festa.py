"""FeSTA: joint steps against training one body on the summed loss, and what crosses."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbench_baselines.festa import FeSTA
from fedbench_baselines.joint_steps import JointUser

sys.path.append(str(Path(__file__).parent))
from shared_architecture import (
    ALIKE,
    STEPS,
    TWINS,
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

PHASE = ["joint_step"] * STEPS + ["fit"]
ROUND = [*PHASE, "upload", "download"]
START = ["upload", "upload", "download", "join"]


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    return five_users(write_suite)


def jointly_trained(path: Path, users: list[str], steps: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The body and the heads after steps on the sum of losses, with one body in one place and no messages at all."""
    programs = {user: program(path, name=user) for user in users}
    body = programs[users[0]].representation.backbone
    parameters = [*body.parameters()]
    for user in users:
        programs[user].representation.backbone = body
        parameters += programs[user].head.parameters()
    if "user4" in programs:
        programs["user4"].head.load_state_dict(programs["user1"].head.state_dict())
    protocol = programs[users[0]].protocol
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=protocol.weight_decay)
    for group in optimizer.param_groups:
        group["rate"] = 2e-3
    for step in range(steps):
        programs[users[0]].schedule(optimizer, step / STEPS, protocol.rounds + 1)
        loss = sum(one.private_loss(*one.private_batch()) for one in programs.values())
        programs[users[0]].step(optimizer, loss)  # type: ignore[arg-type]
    heads = {user: {f"head.{k}": v.detach() for k, v in one.head.named_parameters()} for user, one in programs.items()}
    return {f"backbone.{name}": value.detach() for name, value in body.named_parameters()}, heads


def test_a_phase_is_joint_training_of_one_body_with_own_heads(path: Path) -> None:
    cell = Cell(path, "festa", unify=False)
    # Heads start from user1's only where they are averaged.
    cell.program("user4").head.load_state_dict(cell.program("user1").head.state_dict())
    cell.play(0)
    body, heads = jointly_trained(path, ALIKE, STEPS)
    for user in ALIKE:
        weights = cell.program(user).weights(["body", "head"])
        for name, value in {**body, **heads[user]}.items():
            assert torch.allclose(weights[name], value, atol=2e-5), (user, name)
    start = program(path).representation.backbone
    moved = [value.detach() - body[f"backbone.{name}"] for name, value in start.named_parameters()]
    assert all(float(change.abs().max()) > 1e-3 for change in moved)


def test_all_copies_of_the_body_are_equal_to_the_last_bit(path: Path) -> None:
    cell = Cell(path, "festa")
    for r in range(R):
        cell.play(r)
        bodies = [cell.program(user).weights(["body"]) for user in ALIKE]
        assert all(same(bodies[0], body) for body in bodies)
        heads = [cell.program(user).weights(["head"]) for user in TWINS]
        assert same(*heads)  # averaged after the round
    cell.play(R)
    assert not same(*(cell.program(user).weights(["body"]) for user in TWINS))
    assert {cell.program(user).fits for user in USERS} == {R + 1}


def test_every_step_sends_gradients_and_returns_their_sums(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "festa", tmp_path)
    assert verbs(memory) == [*START, *ROUND * R, "fit"]
    assert result["touched"] == ALIKE
    assert memory[3].sent == {user: {"body": 2e-3} for user in ALIKE}
    for r in range(R):
        phase = memory[len(START) + r * len(ROUND) :][: len(PHASE)]
        assert all(list(exchange.sent) == ALIKE for exchange in phase[:-1]) and list(phase[-1].sent) == list(USERS)
        assert not any(phase[0].sent.values()) and phase[-1].sent["user2"] == {}
        for before, after in pairwise(phase):
            assert not any(of_part(reply, "head") for reply in before.replies.values())
            for name in before.replies["user1"]:
                summed = sum(before.replies[user][name].double() for user in ALIKE)
                assert all(torch.allclose(after.sent[user][name].double(), summed, atol=1e-6) for user in ALIKE)  # type: ignore[arg-type]
        upload, download = memory[len(START) + r * len(ROUND) + len(PHASE) :][:2]
        assert list(upload.sent) == list(download.sent) == TWINS
        assert all(sent == {"parts": ["head"]} for sent in upload.sent.values())
        for name, value in download.sent["user1"].items():
            mean = (40 * upload.replies["user1"][name].double() + 24 * upload.replies["user4"][name].double()) / 64
            assert name.startswith("head.") and torch.allclose(value.double(), mean, atol=1e-6)
    assert not any(memory[-1].sent.values())


def test_bytes_are_a_gradient_each_way_and_step(path: Path, tmp_path: Path) -> None:
    _, result = exchanges(path, "festa", tmp_path)
    body, head = sizes(program(path))
    a_round = STEPS * len(ALIKE) * body + 2 * head
    assert result["bytes"]["tensor_up"] == a_round + (body + head) // R
    assert result["bytes"]["tensor_down"] == a_round + (len(ALIKE) * body + 2 * head) // R
    assert result["bytes"]["paper"] is None


def test_without_unifying_heads_never_cross(path: Path, tmp_path: Path) -> None:
    memory, _ = exchanges(path, "festa", tmp_path, unify=False)
    assert verbs(memory) == ["upload", "download", "join", *PHASE * R, "fit"]
    assert not any(
        of_part(message, "head") for one in memory for message in (*one.sent.values(), *one.replies.values())
    )


def test_every_user_takes_as_many_steps_as_in_local_training(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(path, "festa")
    taken = dict.fromkeys(USERS, 0)
    for user in USERS:
        optimizer = cell.program(user).fit_optimizer

        def counted(*arguments: Any, user: str = user, step: Any = optimizer.step, **named: Any) -> Any:
            taken[user] += 1
            return step(*arguments, **named)

        monkeypatch.setattr(optimizer, "step", counted)
    for r in range(R + 1):
        cell.play(r)
        assert set(taken.values()) == {(r + 1) * STEPS}


def test_joint_steps_of_one_user_are_local_training(path: Path) -> None:
    joint, plain = host(path, "festa"), host(path, "local")
    call(joint, "join", body=2e-3)
    losses = []
    for _ in range(2):
        sums: dict[str, Tensor] = {}
        for _ in range(STEPS):
            sums = call(joint, "joint_step", **sums)
        losses.append((call(joint, "fit", **sums), call(plain, "fit")))
    assert all(one == two for one, two in losses)
    for part in ("representation", "head"):
        states = [user.program.packed()[part] for user in (joint, plain)]
        assert same(*states)
    assert joint.program.fits == plain.program.fits == 2


def test_the_body_has_the_lowest_rate_of_its_group_and_the_schedule_of_a_phase(write_suite: WriteSuite) -> None:
    path = five_users(write_suite)
    text = path.read_text().replace('rates = "small"', 'rates = "slow"', 1)
    path.write_text(text.replace("[rates.small]", "[rates.slow]\nfit = 1e-3\nalign = 1e-3\n\n[rates.small]"))
    cell = Cell(path, "festa")
    cell.play(0)
    for user in ALIKE:
        groups = cell.program(user).fit_optimizer.param_groups
        assert [group["rate"] for group in groups] == [1e-3, 1e-3 if user == "user1" else 2e-3]
    bodies = [cell.program(user).weights(["body"]) for user in ALIKE]
    assert all(same(bodies[0], body) for body in bodies)


def test_users_without_a_partner_train_locally(path: Path, tmp_path: Path) -> None:
    assert changed(path, "festa", tmp_path) == ALIKE
    assert FeSTA().touches([user for user in Cell(path, "festa").suite.users if user.name in ("user1", "user2")]) == []


@pytest.mark.parametrize("users", [["user1", "user2", "user3"], ["user1", "user3", "user4"]])
def test_a_user_that_fails_in_a_step_leaves_the_rest_in_step(
    write_suite: WriteSuite, monkeypatch: pytest.MonkeyPatch, users: list[str]
) -> None:
    path = five_users(write_suite, ("eval_batch = 50", 'eval_batch = 50\non_failure = "skip"'))
    joint_step = JointUser.joint_step

    def failing(self: Any, **sums: Tensor) -> dict[str, Any]:
        if self.name == "user3" and (self.fits, self._taken) == (1, 0) and sums:
            raise RuntimeError("no such luck")
        return joint_step(self, **sums)

    failing.is_verb = True  # type: ignore[attr-defined]
    monkeypatch.setattr(JointUser, "joint_step", failing)
    cell = Cell(path, "festa", users=users)
    for r in range(R):
        cell.play(r)
    assert "user3" not in cell.federation.alive
    left = [user for user in users if user != "user3"]
    assert {cell.program(user).fits for user in left} == {R}
    if "user4" in left:
        assert same(*(cell.program(user).weights(["body"]) for user in left))
    cell.play(R)


def test_a_restored_cell_goes_on_bit_for_bit(path: Path) -> None:
    check_resume(path, "festa")
