"""Where a TOML file writes each key: `tomllib` gives values without positions, an error message needs the line."""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right

Key = tuple[str | int, ...]
"""Names of tables and keys, and indices of array elements, from the root: `("user", 2, "model")`."""

_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}#\n]+")
# Longest delimiter first; a multi-line string may end in up to two quotes of its own before the closing three.
_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}'
    r"|'''(?:[^']|'{1,2}(?!'))*'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)


def show(key: Key) -> str:
    """A key as people write it: `user[2].model`; names that are not bare words stand in quotes."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if _BARE_KEY.fullmatch(part) else '"' + part.replace('"', '\\"') + '"'
            text += f".{name}" if text else name
    return text


def key_lines(text: str) -> dict[Key, int]:
    """The line (from 1) that first mentions each key, table and array element.

    Args:
        text: TOML that `tomllib` accepts.

    Raises:
        ValueError: the text is not TOML.
    """
    return _Scanner(text.replace("\r\n", "\n")).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._lines: dict[Key, int] = {}
        self._last: dict[Key, int] = {}

    def scan(self) -> dict[Key, int]:
        table: Key = ()
        while self._skip(_BLANK) < len(self._text):
            if self._take("[["):
                table = self._header(array=True)
                self._expect("]]")
            elif self._take("["):
                table = self._header(array=False)
                self._expect("]")
            else:
                self._pair(table)
        return self._lines

    def _header(self, *, array: bool) -> Key:
        """The full key of a header: below an array of tables it means the array's last element."""
        *parents, name = self._names()
        key: Key = ()
        for parent in parents:
            key = self._mark((*key, parent))
            if key in self._last:
                key = (*key, self._last[key])
        key = self._mark((*key, name))
        if array:
            self._last[key] = self._last.get(key, -1) + 1
            key = self._mark((*key, self._last[key]))
        return key

    def _pair(self, table: Key) -> None:
        key = table
        for name in self._names():
            key = self._mark((*key, name))
        self._expect("=")
        self._skip(_SPACE)
        self._value(key)

    def _names(self) -> list[str]:
        names: list[str] = []
        while True:
            self._skip(_SPACE)
            if match := _STRING.match(self._text, self._at):
                names.append(str(tomllib.loads(f"name = {match.group()}")["name"]))
            else:
                match = _BARE_KEY.match(self._text, self._at)
                if match is None:
                    raise ValueError(f"no key at line {self._line()}")
                names.append(match.group())
            self._at = match.end()
            self._skip(_SPACE)
            if not self._take("."):
                return names

    def _value(self, key: Key) -> None:
        if self._take("["):
            self._array(key)
        elif self._take("{"):
            self._inline_table(key)
        else:
            match = _STRING.match(self._text, self._at) or _SCALAR.match(self._text, self._at)
            if match is None:
                raise ValueError(f"no value at line {self._line()}")
            self._at = match.end()

    def _array(self, key: Key) -> None:
        index = 0
        self._skip(_BLANK)
        while not self._take("]"):
            self._value(self._mark((*key, index)))
            index += 1
            self._skip(_BLANK)
            if not self._take(","):
                self._expect("]")
                return
            self._skip(_BLANK)

    def _inline_table(self, key: Key) -> None:
        self._skip(_BLANK)
        while not self._take("}"):
            self._pair(key)
            self._skip(_BLANK)
            if not self._take(","):
                self._expect("}")
                return
            self._skip(_BLANK)

    def _mark(self, key: Key) -> Key:
        self._lines.setdefault(key, self._line())
        return key

    def _line(self) -> int:
        return bisect_right(self._starts, self._at)

    def _skip(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._at

    def _take(self, token: str) -> bool:
        found = self._text.startswith(token, self._at)
        self._at += len(token) if found else 0
        return found

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise ValueError(f"no '{token}' at line {self._line()}")
