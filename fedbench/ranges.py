"""What a method's option may be tuned over: declared by the method, drawn from by `fedbench tune`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class Range(Protocol):
    """A set of values that an option can be tuned over."""

    def draw(self, generator: np.random.Generator) -> Any:
        """One value at random."""


@dataclass(frozen=True)
class LogRange:
    """Numbers from `low` to `high`, uniform in their logarithm."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high or not math.isfinite(self.high):
            raise ValueError(f"a LogRange needs 0 < low < high, not {self.low} and {self.high}")

    def draw(self, generator: np.random.Generator) -> float:
        """A number with three significant digits, which is what a suite file should hold."""
        return float(f"{math.exp(generator.uniform(math.log(self.low), math.log(self.high))):.3g}")


@dataclass(frozen=True)
class Choice:
    """One of some values, all equally likely."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a Choice needs at least one value")

    def draw(self, generator: np.random.Generator) -> Any:
        """One of the values."""
        return self.values[int(generator.integers(len(self.values)))]


Ranges = Mapping[str, Range]

ALIGNMENT_RATE = LogRange(0.25, 4.0)
"""The factor on the suite's alignment rates, the same for every method that has one."""
