"""Where the objects of a scene stand and what is behind them: everything that is drawn but the pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedbench_plugins.data.emoji.draws import Draws

COLOURS: tuple[tuple[str, tuple[int, int, int]], ...] = (
    ("white", (240, 240, 236)),
    ("grey", (150, 152, 156)),
    ("black", (40, 40, 46)),
    ("red", (206, 72, 66)),
    ("orange", (236, 152, 72)),
    ("yellow", (240, 214, 104)),
    ("green", (112, 180, 104)),
    ("blue", (98, 150, 220)),
    ("purple", (150, 110, 190)),
    ("pink", (240, 170, 190)),
    ("brown", (150, 110, 80)),
)
"""Background colours by the word that a caption uses."""
PATTERNS = ("plain", "shaded", "glowing", "striped", "chequered", "dotted", "cloudy", "grainy", "two-part")
"""Ways in which a background goes from its first colour to its second."""

_SIZES: tuple[tuple[float, float], ...] = ((0.5, 0.9), (0.42, 0.6), (0.36, 0.5), (0.32, 0.44))
_RADII: tuple[tuple[float, float], ...] = ((0.0, 0.14), (0.22, 0.28), (0.26, 0.3), (0.29, 0.34))
_MAIN_SIZE = (0.6, 0.95)
_MOST_TILT = 30.0
_COLOUR_JITTER = 22.0
_CUT = 0.1
"""Part of an object's size that may lie outside the picture."""


@dataclass(frozen=True)
class Placement:
    """One object: its concept, size (of the picture's side), centre (0..1), tilt in degrees, mirrored or not."""

    concept: int
    size: float
    x: float
    y: float
    tilt: float
    mirrored: bool


@dataclass(frozen=True)
class Background:
    """Two colours (indices of COLOURS and their exact RGB, 0..255), and a pattern with its direction and pace."""

    pattern: str
    colours: tuple[int, int]
    rgb: tuple[tuple[float, float, float], tuple[float, float, float]]
    direction: float
    pace: float
    phase: float


@dataclass(frozen=True)
class Scene:
    """A scene ready to be painted; `seed` is its identity."""

    seed: int
    style: int
    background: Background
    objects: tuple[Placement, ...]


def lay_out(seed: int, concepts: Sequence[int], style: int, *, main: bool) -> Scene:
    """Place the concepts in a scene, by the scene's own seed.

    Args:
        seed: identity of the scene.
        concepts: 1 to 4 of them.
        style: number of the vendor's style.
        main: whether the one object is what the scene is about, and so is large.
    """
    draws = Draws("emoji", "layout", seed, count=64)
    background = _background(draws)
    count = len(concepts)
    low, high = _MAIN_SIZE if main else _SIZES[count - 1]
    # Objects stand on a ring turned by chance, so that they rarely hide each other whatever their number.
    start = draws.uniform(0.0, 2 * math.pi)
    objects = []
    for number, concept in enumerate(concepts):
        angle = start + 2 * math.pi * number / count + draws.uniform(-0.2, 0.2)
        radius = draws.uniform(*_RADII[count - 1])
        size = draws.uniform(low, high)
        objects.append(
            Placement(
                concept=concept,
                size=size,
                x=_inside(0.5 + radius * math.cos(angle) + draws.uniform(-0.04, 0.04), size),
                y=_inside(0.5 + radius * math.sin(angle) + draws.uniform(-0.04, 0.04), size),
                tilt=draws.uniform(-_MOST_TILT, _MOST_TILT),
                mirrored=draws.chance(0.5),
            )
        )
    return Scene(seed, style, background, tuple(objects))


def _inside(centre: float, size: float) -> float:
    margin = min(0.5, size * (0.5 - _CUT))
    return min(max(centre, margin), 1.0 - margin)


def _background(draws: Draws) -> Background:
    first = draws.index(len(COLOURS))
    second = (first + 1 + draws.index(len(COLOURS) - 1)) % len(COLOURS)
    return Background(
        pattern=PATTERNS[draws.index(len(PATTERNS))],
        colours=(first, second),
        rgb=(_jittered(first, draws), _jittered(second, draws)),
        direction=draws.uniform(0.0, 2 * math.pi),
        pace=draws.uniform(2.0, 7.0),
        phase=draws.uniform(),
    )


def _jittered(colour: int, draws: Draws) -> tuple[float, float, float]:
    red, green, blue = (
        min(max(value + draws.uniform(-_COLOUR_JITTER, _COLOUR_JITTER), 0.0), 255.0) for value in COLOURS[colour][1]
    )
    return red, green, blue
