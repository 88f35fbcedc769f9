"""The shapes world: coloured shapes on noisy backgrounds, drawn by numpy alone, with the emoji world's interface."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from fedbench.errors import UserError, unknown
from fedbench.interfaces import Samples, World
from fedbench.seeds import Coordinate, derive, numpy_generator
from fedbench_plugins.data.shape_painter import DISTANCES, PALETTE, SLOTS, Scenes, another_view, paint

SHAPES = tuple(DISTANCES)
COLOURS = tuple(PALETTE)
STYLES = ("filled", "outlined")
"""The drawing styles: the domain shift between users."""

_CONCEPTS = len(SHAPES) * len(COLOURS)
_BLOCK = 500
"""Scenes that share their random generators: a set is the beginning of every larger set of the same name."""
_MOST = 2**24
"""Most items of a set: the low bits of a scene's number count them, the high bits name the set."""


class ShapesWorld(World):
    """Procedural pictures of 10 shapes in 10 colours, filled or outlined: needs no package and no download.

    Tasks: `mlc`, which of the shapes appear among 1 to 3 objects; `ic10`, which shape; `ic100`, which shape in
    which colour. A concept is a (shape, colour) pair. Public scenes hold 1 to 3 objects and have captions.

    Args:
        pixels: height and width of a picture, 16 to 256.

    Raises:
        UserError: an option is out of range or unknown (from every method).
    """

    revision: ClassVar[int] = 1
    manifest: ClassVar[str] = ""
    tasks: ClassVar[tuple[str, ...]] = ("mlc", "ic100", "ic10")
    attribution: ClassVar[str] = ""

    def __init__(self, *, pixels: int = 32) -> None:
        self.pixels = _whole("pixels", pixels, least=16, most=256)

    def verify(self) -> None:
        """Nothing to check: the pictures are made from nothing but numbers."""

    def train(
        self,
        task: str,
        *,
        size: int,
        seed: int,
        user: str,
        views: int,
        style: str = "both",
        coverage: float = 1.0,
        **options: Any,
    ) -> Samples:
        """A user's private training set.

        Args:
            style: `"filled"`, `"outlined"` or `"both"`.
            coverage: fraction of the 100 concepts that occur, in (0, 1]. Which ones depends on user and seed. At
                least one concept of every shape stays for `mlc` and `ic10`; `ic100` has fewer classes to see.
        """
        for option in options:
            raise unknown("option", option, ("style", "coverage"), where="data of a user of the shapes world")
        self._check(task, size, views)
        if style not in ("both", *STYLES):
            raise unknown("style", str(style), ("both", *STYLES), where="data.style")
        number = isinstance(coverage, (int, float)) and not isinstance(coverage, bool)
        if not number or not 0 < coverage <= 1:
            raise UserError(
                f"coverage is {coverage!r}", where="data.coverage", expected="a number above 0, at most 1, such as 0.33"
            )
        name = ("train", task, seed, user, style, f"coverage={float(coverage)!r}")
        concepts = _permitted(task, float(coverage), numpy_generator("shapes", "concepts", seed, user))
        return self._samples(name, task, size=size, views=views, concepts=concepts, style=style)

    def validation(self, task: str, *, size: int, seed: int, user: str) -> Samples:
        """A validation set of one view: all concepts, both styles; redrawn for every seed and user."""
        self._check(task, size, 1)
        return self._samples(("validation", task, seed, user), task, size=size)

    def test(self, task: str, *, size: int) -> Samples:
        """The test set of a task, one view: all concepts, both styles."""
        self._check(task, size, 1)
        return self._samples(("test", task), task, size=size)

    def public(self, *, size: int, views: int) -> Samples:
        """Unlabelled scenes of all concepts in both styles, with captions as `"text"`."""
        self._check("mlc", size, views)
        return self._samples(("public",), None, size=size, views=views)

    def _check(self, task: str, size: int, views: int) -> None:
        if task not in self.tasks:
            raise unknown("task", str(task), self.tasks, where="shapes world")
        _whole("size", size, least=1, most=_MOST)
        _whole("views", views, least=1, most=64)

    def _samples(
        self,
        name: tuple[Coordinate, ...],
        task: str | None,
        *,
        size: int,
        views: int = 1,
        concepts: np.ndarray | None = None,
        style: str = "both",
    ) -> Samples:
        """The set of that name; `task` None is the public set, `concepts` None allows all."""
        permitted = np.arange(_CONCEPTS) if concepts is None else concepts
        pictures = np.empty((size, views, self.pixels, self.pixels, 3), np.uint8)
        blocks = []
        for start in range(0, size, _BLOCK):
            stop = min(start + _BLOCK, size)
            scenes = _draw(task, permitted, style, numpy_generator("shapes", *name, "scenes", start))
            brush = numpy_generator("shapes", *name, "paint", start)
            pictures[start:stop, 0] = paint(scenes, size=stop - start, pixels=self.pixels, random=brush)
            for view in range(1, views):
                camera = numpy_generator("shapes", *name, "view", view, start)
                pictures[start:stop, view] = another_view(pictures[start:stop, 0], total=_BLOCK, random=camera)
            blocks.append(scenes.first(stop - start))
        scenes = Scenes.joined(blocks)

        inputs = {"image": pictures}
        if task is None:
            inputs["text"] = _captions(scenes)
        single = task in ("ic10", "ic100")
        concept = scenes.shapes[:, 0] * len(COLOURS) + scenes.colours[:, 0]
        return Samples(
            key="/".join(["shapes", f"revision={self.revision}", *map(str, name), *map(str, pictures.shape)]),
            inputs=inputs,
            targets=_targets(task, scenes, concept),
            scenes=(derive("shapes", *name) // _MOST) * _MOST + np.arange(size, dtype=np.int64),
            classes=_classes(task),
            pairs=concept * len(STYLES) + scenes.outlined if single else None,
        )


def _permitted(task: str, coverage: float, random: np.random.Generator) -> np.ndarray:
    """The concepts that may occur, ascending; those of a smaller coverage are among those of a larger one."""
    order = random.permutation(_CONCEPTS)
    if task != "ic100":
        # The first concept of each shape goes to the front, so that every class survives any coverage.
        _, firsts = np.unique(order // len(COLOURS), return_index=True)
        order = np.concatenate([order[firsts], np.delete(order, firsts)])
    least = 1 if task == "ic100" else len(SHAPES)
    return np.sort(order[: max(least, round(coverage * _CONCEPTS))])


def _draw(task: str | None, permitted: np.ndarray, style: str, random: np.random.Generator) -> Scenes:
    """One block of scenes: classes come in turns, and so do colours within a shape and styles within a concept."""
    if task == "ic100":
        leading = _turns(permitted, _BLOCK, random)
    else:
        shapes = _turns(np.unique(permitted // len(COLOURS)), _BLOCK, random)
        leading = np.empty(_BLOCK, np.int64)
        for shape in np.unique(shapes):
            rows = np.flatnonzero(shapes == shape)
            leading[rows] = _turns(permitted[permitted // len(COLOURS) == shape], len(rows), random)
    objects = random.choice(permitted, (_BLOCK, SLOTS))
    objects[:, 0] = leading
    counts = random.integers(1, SLOTS + 1, _BLOCK)
    if task in ("ic10", "ic100"):
        counts[:] = 1
    outlined = (random.integers(0, 2, _CONCEPTS)[leading] + _earlier(leading)) % 2 == 1
    if style != "both":
        outlined[:] = style == "outlined"
    return Scenes(objects // len(COLOURS), objects % len(COLOURS), counts, outlined)


def _turns(items: np.ndarray, length: int, random: np.random.Generator) -> np.ndarray:
    """`length` items in turns: every item once, in random order, before any comes again."""
    turns = np.tile(items, (-(-length // len(items)), 1))
    return np.asarray(random.permuted(turns, axis=1).ravel()[:length])


def _earlier(values: np.ndarray) -> np.ndarray:
    """How often each value occurred before its place."""
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    places = np.empty(len(values), np.int64)
    places[order] = np.arange(len(values)) - np.searchsorted(ranked, ranked)
    return places


def _classes(task: str | None) -> tuple[str, ...]:
    if task is None:
        return ()
    return tuple(f"{c} {s}" for s in SHAPES for c in COLOURS) if task == "ic100" else SHAPES


def _targets(task: str | None, scenes: Scenes, concept: np.ndarray) -> np.ndarray | None:
    if task == "mlc":
        present = np.zeros((len(concept), len(SHAPES)), np.uint8)
        for slot in range(SLOTS):
            rows = np.flatnonzero(scenes.counts > slot)
            present[rows, scenes.shapes[rows, slot]] = 1
        return present
    if task is None:
        return None
    return concept if task == "ic100" else scenes.shapes[:, 0]


def _captions(scenes: Scenes) -> np.ndarray:
    """What is in each scene: "a red disc", "a red disc beside a blue star", "... and an orange heart"."""
    texts = []
    for shapes, colours, count in zip(scenes.shapes, scenes.colours, scenes.counts, strict=True):
        names = [f"{COLOURS[c]} {SHAPES[s]}" for s, c in zip(shapes[:count], colours[:count], strict=True)]
        phrases = [f"an {name}" if name[0] in "aeiou" else f"a {name}" for name in names]
        texts.append(" beside ".join([phrases[0], " and ".join(phrases[1:])]) if count > 1 else phrases[0])
    return np.array(texts)


def _whole(name: str, value: object, *, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError(f"{name} is {value!r}", where="shapes world", expected=f"a whole number from {least} to {most}")
    return value
