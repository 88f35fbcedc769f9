"""The leaderboard: a pure function of result files; needs no torch and no plugin."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedbench import delta
from fedbench.choice import NOT_APPLICABLE, Chosen, Identity, Planned, choose, gather, reference_of
from fedbench.errors import UserError
from fedbench.results import Damaged, Result, slug


@dataclass
class Row:
    """One method with its options on a board; percent for Δ, bytes a round of the whole federation, seconds a cell.

    Args:
        delta_mean: Δ% over the seeds that have one, None where none has.
        delta_low: lower end of its 95 % Student-t interval, None for one seed.
        delta_high: its upper end.
        seeds_done: seeds with a finished result.
        seeds_total: seeds planned.
        status: done, partial, failed, missing, damaged, stale (of another revision than the current one), or not
            applicable (the method touches none of the suite's users).
        users: by user: task, metric, higher_is_better, value (mean over seeds), std, delta; and, for a user with
            several tasks, the same for each of its `parts`, with a value of its own only where there is one metric.
        tasks: mean Δ% by task.
        users_harmed: how many users are below their local training, by their mean over seeds.
        worst_user_delta: Δ% of the user that gains least.
        bytes_up: encoded bytes, as is bytes_down; tensor_up and tensor_down are the tensors' alone.
        bytes_paper: what the method's paper would send, where the method says so.
        seconds: wall time of a cell, mean over seeds.
        rank: 1 for the best of the complete rows, None for the others and for references.
        seeds_compared: the seeds over which Δ% is the mean.
        cause: why the row is incomplete or has no Δ%.
        geometric_mean: geometric mean over users of the ratio to local training, 1 for local itself.
        users_touched: how many users the method trains otherwise than with local training.
        mean_rank: mean rank over users and seeds among the methods that have that seed.
        reference: whether it is no federated method but shows what could be had, so it has no rank.
        settings: `tuned` or `defaults`, as the suite says; None where no suite was asked.
    """

    method: str
    options: dict[str, Any]
    delta_mean: float | None = None
    delta_low: float | None = None
    delta_high: float | None = None
    seeds_done: int = 0
    seeds_total: int = 0
    status: str = "missing"
    users: dict[str, dict[str, Any]] = field(default_factory=dict)
    tasks: dict[str, float | None] = field(default_factory=dict)
    users_harmed: int | None = None
    worst_user_delta: float | None = None
    bytes_up: float | None = None
    bytes_down: float | None = None
    bytes_paper: float | None = None
    seconds: float | None = None
    rank: int | None = None
    seeds_compared: list[int] = field(default_factory=list)
    cause: str | None = None
    geometric_mean: float | None = None
    mean_rank: float | None = None
    users_touched: int | None = None
    reference: bool = False
    settings: str | None = None
    tensor_up: float | None = None
    tensor_down: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The row as plain JSON values, under the names of its fields."""
        return dataclasses.asdict(self)


@dataclass
class Board:
    """The ranked table of one suite at one scale, best first, unfinished rows after complete ones.

    Args:
        protocol_key: what all rows share; None where there is no result.
        users: by name, `(task, metric, higher_is_better)` for each of its tasks.
        damaged: every result file that cannot be trusted, shown or not.
        notes: what a reader must know: other protocols left out, duplicates, undefined values.
    """

    suite: str | None
    scale: str | None
    protocol_key: str | None
    seeds: list[int]
    rows: list[Row]
    users: dict[str, list[tuple[str, str, bool]]]
    damaged: list[Damaged]
    notes: list[str]

    @property
    def complete(self) -> bool:
        """Whether every planned cell is done and no file is damaged."""
        return not self.damaged and all(row.status in ("done", NOT_APPLICABLE) for row in self.rows)


def board(
    results: Iterable[Result | Damaged],
    planned: Planned = (),
    seeds: Sequence[int] | None = None,
    *,
    protocol_key: str | None = None,
    versions: Mapping[str, str] | None = None,
    reference: tuple[str, Mapping[str, Any]] | None = None,
) -> Board:
    """Rank the results of one suite at one scale.

    Args:
        results: as a store or a reference board gives them.
        planned: methods with options that the suite asks for: they have a row even without any result. Methods
            that are not planned but have results have one too.
        seeds: planned seeds; results of others are left out with a note. Default: the seeds of the results.
        protocol_key: which results to show where there are several protocols; default: that of the newest result.
        versions: the current version by plugin (`loss:muscle`): rows of other versions are stale.
        reference: the method that Δ% is relative to; default: the first planned `local`, else the plainest one.

    Raises:
        UserError: the results are of several suites or scales.
    """
    every = list(results)
    damaged = [entry for entry in every if isinstance(entry, Damaged)]
    sound = [entry for entry in every if not isinstance(entry, Damaged)]
    places = sorted({(result["suite"], result["scale"]) for result in sound})
    if len(places) > 1:
        raise UserError(
            "one board cannot hold results of several suites or scales",
            where=", ".join(f"{suite} {scale}" for suite, scale in places),
        )
    shown, protocol, notes = choose(sound, protocol_key)
    wanted = sorted(set(seeds)) if seeds is not None else sorted({result["seed"] for result in shown})
    chosen, more = gather(shown, damaged, planned, wanted, versions)
    base = reference_of(chosen, planned, reference)
    local = chosen[base].done if base is not None else {}
    rows = [_row(one, local, wanted) for one in chosen.values()]
    scores = [{seed: result["users"] for seed, result in one.done.items()} for one in chosen.values()]
    for row, rank in zip(rows, delta.mean_ranks(scores), strict=True):
        row.mean_rank = rank
    rows.sort(key=_order)
    for number, row in enumerate((row for row in rows if _complete(row) and not row.reference), 1):
        row.rank = number
    if base is None and rows:
        more.append("there is no local training to compare with: no row has a Δ%")
    place = places[0] if places else (None, None)
    return Board(place[0], place[1], protocol, wanted, rows, _columns(chosen), damaged, notes + more)


@dataclass(frozen=True)
class Provisional:
    """Δ% on *validation* of a cell that still runs, at the last round that it and local training both have."""

    round: int
    mean: float
    users: dict[str, float]


def provisional(
    rounds: Sequence[Mapping[str, Any]],
    local_rounds: Sequence[Mapping[str, Any]],
    higher_is_better: Mapping[str, bool] | None = None,
) -> Provisional | None:
    """What is known of a cell before it ends, from the `rounds` records of it and of local of the same seed.

    Args:
        higher_is_better: by user; default true.

    Returns:
        None until both have scored every user in the same round.
    """
    mine = {record["round"]: record.get("validation") or {} for record in rounds}
    local = {record["round"]: record.get("validation") or {} for record in local_rounds}
    for number in sorted(set(mine) & set(local), reverse=True):
        scores, base = mine[number], local[number]
        if not base or set(scores) != set(base):
            continue
        if any(scores[name] is None or base[name] is None or not base[name] > 0 for name in base):
            continue
        users = {
            name: delta.relative(scores[name], base[name], (higher_is_better or {}).get(name, True)) for name in base
        }
        mean = delta.average(users.values())
        return None if mean is None else Provisional(number, mean, users)
    return None


def _row(one: Chosen, local: Mapping[int, Result], seeds: Sequence[int]) -> Row:
    done = one.done
    paired = [seed for seed in done if seed in local]
    # The same rows object on both sides is what makes a row its own reference.
    by_seed = {seed: delta.of_seed(done[seed]["users"], local[seed]["users"]) for seed in paired}
    gain = delta.over_seeds(by_seed)
    causes = dict(one.causes)
    causes.update({seed: "local training of this seed is missing" for seed in done if seed not in local})
    for seed, notes in gain.notes.items():
        causes[seed] = "; ".join(notes)
    return Row(
        method=one.method,
        options=dict(one.options),
        delta_mean=gain.mean,
        delta_low=gain.low,
        delta_high=gain.high,
        seeds_done=len(done),
        seeds_total=len(seeds),
        status=_status(one, len(paired), len(seeds)),
        users=_users(done, gain),
        tasks=gain.tasks,
        users_harmed=gain.harmed,
        worst_user_delta=gain.worst,
        bytes_up=_mean(done, "bytes", "up"),
        bytes_down=_mean(done, "bytes", "down"),
        bytes_paper=_mean(done, "bytes", "paper"),
        seconds=_mean(done, "seconds", "total"),
        seeds_compared=sorted(seed for seed, found in by_seed.items() if found.mean is not None),
        cause=_condense(causes),
        geometric_mean=gain.geometric_mean,
        users_touched=next((len(result["touched"]) for result in done.values() if "touched" in result), None),
        reference=any(result.get("reference", False) for result in done.values()),
        tensor_up=_mean(done, "bytes", "tensor_up"),
        tensor_down=_mean(done, "bytes", "tensor_down"),
    )


def _status(one: Chosen, paired: int, total: int) -> str:
    if one.stale:
        return "stale"
    if one.done:
        return "done" if len(one.done) == total == paired else "partial"
    return next((state for state in ("failed", "damaged", NOT_APPLICABLE) if state in one.states.values()), "missing")


def _users(done: Mapping[int, Result], gain: delta.Delta) -> dict[str, dict[str, Any]]:
    """By user, its scores over seeds; the parts stand apart only where a user has several."""
    rows: dict[delta.Part, dict[str, Any]] = {}
    scores: dict[delta.Part, list[Mapping[str, Any]]] = {}
    for seed in sorted(done):
        for row in done[seed]["users"]:
            scores.setdefault(delta.part(row), []).append(row)
    for part, found in scores.items():
        values = [row["test"] for row in found]
        subsets = dict.fromkeys(name for row in found for name in row.get("subsets") or {})
        rows[part] = {
            "task": part[1],
            "metric": part[2],
            "higher_is_better": found[0]["higher_is_better"],
            "value": delta.average(values),
            "std": delta.deviation(values),
            "delta": gain.parts.get(part),
            "subsets": {name: delta.average((row.get("subsets") or {}).get(name) for row in found) for name in subsets},
        }
    users: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(part[0] for part in rows):
        own = [row for part, row in rows.items() if part[0] == name]
        if len(own) == 1:
            users[name] = own[0]
            continue
        users[name] = {
            "task": " + ".join(dict.fromkeys(row["task"] for row in own)),
            "metric": " + ".join(dict.fromkeys(row["metric"] for row in own)),
            "higher_is_better": all(row["higher_is_better"] for row in own),
            "value": None,
            "std": None,
            "delta": gain.users.get(name),
            "parts": own,
        }
    return users


def _columns(chosen: Mapping[Identity, Chosen]) -> dict[str, list[tuple[str, str, bool]]]:
    columns: dict[str, list[tuple[str, str, bool]]] = {}
    for one in chosen.values():
        for seed in sorted(one.done):
            for row in one.done[seed]["users"]:
                parts = columns.setdefault(row["name"], [])
                part = (row["task"], row["metric"], row["higher_is_better"])
                if part not in parts:
                    parts.append(part)
    return columns


def _mean(done: Mapping[int, Result], table: str, name: str) -> float | None:
    return delta.average(result[table].get(name) for result in done.values())


def _complete(row: Row) -> bool:
    return row.status == "done" and row.delta_mean is not None


def _order(row: Row) -> tuple[bool, bool, float, str]:
    return not _complete(row), row.delta_mean is None, -(row.delta_mean or 0.0), slug(row.method, row.options)


def _condense(causes: Mapping[int, str]) -> str | None:
    """One line for all seeds: `seeds 0, 2: not run; seed 1: ...`."""
    seeds: dict[str, list[int]] = {}
    for seed in sorted(causes):
        seeds.setdefault(causes[seed], []).append(seed)
    if list(seeds.values()) == [sorted(causes)] and next(iter(seeds)).startswith(NOT_APPLICABLE):
        return next(iter(seeds))
    lines = [
        f"seed{'s' if len(found) > 1 else ''} {', '.join(str(seed) for seed in found)}: {cause}"
        for cause, found in seeds.items()
    ]
    return "; ".join(lines) or None
