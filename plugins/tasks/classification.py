"""One class an image: cross-entropy on a linear head, scored by accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.errors import UserError
from fedbench.interfaces import Task

if TYPE_CHECKING:
    import numpy as np


class ImageClassification(Task):
    """One class an image: cross-entropy, accuracy.

    Args:
        label_smoothing: share of the target spread evenly over all classes, 0 to less than 1.
    """

    metric: ClassVar[str] = "accuracy"
    revision: ClassVar[int] = 1

    def __init__(self, *, label_smoothing: float = 0.0) -> None:
        if not 0 <= label_smoothing < 1:
            raise UserError(
                f"label_smoothing = {label_smoothing}", where=type(self).__name__, expected="0 to less than 1"
            )
        self.label_smoothing = label_smoothing

    def head(self, features: int, classes: int) -> nn.Module:
        return nn.Linear(features, classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of (B, C) logits, targets int64 (B,)."""
        return F.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)

    def scores(self, outputs: Tensor) -> np.ndarray:
        """Probabilities of the C classes, rows that sum to 1: float64 (B, C)."""
        probabilities: np.ndarray = outputs.detach().cpu().double().softmax(1).numpy()
        return probabilities
