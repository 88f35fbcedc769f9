"""What a scene shows, in English: a small grammar that makes true statements only."""

from __future__ import annotations

from collections.abc import Sequence

from fedbench_plugins.data.emoji.draws import Draws
from fedbench_plugins.data.emoji.layout import COLOURS, Background, Placement, Scene

_SOME = frozenset(
    {
        *("bacon", "beans", "blueberries", "bread", "briefs", "broccoli", "butter", "candy", "cherries", "cooked rice"),
        *("curry and rice", "custard", "dango", "eyeglasses", "falafel", "fondue", "french fries", "garlic", "gloves"),
        *("goggles", "grapes", "houses", "jeans", "light rail", "oden", "pancakes", "peanuts", "popcorn"),
        *("shaved ice", "shorts", "socks", "spaghetti", "stuffed flatbread", "flatbread", "sunglasses", "sushi"),
        *("ballet shoes", "woman's boots", "wrestlers", "canned food", "ginger root", "leafy green"),
    }
)
"""Names that take "some": plurals, and what comes in no single piece."""
_CLOSE = 0.15
"""Difference of two centres (of the picture's side) below which one object is not said to be left of another."""
_OPENINGS = ("", "", "", "a picture of ", "here is ", "a drawing of ")


def noun(name: str) -> str:
    """A concept's name with its article: `an aubergine`, `some grapes`."""
    if name in _SOME:
        return f"some {name}"
    return f"{'an' if name[0] in 'aeiou' and not name.startswith('uni') else 'a'} {name}"


def caption(scene: Scene, names: Sequence[str]) -> str:
    """A sentence about a scene, chosen by its seed: all its objects, how two of them stand, at times the background.

    Args:
        scene: what is described.
        names: of all concepts.
    """
    draws = Draws("emoji", "caption", scene.seed, count=8)
    order = sorted(scene.objects, key=lambda placed: -placed.size) if draws.chance(0.5) else list(scene.objects)
    nouns = [noun(names[placed.concept]) for placed in order]
    if len(order) == 2:
        text = f"{nouns[0]} {_relation(order[0], order[1], draws)} {nouns[1]}"
    else:
        text = " and ".join(filter(None, (", ".join(nouns[:-1]), nouns[-1])))
    text = _OPENINGS[draws.index(len(_OPENINGS))] + text
    return f"{text} on {_ground(scene.background)}" if draws.chance(0.4) else text


def _relation(first: Placement, second: Placement, draws: Draws) -> str:
    across, down = second.x - first.x, second.y - first.y
    options = []
    if abs(across) > _CLOSE and abs(across) > abs(down):
        options = ["beside", "next to", "to the left of" if across > 0 else "to the right of"]
    elif abs(down) > _CLOSE:
        options = ["above" if down > 0 else "below", "over" if down > 0 else "under"]
    options += ["and", "with"]
    return options[draws.index(len(options))]


def _ground(background: Background) -> str:
    colour = COLOURS[background.colours[0]][0]
    words = [colour] if background.pattern == "plain" else [colour, background.pattern]
    return noun(" ".join([*words, "background"]))
