"""What `fedbench leaderboard` and `fedbench promote` do: result files in, a board out; no torch, no plugin."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedbench.errors import UserError
from fedbench.leaderboard import Board, board
from fedbench.report import curves as plot_curves
from fedbench.report import label_of, render
from fedbench.results import Damaged, Result, safe
from fedbench.store import Store, reference_results
from fedbench.store import promote as promote_results
from fedbench.suite import Suite, load

if TYPE_CHECKING:
    from fedbench.plan import Cell
    from fedbench.registry import Registry
    from fedbench.specs import MethodSpec

RUNS, REFERENCE = Path("runs"), Path("results")


def planned_board(suite: Suite, results: Iterable[Result | Damaged], cells: Sequence[Cell]) -> Board:
    """The board of these cells: every row of theirs, whether it has results or not."""
    rows = list(dict.fromkeys(cell.method for cell in cells))
    seeds = list(dict.fromkeys(cell.seed for cell in cells))
    versions: dict[str, str] = {}
    for cell in cells:
        versions.update(cell.versions)
    shown = board(
        results,
        [(spec.name, spec.options) for spec in rows],
        seeds,
        protocol_key=cells[0].protocol_key,
        versions=versions,
        reference=("local", {}),
    )
    tuned = _labels(suite, [spec for spec in suite.methods if spec.label in suite.tuning])
    for row in shown.rows:
        row.settings = "tuned" if label_of(row) in tuned else "defaults"
    return shown


def suite_board(suite: Suite, results: Iterable[Result | Damaged]) -> tuple[Board, bool]:
    """The board of a suite as it stands in its file: its own protocol where there are results of it, else the newest.

    Returns:
        The board, and whether its protocol is the suite's own.
    """
    from fedbench.plan import make_cells

    listed = list(results)
    sound = [result for result in listed if not isinstance(result, Damaged)]
    try:
        cells = make_cells(suite, _registry(suite), device=_device(sound))
    except UserError as error:  # a row of a plugin that is not here: what has results is shown all the same
        shown = board(listed, [(spec.name, spec.options) for spec in suite.methods], suite.seeds)
        shown.notes.append(f"versions not compared: {error}")
        return shown, False
    if any(result["protocol_key"] == cells[0].protocol_key for result in sound):
        return planned_board(suite, listed, cells), True
    rows = dict.fromkeys(cell.method for cell in cells)
    shown = board(listed, [(spec.name, spec.options) for spec in rows], suite.seeds, reference=("local", {}))
    if sound:
        shown.notes.append("these results are of an earlier protocol: the suite or a plugin has changed since")
    return shown, False


def show_leaderboard(
    suite_or_folder: str, scale: str, *, results: Path | None, reference: bool, form: str, curves: Path | None
) -> int:
    """Print a board; the exit code is 1 where a result file is damaged.

    Raises:
        UserError: no such suite or folder, or no results at all.
    """
    folder = Path(suite_or_folder)
    suite: Suite | None = None
    own = False
    if folder.is_dir():
        found, source = _results_below(folder), str(folder)
        shown = board(found)
    else:
        suite = load(suite_or_folder, scale=scale)
        found, source = _find(suite, suite_or_folder, results, reference)
        shown, own = suite_board(suite, found)
    if curves:
        plot_curves([result for result in found if not isinstance(result, Damaged)], curves)
    print_board(shown, suite, form, source=source, facts=protocol_facts(suite) if suite and own else None)
    if form in ("json", "csv"):  # which have no place for them
        for note in shown.notes:
            click.echo(f"note: {note}", err=True)
    if form != "table":
        for damaged in shown.damaged:
            click.echo(f"damaged: {damaged}", err=True)
    return 1 if shown.damaged else 0


def print_board(
    shown: Board, suite: Suite | None, form: str, *, source: str, facts: Mapping[str, Any] | None = None
) -> None:
    """Write a board to standard output.

    Args:
        source: where the results come from, for the title.
        facts: what all rows share, for the line below the title.
    """
    suite_name, scale = (suite.name, suite.scale) if suite else ("", "")
    published = published_rows(suite) if suite else {}
    if suite and published:
        shown.notes.append(f"published: {suite.reference['source']}")
    terminal = sys.stdout.isatty()
    text = render(
        shown,
        form,
        title=f"{shown.suite or suite_name} · {shown.scale or scale} · {source}",
        controls=_labels(suite, suite.controls) if suite else set(),
        published=published,
        facts=facts,
        width=shutil.get_terminal_size((100, 24)).columns if terminal else 100,
        color=terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb",
    )
    click.echo(text.rstrip())


def protocol_facts(suite: Suite) -> dict[str, Any]:
    """What all rows of a suite's board share, by the letters that the paper uses."""
    protocol = suite.protocol
    return {
        "rounds": protocol.rounds,
        "local steps": protocol.steps,
        "T": protocol.iterations,
        "B": protocol.batch,
        "M": protocol.others,
        "d": protocol.dimension,
        "public items": suite.public_size,
    }


def published_rows(suite: Suite) -> dict[str, dict[str, Any]]:
    """The suite's published table: method -> column -> value."""
    if not suite.reference:
        return {}
    columns = suite.reference["columns"]
    return {name: dict(zip(columns, row, strict=True)) for name, row in suite.reference["rows"].items()}


def _labels(suite: Suite, specs: Sequence[MethodSpec]) -> set[str]:
    """Labels of rows that a suite names, as the rows show them."""
    from fedbench.plan import resolve_method

    try:
        return {resolve_method(suite, _registry(suite), spec)[2].label for spec in specs}
    except UserError:
        return {spec.label for spec in specs}


def _registry(suite: Suite) -> Registry:
    """The plugins that the suite can name; single files are loaded only where it names some."""
    from fedbench.discovery import default_registry, discover

    return discover(suite.plugins) if suite.plugins else default_registry()


def promote_suite(suite: str, scale: str, *, results: Path | None, target: Path | None, supersede: bool) -> int:
    """Copy finished cells of the suite as it stands into the reference board."""
    from fedbench.plan import make_cells

    loaded = load(suite, scale=scale)
    store = Store(results or RUNS)
    found = [entry for entry in store.results(loaded.name, loaded.scale) if not isinstance(entry, Damaged)]
    planned = {cell.key for cell in make_cells(loaded, _registry(loaded), device=_device(found))}
    keys = [entry["key"] for entry in found if entry["status"] != "failed" and entry["key"] in planned]
    if not keys:
        raise UserError(
            "there is no finished cell of this suite as it stands",
            where=str(store.root / safe(loaded.name) / safe(loaded.scale)),
            expected=f"fedbench run {suite}",
        )
    done = promote_results(store, target or _reference_root(loaded), keys, supersede=supersede)
    click.echo(
        f"promoted {len(done.written)} cells, {len(done.unchanged)} were there already, "
        f"{len(done.superseded)} superseded; {len(keys)} of {len(planned)} cells are on the board"
    )
    return 0


def _find(suite: Suite, asked: str, results: Path | None, reference: bool) -> tuple[list[Result | Damaged], str]:
    if not reference:
        root = results or RUNS
        found = Store(root).results(suite.name, suite.scale)
        if found:
            return found, f"your runs in {root}"
        if results is not None:
            raise UserError(
                f"there are no results of {suite.name} at scale {suite.scale}", where=str(root), expected="fedbench run"
            )
    folder = _reference_root(suite) / safe(suite.name) / safe(suite.scale)
    found = reference_results(folder)
    if not found:
        raise UserError(
            f"there are no results of {suite.name} at scale {suite.scale}",
            where=f"{RUNS} and {folder}",
            expected=f"fedbench run {asked}",
        )
    return found, "committed reference"


def _results_below(folder: Path) -> list[Result | Damaged]:
    from fedbench.results import read_placed

    found = sorted(path for path in folder.rglob("*.json") if path.name.startswith(("result.json", "seed")))
    if not found:
        raise UserError("there are no result files in this folder", where=str(folder), expected="a suite or a folder")
    return [read_placed(path) for path in found if "superseded" not in path.parts]


def _reference_root(suite: Suite) -> Path:
    """`results/` beside the folder `suites/` that holds the suite's file, else below the working folder."""
    if suite.path and suite.path.resolve().parent.name == "suites":
        beside = suite.path.resolve().parent.parent / REFERENCE
        return beside if beside.is_dir() else REFERENCE
    return REFERENCE


def _device(results: Sequence[Any]) -> str:
    """The kind of device of the newest result: keys of the suite's cells are computed for it."""
    newest = max(results, key=lambda result: result["provenance"]["time"], default=None)
    return str(newest["provenance"].get("device", "cpu")) if newest else "cpu"
