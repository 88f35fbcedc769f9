"""A plugin's options: the typed arguments of its constructor, checked before anything runs."""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedbench.errors import UserError, unknown


@dataclass(frozen=True)
class Option:
    """One option: its type as written, default (`inspect.Parameter.empty` where it must be given) and doc line."""

    name: str
    annotation: Any
    default: Any
    doc: str = ""

    @property
    def expected(self) -> str:
        """The type in words."""
        return " or ".join(_name(choice) for choice in _choices(self.annotation))


def read_options(factory: Callable[..., Any]) -> dict[str, Option]:
    """The options of a class or factory; a class without a constructor of its own has none."""
    if inspect.isclass(factory) and not _own_init(factory):
        return {}
    target = factory.__init__ if inspect.isclass(factory) else factory  # type: ignore[misc]
    try:
        hints = typing.get_type_hints(target)
    except Exception:  # a stranger's annotation may name what does not exist at run time
        hints = {}
    docs = _doc_lines((inspect.getdoc(factory) or "") + "\n" + (inspect.getdoc(target) or ""))
    found = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        found[name] = Option(name, hints.get(name, Any), parameter.default, docs.get(name, ""))
    return found


def check_options(owner: str, known: Mapping[str, Option], given: Mapping[str, Any], where: str | None) -> None:
    """Raise `UserError` for an unknown option, a wrong type or a missing one."""
    for name, value in given.items():
        if name not in known:
            raise unknown(f"option of {owner}", name, known, where=where)
        if not _fits(value, known[name].annotation):
            raise UserError(
                f"the option '{name}' of {owner} is {value!r}", where=where, expected=f"expected {known[name].expected}"
            )
    for name, option in known.items():
        if option.default is inspect.Parameter.empty and name not in given:
            raise UserError(f"the option '{name}' of {owner} must be given", where=where, expected=option.expected)


def _own_init(kind: type) -> bool:
    for base in kind.__mro__:
        if "__init__" in vars(base):
            return not base.__module__.startswith(("torch.", "abc", "builtins"))
    return False


def _choices(annotation: Any) -> tuple[Any, ...]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return tuple(part for item in typing.get_args(annotation) for part in _choices(item))
    if origin is Literal:
        return typing.get_args(annotation)
    return (annotation,)


def _fits(value: Any, annotation: Any) -> bool:
    for choice in _choices(annotation):
        if choice is Any or (choice is types.NoneType and value is None):
            return True
        if choice is float and isinstance(value, int | float) and not isinstance(value, bool):
            return True
        if isinstance(choice, type):
            if isinstance(value, choice) and not (choice is not bool and isinstance(value, bool)):
                return True
        elif typing.get_origin(choice) is not None:
            origin = typing.get_origin(choice)
            if isinstance(origin, type) and isinstance(value, origin):
                return True
        elif type(value) is type(choice) and value == choice:
            return True
    return False


def _name(choice: Any) -> str:
    if choice is types.NoneType:
        return "nothing"
    return choice.__name__ if isinstance(choice, type) else repr(choice)


def _doc_lines(text: str) -> dict[str, str]:
    return {name: doc.strip() for name, doc in re.findall(r"^[ \t]+(\w+):[ \t]+(\S.*)$", text, flags=re.MULTILINE)}


def positive(owner: str, option: str, value: float) -> float:
    """The value of an option that must be a finite number above 0.

    Raises:
        UserError: it is not.
    """
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"the option '{option}' of {owner} is {value}", expected="a finite number above 0")
    return float(value)
