"""A board as text: terminal table, JSON, CSV, Markdown, LaTeX."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedbench.choice import NOT_APPLICABLE
from fedbench.curves import curves
from fedbench.errors import unknown
from fedbench.leaderboard import Board, Row
from fedbench.specs import MethodSpec

__all__ = ["FORMATS", "curves", "render"]

Published = Mapping[str, Mapping[str, Any]]
LEGEND = (
    "Δ%: mean over users of the relative gain over the same user's local training of the same seed; "
    "±: 95 % Student-t interval over seeds; harmed: users below their local training; "
    "geo. mean: geometric mean over users of the ratio to local training; mean rank: over users and seeds; "
    "touched: users that train otherwise than alone; settings: tuned on validation, or the paper's defaults; "
    "up, down: encoded bytes a round, all users."
)
PUBLISHED = "published (other data, for orientation)"
SIDE_COLUMNS = ("geo. mean", "mean rank", "touched", "settings")
"""What stands beside Δ%, which weak baselines dominate."""
CONTROL_MARK, REFERENCE_MARK = "†", "‡"


@dataclass(frozen=True)
class Page:
    """A board with what is printed around it."""

    board: Board
    title: str = ""
    controls: frozenset[str] = frozenset()
    published: Published = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    width: int = 100
    color: bool = False

    @property
    def rows(self) -> list[Row]:
        """The rows of the table; methods that touch nobody are only named in the notes."""
        return [row for row in self.board.rows if row.status != NOT_APPLICABLE]

    def name(self, row: Row) -> str:
        """How a row is named; a dagger marks a control, a double one a reference."""
        label = label_of(row)
        if row.reference:
            return f"{label} {REFERENCE_MARK}"
        return f"{label} {CONTROL_MARK}" if row.method in self.controls or label in self.controls else label

    def marks(self, mark: str) -> bool:
        """Whether any row's name ends in the mark."""
        return any(self.name(row).endswith(mark) for row in self.rows)

    def notes(self, *, paths: bool = False) -> list[str]:
        """What must be read with the numbers, one line each; paths of this machine only where asked for."""
        lines = [f"{label_of(row)}: {row.cause}" for row in self.board.rows if row.cause]
        lines += self.board.notes
        lines += [f"damaged file: {entry.path}: {entry.why}" for entry in self.board.damaged] if paths else []
        if self.marks(CONTROL_MARK):
            lines.append(f"{CONTROL_MARK}: a control, no method: what it gains is no collaboration")
        if self.marks(REFERENCE_MARK):
            lines.append(f"{REFERENCE_MARK}: a reference that pools all data, no federated method")
        return [clean(line) for line in lines]


def render(
    board: Board,
    format: str = "table",
    *,
    title: str = "",
    controls: Collection[str] = (),
    published: Published | None = None,
    facts: Mapping[str, Any] | None = None,
    width: int = 100,
    color: bool = False,
) -> str:
    """The board as text that ends in a newline.

    Args:
        format: `table`, `json`, `csv`, `markdown` or `latex`.
        title: heading of table, Markdown and LaTeX.
        controls: methods, by name or by `name:option=value`, to be marked as controls.
        published: a published table, method -> column -> value, shown beneath for orientation.
        facts: what all rows share, e.g. rounds and batch, shown under the title.
        width: columns of the terminal.
        color: whether the table may hold terminal escapes.

    Raises:
        UserError: there is no such format.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    page = Page(board, title, frozenset(controls), published or {}, facts or {}, width, color)
    return FORMATS[format](page)


def label_of(row: Row) -> str:
    """The method and its options as one writes them, e.g. `fedmuscle:loss=muscle`."""
    return MethodSpec(row.method, row.options).label


def clean(text: str) -> str:
    """The text without what could steer a terminal or break a table's line."""
    return "".join(character if character.isprintable() else " " for character in text)


def signed(value: float | None, digits: int = 2) -> str:
    """`+1.50`, `0.00` without a sign, or a dash for None."""
    if value is None:
        return "–"
    return f"{value:+.{digits}f}" if round(value, digits) else f"{0:.{digits}f}"


def fixed(value: float | None, digits: int = 2) -> str:
    """`1.50`, or a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def size(value: float | None) -> str:
    """Bytes in the decimal unit that fits, `98.3 kB`."""
    if value is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.{0 if unit == 'B' else 3 - len(str(int(value)))}f} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def half_width(row: Row) -> float | None:
    """Half the interval of Δ%."""
    return None if row.delta_high is None or row.delta_mean is None else row.delta_high - row.delta_mean


def side_cells(row: Row) -> list[str]:
    """The cells of `SIDE_COLUMNS`."""
    touched = "–" if row.users_touched is None else str(row.users_touched)
    return [fixed(row.geometric_mean, 3), fixed(row.mean_rank, 1), touched, row.settings or "–"]


def scores_of(user: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The scores of a user of a row: one, or one for each of its tasks; none where the row has none."""
    return [] if user is None else list(user.get("parts") or [user])


def columns_of(published: Published) -> list[str]:
    """The columns of a published table, in the order of their first appearance."""
    return list(dict.fromkeys(column for row in published.values() for column in row))


def _table(page: Page) -> str:
    from fedbench.terminal import table

    return table(page)


def _json(page: Page) -> str:
    rows = [row.as_dict() for row in page.board.rows]
    return json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _csv(page: Page) -> str:
    plain = [name for name in Row.__dataclass_fields__ if name not in ("users", "tasks")]
    rows = []
    for row in page.board.rows:
        values = row.as_dict()
        cells = {name: values[name] for name in plain}
        cells["options"] = json.dumps(row.options, sort_keys=True, ensure_ascii=False)
        cells["seeds_compared"] = " ".join(map(str, row.seeds_compared))
        cells |= {f"task_{task}_delta": mean for task, mean in row.tasks.items()}
        for name, user in row.users.items():
            cells[f"{name}_delta"] = user["delta"]
            for score in scores_of(user):
                place = f"{name}_{score['task']}_{score['metric']}"
                cells |= {place: score["value"], f"{place}_std": score["std"]}
        rows.append(cells)
    header = list(dict.fromkeys([*plain, *(name for cells in rows for name in cells)]))
    text = io.StringIO()
    writer = csv.DictWriter(text, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _grid(page: Page, code: Callable[[str], str], line: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows for Markdown and LaTeX; `code` escapes names, `line` breaks a line within a cell."""
    board = page.board
    header = ["#", "method", "Δ%", "± 95 %", "seeds"]
    for name, parts in board.users.items():
        header.append(line.join(code(f"{name} {task} {metric}{'' if up else ' ↓'}") for task, metric, up in parts))
    header += ["harmed", "worst", *SIDE_COLUMNS, "up", "down", "seconds"]
    rows = []
    for row in page.rows:
        state = "" if row.status == "done" else f" {row.status}"
        cells = [str(row.rank or ""), code(page.name(row)), signed(row.delta_mean), fixed(half_width(row))]
        cells.append(f"{row.seeds_done}/{row.seeds_total}{state}")
        for name in board.users:
            scores = scores_of(row.users.get(name))
            texts = [f"{fixed(score['value'])} ({signed(score['delta'], 1)})" for score in scores]
            cells.append(line.join(texts) or "–")
        cells += ["–" if row.users_harmed is None else str(row.users_harmed), signed(row.worst_user_delta, 1)]
        cells += side_cells(row)
        cells += [size(row.bytes_up), size(row.bytes_down), fixed(row.seconds, 0)]
        rows.append(cells)
    return header, rows


def _markdown(page: Page) -> str:
    header, rows = _grid(page, _escape_markdown, "<br>")
    lines = [f"## {_escape_markdown(page.title)}", ""] if page.title else []
    if page.facts:
        lines += [_escape_markdown(facts_line(page.facts)), ""]
    lines += [*_pipes(header, rows), "", LEGEND]
    lines += ["", *(f"- {_escape_markdown(note)}" for note in page.notes())] if page.notes() else []
    if page.published:
        columns = columns_of(page.published)
        body = [
            [_escape_markdown(method), *(_escape_markdown(text_of(row.get(column))) for column in columns)]
            for method, row in page.published.items()
        ]
        lines += ["", f"### {PUBLISHED}", "", *_pipes(["method", *map(_escape_markdown, columns)], body)]
    return "\n".join(lines) + "\n"


def _pipes(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    marks = ["---:" if name == "#" else ":---" if name == "method" else "---:" for name in header]
    return ["| " + " | ".join(cells) + " |" for cells in (header, marks, *rows)]


def _latex(page: Page) -> str:
    header, rows = _grid(page, lambda text: text, " / ")
    lines = [r"% needs \usepackage{booktabs}", *_tabular(page.title, header, rows, page.notes())]
    if page.published:
        columns = columns_of(page.published)
        body = [[method, *(text_of(row.get(column)) for column in columns)] for method, row in page.published.items()]
        lines += ["", *_tabular(PUBLISHED, ["method", *columns], body, [])]
    return "\n".join(lines) + "\n"


def _tabular(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> list[str]:
    sides = "".join("l" if name == "method" else "r" for name in header)
    lines = [r"\begin{table}", r"\centering"]
    lines += [rf"\caption{{{_escape_latex(title)}}}"] if title else []
    lines += [rf"\begin{{tabular}}{{{sides}}}", r"\toprule"]
    lines += [" & ".join(map(_escape_latex, header)) + r" \\", r"\midrule"]
    lines += [" & ".join(map(_escape_latex, cells)) + r" \\" for cells in rows]
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\footnotesize {_escape_latex(note)}" for note in notes]
    return [*lines, r"\end{table}"]


def facts_line(facts: Mapping[str, Any]) -> str:
    """`rounds 8 · batch 32`."""
    return clean(" · ".join(f"{name} {text_of(value)}" for name, value in facts.items()))


def text_of(value: Any) -> str:
    """A published value as text, a dash where there is none."""
    return "–" if value is None else clean(str(value))


def _escape_markdown(text: str) -> str:
    return "".join(f"\\{character}" if character in "\\`*_|<>[]#" else character for character in clean(text))


_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "‡": r"\textdaggerdbl{}",
    "×": r"$\times$",
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "Δ": r"$\Delta$",
    "±": r"$\pm$",
    "−": "$-$",
    "↓": r"$\downarrow$",
    "†": r"\textdagger{}",
    "–": "--",
}


def _escape_latex(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in clean(text))
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped)


FORMATS: Mapping[str, Callable[[Page], str]] = {
    "table": _table,
    "json": _json,
    "csv": _csv,
    "markdown": _markdown,
    "latex": _latex,
}
