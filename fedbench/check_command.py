"""What `fedbench check` does: has a plugin checked, and shows what was found as a table."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from fedbench.conformance.apart import Examination, Report, Unloadable
from fedbench.report import clean

_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def check(target: str, *, plugins: Sequence[Path], traceback: bool, timeout: float) -> int:
    """Check a plugin by name, or all that a file registers.

    Returns:
        0 where every plugin conforms, 1 where a check failed or all were skipped, 2 where one cannot be loaded.

    Raises:
        UserError: there is nothing to check.
    """
    with _Progress() as progress:
        try:
            reports = Examination(target, plugins, timeout=timeout, listen=progress.show).run()
        except Unloadable as error:
            progress.clear()
            if traceback:
                click.echo(error.trace, err=True)
            raise
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns if terminal else 100
    color = terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    for report in reports:
        click.echo(render(report, width=width, color=color))
        if traceback:
            for finding in report.findings:
                if finding.trace:
                    click.echo(f"{finding.check}:\n{finding.trace}")
            click.echo(report.trace, nl=bool(report.trace))
    if not traceback and any(report.trace or any(one.trace for one in report.findings) for report in reports):
        click.echo("Traces: --traceback")
    return max(report.code for report in reports)


def render(report: Report, *, width: int = 100, color: bool = False) -> str:
    """A report as text: its checks and verdicts, and for a failure where, why and what to do."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        legacy_windows=False,
    )
    where = f"  [{report.where}]" if report.where else ""
    console.print(Text(clean(report.label), style="bold").append(clean(where), style="not bold"))
    if report.unloadable:
        console.print(Text(f"cannot be loaded: {clean(report.unloadable)}", style=_STYLES["failed"]))
        return out.getvalue()
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, fixed in (("check", True), ("verdict", True), ("where and why", False), ("what to do", False)):
        grid.add_column(Text(name), no_wrap=fixed, overflow="fold")
    for finding in report.findings:
        failed = finding.verdict == "failed"
        cause = [part for part in (finding.where if failed else "", finding.cause) if part]
        grid.add_row(
            Text(clean(finding.check)),
            Text(finding.verdict, style=_STYLES[finding.verdict]),
            Text(clean(": ".join(cause)), style="" if failed else "dim"),
            Text(clean(finding.advice) if failed else ""),
        )
    console.print(grid)
    console.print(Text(summary(report)))
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def summary(report: Report) -> str:
    """`9 passed, 1 failed, 1 skipped`."""
    counts = Counter[str](finding.verdict for finding in report.findings)
    text = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _STYLES if counts[verdict]) or "nothing was checked"
    return text if counts["passed"] or counts["failed"] else f"{text}: a plugin of which nothing was checked fails"


class _Progress:
    """One line on a terminal that says what is being done; nothing elsewhere."""

    def __enter__(self) -> _Progress:
        self._length = 0
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def show(self, doing: str) -> None:
        """Write what is being done over what was."""
        if sys.stderr.isatty():
            self.clear()
            text = clean(doing)[: shutil.get_terminal_size((100, 24)).columns - 1]
            click.echo(text, nl=False, err=True)
            self._length = len(text)

    def clear(self) -> None:
        """Wipe the line."""
        if self._length:
            click.echo(f"\r{' ' * self._length}\r", nl=False, err=True)
            self._length = 0
