"""Everything that plugins have registered: by kind and name, imported only when used."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedbench.declared import Declared, declared, file_hash, imported_modules
from fedbench.errors import UserError, unknown
from fedbench.interfaces import KINDS
from fedbench.options import Option, check_options, read_options


@dataclass(frozen=True)
class Source:
    """Where a plugin comes from: `door` is built-in, package or file."""

    name: str
    door: str
    version: str = ""
    path: str = ""

    def __str__(self) -> str:
        if self.door == "built-in":
            return "built-in"
        return self.path if self.door == "file" else f"{self.name} {self.version}".strip()


@dataclass(frozen=True)
class Entry:
    """One registered thing; `target` is an object or a lazy `"module:attribute"`."""

    kind: str
    name: str
    target: Any
    source: Source


@dataclass(frozen=True)
class Failure:
    """A plugin that could not be loaded: it stays visible, and is named when something of it is missing."""

    source: Source
    message: str
    trace: str


def placed(error: UserError, where: str) -> UserError:
    """The same error with the place that caused it in front of the place that noticed it."""
    return UserError(error.what, where=f"{where}: {error.where}" if error.where else where, expected=error.expected)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """What a plugin prints while it is loaded or built goes to standard error: standard output is the board's."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@dataclass
class Registry:
    """Names to plugins. Filled by `discovery.discover`; afterwards it only answers."""

    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    observers: list[Any] = field(default_factory=list)
    observer_names: list[tuple[Source, str]] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        """Take one entry; a name that is taken is an error which names both sources."""
        if not isinstance(entry.name, str) or not entry.name:
            raise UserError(f"a {entry.kind} needs a name", where=str(entry.source), expected="a non-empty string")
        if not (callable(entry.target) or isinstance(entry.target, str)):
            raise UserError(
                f"the {entry.kind} '{entry.name}' is registered as {entry.target!r:.80}",
                where=str(entry.source),
                expected='a class, or its place as "module:attribute"',
            )
        taken = self.entries.get((entry.kind, entry.name))
        if taken is not None:
            raise UserError(
                f"the {entry.kind} '{entry.name}' is registered twice",
                where=str(entry.source),
                expected=f"it is already registered by {taken.source}; choose another name",
            )
        self.entries[entry.kind, entry.name] = entry

    def names(self, kind: str) -> list[str]:
        """All names of a kind, sorted."""
        return sorted(name for entry_kind, name in self.entries if entry_kind == kind)

    def entry(self, kind: str, name: str, *, where: str | None = None) -> Entry:
        """The entry, or a `UserError` with the nearest name and the plugins that failed to load."""
        if kind not in KINDS:
            raise unknown("kind of plugin", kind, KINDS, where=where)
        found = self.entries.get((kind, name))
        if found is None:
            error = unknown(kind, name, self.names(kind), where=where)
            if self.failures:
                failed = ", ".join(f"{failure.source} ({failure.message})" for failure in self.failures)
                error = UserError(error.what, where=where, expected=f"{error.expected}; failed to load: {failed}")
            raise error
        return found

    def resolve(self, kind: str, name: str, *, where: str | None = None) -> Any:
        """The class or factory itself, imported now.

        Raises:
            UserError: unknown name, or its module cannot be imported.
        """
        entry = self.entry(kind, name, where=where)
        if not isinstance(entry.target, str):
            return entry.target
        module, _, attribute = entry.target.partition(":")
        try:
            with apart():
                found = getattr(importlib.import_module(module), attribute)
            if not callable(found):
                raise TypeError(f"it is {found!r:.80}, no class")
            return found
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"the {kind} '{name}' cannot be loaded: {type(error).__name__}: {error}",
                where=f"{entry.source}, target {entry.target}",
            ) from error

    def options(self, kind: str, name: str, where: str | None = None) -> dict[str, Option]:
        """The options of a plugin, by name."""
        return read_options(self.resolve(kind, name, where=where))

    def check_options(self, kind: str, name: str, options: Mapping[str, Any], where: str | None = None) -> None:
        """Raise `UserError` for an option that the plugin does not have or whose type is wrong."""
        check_options(f"{kind} '{name}'", self.options(kind, name, where), options, where)

    def create(self, kind: str, name: str, options: Mapping[str, Any] | None = None, where: str | None = None) -> Any:
        """An instance built with checked options; with `where`, whatever its constructor raises is an error there."""
        options = dict(options or {})
        self.check_options(kind, name, options, where)
        build = self.resolve(kind, name)
        with apart():
            return self._build(build, kind, name, options, where)

    def _build(
        self, build: Callable[..., Any], kind: str, name: str, options: Mapping[str, Any], where: str | None
    ) -> Any:
        if where is None:
            return build(**options)
        try:
            return build(**options)
        except UserError as error:
            raise placed(error, where) from None
        except Exception as error:
            raise UserError(f"the {kind} '{name}' refuses: {type(error).__name__}: {error}", where=where) from error

    def declared(self, kind: str, name: str) -> Declared:
        """What the plugin's source says of itself, without importing it."""
        return declared(self.entry(kind, name).target)

    def version(self, kind: str, name: str) -> str:
        """What a cell key records: a built-in's revision, a stranger's file hash (and package version).

        A stranger that builds on built-ins (a loss derived from another) changes with them: their revisions follow.
        """
        entry = self.entry(kind, name)
        if entry.source.door == "built-in":
            return str(self.declared(kind, name).revision or 0)
        modules = imported_modules(entry.target)
        bases = [
            f"+{other.kind}:{other.name}={self.declared(other.kind, other.name).revision or 0}"
            for _, other in sorted(self.entries.items())
            if other.source.door == "built-in" and str(other.target).partition(":")[0] in modules
        ]
        own = f"{entry.source.version}{'+' if entry.source.version else ''}{file_hash(entry.target)[:16]}"
        return own + "".join(bases)

    def of_source(self, source: Source) -> Iterable[Entry]:
        """What one plugin registered."""
        return [entry for entry in self.entries.values() if entry.source == source]
