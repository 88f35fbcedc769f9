"""Reading the values of one TOML table with their types and ranges, so that every mistake names its key and line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

from fedbench.errors import UserError, unknown
from fedbench.suite_source import Document
from fedbench.toml_lines import Key, show

T = TypeVar("T")
_REQUIRED: Final = object()


def shown(value: Any) -> str:
    """A value of TOML in an error message: short, on one line."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "a list of tables or lists"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


MOST = 10_000_000


class Table:
    """One table of a suite.

    Args:
        document: where it is written.
        key: its key in the document.
        label: how messages call it, `protocol` or `user.user1`; keys join it by a dot.
        title: how messages call its keys, `[protocol] ` or `[[user]] `.

    Raises:
        UserError: there is something else than a table.
    """

    def __init__(self, document: Document, key: Key = (), *, label: str | None = None, title: str = "") -> None:
        self._document, self._key, self._title = document, key, title
        self._label = show(key) if label is None else label
        values: Any = document.tables
        for part in key:
            values = values.get(part, {}) if isinstance(values, dict) else values[part]
        if not isinstance(values, dict):
            raise UserError(f"{self._label} is {shown(values)}", where=document.where(key), expected="a table")
        self.values: dict[str, Any] = values

    def label(self, key: str) -> str:
        """How messages call one of the table's keys."""
        return f"{self._label}.{show((key,))}" if self._label else show((key,))

    def where(self, *key: str | int) -> str:
        """Where a key of the table is written, or the table."""
        return self._document.where((*self._key, *key))

    def wrong(self, key: str, expected: str, *index: int) -> UserError:
        """The error for a value that is not what was expected."""
        value = self.values[key][index[0]] if index else self.values[key]
        label = self.label(key) + "".join(f"[{number}]" for number in index)
        return UserError(f"{label} is {shown(value)}", where=self.where(key, *index), expected=expected)

    def only(self, known: Iterable[str]) -> None:
        """Refuse keys that are not among the known ones."""
        names = list(known)
        for key in self.values:
            if key not in names:
                raise unknown(f"{self._title}key", key, names, where=self.where(key))

    def table(self, key: str, *, label: str | None = None, title: str = "") -> Table:
        """The table at `key`; empty where it is not written."""
        return Table(self._document, (*self._key, key), label=label or self.label(key), title=title)

    def item(self, key: str, index: int, *, label: str | None = None, title: str = "") -> Table:
        """The table that is an element of the list at `key`."""
        return Table(self._document, (*self._key, key, index), label=label, title=title)

    def whole(self, key: str, *, least: int, most: int = MOST, default: Any = _REQUIRED) -> int:
        """A whole number of at least `least`, and no more than any machine could hold of it."""
        expected = f"a whole number, at least {least}"
        value = self._get(key, expected, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, expected)
        if value > most:
            raise self.wrong(key, f"{expected} and at most {most}")
        return value

    def number(self, key: str, *, positive: bool, default: Any = _REQUIRED) -> float:
        """A finite number above 0, or of at least 0."""
        expected = "a number above 0" if positive else "a number, at least 0"
        value = self._get(key, expected, default)
        number = finite(value)
        if number is None or number < 0 or (positive and number == 0):
            raise self.wrong(key, expected)
        return number

    def text(self, key: str, *, default: Any = _REQUIRED, pattern: str | None = None, expected: str = "text") -> str:
        """Text that is not blank; with a pattern, text that it fits whole."""
        value = self._get(key, expected, default)
        if key not in self.values:
            return str(value)
        if not isinstance(value, str) or not value.strip() or (pattern and not re.fullmatch(pattern, value)):
            raise self.wrong(key, expected)
        return value

    def choice(self, key: str, choices: Sequence[str], *, default: str) -> str:
        """One of a few words."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "one of " + ", ".join(choices))
        if value not in choices:
            raise unknown(self.label(key), value, choices, where=self.where(key))
        return value

    def texts(self, key: str, *, default: Any = _REQUIRED) -> list[str]:
        """A list of texts."""
        return self._list(key, str, "a list of text", default)

    def wholes(self, key: str) -> list[int]:
        """A list of whole numbers."""
        return self._list(key, int, "a list of whole numbers", _REQUIRED)

    def options(self, *, without: Iterable[str] = ()) -> dict[str, Any]:
        """The values of a plugin's options, whose types only the plugin knows: anything that JSON can hold."""
        names = set(without)
        options = {key: value for key, value in self.values.items() if key not in names}
        for key, value in options.items():
            if not _plain(value):
                raise self.wrong(key, "text, true or false, a finite number, or a list or table of these")
        return options

    def _list(self, key: str, kind: type[T], expected: str, default: Any) -> list[T]:
        values = self._get(key, expected, default)
        if not isinstance(values, list):
            raise self.wrong(key, expected)
        for index, value in enumerate(values):
            if not isinstance(value, kind) or isinstance(value, bool):
                raise self.wrong(key, expected, index)
        return list(values)

    def _get(self, key: str, expected: str, default: Any) -> Any:
        if key in self.values:
            return self.values[key]
        if default is _REQUIRED:
            raise UserError(f"{self.label(key)} is missing", where=self.where(), expected=expected)
        return default


def finite(value: Any) -> float | None:
    """A finite number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_plain(inner) for inner in value.values())
    if isinstance(value, list):
        return all(_plain(inner) for inner in value)
    return isinstance(value, bool | int | str) or finite(value) is not None
