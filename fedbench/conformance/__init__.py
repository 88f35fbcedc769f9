"""The conformance kit: what a plugin of each kind must do so that its numbers can be trusted, checked on tiny data.

`fedbench check` runs it in processes of their own, which end when a plugin hangs; a plugin's tests call it here:

    from fedbench.conformance import assert_conforms

    def test_my_loss() -> None:
        assert_conforms("loss", "cosine", plugins=["my_loss.py"])

The checks of each kind stand in a file of their own (`conformance/losses.py`, …). Importing this imports no torch.
"""

from __future__ import annotations

import importlib
import inspect
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedbench.declared import source_file
from fedbench.registry import Registry
from fedbench.specs import MethodSpec

Verdict = Literal["passed", "failed", "skipped"]

_CHECKS = {
    "method": "fedbench.conformance.methods",
    "loss": "fedbench.conformance.losses",
    "data": "fedbench.conformance.data",
    "model": "fedbench.conformance.models",
    "task": "fedbench.conformance.tasks",
    "metric": "fedbench.conformance.metrics",
    "engine": "fedbench.conformance.carriers",
    "user": "fedbench.conformance.carriers",
    "observer": "fedbench.conformance.carriers",
}
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_CORE = Path(__file__).resolve().parent.parent


class Failed(Exception):
    """A plugin does not do what a check wants.

    Args:
        what: one line.
        at: the function or class to blame; default: the plugin's class.
        trace: of the exception behind it, where there is one.
    """

    def __init__(self, what: str, *, at: Any = None, trace: str = "") -> None:
        super().__init__(what)
        self.at, self.trace = at, trace


class Skipped(Exception):
    """A check does not apply to a plugin; says why."""


@dataclass
class Subject:
    """One plugin to check.

    Args:
        kind: one of `KINDS`, or `observer`.
        options: those given for it; the others have their defaults.
        plugins: the files that must be loaded to find it.
        kept: what its checks share, e.g. a run that several look at.
    """

    kind: str
    name: str
    options: Mapping[str, Any]
    registry: Registry
    plugins: tuple[Path, ...] = ()
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Kind, name and options, as `fedbench check` takes them."""
        return f"{self.kind}:{MethodSpec(self.name, self.options).label}"

    @property
    def target(self) -> Any:
        """What is registered: a class or a factory, imported now."""
        if self.kind != "observer":
            return self.registry.resolve(self.kind, self.name)
        names = [name for _, name in self.registry.observer_names]
        target = self.registry.observers[names.index(self.name)]
        if not isinstance(target, str):
            return target
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def create(self) -> Any:
        """An instance with the options given."""
        return self.registry.create(self.kind, self.name, self.options)


@dataclass(frozen=True)
class Check:
    """One thing that a plugin must do.

    Args:
        name: a word or two.
        run: raises `Failed`, `Skipped` or whatever the plugin raises; may return a note.
        advice: what to do where it fails.
        needs: checks that must have passed; without them this one would say the same again.
    """

    name: str
    run: Callable[[Subject], str | None]
    advice: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """What came of one check of one plugin.

    Args:
        where: `file:line` of the plugin, for a failure.
        cause: the exception or what is wrong, why it was skipped, or a note.
    """

    subject: str
    check: str
    verdict: Verdict
    where: str = ""
    cause: str = ""
    advice: str = ""
    trace: str = ""
    seconds: float = 0.0


def checks_for(kind: str) -> tuple[Check, ...]:
    """The checks of a kind of plugin, in order."""
    if kind not in _CHECKS:
        raise ValueError(f"there are no checks for a {kind}")
    module: Any = importlib.import_module(_CHECKS[kind])
    checks: Any = module.CHECKS
    return tuple(checks[kind] if isinstance(checks, dict) else checks)


def examine(
    subject: Subject,
    *,
    known: Mapping[str, Verdict] | None = None,
    begin: Callable[[Check], None] = lambda check: None,
) -> Iterator[Finding]:
    """Run the checks of a plugin in this process, one after another.

    Args:
        known: verdicts of checks that need not run again.
        begin: called before each check.
    """
    verdicts = dict(known or {})
    for check in checks_for(subject.kind):
        if check.name in verdicts:
            continue
        begin(check)
        finding = _finding(subject, check, verdicts)
        verdicts[check.name] = finding.verdict
        yield finding


def conforms(findings: Sequence[Finding]) -> bool:
    """Whether nothing failed and not everything was skipped: a plugin of which nothing was checked is not sound."""
    verdicts = {finding.verdict for finding in findings}
    return "failed" not in verdicts and "passed" in verdicts


def assert_conforms(
    kind: str, name: str, *, options: Mapping[str, Any] | None = None, plugins: Sequence[str | Path] = ()
) -> list[Finding]:
    """Check a plugin in this process; for the tests of a plugin.

    Args:
        kind: `method`, `loss`, …
        name: as registered.
        options: of the plugin; the others have their defaults.
        plugins: files that register it; what is installed is found by itself.

    Raises:
        AssertionError: a check failed, or every check was skipped.
        UserError: there is no such plugin or option, or a file cannot be loaded.
    """
    from fedbench.conformance.subjects import subject_of
    from fedbench.discovery import discover

    files = tuple(Path(file).resolve() for file in plugins)
    subject = subject_of(kind, name, options or {}, discover(files), files)
    findings = list(examine(subject))
    if not conforms(findings):
        bad = [one for one in findings if one.verdict == "failed"] or findings
        lines = [f"{one.check} {one.verdict}: {one.where} {one.cause}. {one.advice}\n{one.trace}" for one in bad]
        raise AssertionError(f"{subject.label} does not conform\n" + "\n".join(lines))
    return findings


def failed(subject: Subject, check: Check, cause: str, *, trace: str = "", at: Any = None) -> Finding:
    """The finding of a check that failed, with the place in the plugin that is to blame."""
    return Finding(subject.label, check.name, "failed", place(subject, trace, at), cause, check.advice, trace)


def place(subject: Subject, trace: str = "", at: Any = None) -> str:
    """`file:line` of the plugin: the last line of a trace inside its file or folder, else of what is to blame."""
    try:
        target = subject.target
    except Exception:
        return ""
    own = source_file(target)
    if own is None:
        return ""
    frames = [(Path(file), int(line)) for file, line in _FRAME.findall(trace)]
    innermost = [frame for frame in reversed(frames) if frame[0] == own] + [
        frame for frame in reversed(frames) if _beside(frame[0], own)
    ]
    blamed = [found for thing in (at, target) if (found := _line_of(thing)) and _beside(found[0], own)]
    for file, line in innermost + blamed:
        return f"{shown(file)}:{line}"
    return shown(own)


def shown(path: Path) -> str:
    """A path as one types it: relative where it lies below the working folder."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _finding(subject: Subject, check: Check, verdicts: Mapping[str, Verdict]) -> Finding:
    missing = [need for need in check.needs if verdicts.get(need) != "passed"]
    if missing:
        return Finding(subject.label, check.name, "skipped", cause=f"'{missing[0]}' did not pass")
    started = time.perf_counter()
    try:
        note = check.run(subject)
    except Skipped as reason:
        return Finding(subject.label, check.name, "skipped", cause=str(reason))
    except Failed as failure:
        return failed(subject, check, str(failure), trace=failure.trace, at=failure.at)
    except (Exception, SystemExit) as error:  # a plugin that exits is as broken as one that raises
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return failed(subject, check, cause, trace=traceback.format_exc())
    seconds = time.perf_counter() - started
    return Finding(subject.label, check.name, "passed", cause=note or "", seconds=seconds)


def _beside(path: Path, own: Path) -> bool:
    """Whether a file is a plugin's own, or lies in its folder, where that is not a folder of packages."""
    alone = own.parent.name == "site-packages"
    return path == own or (not alone and path.is_relative_to(own.parent) and not path.resolve().is_relative_to(_CORE))


def _line_of(thing: Any) -> tuple[Path, int] | None:
    thing = inspect.unwrap(thing) if callable(thing) else thing
    try:
        file = inspect.getsourcefile(thing)
        line = inspect.getsourcelines(thing)[1]
    except (TypeError, OSError):
        return None
    return (Path(file), line) if file else None
