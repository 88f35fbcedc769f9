"""Made-up results for the tests of store, leaderboard and report."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbench.results import Result, seal

PROTOCOL = hashlib.sha256(b"protocol").hexdigest()
USERS = (("user1", "mlc", "mAP"), ("user2", "ic100", "accuracy"))
Score = float | None


def user_row(name: str, task: str, metric: str, test: Score, *, higher: bool = True, **more: Any) -> dict[str, Any]:
    """A score row as a result file holds it."""
    fixed = {"name": name, "task": task, "metric": metric, "higher_is_better": higher}
    return {**fixed, "model": "small", "test": test, "validation": test, **more}


def provenance(time: str = "2026-01-02T03:04:05Z") -> dict[str, Any]:
    """The least that a result must say of where it comes from."""
    return {
        "fedbench": "0.1.0",
        "protocol": 1,
        "python": "3.11.0",
        "packages": {},
        "machine": {},
        "command": ["fedbench", "run"],
        "time": time,
    }


def result(
    method: str,
    scores: Sequence[Score] = (),
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    users: Sequence[Mapping[str, Any]] | None = None,
    protocol_key: str = PROTOCOL,
    versions: Mapping[str, str] | None = None,
    failed: str | None = None,
    time: str = "2026-01-02T03:04:05Z",
    rounds: Sequence[Mapping[str, Any]] = (),
    **more: Any,
) -> Result:
    """A sealed result: `scores` are the test values of `USERS`, or `users` are whole rows."""
    options = dict(options or {})
    versions = dict(versions or {f"method:{method}": "1"})
    identity = repr((method, sorted(options.items()), seed, protocol_key, sorted(versions.items())))
    if users is None:
        users = [user_row(*user, test) for user, test in zip(USERS, scores, strict=False)]
    return seal(
        {
            "suite": "toy",
            "scale": "mini",
            "method": method,
            "options": options,
            "resolved": options,
            "seed": seed,
            "key": hashlib.sha256(identity.encode()).hexdigest(),
            "protocol_key": protocol_key,
            "versions": versions,
            "status": "failed" if failed else "done",
            "error": {"kind": "raised", "message": failed, "user": "user2", "trace": "Traceback"} if failed else None,
            "users": [] if failed else users,
            "rounds": list(rounds),
            "bytes": {"up": 1000.0, "down": 2000.0, "tensor_up": 990.0, "tensor_down": 1980.0, "paper": None},
            "seconds": {"total": 10.0},
            "provenance": provenance(time),
            **more,
        }
    )


def folder_of(store_root: Path, entry: Result) -> Path:
    """Where a store keeps a result."""
    from fedbench.store import Store

    names = ("suite", "scale", "method", "options", "seed", "key")
    return Store(store_root).cell(**{name: entry[name] for name in names}).path
