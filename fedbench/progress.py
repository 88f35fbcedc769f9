"""What a run shows while it works: bars on a terminal, plain lines elsewhere, with an estimate of what remains."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from fedbench.errors import one_line
from fedbench.leaderboard import provisional
from fedbench.plan import Cell


class Estimate:
    """Seconds left, from the rounds seen so far: a method's own pace where known, else the pace of all."""

    def __init__(self, cells: Sequence[Cell], workers: int) -> None:
        self._left = {cell.key: cell.suite.protocol.rounds + 1 for cell in cells}
        self._method = {cell.key: cell.method.label for cell in cells}
        self._seen: dict[str, list[float]] = {}
        self._workers = max(1, workers)

    def round(self, cell: Cell, seconds: float) -> None:
        """Count one finished round."""
        self._left[cell.key] = max(0, self._left[cell.key] - 1)
        self._seen.setdefault(cell.method.label, []).append(seconds)

    def resumed(self, cell: Cell, rounds: int) -> None:
        """Rounds that need not be run again."""
        self._left[cell.key] = max(0, self._left[cell.key] - rounds)

    def over(self, cell: Cell) -> None:
        """Nothing of this cell is left."""
        self._left[cell.key] = 0

    def seconds(self) -> float | None:
        """Seconds left for all cells, or None before the first round."""
        if not self._seen:
            return None
        pace = {method: sum(seen) / len(seen) for method, seen in self._seen.items()}
        usual = sum(pace.values()) / len(pace)
        total = sum(left * pace.get(self._method[key], usual) for key, left in self._left.items())
        running = sum(1 for left in self._left.values() if left)
        return total / max(1, min(self._workers, running))


class Progress:
    """Told about every event of a run; this one writes plain lines, for logs and pipes.

    Args:
        console: where lines go, standard error by default, so that standard output stays the board's.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, soft_wrap=True)
        self.started_at = time.monotonic()
        self._records: dict[tuple[str, int], list[Mapping[str, Any]]] = {}

    def begin(self, cells: Sequence[Cell], workers: int) -> None:
        self.total, self.done = len(cells), 0
        self.estimate = Estimate(cells, workers)
        if cells:
            self.line(f"{len(cells)} cells to run, {workers} at a time")

    def started(self, cell: Cell) -> None:
        self.line(f"{cell.label}: started")

    def preparing(self, cell: Cell, user: str) -> None:
        """Data and frozen features of a user are being made or read."""

    def resumed(self, cell: Cell, rounds: int) -> None:
        self.estimate.resumed(cell, rounds)
        self.line(f"{cell.label}: resumed after round {rounds}")

    def round(self, cell: Cell, record: Mapping[str, Any]) -> None:
        self.estimate.round(cell, record["seconds"])
        self._records.setdefault((cell.method.label, cell.seed), []).append(record)
        values = " ".join(f"{value:.1f}" for value in record["validation"].values())
        self.line(
            f"{cell.label}: round {record['round'] + 1}/{cell.suite.protocol.rounds + 1}"
            f" validation {values}{self.provisional(cell, record['round'])}{self.remaining()}"
        )

    def finished(self, cell: Cell, seconds: float, error: str | None) -> None:
        self.done += 1
        self.estimate.over(cell)
        verdict = f"FAILED: {error}" if error else f"done in {seconds:.0f} s"
        self.line(f"{cell.label}: {verdict} ({self.done}/{self.total}){self.remaining()}")

    def skipped(self, cell: Cell, why: str) -> None:
        """The cell is left to another run."""
        self.done += 1
        self.estimate.over(cell)
        self.line(f"{cell.label}: left out: {why} ({self.done}/{self.total})")

    def note(self, text: str) -> None:
        self.line(text)

    def end(self) -> None:
        """The run is over or interrupted."""

    def line(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.started_at), 60)
        self.console.print(f"[{minutes:02d}:{seconds:02d}] {one_line(text)}", markup=False, highlight=False)

    def remaining(self) -> str:
        """Time left in words, empty before anything is known."""
        left = self.estimate.seconds()
        if left is None or left < 1:
            return ""
        return f", about {left / 60:.0f} min left" if left > 90 else f", about {left:.0f} s left"

    def provisional(self, cell: Cell, number: int) -> str:
        """The provisional Δ% on validation, where local training of the same seed has reached the same round."""
        local = self._records.get(("local", cell.seed))
        if local is None or cell.method.name == "local":
            return ""
        known = provisional(self._records[cell.method.label, cell.seed], local)
        if known is None or known.round != number or not math.isfinite(known.mean):
            return ""
        return f", provisional Δ {known.mean:+.1f} % on validation"


class TerminalProgress(Progress):
    """Bars for the cells that run, lines for what has ended."""

    def begin(self, cells: Sequence[Cell], workers: int) -> None:
        self.total, self.done = len(cells), 0
        self.estimate = Estimate(cells, workers)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            console=self.console,
            transient=True,
        )
        self._all = self._bars.add_task("all cells", total=len(cells), note="")
        self._tasks: dict[str, TaskID] = {}
        self._bars.start()

    def started(self, cell: Cell) -> None:
        total = cell.suite.protocol.rounds + 1
        self._tasks[cell.key] = self._bars.add_task(cell.label, total=total, note="preparing")

    def preparing(self, cell: Cell, user: str) -> None:
        self._bars.update(self._tasks[cell.key], note=f"preparing {user}")

    def resumed(self, cell: Cell, rounds: int) -> None:
        self.estimate.resumed(cell, rounds)
        self._bars.update(self._tasks[cell.key], completed=rounds, note="resumed")

    def round(self, cell: Cell, record: Mapping[str, Any]) -> None:
        self.estimate.round(cell, record["seconds"])
        self._records.setdefault((cell.method.label, cell.seed), []).append(record)
        note = self.provisional(cell, record["round"]).removeprefix(", ")
        self._bars.update(self._tasks[cell.key], advance=1, note=note)
        self._bars.update(self._all, note=self.remaining().removeprefix(", "))

    def finished(self, cell: Cell, seconds: float, error: str | None) -> None:
        self._bars.remove_task(self._tasks.pop(cell.key))
        super().finished(cell, seconds, error)
        self._bars.update(self._all, completed=self.done)

    def skipped(self, cell: Cell, why: str) -> None:
        self._bars.remove_task(self._tasks.pop(cell.key))
        super().skipped(cell, why)
        self._bars.update(self._all, completed=self.done)

    def end(self) -> None:
        self._bars.stop()


def make_progress() -> Progress:
    """Bars where standard error is a terminal, plain lines elsewhere."""
    console = Console(stderr=True, soft_wrap=True)
    return TerminalProgress(console) if console.is_terminal else Progress(console)
