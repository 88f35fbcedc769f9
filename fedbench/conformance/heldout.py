"""Worlds for the kit: one that remembers what it made, one whose held-out data are others, and a wire around both."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fedbench.interfaces import Samples

_SETS = ("train", "validation", "test", "public")
HELD_OUT = ("validation", "test")


@functools.cache
def remembered(world: type) -> type:
    """A world that makes every set once in a process, and hands it out read-only.

    All its instances must have the same options.
    """
    memory: dict[str, Samples] = {}

    def remembering(name: str) -> Any:
        def method(self: Any, *args: Any, **options: Any) -> Samples:
            key = repr((name, args, sorted(options.items())))
            if key not in memory:
                memory[key] = _frozen(getattr(world, name)(self, *args, **options))
            return memory[key]

        return method

    return type(
        world.__name__, (world,), {name: remembering(name) for name in _SETS} | {"__module__": world.__module__}
    )


@functools.cache
def spoiled(world: type) -> type:
    """The same world with other validation and test sets: inverted pictures, reversed texts, other targets."""

    def spoiling(name: str) -> Any:
        def method(self: Any, *args: Any, **options: Any) -> Samples:
            return _spoiled(getattr(world, name)(self, *args, **options))

        return method

    made = {name: spoiling(name) for name in HELD_OUT}
    return type(world.__name__, (world,), made | {"__module__": world.__module__})


@functools.cache
def with_task(world: type, task: str, like: str) -> type:
    """The world with one more task, whose data are those of another."""

    def answering(name: str) -> Any:
        def method(self: Any, asked: str, *args: Any, **options: Any) -> Samples:
            found: Samples = getattr(world, name)(self, like if asked == task else asked, *args, **options)
            return found

        return method

    made = {name: answering(name) for name in _SETS if name != "public"}
    return type(world.__name__, (world,), made | {"__module__": world.__module__})


@contextmanager
def tripwire(world: type) -> Iterator[list[str]]:
    """Notes where a world is asked for held-out data; `remembered` ones that have them ask no more."""
    caught: list[str] = []

    def wired(original: Any) -> Any:
        def method(*args: Any, **options: Any) -> Samples:
            caught.append("".join(traceback.format_stack()[:-1]))
            found: Samples = original(*args, **options)
            return found

        return method

    own = {name: vars(world).get(name) for name in HELD_OUT}
    for name in HELD_OUT:
        setattr(world, name, wired(getattr(world, name)))
    try:
        yield caught
    finally:
        for name, original in own.items():
            if original is None:
                delattr(world, name)
            else:
                setattr(world, name, original)


def _frozen(samples: Samples) -> Samples:
    for array in (*samples.inputs.values(), samples.targets, samples.scenes, samples.pairs):
        if array is not None:
            array.flags.writeable = False
    return samples


def _spoiled(samples: Samples) -> Samples:
    inputs = {name: _inverted(array) for name, array in samples.inputs.items()}
    targets = samples.targets
    if targets is not None:
        targets = 1 - targets if targets.ndim > 1 else (targets + 1) % max(1, len(samples.classes))
    return dataclasses.replace(samples, key=f"{samples.key}/spoiled", inputs=inputs, targets=targets)


def _inverted(array: np.ndarray) -> np.ndarray:
    return 255 - array if array.dtype == np.uint8 else array[::-1].copy()
