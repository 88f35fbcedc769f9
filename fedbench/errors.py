"""Errors that a user of fedbench can cause, and how they are worded."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something that the person running fedbench can put right: shown as one message, exit code 2, no traceback.

    Say what is wrong, where (file, key, line), what was expected and, for a name, the nearest valid one.
    """

    def __init__(self, what: str, *, where: str | None = None, expected: str | None = None) -> None:
        self.what, self.where, self.expected = what, where, expected
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text} ({self.expected})" if self.expected else text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.expected)


class StorageError(UserError):
    """Something cannot be kept on disk, which is no failure of what was to be kept."""


class InUse(UserError):
    """Another process is at work on it now."""


def _rebuild(kind: type[UserError], what: str, where: str | None, expected: str | None) -> UserError:
    return kind(what, where=where, expected=expected)


def one_line(text: str, most: int = 2000) -> str:
    """The text as one printable line, whatever a plugin's exception or a file put into it; a long one is cut."""
    text = " ".join(text[: 100 * most].split())
    if len(text) > most:
        text = f"{text[: most // 2]} … {text[-(most // 2) :]}"
    return "".join(character if character.isprintable() else " " for character in text)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None where nothing is close."""
    names = list(known)
    name = str(name)  # a TOML value may be anything
    folded = {known_name.lower(): known_name for known_name in names}
    hits = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.5)
    return folded[hits[0]] if hits else None


def unknown(kind: str, name: str, known: Iterable[str], *, where: str | None = None) -> UserError:
    """The error for a name that is not among the `known` ones: suggests the nearest, else lists them all."""
    names = sorted(known)
    hint = nearest(name, names)
    expected = f"did you mean '{hint}'?" if hint else "known: " + (", ".join(names) or "none")
    return UserError(f"unknown {kind} '{name}'", where=where, expected=expected)
