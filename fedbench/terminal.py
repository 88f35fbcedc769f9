"""The board on a terminal: the ranking, then every user's values, then what must be read with them."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedbench import report
from fedbench.leaderboard import Row

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_NAME_WIDTH = 22
_LEAST_NAME_WIDTH = 16
_STATUS = {"done": "", "partial": "yellow", "stale": "yellow", "failed": "bold red", "damaged": "bold red"}


def table(page: report.Page) -> str:
    """The page for a terminal of `page.width` columns, with escapes only if `page.color`."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out,
        width=page.width,
        force_terminal=page.color,
        color_system="standard" if page.color else None,
        highlight=False,
        legacy_windows=False,
    )
    if page.title:
        console.print(Text(report.clean(page.title), style="bold"))
    if page.facts:
        console.print(Text(report.facts_line(page.facts), style="dim"))
    chunks = _chunks(page)
    tables = [
        _ranking(page),
        _beside(page),
        *(_by_user(page, names) for names in chunks),
        *([_by_task(page)] if chunks[1:] else []),
    ]
    for grid in tables:
        console.print(grid)
        console.print()
    for note in page.notes(paths=True):
        console.print(Padding(Text(note, style="yellow"), (0, 0, 0, 2)))
    console.print(Text(report.LEGEND, style="dim"))
    if page.published:
        console.print()
        console.print(Text(report.PUBLISHED, style="bold"))
        console.print(_published(page))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().split("\n")) + "\n"


def _ranking(page: report.Page) -> Table:
    paper = any(row.bytes_paper is not None for row in page.rows)
    columns = ["#", "method", "Δ%", "± 95 %", "seeds", "harmed", "worst", "up", "down"]
    grid = _grid([*columns, *(["paper's"] if paper else []), "time"])
    users = len(page.board.users)
    for row in page.rows:
        state = "" if row.status == "done" else f"\n{row.status}"
        cells = [
            _text(str(row.rank or "")),
            _name(page, row, _NAME_WIDTH),
            _delta(row.delta_mean, 2, bold=True),
            _text(report.fixed(report.half_width(row))),
            _text(f"{row.seeds_done}/{row.seeds_total}{state}", _STATUS.get(row.status, "yellow")),
            _text("–" if row.users_harmed is None else f"{row.users_harmed} of {users}"),
            _delta(row.worst_user_delta, 1),
            _text(report.size(row.bytes_up)),
            _text(report.size(row.bytes_down)),
        ]
        cells += [_text(report.size(row.bytes_paper))] if paper else []
        cells += [_text("–" if row.seconds is None else f"{row.seconds:.0f} s")]
        grid.add_row(*cells)
    return grid


def _beside(page: report.Page) -> Table:
    """What a mean that weak baselines dominate does not say."""
    grid = _grid(["method", *report.SIDE_COLUMNS])
    for row in page.rows:
        if row.users:
            grid.add_row(_name(page, row, _NAME_WIDTH), *map(_text, report.side_cells(row)))
    return grid


def _by_user(page: report.Page, names: Sequence[str]) -> Table:
    headers = []
    for name in names:
        parts = page.board.users[name]
        tasks = ", ".join(dict.fromkeys(task for task, _, _ in parts))
        metrics = ", ".join(dict.fromkeys(metric + ("" if up else " ↓") for _, metric, up in parts))
        headers.append("\n".join(map(report.clean, (name, tasks, metrics))))
    grid = _grid(["method", *headers])
    digits = _delta_width(page)
    name_width = max(_LEAST_NAME_WIDTH, min(_NAME_WIDTH, page.width - len(names) * _user_width(page)))
    for row in page.rows:
        if row.users:
            scores = (_scores(row.users.get(name), digits) for name in names)
            grid.add_row(_name(page, row, name_width), *scores)
    return grid


def _by_task(page: report.Page) -> Table:
    tasks = list(dict.fromkeys(task for parts in page.board.users.values() for task, _, _ in parts))
    grid = _grid(["method", *(f"{report.clean(task)} Δ%" for task in tasks)])
    for row in page.rows:
        if row.users:
            grid.add_row(_name(page, row, _NAME_WIDTH), *(_delta(row.tasks.get(task), 2) for task in tasks))
    return grid


def _published(page: report.Page) -> Table:
    columns = report.columns_of(page.published)
    grid = _grid(["method", *map(report.clean, columns)])
    for method, row in page.published.items():
        grid.add_row(_text(method), *(_text(report.text_of(row.get(column))) for column in columns))
    return grid


def _chunks(page: report.Page) -> list[list[str]]:
    """The users in groups that fit the width beside the method's name."""
    names = list(page.board.users)
    fit = max(1, (page.width - _LEAST_NAME_WIDTH) // _user_width(page))
    return [names[start : start + fit] for start in range(0, len(names), fit)]


def _user_width(page: report.Page) -> int:
    return len("00.00 ") + _delta_width(page) + 2


def _delta_width(page: report.Page) -> int:
    """Characters of the longest Δ% of a user."""
    scores = (score for row in page.rows for user in row.users.values() for score in report.scores_of(user))
    return max((len(report.signed(score["delta"], 1)) for score in scores), default=1)


def _scores(user: Mapping[str, Any] | None, digits: int) -> Text:
    from rich.text import Text

    text = Text(justify="right", no_wrap=True)
    scores = report.scores_of(user)
    for index, score in enumerate(scores):
        text.append(("\n" if index else "") + report.fixed(score["value"]) + " ")
        text.append_text(_delta(score["delta"], 1, width=digits))
    return text if scores else _text("–")


def _delta(value: float | None, digits: int, *, bold: bool = False, width: int = 0) -> Text:
    colour = "" if value is None or round(value, digits) == 0 else "green" if value > 0 else "red"
    return _text(report.signed(value, digits).rjust(width), f"bold {colour}".strip() if bold else colour)


def _name(page: report.Page, row: Row, width: int) -> Text:
    """The method's name with its options dimmed, broken between options; a control or reference is all dim."""
    name = report.clean(page.name(row))
    lines = [""]
    for piece in re.findall(r"[^:,]*[:,]?", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("  ")
        lines[-1] += piece
    text = _text("\n".join(lines), "dim" if name.endswith((report.CONTROL_MARK, report.REFERENCE_MARK)) else "")
    text.stylize("dim", min(len(row.method), len(name)))
    return text


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text("\n".join(map(report.clean, text.split("\n"))), style=style)


def _grid(columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        left = column == "method"
        grid.add_column(
            Text(column, justify="left" if left else "right"),
            justify="left" if left else "right",
            overflow="fold",
            no_wrap=not left,
        )
    return grid
