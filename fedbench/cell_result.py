"""What every result of a cell says, and the whole result of a cell whose process could not write its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedbench.plan import Cell


def described(cell: Cell, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a result that its cell and its surroundings alone decide."""
    return {
        "suite": cell.suite.name,
        "scale": cell.suite.scale,
        "method": cell.method.name,
        "options": dict(cell.method.options),
        "resolved": {**cell.resolved, **{name: dict(part.options) for name, part in cell.parts.items()}},
        "seed": cell.seed,
        "key": cell.key,
        "protocol_key": cell.protocol_key,
        "versions": dict(cell.versions),
        "provenance": dict(provenance),
    }


def mean_bytes(exchanges: Sequence[Mapping[str, Any]], users: Sequence[str]) -> dict[str, int]:
    """Bytes a round of some users together, each way, as encoded and as bare tensors: means over the round records."""
    count = max(1, len(exchanges))
    return {
        way: round(sum(record["users"][user][column] for record in exchanges for user in users) / count)
        for column, way in enumerate(("up", "down", "tensor_up", "tensor_down"))
    }


def spent_seconds(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of all rounds, in total and by verb."""
    seconds: dict[str, float] = {"total": sum(record["seconds"] for record in records)}
    for record in records:
        for verb, spent in record["verbs"].items():
            seconds[verb] = seconds.get(verb, 0.0) + spent
    return seconds


def failure(message: str, *, kind: str = "raised", user: str | None = None, trace: str = "") -> dict[str, Any]:
    """The `error` of a failed result."""
    return {"kind": kind, "message": message, "user": user, "trace": trace}


def failed(cell: Cell, provenance: Mapping[str, Any], error: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a cell that failed before anything of it was known, or without a word."""
    nothing: dict[str, Any] = {"users": [], "touched": [], "faults": [], "rounds": [], "bytes": {}, "seconds": {}}
    return {**described(cell, provenance), "status": "failed", "error": dict(error), **nothing}
