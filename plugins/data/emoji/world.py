"""The mini world as a source of data: private, validation, test and public sets of emoji scenes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedbench.cache import Cache, default_folder
from fedbench.errors import UserError, unknown
from fedbench.interfaces import Samples, World
from fedbench_plugins.data.emoji import catalogue as catalogues
from fedbench_plugins.data.emoji import packages
from fedbench_plugins.data.emoji.captions import caption
from fedbench_plugins.data.emoji.catalogue import STYLES, Catalogue
from fedbench_plugins.data.emoji.contents import Contents, covered, several, single
from fedbench_plugins.data.emoji.groups import GROUPS
from fedbench_plugins.data.emoji.layout import Scene, lay_out

_BOTH = tuple(range(len(STYLES)))


class EmojiWorld(World):
    """Scenes composed from emoji drawings of two vendors, read from pip packages.

    Tasks: `ic100` (one of 100 concepts), `ic10` (one of ten super-groups), `mlc` (which super-groups are there).
    The public set shows one to four of all concepts in either style, with a caption for each scene.

    Args:
        pixels: side of a scene, 16 to 256.

    Raises:
        UserError: packages are missing or altered, or an option has no such value.
    """

    revision: ClassVar[int] = 1
    manifest: ClassVar[str] = "63745553fcd9b03e5d81bd14581f9a71d3cd03d7d943ddbeed8408cec58cc119"
    tasks: ClassVar[tuple[str, ...]] = ("mlc", "ic100", "ic10")
    attribution: ClassVar[str] = (
        "Drawings: Twemoji, graphics © Twitter, Inc and other contributors, CC-BY 4.0; "
        "OpenMoji, the open-source emoji and icon project, CC-BY-SA 4.0. Composed into scenes."
    )

    def __init__(self, *, pixels: int = 64) -> None:
        if not 16 <= pixels <= 256:
            raise UserError(f"a scene can't have {pixels} pixels", where="data 'emoji', pixels", expected="16 to 256")
        self.pixels = pixels

    def verify(self) -> None:
        """Check that the packages and renderers are there and that the files used are unaltered."""
        packages.renderers()
        self._check(catalogues.load())

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
        """A user's private set, from a part of the concepts and one or both styles.

        Args:
            task: one of `tasks`.
            size: items.
            seed: redraws the set and which concepts the user has.
            user: name of the user.
            views: V, 1 or more.
            style: "twemoji", "openmoji" or "both".
            coverage: above 0, at most 1: the part of each group's concepts that the user has pictures of. Each
                concept is a class in IC100, so that a smaller coverage leaves classes out there.

        Raises:
            UserError: an unknown task or option, or a value out of range.
        """
        _check_options({**options, "style": style, "coverage": coverage})
        coverage = float(coverage)
        styles = _BOTH if style == "both" else (STYLES.index(style),)
        words = {"seed": seed, "user": user, "style": style, "coverage": coverage}
        groups = covered(self._catalogue, coverage, seed, user)
        return self._set(task, size, views, groups, styles, ("train", task, seed, user), words)

    def validation(self, task: str, *, size: int, seed: int, user: str) -> Samples:
        """A validation set of one view: all concepts, both styles, redrawn by seed and user."""
        where = ("validation", task, seed, user)
        return self._set(task, size, 1, self._catalogue.groups, _BOTH, where, {"seed": seed, "user": user})

    def test(self, task: str, *, size: int) -> Samples:
        """The test set of a task, one view: all concepts, both styles, the same for all seeds and users."""
        return self._set(task, size, 1, self._catalogue.groups, _BOTH, ("test", task), {})

    def public(self, *, size: int, views: int) -> Samples:
        """Unlabelled scenes of one to four objects, each concept as likely as any other, with captions as text."""
        _positive(size, "size")
        everything = range(len(self._catalogue.concepts))
        contents = several([everything], _BOTH, size, "emoji", "public")
        key = self._key(("public", "strong views"), size, views, {})
        scenes = _scenes(contents, main=False)
        names = [concept.name for concept in self._catalogue.concepts]
        text = np.array([caption(scene, names) for scene in scenes()])
        return Samples(
            key, {"image": self._images(key, scenes, views, strong=True), "text": text}, None, contents.scenes
        )

    def _set(
        self,
        task: str,
        size: int,
        views: int,
        groups: tuple[tuple[int, ...], ...],
        styles: Sequence[int],
        where: tuple[str | int, ...],
        words: Mapping[str, Any],
    ) -> Samples:
        if task not in self.tasks:
            raise unknown("task", task, self.tasks, where="data 'emoji'")
        _positive(size, "size")
        key = self._key(where, size, views, words)
        group_of = np.array([concept.group for concept in self._catalogue.concepts])
        if task == "mlc":
            contents = several(groups, styles, size, "emoji", *where)
            targets = np.zeros((size, len(GROUPS)), np.uint8)
            for row, concepts in enumerate(contents.concepts):
                targets[row, group_of[list(concepts)]] = 1
            images = self._images(key, _scenes(contents, main=False), views)
            return Samples(key, {"image": images}, targets, contents.scenes, self.classes(task))
        if task == "ic10":
            members: Sequence[Sequence[int]] = groups
        else:
            kept = {concept for group in groups for concept in group}
            members = [(concept,) for concept in self._catalogue.ic100 if concept in kept]
        contents = single(members, styles, size, "emoji", *where)
        shown = np.array(contents.concepts, np.int64)[:, 0]
        numbers = group_of if task == "ic10" else _positions(self._catalogue.ic100, len(group_of))
        images = self._images(key, _scenes(contents, main=True), views)
        pairs = len(STYLES) * shown + np.array(contents.styles)
        targets = numbers[shown].astype(np.int64)
        return Samples(key, {"image": images}, targets, contents.scenes, self.classes(task), pairs)

    def classes(self, task: str) -> tuple[str, ...]:
        """Names of a task's classes, in the order of its targets."""
        if task == "ic100":
            return tuple(self._catalogue.concepts[concept].name for concept in self._catalogue.ic100)
        return tuple(group.name for group in GROUPS)

    def _images(self, key: str, scenes: Callable[[], list[Scene]], views: int, *, strong: bool = False) -> np.ndarray:
        _positive(views, "views")
        return _cache(default_folder()).array(key, lambda: self._compose(scenes(), views, strong))

    def _compose(self, scenes: Sequence[Scene], views: int, strong: bool) -> np.ndarray:
        # Imported here, since pillow is an extra and its absence must stay one clear message of `verify`.
        from fedbench_plugins.data.emoji.composer import Composer
        from fedbench_plugins.data.emoji.drawings import drawings

        composer = Composer(drawings(self._catalogue, self.pixels, self._origin, _cache(default_folder())))
        images = np.empty((len(scenes), views, self.pixels, self.pixels, 3), np.uint8)
        for row, scene in enumerate(scenes):
            picture = composer.paint(scene)
            for number in range(views):
                images[row, number] = np.asarray(composer.view(picture, scene.seed, number, strong=strong))
        return images

    def _key(self, where: tuple[str | int, ...], size: int, views: int, words: Mapping[str, Any]) -> str:
        rest = {"pixels": self.pixels, "size": size, "views": views, **words}
        return f"emoji {json.dumps(where)}, {json.dumps(rest, sort_keys=True)}, {self._origin}"

    @cached_property
    def _origin(self) -> str:
        return f"revision {self.revision}, manifest {self.manifest}, {packages.renderers()}"

    @cached_property
    def _catalogue(self) -> Catalogue:
        found = catalogues.load()
        self._check(found)
        return found

    def _check(self, found: Catalogue) -> None:
        if packages.manifest(found.files) == self.manifest:
            return
        altered = packages.altered(found.files)
        raise UserError(
            "the emoji packages' files are not those that this version of fedbench knows",
            where=altered[0] if altered else "data 'emoji'",
            expected=packages.REINSTALL,
        )


@cache
def _cache(folder: Path) -> Cache:
    # One a process: a cache checks each file once, however many worlds ask.
    return Cache(folder)


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in ("style", "coverage"):
            raise unknown("option", name, ("style", "coverage"), where="data 'emoji'")
    style, coverage = options["style"], options["coverage"]
    if style not in (*STYLES, "both"):
        raise unknown("style", str(style), (*STYLES, "both"), where="data 'emoji', style")
    if isinstance(coverage, bool) or not isinstance(coverage, int | float) or not 0 < coverage <= 1:
        raise UserError(
            f"coverage can't be {coverage!r}", where="data 'emoji', coverage", expected="above 0 and at most 1"
        )


def _positive(number: int, name: str) -> None:
    if number < 1:
        raise UserError(f"{name} can't be {number}", where="data 'emoji'", expected="1 or more")


def _scenes(contents: Contents, *, main: bool) -> Callable[[], list[Scene]]:
    """The scenes, laid out only when they are needed: labels of a cached set don't need them."""
    rows = zip(contents.scenes.tolist(), contents.concepts, contents.styles, strict=True)
    frozen = list(rows)
    return lambda: [lay_out(scene, concepts, style, main=main) for scene, concepts, style in frozen]


def _positions(members: Sequence[int], length: int) -> np.ndarray:
    positions = np.full(length, -1, np.int64)
    positions[list(members)] = np.arange(len(members))
    return positions
