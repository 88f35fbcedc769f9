"""`--set KEY=VALUE`: one value of a suite changed for one run."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedbench.errors import UserError, unknown
from fedbench.suite_source import DEEPEST, PROTOCOL_KEYS, Document, absolute, too_deep
from fedbench.toml_lines import Key

SETTABLE = ("seeds", "methods", "controls", "plugins", "protocol", "data", "public", "rates", "user", "method", "loss")
"""What `--set` may change."""


def overridden(document: Document, text: str) -> Document:
    """A document with one `--set KEY=VALUE` applied; whether it is valid then is checked after the last one.

    A bare key that is a field of the protocol means `protocol.KEY`; `user.NAME.KEY` means the user of that name;
    the value is a TOML value, or else text. A table merges with what is there.

    Raises:
        UserError: the text has another form, or the key is none that can be set.
    """
    where = f"--set {text}"
    name, equals, value_text = text.partition("=")
    key = _dotted(name.strip())
    if not equals or not key:
        raise UserError("malformed", where=where, expected="--set KEY=VALUE, e.g. --set protocol.rounds=1")
    if len(key) == 1 and key[0] in PROTOCOL_KEYS:
        key = ("protocol", *key)
    if key[0] not in SETTABLE:
        raise unknown("key", name.strip(), (*SETTABLE, *PROTOCOL_KEYS), where=where)
    value = _value(value_text)
    if key == ("plugins",):
        value = absolute(value, Path.cwd())
    if key[0] == "rates" and len(key) > 1:
        rates = document.tables.get("rates")
        if isinstance(rates, dict) and key[1] not in rates:
            raise unknown("rates", key[1], rates, where=where)
    if key[0] == "user" and len(key) > 1:
        return _user_overridden(document, key[1], key[2:], value, where)
    return document.merged(_nested(document.file, (), key, value, where))


def _user_overridden(document: Document, user: str, key: tuple[str, ...], value: Any, where: str) -> Document:
    written = document.tables.get("user")
    tables = written if isinstance(written, list) else []
    names = [table.get("name") if isinstance(table, dict) else None for table in tables]
    if user not in names:
        raise unknown("user", user, [name for name in names if isinstance(name, str)], where=where)
    if not key and not isinstance(value, dict):
        raise UserError(f"user.{user} is a table", where=where, expected=f"--set user.{user}.KEY=VALUE")
    at: Key = ("user", names.index(user))
    model = tables[names.index(user)].get("model")
    if key[:1] == ("model",) and len(key) > 1 and isinstance(model, str):
        # The short form of a model has to become a table before an option can join it.
        table = _nested(document.file, at, ("model",), {"name": model}, document.where((*at, "model")))
        document = document.merged(table, into=at)
    return document.merged(_nested(document.file, at, key, value, where), into=at)


def _nested(file: str, at: Key, key: tuple[str, ...], value: Any, where: str) -> Document:
    """A document that holds `value` at `key`; its positions are those below `at`."""
    tables: Any = value
    for name in reversed(key):
        tables = {name: tables}
    full: Key = (*at, *key)
    # The section itself stays where its file writes it.
    parents = {full[:length]: where for length in range(max(2, len(at) + 1), len(full) + 1)}
    inner = list(_paths(value, full))
    if any(len(path) > DEEPEST for path in (full, *inner)):
        raise too_deep(where)
    return Document(file, tables, parents | {full: where} | dict.fromkeys(inner, where))


def _paths(value: Any, at: Key) -> Iterator[Key]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, inner in items:
        yield (*at, part)
        yield from _paths(inner, (*at, part))


def _dotted(text: str) -> tuple[str, ...]:
    """The names in a dotted TOML key; empty where the text is none."""
    try:
        table: Any = tomllib.loads(f"{text} = 0")
    except (ValueError, RecursionError):
        return ()
    names: list[str] = []
    while isinstance(table, dict) and len(table) == 1:
        [(name, table)] = table.items()
        names.append(name)
    return tuple(names) if table == 0 else ()


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if list(parsed) == ["value"] else text
