"""Which result files a board shows: one protocol, one version of each method, one result for each seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fedbench.results import Damaged, Result, canonical, identity, slug

Identity = tuple[str, str]
Planned = Sequence[tuple[str, Mapping[str, Any]]]

REFERENCE = "local"
"""The method that Δ% is relative to."""
NOT_APPLICABLE = "not applicable"
"""The status of a method that touches none of the suite's users."""


@dataclass
class Chosen:
    """What a row is made from: finished results by seed, and for every other seed its state and the cause."""

    method: str
    options: Mapping[str, Any]
    done: dict[int, Result] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    causes: dict[int, str] = field(default_factory=dict)
    stale: bool = False
    folder: str = ""

    def __post_init__(self) -> None:
        self.folder = self.folder or slug(self.method, self.options)

    @property
    def identity(self) -> Identity:
        """What tells rows apart."""
        return identity(self.method, self.options)


def choose(results: Sequence[Result], protocol_key: str | None) -> tuple[list[Result], str | None, list[str]]:
    """The results of one protocol: the one asked for, else that of the newest result; and a note on the others."""
    if protocol_key is None and results:
        protocol_key = max(results, key=age)["protocol_key"]
    shown = [result for result in results if result["protocol_key"] == protocol_key]
    others: dict[str, int] = {}
    for result in results:
        if result["protocol_key"] != protocol_key:
            others[result["protocol_key"]] = others.get(result["protocol_key"], 0) + 1
    notes = [
        f"not shown: {count} result{'s' if count > 1 else ''} of another protocol ({key[:12]})"
        for key, count in sorted(others.items())
    ]
    return shown, protocol_key, notes


def gather(
    results: Iterable[Result],
    damaged: Iterable[Damaged],
    planned: Planned,
    seeds: Sequence[int],
    versions: Mapping[str, str] | None,
) -> tuple[dict[Identity, Chosen], list[str]]:
    """The row of every planned method and of every other that has results, planned ones first; and notes."""
    rows = {identity(method, options): Chosen(method, options) for method, options in planned}
    found: dict[Identity, list[Result]] = {}
    notes, strays = [], set()
    for result in results:
        if result["seed"] not in seeds:
            strays.add(result["seed"])
            continue
        key = identity(result["method"], result["options"])
        rows.setdefault(key, Chosen(result["method"], result["options"]))
        found.setdefault(key, []).append(result)
    if strays:
        notes.append("not shown: results of seeds that are not planned: " + ", ".join(map(str, sorted(strays))))
    broken = _by_place(damaged)
    known = {row.folder for row in rows.values()}
    for name in sorted({name for name, _ in broken} - known):  # all that is known of it is its folder
        rows[identity(name, {})] = Chosen(name, {}, folder=name)
    for key, row in rows.items():
        notes += _fill(row, found.get(key, []), versions)
        for seed in seeds:
            if seed not in row.done and seed not in row.states:
                bad = broken.get((row.folder, seed))
                row.states[seed] = "damaged" if bad else "missing"
                row.causes.setdefault(seed, f"damaged: {bad.why}" if bad else "not run")
    return rows, notes


def reference_of(
    rows: Mapping[Identity, Chosen], planned: Planned, wanted: tuple[str, Mapping[str, Any]] | None
) -> Identity | None:
    """The row that Δ% is relative to: the one wanted, else the first planned local, else the plainest local."""
    if wanted is not None:
        return identity(*wanted) if identity(*wanted) in rows else None
    for method, options in planned:
        if method == REFERENCE:
            return identity(method, options)
    return min((key for key in rows if key[0] == REFERENCE), key=lambda key: (len(key[1]), key), default=None)


def age(result: Result) -> tuple[datetime, str]:
    """What sorts results from old to new."""
    time = datetime.fromisoformat(result["provenance"]["time"])
    return time if time.tzinfo else time.replace(tzinfo=UTC), result["digest"]


def _fill(row: Chosen, results: Sequence[Result], versions: Mapping[str, str] | None) -> list[str]:
    """Take the results of one set of plugin versions, the current or else the newest: never two in one row."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(canonical(result["versions"]), []).append(result)
    if not groups:
        return []
    ranked = sorted(groups.values(), key=lambda group: (not _stale(group[0], versions), max(map(age, group))))
    newest = ranked[-1]
    outdated = _stale(newest[0], versions)
    notes = []
    for result in sorted(newest, key=lambda result: (result["status"] == "done", age(result))):
        seed = result["seed"]
        if seed in row.done:
            notes.append(f"{row.folder} seed {seed} has several results: the newest is shown")
        if result["status"] == "done":
            row.done[seed] = result
            row.states.pop(seed, None)
            row.causes.pop(seed, None)
        elif result["status"] == NOT_APPLICABLE:
            row.states[seed] = NOT_APPLICABLE
            row.causes[seed] = _first_line(result["error"])
        else:
            row.states[seed] = "failed"
            row.causes[seed] = "failed: " + _first_line(result["error"])
    if outdated:
        row.stale = True
        row.causes.update({result["seed"]: f"stale: {outdated}" for result in newest})
    for group in ranked[:-1]:
        for result in group:
            seed = result["seed"]
            if seed not in row.done and seed not in row.states:
                row.causes[seed] = "not run (there is a result of another plugin version)"
    return notes


def _stale(result: Result, versions: Mapping[str, str] | None) -> str:
    """Which plugins have another version than the current one, "" where none has."""
    changed = [
        f"{plugin} was {version}, is {versions[plugin]}"
        for plugin, version in sorted(result["versions"].items())
        if versions and versions.get(plugin, version) != version
    ]
    return ", ".join(changed)


def _by_place(damaged: Iterable[Damaged]) -> dict[tuple[str, int], Damaged]:
    return {(entry.slug, entry.seed): entry for entry in damaged if entry.seed is not None}


def _first_line(error: Mapping[str, Any]) -> str:
    line = next(iter(error["message"].strip().splitlines()), "") or error["kind"]
    return f"{error['user']}: {line}" if error.get("user") and error["user"] not in line else line
