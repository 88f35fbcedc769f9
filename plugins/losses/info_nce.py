"""What the contrastive losses share: checked inputs and options, exact similarities, InfoNCE rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedbench.errors import UserError


def exact(owner: str, anchor: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Both inputs in one dtype of at least float32: embeddings in half precision are contrasted in float32.

    Args:
        owner: who asks, for the message.
        anchor: (B, d), B ≥ 1.
        others: (M, B, d), M ≥ 1.

    Raises:
        UserError: the shapes do not fit.
    """
    if anchor.dim() != 2 or others.dim() != 3 or others.shape[1:] != anchor.shape or 0 in others.shape:
        raise UserError(
            f"{owner} got an anchor of shape {tuple(anchor.shape)} and others of shape {tuple(others.shape)}",
            expected="(B, d) and (M, B, d), M and B at least 1",
        )
    dtype = torch.promote_types(torch.promote_types(anchor.dtype, others.dtype), torch.float32)
    return anchor.to(dtype), others.to(dtype)


def similarities(anchor: Tensor, others: Tensor) -> Tensor:
    """Dot products of every anchor row with every other row: (B, d), (M, B, d) -> (M, B, B), [m, i, j] = z_i·z^m_j."""
    # Under autocast this would be a half-precision product, whose error a temperature of 0.02 magnifies 50 times.
    with torch.autocast(anchor.device.type, enabled=False):
        return anchor @ others.transpose(1, 2)


def info_nce(logits: Tensor) -> Tensor:
    """One-directional InfoNCE, mean over rows: logits (B, C ≥ B), the positive of row i is column i."""
    return functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device))
