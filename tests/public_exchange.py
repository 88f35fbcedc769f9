"""A federation with partners and a user alone in its label space, for the tests of methods that exchange outputs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from fedbench import messages
from fedbench.discovery import discover
from fedbench.federation import Federation
from fedbench.method import Method, ServerProgram
from fedbench.plan import make_cell
from fedbench.specs import MethodSpec, Value
from fedbench.suite import load
from fedbench.user import UserHost

sys.path.append(str(Path(__file__).parent))
from spies import Exchange, spied
from tiny import WriteSuite, run

R, T, B, D = 2, 3, 8, 16
TASKS = {"user1": "mlc", "user2": "mlc", "user3": "ic100", "user4": "ic100", "user5": "ic10"}
MODELS = {**dict.fromkeys(TASKS, "small-convnet"), "user2": "small-resnet"}
CLASSES = {"mlc": 10, "ic100": 100, "ic10": 10}
GROUPS = [["user1", "user2"], ["user3", "user4"]]
PARTNERS = ["user1", "user2", "user3", "user4"]
ALONE = "user5"

USER = """
[[user]]
name = "{name}"
task = "{task}"
model = {{ name = "{model}", width = 8 }}
train = {train}
rates = "small"
data = {{ style = "filled" }}
"""

DIFFERENT_RATES = ("align = 1e-3", "align = 1e-3\nprojection = 4e-3")


def five_users(write_suite: WriteSuite, *replacements: tuple[str, str]) -> Path:
    """A suite of five users: two label spaces of two users each, and one of one; users 3 and 4 have equal nets."""
    path = write_suite(("iterations = 2", f"iterations = {T}"), *replacements)
    head = path.read_text().partition("[[user]]")[0]
    users = [
        USER.format(name=name, task=task, model=MODELS[name], train=20 if name == "user4" else 40)
        for name, task in TASKS.items()
    ]
    path.write_text(head + "".join(users))
    return path


def exchanges(
    path: Path, method: str, runs: Path, *, seed: int = 0, **options: Value
) -> tuple[list[Exchange], dict[str, Any]]:
    """What a cell exchanged, evaluations left out, and its result."""
    suite, registry = load(str(path)), discover()
    cell = make_cell(suite, registry, MethodSpec(method, options), seed, "cpu")
    memory = spied(registry)
    result = run(cell, registry, runs)
    assert result["status"] == "done", result["error"]
    return [exchange for exchange in memory if exchange.verb != "evaluate"], result


def changed(path: Path, method: str, runs: Path, **options: Value) -> list[str]:
    """The users whose last local phase differs from local training's; everyone else's numbers are equal to the bit."""
    local, alone = exchanges(path, "local", runs)
    memory, result = exchanges(path, method, runs, **options)  # type: ignore[arg-type]
    losses = [[one.replies[user]["loss"] for one in (local[-1], memory[-1])] for user in TASKS]
    different = [user for user, (one, two) in zip(TASKS, losses, strict=True) if one != two]
    for user in set(TASKS) - set(different):
        for ours, theirs in zip(result["rounds"], alone["rounds"], strict=True):
            assert ours["validation"][user] == theirs["validation"][user]
        (ours, theirs) = ([row["test"] for row in each["users"] if row["name"] == user] for each in (result, alone))
        assert ours == theirs
    return different


def call(user: UserHost, verb: str, **message: Any) -> dict[str, Any]:
    """Ask a user for a verb, through the codec."""
    return messages.decode(user.call(verb, messages.encode(message)))


def batches(seed: int = 0) -> torch.Tensor:
    """T public batches."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(32, generator=generator)[:B] for _ in range(T)])


def server(path: Path, method: Method) -> Any:
    """The server of a method on a suite, with users that nobody may ask."""
    suite = load(str(path))
    specs = {user.name: user for user in suite.users}
    federation = Federation(None, list(specs), suite.protocol, lambda: None)  # type: ignore[arg-type]
    made: ServerProgram = method.Server(method, suite.protocol, federation, specs, suite.public_size, 0)
    return made
