"""FedLPS: FedAvg within each task of an architecture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fedbench_baselines.fedlps import FedLPS

sys.path.append(str(Path(__file__).parent))
from shared_architecture import TWINS, USERS, Cell, R, call, changed, check_resume, exchanges, five_users, same, sizes
from spies import verbs
from tiny import WriteSuite, program

ROUND = ["fit", "upload", "download"]


@pytest.fixture
def path(write_suite: WriteSuite) -> Path:
    return five_users(write_suite)


def test_whole_models_are_averaged_among_users_of_one_task_and_architecture(path: Path, tmp_path: Path) -> None:
    memory, result = exchanges(path, "fedlps", tmp_path)
    assert verbs(memory) == ["upload", "upload", "download", *ROUND * R, "fit"]
    assert result["touched"] == TWINS
    assert [list(exchange.sent) for exchange in memory[:3]] == [["user1"], ["user1"], TWINS]
    for upload, download in zip(memory[4::3], memory[5::3], strict=True):
        assert list(upload.sent) == list(download.sent) == TWINS
        assert all(sent["parts"] == ["body", "head"] for sent in upload.sent.values())
        one, two = (upload.replies[user] for user in TWINS)
        weights = [USERS[user][2] for user in TWINS]
        for name, value in download.sent["user1"].items():
            mean = (weights[0] * one[name].double() + weights[1] * two[name].double()) / sum(weights)
            assert torch.allclose(value.double(), mean, atol=1e-6)
        assert same(*download.sent.values()) and download.sent["user1"].keys() == one.keys()


def test_twins_go_on_as_one_and_others_of_the_architecture_do_not(path: Path) -> None:
    cell = Cell(path, "fedlps")
    cell.play(0)
    states = [call(cell.hosts[user], "upload", parts=["body", "head"]) for user in (*TWINS, "user3")]
    assert same(states[0], states[1]) and not same(states[0], states[2])


def test_bytes_are_those_of_whole_models(path: Path, tmp_path: Path) -> None:
    _, result = exchanges(path, "fedlps", tmp_path)
    model = sum(sizes(program(path)))
    assert result["bytes"]["tensor_up"] == 2 * model + model // R
    assert result["bytes"]["tensor_down"] == 2 * model + 2 * model // R


def test_equal_task_or_equal_architecture_alone_is_no_partner(path: Path, tmp_path: Path) -> None:
    assert changed(path, "fedlps", tmp_path) == TWINS
    users = {user.name: user for user in Cell(path, "fedlps").suite.users}
    assert FedLPS().touches([users["user1"], users["user3"]]) == []  # one architecture
    assert FedLPS().touches([users["user2"], users["user5"]]) == []  # one task


def test_what_a_model_freezes_never_crosses(path: Path) -> None:
    user = program(path, "fedlps")
    first, *rest = dict(user.representation.backbone.named_parameters()).items()
    first[1].requires_grad_(False)
    sent = call(Cell(path, "fedlps").hosts["user1"], "upload", parts=["body"])
    frozen = user.upload(parts=["body"])  # type: ignore[attr-defined]
    assert set(sent) - set(frozen) == {f"backbone.{first[0]}"} and len(frozen) == len(rest)


def test_a_restored_cell_goes_on_bit_for_bit(path: Path) -> None:
    check_resume(path, "fedlps")
