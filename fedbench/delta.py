"""Δ%: the relative gain over the same user's local training of the same seed, and its statistics.

A score row is a user's row of a result file (`users`); a user with several tasks has several rows.
All means are exact sums, so the order of users, seeds or files changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Rows = Sequence[Mapping[str, Any]]
Part = tuple[str, str, str]
"""User, task and metric: what one score is of."""
_MOST = 1e9
"""The largest Δ% that is taken for a number; what is above comes from a reference that is all but 0."""


@dataclass(frozen=True)
class SeedDelta:
    """Δ% of one seed, in percent; None where it is undefined, and then a note says why.

    Args:
        mean: over users.
        users: by user, the mean over its tasks.
        parts: by (user, task, metric).
        log_ratio: mean over users of log(M/L), signed so that more is better.
        notes: why a value is undefined.
    """

    mean: float | None
    users: dict[str, float | None]
    parts: dict[Part, float | None]
    log_ratio: float | None
    notes: list[str]


@dataclass(frozen=True)
class Delta:
    """Δ% over seeds, in percent.

    Args:
        mean: over seeds; None where no seed has one.
        low: lower end of the 95 % Student-t interval of the mean; None for a single seed.
        high: its upper end.
        users: by user, the mean over seeds.
        parts: by (user, task, metric), the mean over seeds.
        tasks: by task, the mean over its users and seeds.
        geometric_mean: the geometric mean over users of M/L (L/M where lower is better), 1 for local training.
        notes: why a value is undefined, by seed.
    """

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    users: dict[str, float | None] = field(default_factory=dict)
    parts: dict[Part, float | None] = field(default_factory=dict)
    tasks: dict[str, float | None] = field(default_factory=dict)
    geometric_mean: float | None = None
    notes: dict[int, list[str]] = field(default_factory=dict)

    @property
    def harmed(self) -> int | None:
        """How many users are below their own local training; None where nothing is known."""
        known = [value for value in self.users.values() if value is not None]
        return sum(value < 0 for value in known) if known else None

    @property
    def worst(self) -> float | None:
        """The Δ% of the user that gains least."""
        return min((value for value in self.users.values() if value is not None), default=None)


def relative(value: float, local: float, higher_is_better: bool = True) -> float:
    """(−1)^l (value − local) / local × 100, with l = 1 where lower is better. Needs local > 0."""
    change = (value - local) / local * 100
    return change if higher_is_better else -change


def part(row: Mapping[str, Any]) -> Part:
    """What a score row is of."""
    return row["name"], row["task"], row["metric"]


def of_seed(rows: Rows, local: Rows, *, score: str = "test") -> SeedDelta:
    """Δ% of one seed.

    Args:
        rows: the method's score rows.
        local: local training's score rows of the same seed; the same object where the method is local itself.
        score: which score, `test` or `validation`.
    """
    mine = {part(row): row for row in rows}
    reference = {part(row): row for row in local}
    parts: dict[Part, float | None] = {}
    logs: dict[Part, float | None] = {}
    notes = []
    for key in [*reference, *(key for key in mine if key not in reference)]:
        value, base = _score(mine, key, score), _score(reference, key, score)
        higher = bool((mine.get(key) or reference[key])["higher_is_better"])
        parts[key] = logs[key] = None
        if value is None:
            notes.append(f"{key[0]} has no {score} value ({key[1]} {key[2]})")
        elif rows is local:
            parts[key], logs[key] = 0.0, 0.0
        elif base is None:
            notes.append(f"local training has no {score} value of {key[0]} ({key[1]} {key[2]})")
        elif base <= 0:
            notes.append(f"local training of {key[0]} scores {base:g}: Δ% is undefined ({key[1]} {key[2]})")
        elif abs(change := relative(value, base, higher)) > _MOST:
            notes.append(f"local training of {key[0]} scores {base:g}: Δ% is out of range ({key[1]} {key[2]})")
        else:
            parts[key] = change
            logs[key] = math.log(value / base) * (1 if higher else -1) if value > 0 else None
    users = _within_users(parts)
    return SeedDelta(_strict(users.values()), users, parts, _strict(_within_users(logs).values()), notes)


def over_seeds(seeds: Mapping[int, SeedDelta]) -> Delta:
    """Δ% over the given seeds; a seed whose own Δ% is undefined counts in no mean but those of its sound users."""
    every = [seeds[seed] for seed in sorted(seeds)]
    mean, low, high = interval([one.mean for one in every if one.mean is not None])
    keys = list(dict.fromkeys(key for one in every for key in one.parts))
    names = list(dict.fromkeys(key[0] for key in keys))
    parts = {key: average(one.parts.get(key) for one in every) for key in keys}
    logs = _strict(one.log_ratio for one in every if one.mean is not None)
    return Delta(
        mean=mean,
        low=low,
        high=high,
        users={name: average(one.users.get(name) for one in every) for name in names},
        parts=parts,
        tasks={
            task: average(
                average(value for key, value in one.parts.items() if key[1] == task and value is not None)
                for one in every
            )
            for task in dict.fromkeys(key[1] for key in keys)
        },
        geometric_mean=None if logs is None else math.exp(logs),
        notes={seed: seeds[seed].notes for seed in sorted(seeds) if seeds[seed].notes},
    )


def mean_ranks(scores: Sequence[Mapping[int, Rows]]) -> list[float | None]:
    """The mean rank of every method over users, tasks and seeds: 1 is best, ties share their mean rank.

    Args:
        scores: of each method, by seed, the score rows. At each seed the methods that have it are ranked.
    """
    tables: dict[tuple[int, Part], dict[int, float]] = {}
    for method, seeds in enumerate(scores):
        for seed, rows in seeds.items():
            for row in rows:
                if row["test"] is not None:
                    value = row["test"] if row["higher_is_better"] else -row["test"]
                    tables.setdefault((seed, part(row)), {})[method] = value
    ranks: list[list[float]] = [[] for _ in scores]
    for table in tables.values():
        values = list(table.values())
        for method, value in table.items():
            better = sum(other > value for other in values)
            ranks[method].append(better + (values.count(value) + 1) / 2)
    return [average(found) for found in ranks]


def average(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are there; None where none is."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def deviation(values: Iterable[float | None]) -> float | None:
    """The sample standard deviation (n − 1); None for fewer than two values."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    mean = math.fsum(known) / len(known)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in known) / (len(known) - 1))


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float | None, float | None, float | None]:
    """Mean and two-sided Student-t interval of the mean; (mean, None, None) for a single value."""
    mean, spread = average(values), deviation(values)
    if mean is None or spread is None:
        return mean, None, None
    half = t_quantile((1 + level) / 2, len(values) - 1) * spread / math.sqrt(len(values))
    return mean, mean - half, mean + half


def t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t distribution, for probabilities from 0.5 to below 1."""
    if not 0.5 <= probability < 1 or freedom < 1:
        raise ValueError("needs 0.5 <= probability < 1 and at least one degree of freedom")
    low, high = 0.0, 1.0
    while _t_below(high, freedom) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _t_below(t: float, freedom: int) -> float:
    """P(T <= t) for t >= 0, by the incomplete beta function."""
    x = freedom / (freedom + t * t)
    a, b = freedom / 2, 0.5
    if x >= (a + 1) / (a + b + 2):  # its continued fraction converges fast on one side only
        return 0.5 + 0.5 * _beta_below(b, a, 1 - x)
    return 1 - 0.5 * _beta_below(a, b, x)


def _beta_below(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by Lentz's continued fraction."""
    if x <= 0:
        return 0.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    value, c, d = 1.0, 1.0, 0.0
    for step in range(400):
        m = step // 2
        if step == 0:
            term = 1.0
        elif step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / ((1 + term * d) or tiny)
        c = (1 + term / c) or tiny
        value *= c * d
        if step and abs(c * d - 1) < 1e-16:
            break
    return front * (value - 1)


def _score(rows: Mapping[Part, Mapping[str, Any]], key: Part, score: str) -> float | None:
    value = rows[key].get(score) if key in rows else None
    return value if value is not None and math.isfinite(value) else None


def _within_users(parts: Mapping[Part, float | None]) -> dict[str, float | None]:
    grouped: dict[str, list[float | None]] = {}
    for (name, _, _), value in parts.items():
        grouped.setdefault(name, []).append(value)
    return {name: _strict(values) for name, values in grouped.items()}


def _strict(values: Iterable[float | None]) -> float | None:
    """The mean, None as soon as one value is missing: a mean over fewer users is another quantity."""
    every = list(values)
    return None if not every or None in every else average(every)
