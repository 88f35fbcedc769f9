"""Learning curves: the validation metric by round, one panel for each user, one line for each method."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbench import delta
from fedbench.cache import atomic_file
from fedbench.choice import REFERENCE, choose
from fedbench.errors import UserError
from fedbench.results import Damaged, Result
from fedbench.specs import MethodSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = dict[int, list[float]]

# Okabe and Ito's colours, told apart by most colour-blind readers; lines beyond them change their dashes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C00")
_DASHES = ("-", "--", ":", "-.")


def curves(results: Iterable[Result | Damaged], path: Path, *, protocol_key: str | None = None) -> Path:
    """Draw the finished results of one protocol as a PNG: mean over seeds, with a band from lowest to highest seed.

    Args:
        results: of one suite at one scale.
        path: where the picture goes.
        protocol_key: which protocol; default: that of the newest result.

    Raises:
        UserError: there is nothing to draw, matplotlib is missing, or the file cannot be written.
    """
    done = [entry for entry in results if not isinstance(entry, Damaged) and entry["status"] == "done"]
    shown, _, _ = choose(done, protocol_key)
    users, lines = _collect(shown)
    if not lines:
        raise UserError("no finished result has validation scores by round", expected="run the suite first")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("curves need matplotlib", expected="pip install matplotlib") from None
    across = min(3, len(users))
    down = math.ceil(len(users) / across)
    labels = sorted(lines, key=lambda label: (label.partition(":")[0] != REFERENCE, label))
    styles = _styles(labels)
    legend_rows = math.ceil(len(labels) / across)
    height = 2.6 * down + 0.24 * legend_rows + 0.3
    figure = Figure(figsize=(3.6 * across + 0.4, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False, sharex=True).flatten()
    for panel, (name, ylabel) in zip(panels, users.items(), strict=False):
        panel.set_title(name, fontsize=10)
        panel.set_ylabel(ylabel, fontsize=9)
        for label in labels:
            if name in lines[label]:
                _draw(panel, lines[label][name], label, styles[label])
    for panel in panels[len(users) :]:
        panel.set_visible(False)
    for panel in panels[max(0, len(users) - across) : len(users)]:
        panel.set_xlabel("round", fontsize=9)
        panel.tick_params(labelbottom=True)
    handles = {str(line.get_label()): line for panel in panels for line in panel.get_lines()}
    order = [handles[label] for label in labels]
    figure.legend(order, labels, loc="outside lower center", ncols=across, fontsize=8, frameon=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as handle:
            figure.savefig(handle, format="png", metadata={"Software": None})
    except OSError as error:
        raise UserError(f"the picture cannot be written: {error.strerror}", where=str(path)) from None
    return path


def _collect(results: Iterable[Result]) -> tuple[dict[str, str], dict[str, dict[str, Points]]]:
    """Labels of the vertical axis by user, and by method and user the scores of all seeds by round."""
    users: dict[str, str] = {}
    lines: dict[str, dict[str, Points]] = {}
    for result in results:
        label = MethodSpec(result["method"], result["options"]).label
        for row in result["users"]:
            users.setdefault(row["name"], f"{row['task']} {row['metric']}, validation")
        for record in result["rounds"]:
            for name, value in (record.get("validation") or {}).items():
                if value is not None:
                    points = lines.setdefault(label, {}).setdefault(name, {})
                    points.setdefault(record["round"], []).append(value)
    scored = {name for line in lines.values() for name in line}
    named = {name: users.get(name, "validation") for name in [*users, *sorted(scored - set(users))]}
    return {name: axis for name, axis in named.items() if name in scored}, lines


def _styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and dashes of every line; local training stands out in dashed black."""
    styles: dict[str, dict[str, Any]] = {}
    others = 0
    for label in labels:
        if label.partition(":")[0] == REFERENCE and not styles:
            styles[label] = {"color": "black", "linestyle": "--"}
            continue
        dashes = _DASHES[others // len(_COLOURS) % len(_DASHES)]
        styles[label] = {"color": _COLOURS[others % len(_COLOURS)], "linestyle": dashes}
        others += 1
    return styles


def _draw(panel: Axes, points: Points, label: str, style: dict[str, Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    rounds = sorted(points)
    means = [delta.average(points[number]) or 0.0 for number in rounds]
    marker = "o" if len(rounds) < 2 else None
    panel.plot(rounds, means, label=label, linewidth=1.6, marker=marker, **style)
    if any(len(values) > 1 for values in points.values()):
        low, high = [min(points[number]) for number in rounds], [max(points[number]) for number in rounds]
        panel.fill_between(rounds, low, high, color=style["color"], alpha=0.12, linewidth=0)
    panel.grid(True, alpha=0.25, linewidth=0.6)
    panel.tick_params(labelsize=8)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
