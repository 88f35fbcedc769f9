"""Random numbers whose bits do not depend on a numpy release."""

from __future__ import annotations

import numpy as np

from fedbench import seeds


class Draws:
    """Numbers drawn one after another from a block of uniform ones: quicker than as many calls of a generator.

    Only uniform numbers are taken from numpy, whose other distributions may change between releases.

    Args:
        coordinates: name the generator, as in `fedbench.seeds`.
        count: how many numbers can be drawn.
    """

    def __init__(self, *coordinates: seeds.Coordinate, count: int = 64) -> None:
        self._block = iter(seeds.numpy_generator(*coordinates).random(count).tolist())

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """A number from [low, high)."""
        value: float = next(self._block)
        return low + (high - low) * value

    def index(self, length: int) -> int:
        """A position in something of `length` members."""
        return int(self.uniform() * length)

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self.uniform() < probability


def permutation(length: int, *coordinates: seeds.Coordinate) -> list[int]:
    """The numbers 0 .. length - 1 in an order drawn from the coordinates."""
    order: list[int] = np.argsort(seeds.numpy_generator(*coordinates).random(length), kind="stable").tolist()
    return order
