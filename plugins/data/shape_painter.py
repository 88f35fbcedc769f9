"""Paints scenes of coloured shapes with numpy alone: signed distances, anti-aliased, many scenes at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

SLOTS = 3
"""Most objects a scene can hold."""

PALETTE: Mapping[str, tuple[float, float, float]] = {
    "red": (0.0, 0.92, 0.86),
    "orange": (0.078, 0.97, 0.97),
    "yellow": (0.150, 0.95, 0.97),
    "lime": (0.240, 0.88, 0.86),
    "green": (0.385, 0.92, 0.46),
    "cyan": (0.510, 0.88, 0.90),
    "blue": (0.630, 0.88, 0.84),
    "purple": (0.765, 0.78, 0.66),
    "pink": (0.900, 0.52, 0.98),
    "brown": (0.065, 0.72, 0.42),
}
"""Hue, saturation and value of each colour, in 0..1."""

_COLOUR_JITTER = np.array([0.012, 0.06, 0.05], np.float32)
_LINE = np.float32(1.7 / 32)
"""Width of an outline as a fraction of the picture: it does not grow with the shape, as a pen's would not."""


@dataclass(frozen=True)
class Scenes:
    """What is to be painted: all that labels and captions depend on, and nothing else.

    Args:
        shapes: int64 (N, SLOTS), indices into `DISTANCES`.
        colours: int64 (N, SLOTS), indices into `PALETTE`.
        counts: int64 (N,), how many slots are in use, 1 to SLOTS.
        outlined: bool (N,), drawn with a pen instead of filled.
    """

    shapes: np.ndarray
    colours: np.ndarray
    counts: np.ndarray
    outlined: np.ndarray

    def first(self, size: int) -> Scenes:
        """The first `size` scenes."""
        return Scenes(self.shapes[:size], self.colours[:size], self.counts[:size], self.outlined[:size])

    @staticmethod
    def joined(parts: Sequence[Scenes]) -> Scenes:
        """The scenes of all parts, one after the other."""
        columns = zip(*((part.shapes, part.colours, part.counts, part.outlined) for part in parts), strict=True)
        return Scenes(*(np.concatenate(column) for column in columns))


def paint(scenes: Scenes, *, size: int, pixels: int, random: np.random.Generator) -> np.ndarray:
    """Pictures of the first `size` scenes: uint8 (size, pixels, pixels, 3).

    Position, scale, rotation, colour jitter, background and noise come from `random`; a picture does not depend
    on `size`.
    """
    total = len(scenes.counts)
    # Everything but the noise is drawn for all scenes, and the noise last: so a prefix of the scenes looks the same.
    centres, radii = _layout(scenes.counts, random)
    angles = random.uniform(-0.2, 0.2, (total, SLOTS)).astype(np.float32)
    colours = np.array(list(PALETTE.values()), np.float32)[scenes.colours]
    colours = _rgb(colours + _COLOUR_JITTER * random.uniform(-1, 1, colours.shape).astype(np.float32))
    canvas = _backgrounds(total, pixels, random)[:size]
    noise = random.uniform(0.01, 0.05, (total, 1, 1, 1)).astype(np.float32)[:size]

    ticks = (np.arange(pixels, dtype=np.float32) + 0.5) / pixels
    for slot in range(SLOTS):
        rows = np.flatnonzero(scenes.counts[:size] > slot)
        radius = radii[rows, slot, None, None]
        across = (ticks[None, None, :] - centres[rows, slot, 0, None, None]) / radius
        down = (ticks[None, :, None] - centres[rows, slot, 1, None, None]) / radius
        cosine, sine = (f(angles[rows, slot, None, None]) for f in (np.cos, np.sin))
        u, v = cosine * across + sine * down, cosine * down - sine * across
        distance = _distances(scenes.shapes[rows, slot], u, v) * radius
        pen = scenes.outlined[rows, None, None]
        distance = np.where(pen, np.abs(distance) - _LINE / 2, distance)
        alpha = np.clip(0.5 - distance * pixels, 0, 1)[..., None]
        canvas[rows] += alpha * (colours[rows, slot, None, None, :] - canvas[rows])
    canvas += noise * random.standard_normal(canvas.shape, dtype=np.float32)
    return np.asarray(np.clip(canvas * 255 + 0.5, 0, 255).astype(np.uint8))


def another_view(pictures: np.ndarray, *, total: int, random: np.random.Generator) -> np.ndarray:
    """The pictures once more, mirrored or not, zoomed, shifted and lit differently: uint8, the same shape.

    `total` rows of random numbers are drawn, however few pictures there are.
    """
    size, pixels = pictures.shape[:2]
    mirrored = random.random(total)[:size] < 0.5
    window = random.uniform(0.85, 1.0, total)[:size]
    offsets = random.uniform(-0.05, 0.05, (2, total))[:, :size]
    light = random.uniform(0.75, 1.25, (total, 1, 1, 1)).astype(np.float32)[:size]
    ticks = (np.arange(pixels) + 0.5) / pixels - 0.5
    rows, columns = (
        np.clip((ticks * window[:, None] + offset[:, None] + 0.5) * pixels, 0, pixels - 1).astype(np.int64)
        for offset in offsets
    )
    columns = np.where(mirrored[:, None], columns[:, ::-1], columns)
    moved = pictures[np.arange(size)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return np.asarray(np.clip(moved * light, 0, 255).astype(np.uint8))


def _layout(counts: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Centres (N, SLOTS, 2) and radii (N, SLOTS) as fractions of the picture; several objects never overlap."""
    total = len(counts)
    spread = random.uniform(-1, 1, (total, SLOTS, 2))
    scale = random.random((total, SLOTS))
    quadrants = random.permuted(np.tile(np.arange(4), (total, 1)), axis=1)[:, :SLOTS]
    alone = (counts == 1)[:, None]
    radii = np.where(alone, 0.24 + 0.15 * scale, 0.175 + 0.05 * scale)
    corners = 0.25 + 0.5 * np.stack([quadrants % 2, quadrants // 2], axis=-1)
    centres = np.where(alone[..., None], 0.5 + spread * (0.5 - radii[..., None]), corners + 0.03 * spread)
    return centres.astype(np.float32), radii.astype(np.float32)


def _backgrounds(total: int, pixels: int, random: np.random.Generator) -> np.ndarray:
    """Greyish, softly shaded backgrounds: float32 (N, pixels, pixels, 3) in 0..1."""
    hue, saturation, depth = random.random(total), random.uniform(0, 0.18, total), random.random(total)
    # Dark or pale, never between: mid greys would hide brown, green and purple.
    value = np.where(random.random(total) < 0.5, 0.03 + 0.2 * depth, 0.75 + 0.25 * depth)
    slope = random.uniform(-0.12, 0.12, (total, 2)).astype(np.float32)
    colour = _rgb(np.stack([hue, saturation, value], axis=-1).astype(np.float32))
    ticks = np.linspace(-1, 1, pixels, dtype=np.float32)
    shade = slope[:, 0, None, None] * ticks[None, :, None] + slope[:, 1, None, None] * ticks[None, None, :]
    return np.asarray(colour[:, None, None, :] * (1 + shade[..., None]))


def _rgb(hsv: np.ndarray) -> np.ndarray:
    """Hue (cyclic), saturation and value (clipped) in 0..1 -> red, green, blue in 0..1, last axis."""
    hue = hsv[..., 0, None] * 6
    saturation, value = (np.clip(hsv[..., i, None], 0, 1) for i in (1, 2))
    wheel = np.abs((hue + np.array([0, 4, 2], np.float32)) % 6 - 3) - 1
    return np.asarray(value * (1 - saturation * (1 - np.clip(wheel, 0, 1))))


def _distances(shapes: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Signed distance (negative inside) of points (N, P, P) to the N shapes, in radii."""
    out = np.empty_like(u)
    for number, distance in enumerate(DISTANCES.values()):
        rows = np.flatnonzero(shapes == number)
        if len(rows):
            out[rows] = distance(u[rows], v[rows])
    return out


def _disc(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.asarray(np.hypot(u, v) - 0.92)


def _ring(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(np.hypot(u, v) - 0.68) - 0.25)


def _rectangle(u: np.ndarray, v: np.ndarray, width: float, height: float) -> np.ndarray:
    return np.asarray(np.maximum(np.abs(u) - width, np.abs(v) - height))


def _square(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return _rectangle(u, v, 0.76, 0.76)


def _triangle(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    v = v - 0.18
    return np.asarray(np.maximum(v - 0.52, np.abs(u) * 0.866 - v * 0.5 - 0.52))


def _diamond(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    # Narrower than it is tall: a square that stands on its corner would be a rotated square.
    return np.asarray((np.abs(u) + 0.6 * np.abs(v) - 0.6) / math.hypot(1, 0.6))


def _cross(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.asarray(np.minimum(_rectangle(u, v, 0.95, 0.29), _rectangle(u, v, 0.29, 0.95)))


def _star(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    step = np.pi / 5
    folded = np.abs((np.arctan2(u, -v) + step) % (2 * step) - step)
    radius, notch = np.hypot(u, v), 0.43
    # The edge from the tip (1, 0) to the notch, as a line with its outward normal.
    edge = np.array([notch * np.cos(step) - 1, notch * np.sin(step)])
    normal = np.array([edge[1], -edge[0]]) / np.hypot(*edge)
    x, y = radius * np.cos(folded) - 1, radius * np.sin(folded)
    return np.asarray(x * np.float32(normal[0]) + y * np.float32(normal[1]))


def _bar(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return _rectangle(u, v, 0.97, 0.33)


def _crescent(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(np.hypot(u, v) - 0.95, 0.75 - np.hypot(u - 0.5, v)))


def _heart(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    # Two half discs on a square that stands on its corner; exact distance after Inigo Quilez, "2D distance functions".
    scale = np.float32(0.62)
    x, y = np.abs(u) * scale, 0.56 - v * scale
    lobe = np.hypot(x - 0.25, y - 0.75) - np.float32(np.sqrt(2) / 4)
    along = 0.5 * np.maximum(x + y, 0)
    below = np.minimum(np.hypot(x, y - 1), np.hypot(x - along, y - along)) * np.sign(x - y)
    return np.asarray(np.where(x + y > 1, lobe, below) / scale)


DISTANCES: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "disc": _disc,
    "ring": _ring,
    "square": _square,
    "triangle": _triangle,
    "diamond": _diamond,
    "cross": _cross,
    "star": _star,
    "bar": _bar,
    "crescent": _crescent,
    "heart": _heart,
}
"""Each shape's signed distance from (across, down) in radii around its centre; all fit a disc of radius 1.1."""
