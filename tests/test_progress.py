"""What a run shows while it works: plain lines for logs, bars for terminals, an estimate of what remains."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedbench.discovery import discover
from fedbench.plan import Cell, make_cells
from fedbench.progress import Estimate, Progress, TerminalProgress, make_progress
from fedbench.suite import load

sys.path.append(str(Path(__file__).parent))
from tiny import WriteSuite


@pytest.fixture
def cells(write_suite: WriteSuite) -> list[Cell]:
    """`local` and four more cells of seed 0, of three rounds each."""
    return make_cells(load(str(write_suite())), discover(), seeds=[0])


def record(number: int, seconds: float = 10.0, **validation: float) -> dict[str, Any]:
    scores = validation or {"user1": 50.0, "user2": 20.0}
    return {"round": number, "seconds": seconds, "validation": scores}


def lines(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def plain() -> Progress:
    return Progress(Console(file=io.StringIO(), soft_wrap=True, width=80))


# -- the estimate


def test_nothing_is_known_before_the_first_round(cells: list[Cell]) -> None:
    assert Estimate(cells, 1).seconds() is None


def test_a_method_has_its_own_pace_and_others_the_usual_one(cells: list[Cell]) -> None:
    local, muscle, *others = cells
    estimate = Estimate(cells, 1)
    estimate.round(local, 2.0)
    assert estimate.seconds() == pytest.approx(2 * 2 + 4 * 3 * 2)  # all are thought to be like local
    estimate.round(local, 4.0)
    estimate.round(muscle, 10.0)
    usual = (3 + 10) / 2
    assert estimate.seconds() == pytest.approx(1 * 3 + 2 * 10 + len(others) * 3 * usual)


def test_workers_share_the_work_while_there_is_enough(cells: list[Cell]) -> None:
    one, four = Estimate(cells, 1), Estimate(cells, 4)
    for estimate in (one, four):
        estimate.round(cells[0], 2.0)
    total = one.seconds()
    assert total is not None and four.seconds() == pytest.approx(total / 4)
    for cell in cells[1:]:
        four.over(cell)
    assert four.seconds() == pytest.approx(2 * 2.0)  # one cell is left, and it keeps one worker busy


def test_resumed_rounds_and_ended_cells_are_not_waited_for(cells: list[Cell]) -> None:
    estimate = Estimate(cells[:2], 1)
    estimate.resumed(cells[0], 2)
    estimate.round(cells[0], 5.0)
    assert estimate.seconds() == pytest.approx(3 * 5)
    estimate.over(cells[1])
    assert estimate.seconds() == 0


# -- plain lines


def test_a_log_tells_the_story_in_plain_lines(cells: list[Cell]) -> None:
    progress = plain()
    local, muscle = cells[:2]
    progress.begin([local, muscle], 1)
    progress.started(local)
    progress.preparing(local, "user1")
    for number in range(3):
        progress.round(local, record(number))
    progress.finished(local, 30.0, None)
    progress.started(muscle)
    progress.resumed(muscle, 1)
    progress.round(muscle, record(1, user1=55.0, user2=24.0))
    progress.note("something to know [not markup]")
    progress.finished(muscle, 0.0, "user2: align: RuntimeError: no such luck")
    progress.end()
    told = lines(progress.console)
    assert all(re.match(r"\[\d\d:\d\d\] ", line) for line in told)
    assert [line[8:] for line in told] == [
        "2 cells to run, 1 at a time",
        "local seed 0: started",
        "local seed 0: round 1/3 validation 50.0 20.0, about 50 s left",
        "local seed 0: round 2/3 validation 50.0 20.0, about 40 s left",
        "local seed 0: round 3/3 validation 50.0 20.0, about 30 s left",
        "local seed 0: done in 30 s (1/2), about 30 s left",
        "fedmuscle:loss=muscle seed 0: started",
        "fedmuscle:loss=muscle seed 0: resumed after round 1",
        "fedmuscle:loss=muscle seed 0: round 2/3 validation 55.0 24.0,"
        " provisional Δ +15.0 % on validation, about 10 s left",
        "something to know [not markup]",
        "fedmuscle:loss=muscle seed 0: FAILED: user2: align: RuntimeError: no such luck (2/2)",
    ]


def test_a_log_has_no_control_characters(cells: list[Cell]) -> None:
    progress = plain()
    progress.begin(cells, 2)
    progress.round(cells[0], record(0))
    assert isinstance(progress.console.file, io.StringIO)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", progress.console.file.getvalue())


def test_long_times_are_told_in_minutes(cells: list[Cell]) -> None:
    progress = plain()
    progress.begin(cells[:1], 1)
    progress.round(cells[0], record(0, seconds=90.0))
    assert lines(progress.console)[-1].endswith("about 3 min left")


def test_no_provisional_gain_without_local_training_of_the_same_seed_and_round(
    write_suite: WriteSuite,
) -> None:
    cells = make_cells(load(str(write_suite())), discover(), seeds=[0, 1])
    local, muscle = cells[0], cells[6]
    assert (local.seed, muscle.seed, muscle.method.name) == (0, 1, "fedmuscle")
    progress = plain()
    progress.begin(cells, 1)
    progress.round(muscle, record(0))
    progress.round(local, record(0))
    progress.round(muscle, record(1))
    progress.round(cells[1], record(1))  # of seed 0, where local has not reached this round
    assert not any("provisional" in line for line in lines(progress.console))
    progress.round(local, record(1))
    progress.round(cells[1], record(1))
    assert "provisional Δ +0.0 %" in lines(progress.console)[-1]


def test_scores_that_are_no_numbers_are_shown_and_break_nothing(cells: list[Cell]) -> None:
    progress = plain()
    progress.begin(cells[:2], 1)
    for cell in cells[:2]:
        progress.round(cell, record(0, user1=float("nan"), user2=0.0))
    assert "validation nan 0.0" in lines(progress.console)[-1]
    progress.round(cells[0], record(1, user1=10.0))
    progress.round(cells[1], record(1, user1=float("nan")))
    assert "provisional" not in lines(progress.console)[-1]


def test_nothing_to_run_says_nothing(cells: list[Cell]) -> None:
    progress = plain()
    progress.begin([], 2)
    progress.end()
    assert lines(progress.console) == []


# -- bars


def terminal() -> TerminalProgress:
    console = Console(file=io.StringIO(), force_terminal=True, width=140, soft_wrap=True, color_system=None)
    return TerminalProgress(console)


def test_a_terminal_shows_bars_and_keeps_what_has_ended(cells: list[Cell]) -> None:
    progress = terminal()
    progress.note("before anything began")
    progress.begin(cells[:2], 2)
    for cell in cells[:2]:
        progress.started(cell)
        progress.preparing(cell, "user1")
    progress.resumed(cells[1], 1)
    progress.round(cells[0], record(0))
    progress.round(cells[1], record(1))
    progress._bars.refresh()
    shown = str(progress.console.file.getvalue())  # type: ignore[attr-defined]
    assert "all cells" in shown and "local seed 0" in shown
    assert "1/3" in shown and "2/3" in shown
    progress.finished(cells[0], 12.0, None)
    progress.finished(cells[1], 0.0, "user1: no such luck")
    progress.end()
    text = str(progress.console.file.getvalue())  # type: ignore[attr-defined]
    for line in (
        "before anything began",
        "local seed 0: done in 12 s (1/2)",
        "fedmuscle:loss=muscle seed 0: FAILED: user1: no such luck (2/2)",
    ):
        assert line in text


def test_bars_stop_even_when_cells_are_left(cells: list[Cell]) -> None:
    progress = terminal()
    progress.begin(cells, 2)
    progress.started(cells[0])
    progress.end()
    assert not progress._bars.live.is_started


def test_a_failure_before_the_first_round_needs_no_bar_of_its_own(cells: list[Cell]) -> None:
    for progress in (plain(), terminal()):
        progress.begin(cells[:1], 1)
        progress.started(cells[0])
        progress.finished(cells[0], 0.0, "refused")
        progress.end()
        assert progress.done == 1


@pytest.mark.parametrize(("tty", "kind"), [(True, TerminalProgress), (False, Progress)])
def test_bars_are_for_terminals_alone(monkeypatch: pytest.MonkeyPatch, tty: bool, kind: type) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return tty

    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Stream())
    assert type(make_progress()) is kind


def test_progress_goes_to_standard_error(monkeypatch: pytest.MonkeyPatch, cells: list[Cell]) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    progress: Any = make_progress()
    details: Mapping[str, Any] = record(0)
    progress.begin(cells, 1)
    progress.round(cells[0], details)
    assert out.getvalue() == "" and "round 1/3" in err.getvalue()
