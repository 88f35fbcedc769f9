"""What engines, kinds of user and observers must do: change no number of a run, and lose no user and no message."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from fedbench.cache import Cache
from fedbench.choice import REFERENCE
from fedbench.conformance import Check, Failed, Subject
from fedbench.conformance.cells import (
    Evidence,
    WatchingEngine,
    cell_of,
    difference,
    digest,
    federation,
    play,
    with_users,
)
from fedbench.conformance.generators import elsewhere
from fedbench.conformance.runs import local_training, steady, world_of
from fedbench.examiner import Examiner
from fedbench.interfaces import Engine, Fault, UserHandle
from fedbench.messages import pack
from fedbench.plan import Cell
from fedbench.specs import MethodSpec, parse_loss
from fedbench.user import Participant, Representation


class CarryingEngine(WatchingEngine):
    """Hands everything on to the engine that is checked, and remembers what came back."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def start(self, users: Mapping[str, UserHandle]) -> None:
        super().start(users)
        self._engine.start(users)

    def carry(self, user: str, verb: str, message: bytes) -> bytes | Fault:
        return self._engine.ask(verb, {user: message})[user]

    def save(self) -> dict[str, bytes]:
        return self._engine.save()

    def restore(self, states: Mapping[str, bytes]) -> None:
        self._engine.restore(states)

    def close(self) -> None:
        self._engine.stop()

    def weights(self) -> dict[tuple[str, str], str]:
        """None: they may be elsewhere."""
        return {}

    def broken(self) -> list[str]:
        return []


class _Echo:
    """A user that replies with what it is sent, and remembers it."""

    def __init__(self) -> None:
        self.state = b""

    def call(self, verb: str, message: bytes) -> bytes:
        if verb == "fail":
            raise RuntimeError("the kit made this user fail")
        self.state += message
        return message

    def save(self) -> bytes:
        return self.state

    def restore(self, state: bytes) -> None:
        self.state = state


def messages(subject: Subject) -> None:
    """Opaque bytes go to the users named, and come back in user order; who is not named is not asked."""
    engine, at = subject.create(), subject.target.ask
    engine.start({"b": _Echo(), "a": _Echo(), "c": _Echo()})
    try:
        sent = {"c": b"\x00three", "b": b"one"}
        replies = engine.ask("echo", sent)
        if list(replies) != ["b", "c"]:
            raise Failed(f"asked for c and b of b, a and c, it replied for {', '.join(replies)}", at=at)
        if replies != sent:
            raise Failed("bytes came back changed", at=at)
        if engine.save() != {"b": b"one", "a": b"", "c": b"\x00three"}:
            raise Failed("save() did not return the state of every user", at=subject.target.save)
        states = {"b": b"1", "a": b"2", "c": b"3"}
        engine.restore(states)
        if engine.save() != states:
            raise Failed("save() after restore() is not what was restored", at=subject.target.restore)
    finally:
        engine.stop()


def faults(subject: Subject) -> None:
    """A user that raises is a `Fault` with name and message; it lives on, and the others reply."""
    engine, at = subject.create(), subject.target.ask
    engine.start({"a": _Echo(), "b": _Echo()})
    try:
        fault = engine.ask("fail", {"a": b"x"}).get("a")
        if not isinstance(fault, Fault):
            raise Failed(f"a user that raised gave {fault!r:.60}, no Fault", at=at)
        if (fault.user, fault.verb, fault.kind) != ("a", "fail", "raised"):
            raise Failed(f"user a raised in 'fail': the fault says {fault.user}, '{fault.verb}', {fault.kind}", at=at)
        if "made this user fail" not in fault.message:
            raise Failed(f"the fault's message is '{fault.message}', not the exception's", at=at)
        if engine.ask("echo", {"a": b"x", "b": b"y"}) != {"a": b"x", "b": b"y"}:
            raise Failed("after a fault users no longer reply", at=at)
    finally:
        engine.stop()


def same_numbers(subject: Subject) -> None:
    """A run over it gives the bits of a run in one process."""
    cell = cell_of(subject.registry, MethodSpec(parse_loss("any").name, {}))
    world = world_of(subject.registry, cell)
    usual = play(cell, subject.registry, world=world)
    over = play(cell, subject.registry, world=world, engine=lambda: CarryingEngine(subject.create()))
    if differs := difference(usual.evidence(), over.evidence()):
        raise Failed(f"over it a run differs: {differs}", at=subject.target.ask)


def parts(subject: Subject) -> None:
    """It builds a participant and, apart from it, an examiner that share no scene."""
    at = subject.target.build
    participant, examiner = _built(subject)
    for kind, value in ((Participant, participant), (Examiner, examiner)):
        if not isinstance(value, kind):
            raise Failed(f"build() returned a {type(value).__name__}, expected a {kind.__name__}", at=at)
    if not isinstance(participant.representation, Representation):
        raise Failed(f"its representation is a {type(participant.representation).__name__}", at=at)
    sets = {
        "train": participant.train,
        "public": participant.public,
        "validation": examiner.validation,
        "test": examiner.test,
    }
    scenes = {name: set(data.samples.scenes.tolist()) for name, data in sets.items()}
    for one, two in itertools.combinations(scenes, 2):
        if scenes[one] & scenes[two]:
            raise Failed(f"{one} and {two} share scenes", at=at)


def initial_weights(subject: Subject) -> None:
    """The seed and the user's name decide the initial weights, whatever the global generators hold."""
    first = _weights(_built(subject)[0])
    with elsewhere():
        second = _weights(_built(subject)[0])
    if differs := difference(first, second):
        raise Failed(f"built twice, '{differs}' differs", at=subject.target.build)


def user_training(subject: Subject) -> None:
    """Users of this kind train for two rounds, straight and resumed alike."""
    steady(_cell_with_kind(subject), subject.registry)


def changes_nothing(subject: Subject) -> None:
    """A run that it watches has the bits of one that nobody watches, and it raises nothing."""
    target: Any = subject.target
    notes: list[str] = []
    usual = local_training(federation().scale)
    watched = play(
        usual.cell,
        subject.registry,
        world=world_of(subject.registry, usual.cell),
        observers=[target() if isinstance(target, type) else target],
        notes=notes,
    )
    if notes:
        raise Failed(notes[0])
    if differs := difference(usual.evidence(), watched.evidence()):
        raise Failed(f"watched by it a run differs: {differs}")


def _cell_with_kind(subject: Subject) -> Cell:
    suite = with_users(federation(), kind=subject.name)
    return cell_of(subject.registry, MethodSpec(REFERENCE, {}), suite)


def _built(subject: Subject) -> tuple[Any, Any]:
    cell = _cell_with_kind(subject)
    suite = cell.suite
    sizes = {
        "validation": suite.validation,
        "test": suite.test,
        "public": suite.public_size,
        "train views": suite.train_views,
        "public views": suite.public_views,
    }
    found: tuple[Any, Any] = subject.create().build(
        suite.users[0],
        world=world_of(subject.registry, cell)(**suite.data_options),
        registry=subject.registry,
        protocol=suite.protocol,
        sizes=sizes,
        seed=0,
        cache=Cache(),
        device=torch.device("cpu"),
    )
    return found


def _weights(participant: Participant) -> Evidence:
    state = {**participant.representation.state_dict(), **participant.head.state_dict(prefix="head.")}
    return [(name, digest(pack(value))) for name, value in state.items()]


CHECKS = {
    "engine": (
        Check("messages", messages, "return replies in the order in which users were started, bytes untouched"),
        Check("faults", faults, "turn whatever a user raises into a Fault of its name, and go on"),
        Check("same numbers", same_numbers, "carry messages and nothing else", ("messages",)),
    ),
    "user": (
        Check("parts", parts, "return a Participant and an Examiner, held-out data in the latter only"),
        Check(
            "initial weights",
            initial_weights,
            "seed torch with seeds.derive(..., seed, spec.name) inside torch.random.fork_rng()",
            ("parts",),
        ),
        Check("training", user_training, "keep what changes in the representation and the head", ("initial weights",)),
    ),
    "observer": (Check("changes nothing", changes_nothing, "only look: a run's numbers may not depend on it"),),
}
