"""The two contracts that are `torch.nn.Module`s: alignment losses and models. Importing this imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    import numpy as np

    from fedbench.cache import Cache
    from fedbench.interfaces import Samples


class AlignmentLoss(nn.Module):
    """A loss that pulls one user's public embeddings towards other users' (kind `loss`).

    `forward(anchor, others)`: anchor (B, d) with unit rows and a graph, others (M, B, d) with unit rows, detached;
    row b is the same public item everywhere. Returns a scalar, to be minimised. It may not change its inputs, use
    the global generator or detach the anchor. Its parameters join the user's alignment optimizer.
    """

    def forward(self, anchor: Tensor, others: Tensor) -> Tensor:
        raise NotImplementedError

    def bound(self, loss: float, *, batch: int, others: int) -> float | None:
        """What is logged per round as the paper's bound, given the mean loss; None where a loss has none."""
        return None


class Model(nn.Module):
    """A user's backbone (kind `model`): what its trainable part reads -> features.

    Options are keyword-only constructor arguments. Initialisation may use the global generator: the core seeds it
    from named coordinates. Batch-norm statistics of pretrained nets stay frozen.
    """

    weights: ClassVar[str] = ""
    """SHA-256 of the pretrained weights' file ("" for nets from scratch)."""
    modality: ClassVar[str] = "image"
    features: int
    """Length of a feature vector."""

    @classmethod
    def verify(cls) -> None:
        """Check that pretrained weights are there and unaltered, before anything runs; raise `UserError` if not."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) rows of what `prepare` returns (one view each, as float32) -> (B, features)."""
        raise NotImplementedError

    def prepare(self, samples: Samples, cache: Cache) -> np.ndarray:
        """What the trainable part reads, for all items and views: array (N, V, ...), float16, float32 or uint8.

        Frozen layers run here, once an item and view, and their outputs are cached on disk; nets without
        frozen layers return the pixels as they are and scale them in `forward`.
        """
        raise NotImplementedError


def scaled_pixels(images: Tensor) -> Tensor:
    """uint8 or float pixels (B, H, W, 3) in 0..255 -> float32 (B, 3, H, W) in -1..1, contiguous."""
    return images.to(torch.float32).permute(0, 3, 1, 2).contiguous().div_(127.5).sub_(1.0)
