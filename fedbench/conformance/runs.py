"""Runs of the kit's federation that several checks look at."""

from __future__ import annotations

import functools

from fedbench.choice import REFERENCE
from fedbench.conformance import Failed, Skipped, Subject
from fedbench.conformance.cells import (
    SCALES,
    Course,
    Evidence,
    WatchingEngine,
    cell_of,
    difference,
    federation,
    play,
)
from fedbench.conformance.forks import ForkingEngine
from fedbench.conformance.heldout import remembered
from fedbench.discovery import default_registry
from fedbench.method import Method
from fedbench.plan import Cell, check_method
from fedbench.registry import Registry
from fedbench.specs import MethodSpec


def cell(subject: Subject) -> Cell:
    """A method's cell in the first of the kit's federations in which it touches anyone.

    Raises:
        Skipped: there is none.
    """
    if "cell" not in subject.kept:
        spec = MethodSpec(subject.name, subject.options)
        for scale in SCALES:
            suite = federation(scale)
            check_method(suite, subject.registry, spec)
            made = cell_of(subject.registry, spec, suite)
            method: Method = subject.registry.create("method", spec.name, made.resolved)
            if method.touches(suite.users):
                subject.kept |= {"cell": made, "method": method}
                break
        else:
            raise Skipped("it touches nobody, neither where tasks and models differ nor where all users are alike")
    found: Cell = subject.kept["cell"]
    return found


def straight(subject: Subject) -> Course:
    """The method's run that all others are compared with, watched."""
    if "straight" not in subject.kept:
        subject.kept["straight"] = play(
            cell(subject), subject.registry, engine=watching, world=world_of(subject.registry, cell(subject))
        )
    found: Course = subject.kept["straight"]
    return found


def again(subject: Subject, **changed: object) -> Course:
    """The same run once more."""
    given = {"world": world_of(subject.registry, cell(subject)), **changed}
    return play(cell(subject), subject.registry, **given)  # type: ignore[arg-type]


def evidence(subject: Subject) -> Evidence:
    """What another process must find of a method, too."""
    return again(subject).evidence()


def forked_evidence(subject: Subject) -> Evidence:
    """The same, with every user in a process of its own."""
    return again(subject, engine=ForkingEngine).evidence()


def watching() -> WatchingEngine:
    """An engine that looks at all weights after every call."""
    return WatchingEngine(watch=True)


def world_of(registry: Registry, cell: Cell) -> type:
    """A cell's world, which remembers what it has made."""
    return remembered(registry.resolve("data", cell.suite.data_name))


@functools.cache
def local_training(scale: str) -> Course:
    """The reference's run of a scale."""
    registry = default_registry()
    made = cell_of(registry, MethodSpec(REFERENCE, {}), federation(scale))
    return play(made, registry, engine=watching, world=world_of(registry, made))


def steady(cell: Cell, registry: Registry, *, world: type | None = None) -> Course:
    """Run a cell straight and once more from its first checkpoint.

    Args:
        world: instead of the suite's.

    Raises:
        Failed: the two differ, or one fails.
    """
    made = world_of(registry, cell) if world is None else remembered(world)
    course = play(cell, registry, world=made)
    resumed = play(cell, registry, world=made, checkpoint=course.checkpoints[1])
    if differs := difference(course.evidence(since=1), resumed.evidence()):
        raise Failed(f"resumed after round 1 a run with it differs: {differs}")
    if course.broken:
        raise Failed(f"the weights of {course.broken[0]} are not finite after a run with it")
    return course
