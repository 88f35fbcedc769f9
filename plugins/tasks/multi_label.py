"""Any number of classes an image: binary cross-entropy on a linear head, scored by mean average precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.interfaces import Task

if TYPE_CHECKING:
    import numpy as np


class MultiLabelClassification(Task):
    """Any number of classes an image: binary cross-entropy, mAP."""

    metric: ClassVar[str] = "mean-average-precision"
    revision: ClassVar[int] = 1

    def head(self, features: int, classes: int) -> nn.Module:
        return nn.Linear(features, classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Binary cross-entropy in nats of (B, C) logits, mean over items and classes; targets 0 or 1, (B, C)."""
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype))

    def scores(self, outputs: Tensor) -> np.ndarray:
        """Probability of each class by itself: float64 (B, C)."""
        probabilities: np.ndarray = outputs.detach().cpu().double().sigmoid().numpy()
        return probabilities
