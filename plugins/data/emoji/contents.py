"""Which concepts, in which vendor's style, are in each scene of a set: drawn before anything is placed or painted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbench import seeds
from fedbench_plugins.data.emoji.catalogue import Catalogue
from fedbench_plugins.data.emoji.draws import Draws, permutation

MOST = 4
"""Objects in a scene, at most."""


@dataclass(frozen=True)
class Contents:
    """What is in N scenes.

    Args:
        scenes: int64 (N,): identity of each scene, and the seed of everything else about it.
        concepts: the numbers of the concepts in each scene, 1 to 4.
        styles: the number of the style of each scene.
    """

    scenes: np.ndarray
    concepts: tuple[tuple[int, ...], ...]
    styles: tuple[int, ...]


def covered(catalogue: Catalogue, coverage: float, seed: int, user: str) -> tuple[tuple[int, ...], ...]:
    """The concepts that a user has pictures of, by group: a fraction of each group, one at least.

    A smaller coverage is a subset of a larger one; all tasks of a user share it.
    """
    kept = []
    for number, members in enumerate(catalogue.groups):
        order = permutation(len(members), "emoji", "coverage", seed, user, number)
        kept.append(tuple(members[i] for i in sorted(order[: max(1, round(coverage * len(members)))])))
    return tuple(kept)


def single(classes: Sequence[Sequence[int]], styles: Sequence[int], size: int, *where: seeds.Coordinate) -> Contents:
    """Scenes of one object each: classes, concepts of a class and styles of a concept as often as each other.

    Args:
        classes: the concepts of each class.
        styles: the styles to alternate between.
        size: N.
        where: coordinates of the set; the same ones with a larger size continue the same scenes.
    """
    queues = [
        [members[i] for i in permutation(len(members), *where, "order", number)]
        for number, members in enumerate(classes)
    ]
    concepts, chosen = [], []
    for index in range(size):
        turn, position = divmod(index, len(classes))
        if position == 0:
            order = permutation(len(classes), *where, "turn", turn)
        queue = queues[order[position]]
        visit, place = divmod(turn, len(queue))
        concepts.append((queue[place],))
        # The first style depends on the concept, so that a set of one visit to each holds both.
        chosen.append(styles[(visit + queue[place]) % len(styles)])
    return Contents(_scenes(size, *where), tuple(concepts), tuple(chosen))


def several(groups: Sequence[Sequence[int]], styles: Sequence[int], size: int, *where: seeds.Coordinate) -> Contents:
    """Scenes of one to four different objects in one style.

    Args:
        groups: an object's group is drawn first, then its concept from the group.
        styles: drawn once a scene.
        size: N.
        where: coordinates of the set; the same ones with a larger size continue the same scenes.
    """
    scenes = _scenes(size, *where)
    concepts, chosen = [], []
    for scene in scenes.tolist():
        draws = Draws("emoji", "contents", scene, count=2 + 2 * MOST)
        chosen.append(styles[draws.index(len(styles))])
        picked: dict[int, None] = {}
        for _ in range(1 + draws.index(MOST)):
            members = groups[draws.index(len(groups))]
            picked[members[draws.index(len(members))]] = None
        concepts.append(tuple(picked))
    return Contents(scenes, tuple(concepts), tuple(chosen))


def _scenes(size: int, *where: seeds.Coordinate) -> np.ndarray:
    return np.array([seeds.derive(*where, "scene", index) for index in range(size)], dtype=np.int64)
