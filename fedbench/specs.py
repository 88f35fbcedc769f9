"""How a method and its options are written on one line: `fedmuscle:loss=muscle,loss.tau=0.3`."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedbench.errors import UserError

Value = bool | int | float | str

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]*")
_OPTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")
_PAIR = re.compile(r'\s*([^=,"]*?)\s*=\s*("(?:[^"\\]|\\.)*"|[^,"]*?)\s*(?:,|$)')
_WHOLE = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_FORM = "NAME or NAME:option=value,option=value"
_LOSS_METHOD = "fedmuscle"


@functools.total_ordering
@dataclass(frozen=True, eq=False)
class MethodSpec:
    """A method and the options given for it; specs of one label are equal, hash alike and sort by label.

    Args:
        name: the method plugin.
        options: by name, kept in the order of the names; `loss.NAME` is an option of the method's loss.
    """

    name: str
    options: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", dict(sorted(self.options.items())))

    @property
    def label(self) -> str:
        """The one way to write this spec, which `parse_method` reads back: `fedmuscle:loss=muscle,tau=0.1`."""
        pairs = ",".join(f"{name}={_written(value)}" for name, value in self.options.items())
        return f"{self.name}:{pairs}" if pairs else self.name

    def __str__(self) -> str:
        return self.label

    # By label, since True == 1 == 1.0 in Python while they are different options.
    def __eq__(self, other: object) -> bool:
        return self.label == other.label if isinstance(other, MethodSpec) else NotImplemented

    def __lt__(self, other: MethodSpec) -> bool:
        return self.label < other.label

    def __hash__(self) -> int:
        return hash(self.label)


def parse_method(text: str, *, where: str | None = None) -> MethodSpec:
    """Read `NAME[:option=value,...]`; a value is a bool, an int, a float or a string (in double quotes if need be).

    Raises:
        UserError: the text has another form, names an option twice, or has a number out of range.
    """
    name, colon, rest = text.strip().partition(":")
    if not _NAME.fullmatch(name):
        raise UserError(f"'{text}' is not a method", where=where, expected=_FORM)
    if colon and not rest.strip():
        raise UserError(f"'{text}' has no options after the colon", where=where, expected=_FORM)
    options: dict[str, Value] = {}
    position = 0
    while position < len(rest):
        match = _PAIR.match(rest, position)
        if match is None or not _OPTION.fullmatch(match[1]) or not match[2]:
            raise UserError(f"'{text}' is malformed at '{rest[position:].strip()}'", where=where, expected=_FORM)
        if match[1] in options:
            raise UserError(f"'{text}' gives the option '{match[1]}' twice", where=where)
        options[match[1]] = _read(match[2], text, where)
        position = match.end()
    if rest.rstrip().endswith(","):
        raise UserError(f"'{text}' ends in a comma", where=where, expected=_FORM)
    return MethodSpec(name, options)


def parse_loss(text: str, *, where: str | None = None) -> MethodSpec:
    """What `--loss NAME[:option=value,...]` stands for: FedMuscle's method with that loss.

    Raises:
        UserError: as `parse_method`.
    """
    loss = parse_method(text, where=where)
    options = {f"loss.{name}": value for name, value in loss.options.items()}
    return MethodSpec(_LOSS_METHOD, {"loss": loss.name, **options})


def _read(value: str, text: str, where: str | None) -> Value:
    if value.startswith('"'):
        try:
            return str(json.loads(value))
        except ValueError:
            raise UserError(f"'{text}' has a malformed string {value}", where=where) from None
    try:
        return _plain(value)
    except ValueError:
        raise UserError(f"'{text}' has a number out of range: {value[:40]}", where=where) from None


def _plain(value: str) -> Value:
    if value in ("true", "True", "false", "False"):
        return value in ("true", "True")
    if _WHOLE.fullmatch(value):
        return int(value)
    if _NUMBER.fullmatch(value):
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(value)
        return number
    return value


def _written(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        bare = value and value == value.strip() and not re.search(r'[,="\\\x00-\x1f]', value)
        return value if bare and isinstance(_plain_or_text(value), str) else json.dumps(value, ensure_ascii=False)
    return repr(value)


def _plain_or_text(value: str) -> Value | None:
    try:
        return _plain(value)
    except ValueError:
        return None
