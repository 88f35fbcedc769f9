"""Scenes as pixels, and their augmented views."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from fedbench import seeds
from fedbench_plugins.data.emoji.draws import Draws
from fedbench_plugins.data.emoji.layout import Background, Placement, Scene

_CONTRAST = 0.6
"""How far a pattern goes towards the second colour: the objects should stay what stands out."""
_RIM = 2
"""Transparent pixels around a drawing, so that its edge is smoothed where it touches its square."""


class Composer:
    """Paints scenes.

    Args:
        drawings: uint8 (concepts, styles, P, P, 4); scenes get the same side P.
    """

    def __init__(self, drawings: np.ndarray) -> None:
        self.pixels = int(drawings.shape[2])
        self._drawings = drawings
        self._levels: dict[tuple[int, int], tuple[Image.Image, Image.Image]] = {}
        axis = (np.arange(self.pixels, dtype=np.float32) + 0.5) / self.pixels - 0.5
        self._x, self._y = np.meshgrid(axis, axis)

    def paint(self, scene: Scene) -> Image.Image:
        """The plain view of a scene, RGB."""
        picture = self._background(scene.background, scene.seed)
        for placed in scene.objects:
            drawn = self._placed(placed, scene.style)
            picture.paste(drawn, (0, 0), drawn)
        return picture

    def view(self, picture: Image.Image, scene: int, number: int, *, strong: bool = False) -> Image.Image:
        """The augmented view `number` of a scene's picture: cropped, tilted, mirrored, in other colours; 0 is plain.

        A `strong` view is cropped closer, turned in hue by up to a fifth of the circle, and grey one time in five,
        after SimCLR: otherwise the colours of the background tell two scenes apart, and nobody need look at what
        is in them.
        """
        if number == 0:
            return picture
        draws = Draws("emoji", "view", scene, number, count=18)
        cropped = self._cropped(picture, draws, 0.5 if strong else 0.7)
        matrix = _recolouring(draws)
        if strong:
            matrix = _turned(matrix, draws.uniform(-1.26, 1.26), 0.0 if draws.chance(0.2) else 1.0)
        return cropped.convert("RGB", matrix)

    def _cropped(self, picture: Image.Image, draws: Draws, least: float) -> Image.Image:
        side = draws.uniform(least, 0.95)
        # A square turned by a small angle needs about (1 + angle) of its side: no tilt may reach outside.
        tilt = draws.uniform(-1.0, 1.0) * min(0.2, 1.0 / side - 1.0)
        reach = side * (math.cos(tilt) + math.sin(abs(tilt))) / 2
        x, y = (draws.uniform(reach, 1.0 - reach) * self.pixels for _ in range(2))
        mirror = -1.0 if draws.chance(0.5) else 1.0
        cosine, sine = side * math.cos(tilt), side * math.sin(tilt)
        half = self.pixels / 2
        a, b, d, e = mirror * cosine, -sine, mirror * sine, cosine
        matrix = (a, b, x - (a + b) * half, d, e, y - (d + e) * half)
        return picture.transform(picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)

    def _placed(self, placed: Placement, style: int) -> Image.Image:
        """The drawing on a transparent canvas of the scene's size, where and how it is placed."""
        full, half = self._source(placed.concept, style)
        # Bilinear sampling skips pixels when it shrinks a lot, hence the smaller source for small objects.
        source = full if placed.size > 0.6 else half
        inner = source.width - 2 * _RIM
        zoom = inner / (placed.size * self.pixels)
        angle = math.radians(placed.tilt)
        mirror = -1.0 if placed.mirrored else 1.0
        cosine, sine = zoom * math.cos(angle), zoom * math.sin(angle)
        a, b, d, e = mirror * cosine, mirror * sine, -sine, cosine
        x, y, middle = placed.x * self.pixels, placed.y * self.pixels, source.width / 2
        matrix = (a, b, middle - a * x - b * y, d, e, middle - d * x - e * y)
        size = (self.pixels, self.pixels)
        return source.transform(size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)

    def _source(self, concept: int, style: int) -> tuple[Image.Image, Image.Image]:
        found = self._levels.get((concept, style))
        if found is None:
            drawing = Image.fromarray(np.asarray(self._drawings[concept, style]))
            small = drawing.resize((self.pixels // 2, self.pixels // 2), Image.Resampling.BOX)
            found = self._levels[concept, style] = (_rimmed(drawing), _rimmed(small))
        return found

    def _background(self, background: Background, seed: int) -> Image.Image:
        share = self._share(background, seed)
        first, second = (np.array(rgb, np.float32) for rgb in background.rgb)
        blend: np.ndarray = first + (_CONTRAST * share[..., None]) * (second - first)
        return Image.fromarray(blend.astype(np.uint8))

    def _share(self, background: Background, seed: int) -> np.ndarray:
        """How much of the second colour a pixel has: float32, 0..1, (P, P) or (1, P) for what repeats."""
        pattern, pace = background.pattern, background.pace
        along = math.cos(background.direction) * self._x + math.sin(background.direction) * self._y
        across = math.cos(background.direction) * self._y - math.sin(background.direction) * self._x
        if pattern == "plain":
            return np.zeros_like(along)
        if pattern == "shaded":
            return np.clip(along + 0.5, 0.0, 1.0)
        if pattern == "glowing":
            x = self._x - 0.5 * math.cos(background.direction) * background.phase
            y = self._y - 0.5 * math.sin(background.direction) * background.phase
            return np.clip(1.2 - 1.6 * np.hypot(x, y), 0.0, 1.0)
        if pattern == "two-part":
            return np.asarray(along > background.phase * 0.4 - 0.2, np.float32)
        if pattern in ("cloudy", "grainy"):
            return self._noise(seed, coarse=pattern == "cloudy", pace=pace)
        along, across = pace * along + background.phase, pace * across + background.phase
        if pattern == "striped":
            return np.asarray(along % 1.0 < 0.5, np.float32)
        if pattern == "chequered":
            return np.asarray((np.floor(along) + np.floor(across)) % 2, np.float32)
        return np.asarray(np.hypot(along % 1.0 - 0.5, across % 1.0 - 0.5) < 0.3, np.float32)

    def _noise(self, seed: int, *, coarse: bool, pace: float) -> np.ndarray:
        cells = round(pace) if coarse else self.pixels // 2
        grid = seeds.numpy_generator("emoji", "noise", seed).random((cells, cells), dtype=np.float32)
        picture = Image.fromarray(grid).resize((self.pixels, self.pixels), Image.Resampling.BILINEAR)
        return np.asarray(picture)


def _rimmed(drawing: Image.Image) -> Image.Image:
    canvas = Image.new("RGBA", (drawing.width + 2 * _RIM, drawing.height + 2 * _RIM))
    canvas.paste(drawing, (_RIM, _RIM))
    return canvas


def _recolouring(draws: Draws) -> tuple[float, ...]:
    """A 3 x 4 colour matrix: another saturation, contrast, brightness and tint."""
    saturation, contrast = draws.uniform(0.5, 1.5), draws.uniform(0.75, 1.25)
    shift = 128.0 * (1.0 - contrast) + draws.uniform(-30.0, 30.0)
    rows: list[float] = []
    for channel in range(3):
        gain = contrast * draws.uniform(0.88, 1.12)
        for other, luma in enumerate((0.299, 0.587, 0.114)):
            rows.append(gain * ((1.0 - saturation) * luma + (saturation if other == channel else 0.0)))
        rows.append(shift)
    return tuple(rows)


def _turned(matrix: tuple[float, ...], hue: float, colour: float) -> tuple[float, ...]:
    """A colour matrix behind a turn of the hue by an angle, and a loss of all colour where `colour` is 0."""
    cosine, sine = colour * math.cos(hue), colour * math.sin(hue) / math.sqrt(3.0)
    even = (1.0 - cosine) / 3.0
    turn = [[even + cosine * (row == column) for column in range(3)] for row in range(3)]
    for row in range(3):
        turn[row][(row + 1) % 3] -= sine
        turn[row][(row + 2) % 3] += sine
    rows: list[float] = []
    for row in range(3):
        own = matrix[4 * row : 4 * row + 3]
        rows += [sum(own[inner] * turn[inner][column] for inner in range(3)) for column in range(3)]
        rows.append(matrix[4 * row + 3])
    return tuple(rows)
