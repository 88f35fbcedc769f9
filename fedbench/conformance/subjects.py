"""What `fedbench check NAME|FILE` means: which plugins are to be checked, and with which options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbench.conformance import Subject
from fedbench.conformance.cells import federation
from fedbench.discovery import discover
from fedbench.errors import UserError, unknown
from fedbench.interfaces import KINDS
from fedbench.plan import check_method
from fedbench.registry import Registry
from fedbench.specs import MethodSpec, parse_method

OBSERVER = "observer"
"""What is registered like a plugin, though a suite cannot name it."""


def subjects(text: str, plugins: Sequence[Path] = ()) -> list[Subject]:
    """The plugins that a name or a file means.

    Args:
        text: a plugin file, of which everything it registers is meant, or `[KIND:]NAME[:option=value,…]`.
        plugins: further files to load.

    Raises:
        UserError: the file cannot be loaded, no plugin has that name, or several have.
    """
    files = [Path(file).resolve() for file in plugins]
    if is_file(text):
        return _of_file(Path(text).resolve(), files)
    return [_named(text, discover(files), tuple(files))]


def is_file(text: str) -> bool:
    """Whether this is a file and no name: it ends in .py, or holds a path."""
    return text.endswith(".py") or "/" in text or Path(text).is_file()


def _of_file(path: Path, others: Sequence[Path]) -> list[Subject]:
    files = (*(file for file in others if file != path), path)
    registry = discover(files)
    source = registry.sources[-1]  # files are loaded last, in their order
    entries = sorted(registry.of_source(source), key=lambda entry: (KINDS.index(entry.kind), entry.name))
    found = [Subject(entry.kind, entry.name, {}, registry, files) for entry in entries]
    watching = [name for owner, name in registry.observer_names if owner == source]
    return found + [Subject(OBSERVER, name, {}, registry, files) for name in watching]


def _named(text: str, registry: Registry, files: tuple[Path, ...]) -> Subject:
    prefix, colon, rest = text.partition(":")
    if prefix == OBSERVER and colon:
        names = [name for _, name in registry.observer_names]
        if rest not in names:
            raise unknown(OBSERVER, rest, names)
        return Subject(OBSERVER, rest, {}, registry, files)
    kinds: Sequence[str] = KINDS
    if colon and prefix in KINDS and rest:
        kinds, text = [prefix], rest
    spec = parse_method(text, where="fedbench check")
    having = [kind for kind in kinds if (kind, spec.name) in registry.entries]
    if not having:
        if len(kinds) == 1:
            registry.entry(kinds[0], spec.name)  # says what is missing, and which plugins failed to load
        error = unknown("plugin", spec.name, {name for _, name in registry.entries})
        broken = ", ".join(f"{failure.source} ({failure.message})" for failure in registry.failures)
        raise UserError(error.what, expected=f"{error.expected}; failed to load: {broken}") if broken else error
    if len(having) > 1:
        choices = " or ".join(f"{kind}:{spec.name}" for kind in having)
        raise UserError(f"'{spec.name}' names plugins of several kinds", expected=f"write {choices}")
    return subject_of(having[0], spec.name, spec.options, registry, files)


def subject_of(
    kind: str, name: str, options: Mapping[str, Any], registry: Registry, files: tuple[Path, ...]
) -> Subject:
    """One plugin with checked options.

    Raises:
        UserError: there is no such plugin, or it does not take these options.
    """
    registry.entry(kind, name)
    if options and kind == "method":  # which may also have options of its parts
        check_method(federation(), registry, MethodSpec(name, options))
    elif options:
        registry.check_options(kind, name, options)
    return Subject(kind, name, dict(options), registry, files)
