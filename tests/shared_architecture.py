"""A tiny suite whose users mostly share an architecture, for the tests of the methods that merge weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbench import messages
from fedbench.discovery import discover
from fedbench.federation import Federation, Meter
from fedbench.method import Method
from fedbench.plan import make_cell
from fedbench.specs import MethodSpec, Value
from fedbench.suite import load
from fedbench.user import UserHost, UserProgram
from fedbench_plugins.engines.local import LocalEngine

sys.path.append(str(Path(__file__).parent))
from spies import Exchange, spied
from tiny import WriteSuite, host, run

R, STEPS = 2, 3
USERS = {
    "user1": ("mlc", "small-convnet", 40),
    "user2": ("ic100", "small-resnet", 40),
    "user3": ("ic10", "small-convnet", 40),
    "user4": ("mlc", "small-convnet", 24),
    "user5": ("ic100", "small-convnet", 40),
}
ALIKE = ["user1", "user3", "user4", "user5"]
"""Who has the architecture of others."""
TWINS = ["user1", "user4"]
"""Who has the label space of another, too."""
ALONE = "user2"

USER = """
[[user]]
name = "{name}"
task = "{task}"
model = {{ name = "{model}", width = 8 }}
train = {train}
rates = "small"
data = {{ style = "filled" }}
"""


def five_users(write_suite: WriteSuite, *replacements: tuple[str, str]) -> Path:
    """A suite of five users: four of one architecture, two of them of one task, and one whose net nobody shares."""
    path = write_suite(("steps = 2", f"steps = {STEPS}"), *replacements)
    head = path.read_text().partition("[[user]]")[0]
    users = [
        USER.format(name=name, task=task, model=model, train=train) for name, (task, model, train) in USERS.items()
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
    losses = [[one.replies[user]["loss"] for one in (local[-1], memory[-1])] for user in USERS]
    different = [user for user, (one, two) in zip(USERS, losses, strict=True) if one != two]
    for user in set(USERS) - set(different):
        for ours, theirs in zip(result["rounds"], alone["rounds"], strict=True):
            assert ours["validation"][user] == theirs["validation"][user]
        (ours, theirs) = ([row["test"] for row in each["users"] if row["name"] == user] for each in (result, alone))
        assert ours == theirs
    return different


def call(user: UserHost, verb: str, **message: Any) -> dict[str, Any]:
    """Ask a user for a verb, through the codec."""
    return messages.decode(user.call(verb, messages.encode(message)))


def of_part(state: Mapping[str, Any], part: str) -> dict[str, Tensor]:
    """The weights of a message that are the head's, or the others."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: value for name, value in tensors.items() if name.startswith("head.") == (part == "head")}


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    """Whether two states are equal to the last bit."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def sizes(user: UserProgram) -> tuple[int, int]:
    """Bytes of a user's backbone and of its head."""
    return tuple(  # type: ignore[return-value]
        sum(4 * value.numel() for value in part.parameters() if value.requires_grad)
        for part in (user.representation.backbone, user.head)
    )


class Cell:
    """The programs of a cell, which a test drives round by round.

    Args:
        users: who takes part; default: all of the suite.
    """

    def __init__(self, path: Path, method: str, users: Sequence[str] | None = None, **options: Any) -> None:
        self.suite = load(str(path))
        specs = {user.name: user for user in self.suite.users if users is None or user.name in users}
        self.hosts = {name: host(path, method, name=name, **options) for name in specs}
        engine = LocalEngine()
        engine.start(self.hosts)
        self.federation = Federation(engine, list(specs), self.suite.protocol, lambda: None)
        made: Method = discover().create("method", method, options)
        self.server: Any = made.Server(made, self.suite.protocol, self.federation, specs, self.suite.public_size, 0)

    def program(self, user: str) -> Any:
        return self.hosts[user].program

    def play(self, r: int) -> None:
        """One round; the last phase where all rounds are over."""
        self.federation.meter = Meter()
        if r < self.suite.protocol.rounds:
            self.server.round(r)
        else:
            self.server.finish()

    def save(self) -> dict[str, bytes]:
        return {"server": messages.pack(self.server.packed())} | {
            name: user.save() for name, user in self.hosts.items()
        }

    def restore(self, state: Mapping[str, bytes]) -> None:
        self.server.unpacked(messages.unpack(state["server"]))
        for name, user in self.hosts.items():
            user.restore(state[name])


def check_resume(path: Path, method: str, **options: Any) -> None:
    """A cell that is restored after any round goes on bit for bit."""
    whole, states = Cell(path, method, **options), []
    rounds = whole.suite.protocol.rounds
    for r in range(rounds + 1):
        whole.play(r)
        states.append(whole.save())
    for r, state in enumerate(states[:rounds]):
        again = Cell(path, method, **options)
        again.restore(state)
        assert again.save() == state
        for later in range(r + 1, rounds + 1):
            again.play(later)
        assert again.save() == states[-1] != state
