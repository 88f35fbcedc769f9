"""The global generators of this process: whether something drew from them, and a place where they stand elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# By reference, as nothing in fedbench may draw from them.
_NUMPY: Any = np.random.mtrand._rand  # type: ignore[attr-defined]
_PYTHON: Any = sys.modules["random"]


@contextmanager
def elsewhere(seed: int = 1) -> Iterator[None]:
    """The global generators from another seed on; afterwards as before."""
    before = _states()
    torch.manual_seed(seed)
    _NUMPY.seed(seed)
    _PYTHON.seed(seed)
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Names those that were drawn from, once the block is left; afterwards they are as before."""
    before = _states()
    drawn: list[str] = []
    try:
        yield drawn
    finally:
        after = _states()
        same = (
            torch.equal(before[0], after[0]),
            all(np.array_equal(one, two) for one, two in zip(before[1], after[1], strict=True)),
            before[2] == after[2],
        )
        drawn += [name for name, equal in zip(("torch", "numpy", "random"), same, strict=True) if not equal]
        _restore(before)


def _states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), _NUMPY.get_state(), _PYTHON.getstate()


def _restore(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    _NUMPY.set_state(states[1])
    _PYTHON.setstate(states[2])
