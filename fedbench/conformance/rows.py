"""Rows that users may send, and what a loss makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedbench.conformance import Failed
from fedbench.seeds import torch_generator

DIMENSION = 64

Rows = Callable[[int, int, torch.dtype], tuple[Tensor, Tensor]]
"""B, M and a number format -> anchor (B, d) and others (M, B, d), not yet normalised."""


@dataclass(frozen=True)
class Result:
    """What a loss gave: its value, the gradient at the rows before they were normalised, and its inputs afterwards."""

    value: Tensor
    gradient: Tensor
    anchor: Tensor
    others: Tensor


def random_rows(batch: int, others: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows in all directions."""
    generator = torch_generator("conformance", batch, others)
    drawn = torch.randn(others + 1, batch, DIMENSION, generator=generator, dtype=torch.float64).to(dtype)
    return drawn[0], drawn[1:]


def equal_rows(batch: int, others: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All rows of all users are one."""
    row = random_rows(1, 1, dtype)[0]
    return row.repeat(batch, 1), row.repeat(others, batch, 1)


def aligned_rows(batch: int, others: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All users agree, and items are orthogonal."""
    rows = torch.eye(DIMENSION, dtype=dtype)[:batch]
    return rows, rows.repeat(others, 1, 1)


def orthogonal_rows(batch: int, others: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """No user's item has anything in common with another's, as far as there are dimensions."""
    rows = torch.eye(DIMENSION, dtype=dtype)
    users = [rows.roll(-batch * number, 0)[:batch] for number in range(others + 1)]
    return users[0], torch.stack(users[1:])


def opposite_rows(batch: int, others: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The anchor's rows point away from the others'."""
    rows, same = aligned_rows(batch, others, dtype)
    return -rows, same


def turned_rows(batch: int, others: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The random rows, with the other users in another order."""
    anchor, rows = random_rows(batch, others, dtype)
    return anchor, rows.roll(1, 0)


def rounded(dtype: torch.dtype) -> Rows:
    """The random rows as a lower precision has them, in whatever precision is wanted."""

    def rows(batch: int, others: int, wanted: torch.dtype) -> tuple[Tensor, Tensor]:
        anchor, fixed = random_rows(batch, others, dtype)
        return anchor.to(wanted), fixed.to(wanted)

    return rows


def outcome(
    loss: Any, batch: int, others: int, *, rows: Rows = random_rows, dtype: torch.dtype = torch.float32
) -> Result:
    """One forward and backward pass, as in the alignment phase.

    Raises:
        Failed: the value is no scalar with a gradient at the anchor.
        UserError: the loss refuses these numbers of rows or users.
    """
    start, fixed = rows(batch, others, dtype)
    leaf = start.clone().requires_grad_()
    anchor, others_rows = functional.normalize(leaf, dim=-1), functional.normalize(fixed, dim=-1)
    value = loss(anchor, others_rows)
    shape = f"B = {batch}, M = {others}"
    if not isinstance(value, Tensor) or value.ndim != 0:
        raise Failed(f"{shape}: it returned {_described(value)}, no scalar", at=type(loss).forward)
    if not value.requires_grad:
        raise Failed(f"{shape}: its value has no gradient", at=type(loss).forward)
    (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True, retain_graph=True)
    if gradient is None:
        raise Failed(f"{shape}: no gradient reaches the anchor", at=type(loss).forward)
    return Result(value, gradient, anchor, others_rows)


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
