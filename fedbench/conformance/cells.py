"""The kit's tiny federation: runs a cell of it as the core runs every cell, and writes down everything that happens."""

from __future__ import annotations

import hashlib
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from fedbench import messages
from fedbench.cache import Cache
from fedbench.conformance import Failed, Skipped
from fedbench.federation import CellFailed
from fedbench.interfaces import Engine, Fault, Observer, UserHandle
from fedbench.plan import Cell, make_cell
from fedbench.registry import Entry, Registry
from fedbench.rounds import CellRun, NotApplicable, Restart, Surroundings
from fedbench.specs import MethodSpec
from fedbench.store import CellFolder
from fedbench.suite import BASE_SCALE, Suite, load

SCALES = (BASE_SCALE, "alike")
EVALUATE = "evaluate"

Evidence = list[tuple[str, str]]
"""What two runs must have in common: what it is, in words, and its digest."""


def federation(scale: str = BASE_SCALE) -> Suite:
    """The kit's suite."""
    from importlib.resources import files

    return load(str(Path(str(files("fedbench_suites"))) / "conformance.toml"), scale=scale)


@dataclass(frozen=True)
class Call:
    """One verb of one user: what crossed, and which users' weights changed meanwhile, as (user, part)."""

    round: int
    verb: str
    user: str
    sent: str
    reply: str
    sizes: tuple[int, int, int, int]
    """As a round's record has them: encoded bytes up and down, then those of the tensors alone."""
    changed: frozenset[tuple[str, str]] = frozenset()


class WatchingEngine(Engine):
    """Carries messages in this process and remembers every call.

    Args:
        watch: whether to look at all users' weights after every call.
        fail: the user and the verb that fails once, at its first call.
    """

    def __init__(self, *, watch: bool = False, fail: tuple[str, str] | None = None) -> None:
        self.users: dict[str, UserHandle] = {}
        self.calls: list[Call] = []
        self.round = 0
        self._watch, self._fail = watch, fail
        self._weights: dict[tuple[str, str], str] = {}

    def start(self, users: Mapping[str, UserHandle]) -> None:
        self.users = dict(users)
        self._weights = self.weights() if self._watch else {}

    def ask(
        self, verb: str, outgoing: Mapping[str, bytes], *, timeout: float | None = None
    ) -> dict[str, bytes | Fault]:
        return {user: self._remembered(user, verb, outgoing[user]) for user in self.users if user in outgoing}

    def save(self) -> dict[str, bytes]:
        return {name: user.save() for name, user in self.users.items()}

    def restore(self, states: Mapping[str, bytes]) -> None:
        for name, state in states.items():
            self.users[name].restore(state)
        self._weights = self.weights() if self._watch else {}

    def carry(self, user: str, verb: str, message: bytes) -> bytes | Fault:
        """One call, to the user itself."""
        try:
            return self.users[user].call(verb, message)
        except Exception as error:
            return Fault(user, verb, "raised", f"{type(error).__name__}: {error}", traceback.format_exc())

    def close(self) -> None:
        """Release what carries the messages, once the run has been looked at."""

    def weights(self) -> dict[tuple[str, str], str]:
        """A digest of every user's representation and head."""
        found = {}
        for name, user in self.users.items():
            program: Any = user.program  # type: ignore[attr-defined]
            for part in ("representation", "head"):
                found[name, part] = digest(messages.pack(getattr(program, part).state_dict()))
        return found

    def broken(self) -> list[str]:
        """Users whose weights are not finite."""
        return [name for name, user in self.users.items() if not _finite(user.program)]  # type: ignore[attr-defined]

    def _remembered(self, user: str, verb: str, message: bytes) -> bytes | Fault:
        if self._fail == (user, verb):
            self._fail = None
            reply: bytes | Fault = Fault(user, verb, "raised", "RuntimeError: the kit made this user fail")
        else:
            reply = self.carry(user, verb, message)
        before = self._weights
        self._weights = self.weights() if self._watch else {}
        changed = frozenset(key for key, value in self._weights.items() if before[key] != value)
        answer = b"" if isinstance(reply, Fault) else reply
        sizes = (len(answer), len(message), _tensor_bytes(answer), _tensor_bytes(message))
        self.calls.append(Call(self.round, verb, user, digest(message), digest(answer), sizes, changed))
        return reply


@dataclass
class Course:
    """What happened in a run."""

    cell: Cell
    calls: list[Call]
    records: list[dict[str, Any]]
    scores: dict[str, dict[str, Any]]
    faults: list[Fault]
    touched: list[str]
    states: dict[str, str]
    """Digest of each user's packed state at the end."""
    weights: dict[tuple[str, str], str]
    broken: list[str]
    """Users whose weights are not finite in the end."""
    checkpoints: dict[int, bytes] = field(default_factory=dict)
    """By the number of rounds done."""

    def evidence(self, *, since: int = 0, scored: bool = True) -> Evidence:
        """Everything that must be equal in another run: what crossed from a round on, and the users in the end.

        Args:
            scored: whether scores count, too.
        """
        found: Evidence = []
        for call in self.calls:
            if call.round >= since and (scored or call.verb != EVALUATE):
                found.append((f"what {call.user} was sent with '{call.verb}' in round {call.round + 1}", call.sent))
                found.append((f"what {call.user} replied to '{call.verb}' in round {call.round + 1}", call.reply))
        return found + [(f"{user} at the end", state) for user, state in self.states.items()]


def play(
    cell: Cell,
    registry: Registry,
    *,
    engine: Callable[[], WatchingEngine] = WatchingEngine,
    world: type | None = None,
    checkpoint: bytes | None = None,
    observers: Sequence[Observer] = (),
    notes: list[str] | None = None,
) -> Course:
    """Run a cell, from a checkpoint where there is one.

    Args:
        engine: makes what carries the messages.
        world: takes the place of the suite's data.
        notes: gets what the core remarks.

    Raises:
        Skipped: the method touches nobody.
        Failed: a user failed, or the checkpoint cannot be restored.
    """
    made: list[WatchingEngine] = []
    checkpoints: dict[int, bytes] = {}
    remarks = notes if notes is not None else []

    def build() -> Engine:
        made.append(engine())
        return made[-1]

    def hear(event: str, details: Mapping[str, Any]) -> None:
        if event == "round":
            # The checkpoint of a round is written after it is announced: here lies that of the round before.
            if folder.checkpoint_path.exists():
                checkpoints[details["round"]] = folder.checkpoint_path.read_bytes()
            made[-1].round = details["round"] + 1
        elif event == "resumed":
            made[-1].round = details["rounds"]
        elif event == "note":
            remarks.append(details["text"])

    with tempfile.TemporaryDirectory(prefix="fedbench-check-") as place:
        method = cell.method
        folder = CellFolder(Path(place), cell.suite.name, cell.suite.scale, method.name, {}, cell.seed, cell.key)
        if checkpoint is not None:
            folder.checkpoint_path.write_bytes(checkpoint)
        around = Surroundings(_carried(registry, build, world), Cache(), torch.device("cpu"), {}, hear, list(observers))
        run = CellRun(cell, folder, around)
        description = {"method": method.name, "options": dict(method.options), "seed": cell.seed, "key": cell.key}
        around.tell("cell_started", description)
        try:
            run.run()
            around.tell("cell_finished", description, run.result("done", None))
            return Course(
                cell=cell,
                calls=made[-1].calls,
                records=run.records,
                scores=run.scores,
                faults=run.faults,
                touched=run.touched,
                states={user: digest(state) for user, state in made[-1].save().items()},
                weights=made[-1].weights(),
                broken=made[-1].broken(),
                checkpoints=checkpoints,
            )
        except NotApplicable as error:
            raise Skipped(str(error)) from None
        except Restart:
            raise Failed(f"its state cannot be restored: {remarks[-1].rpartition('.damaged-1: ')[2]}") from None
        except CellFailed as error:
            fault = error.fault
            raise Failed(f"{fault.user}, '{fault.verb}': {fault.message}", trace=fault.trace) from None
        finally:
            for one in made:
                one.close()


def cell_of(registry: Registry, spec: MethodSpec, suite: Suite | None = None) -> Cell:
    """One cell of the kit's federation, or of another suite."""
    return make_cell(suite or federation(), registry, spec, 0, "cpu")


def with_users(suite: Suite, **changes: Any) -> Suite:
    """The suite with every user changed alike."""
    return replace(suite, users=tuple(replace(user, **changes) for user in suite.users))


def digest(data: bytes) -> str:
    """A short name of some bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def difference(one: Evidence, two: Evidence) -> str | None:
    """The first thing in which two runs differ, in words."""
    for first, second in zip_longest(one, two):
        if first != second:
            return str((first or second)[0])
    return None


def exchanges(calls: Sequence[Call]) -> Iterator[Call]:
    """What a method asked for."""
    return (call for call in calls if call.verb != EVALUATE)


def _carried(registry: Registry, build: Callable[[], Engine], world: type | None) -> Registry:
    """The registry with other engines, and another world."""
    entries = dict(registry.entries)
    for (kind, name), entry in registry.entries.items():
        if kind == "engine":
            entries[kind, name] = Entry(kind, name, build, entry.source)
        elif kind == "data" and world is not None:
            entries[kind, name] = Entry(kind, name, world, entry.source)
    return replace(registry, entries=entries)


def _finite(program: Any) -> bool:
    parameters = [*program.representation.parameters(), *program.head.parameters()]
    return all(bool(torch.isfinite(parameter).all()) for parameter in parameters)


def _tensor_bytes(encoded: bytes) -> int:
    return messages.tensor_bytes(messages.decode(encoded)) if encoded else 0
