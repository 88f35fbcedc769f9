"""A suite as written: its file over those that it extends, with the position of every key."""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedbench.errors import UserError, nearest, unknown
from fedbench.interfaces import Protocol
from fedbench.toml_lines import Key, key_lines

DEEPEST = 50
"""How many tables and lists may stand in each other: far more than a suite needs, far less than Python's stack."""
BASE_SCALE = "mini"
"""The scale that the tables outside `[scale.NAME]` describe."""
PROTOCOL_KEYS = tuple(item.name for item in fields(Protocol))
DATA_KEYS = ("name", "validation", "test", "views")
"""Keys of `[data]` that are the core's; all others are options of the world."""


@dataclass(frozen=True)
class Document:
    """Tables of TOML and, for each key in them, where it is written (`suites/setup1.toml:41`)."""

    file: str
    tables: dict[str, Any]
    lines: dict[Key, str]

    def where(self, key: Key) -> str:
        """Where the key is written, or else the nearest table around it, or else the file."""
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key, self.file)

    def below(self, key: Key) -> Document:
        """The table at `key` as a document of its own."""
        lines = {line[len(key) :]: where for line, where in self.lines.items() if line[: len(key)] == key}
        return Document(self.file, _table(self.tables, key), lines)

    def merged(self, over: Document, *, into: Key = ()) -> Document:
        """This document under another: tables merge deeply, everything else is replaced.

        Where `over` names another world, the options of the former world go: they were that world's.

        Args:
            over: its tables count from `into`, its positions from the root.
            into: a table of this document.
        """
        tables, lines = copy.deepcopy(self.tables), dict(self.lines)
        _merge(_table(tables, into), over.tables, into, lines)
        return Document(over.file, tables, lines | over.lines)


def _table(tables: Any, key: Key) -> Any:
    for part in key:
        tables = tables[part]
    return tables


def _merge(base: dict[str, Any], over: dict[str, Any], at: Key, lines: dict[Key, str]) -> None:
    world = at == ("data",) or (at[:1] == ("scale",) and at[2:] == ("data",))
    if world and "name" in over and over["name"] != base.get("name"):
        for key in [key for key in base if key not in DATA_KEYS]:
            del base[key]
            _forget(lines, (*at, key))
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value, (*at, key), lines)
        else:
            _forget(lines, (*at, key))
            base[key] = copy.deepcopy(value)


def _forget(lines: dict[Key, str], key: Key) -> None:
    for line in [line for line in lines if line[: len(key)] == key]:
        del lines[line]


def scales_of(document: Document) -> list[str]:
    """The base scale, then the names of the `[scale.NAME]` tables, sorted."""
    return [BASE_SCALE, *sorted(document.tables.get("scale", {}))]


def at_scale(document: Document, scale: str) -> Document:
    """The tables of one scale: those outside `[scale.NAME]`, under those of `[scale.NAME]`.

    Raises:
        UserError: there is no such scale.
    """
    if scale not in scales_of(document):
        raise unknown("scale", scale, scales_of(document), where=document.file)
    tables = {key: value for key, value in document.tables.items() if key != "scale"}
    lines = {key: where for key, where in document.lines.items() if key[0] != "scale"}
    base = Document(document.file, tables, lines)
    return base if scale == BASE_SCALE else base.merged(document.below(("scale", scale)))


def _shipped_folder() -> Path:
    from importlib.resources import files

    return Path(str(files("fedbench_suites")))


def shipped() -> list[str]:
    """Names of the suites that come with fedbench."""
    return sorted(path.stem for path in _shipped_folder().glob("*.toml"))


def find(path_or_name: str, *, beside: Path = Path(), where: str | None = None) -> Path:
    """The suite file that a path (relative to `beside`) or else the name of a shipped suite means.

    Raises:
        UserError: there is none; a folder is none either.
    """
    path = beside / path_or_name
    # os.path answers False to names that no file can have, where Path's own tests may raise.
    if os.path.isfile(path):
        return path
    names = shipped()
    name = path_or_name.removesuffix(".toml")
    if name in names:
        return _short(_shipped_folder() / f"{name}.toml")
    if path_or_name and os.path.isdir(path):
        raise UserError(f"'{path_or_name}' is a folder, not a suite", where=where, expected="a .toml file")
    hint = nearest(Path(name).name, names)
    expected = f"did you mean '{hint}'?" if hint else "a .toml file" + (f", or one of {', '.join(names)}" * bool(names))
    raise UserError(f"there is no suite '{path_or_name}'", where=where, expected=expected)


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def read(path: Path, *, _above: tuple[Path, ...] = ()) -> Document:
    """The tables of a file over those of the files it extends, with `plugins` as absolute paths.

    Raises:
        UserError: a file is missing, no UTF-8, no TOML, has no `name`, or extends itself.
    """
    own = _parse(path)
    if "name" not in own.tables:
        raise UserError("name is missing", where=own.file, expected='a line such as name = "my-suite"')
    for table in _plugin_tables(own.tables):
        table["plugins"] = absolute(table["plugins"], path.parent)
    base = own.tables.pop("extends", None)
    if base is None:
        return own
    where = own.where(("extends",))
    if not isinstance(base, str):
        raise UserError("extends is not text", where=where, expected="a path or the name of a shipped suite")
    base_path = find(base, beside=path.parent, where=where)
    above = (*_above, path.resolve())
    if base_path.resolve() in above:
        chain = " -> ".join(link.name for link in (*above, base_path))
        raise UserError(f"the suite extends itself: {chain}", where=where)
    return read(base_path, _above=above).merged(own)


def _parse(path: Path) -> Document:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"the suite cannot be read: {error.strerror}", where=str(path)) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        byte = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise UserError(f"not UTF-8: {byte}", where=f"{path}:{line}", expected="text saved as UTF-8") from None
    try:
        tables = tomllib.loads(text)
        lines = {key: f"{path}:{line}" for key, line in key_lines(text).items()}
    except RecursionError:
        raise too_deep(str(path)) from None
    except ValueError as error:
        raise _syntax_error(path, text, str(error)) from None
    for key, where in lines.items():
        if len(key) > DEEPEST:
            raise too_deep(where)
    return Document(str(path), tables, lines)


def too_deep(where: str) -> UserError:
    """The error for tables and lists nested beyond `DEEPEST`."""
    return UserError("nested too deeply", where=where, expected=f"at most {DEEPEST} levels")


def _syntax_error(path: Path, text: str, message: str) -> UserError:
    if at := re.search(r" \(at line (\d+), column (\d+)\)$", message):
        return UserError(f"not TOML: {message[: at.start()]} at column {at[2]}", where=f"{path}:{at[1]}")
    if message.endswith("(at end of document)"):
        return UserError(f"not TOML: {message}", where=f"{path}:{max(1, len(text.splitlines()))}")
    return UserError(f"not TOML: {message}", where=str(path))


def _plugin_tables(tables: dict[str, Any]) -> Iterator[dict[str, Any]]:
    scales = tables.get("scale")
    for table in (tables, *(scales.values() if isinstance(scales, dict) else ())):
        if isinstance(table, dict) and "plugins" in table:
            yield table


def absolute(plugins: Any, folder: Path) -> Any:
    """Paths of plugins, relative to `folder`, as absolute paths; anything but text is left to be refused later."""
    if not isinstance(plugins, list):
        return plugins
    return [str((folder / plugin).resolve()) if isinstance(plugin, str) else plugin for plugin in plugins]
