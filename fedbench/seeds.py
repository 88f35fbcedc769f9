"""Random generators derived from named coordinates, so that no number depends on what ran before."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    import torch

Coordinate = str | int


def derive(*coordinates: Coordinate) -> int:
    """A 63-bit seed that is a pure function of the coordinates: `derive("fit", "user1", 0)`.

    Strings and integers of equal spelling give different seeds, and so do different orders.
    """
    if not coordinates:
        raise ValueError("a seed needs at least one coordinate")
    digest = hashlib.sha256()
    for coordinate in coordinates:
        text = f"{type(coordinate).__name__}:{coordinate}"
        digest.update(f"{len(text)}:{text};".encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def torch_generator(*coordinates: Coordinate) -> torch.Generator:
    """A fresh CPU `torch.Generator` seeded by the coordinates."""
    import torch

    return torch.Generator().manual_seed(derive(*coordinates))


def numpy_generator(*coordinates: Coordinate) -> numpy.random.Generator:
    """A fresh `numpy.random.Generator` (PCG64) seeded by the coordinates."""
    import numpy

    return numpy.random.Generator(numpy.random.PCG64(derive(*coordinates)))
