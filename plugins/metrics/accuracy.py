"""Top-1 accuracy."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedbench.errors import UserError
from fedbench.interfaces import Metric


class Accuracy(Metric):
    """Share of items whose highest score is their class, in percent."""

    label: ClassVar[str] = "accuracy"
    revision: ClassVar[int] = 1

    def __call__(self, scores: np.ndarray, targets: np.ndarray) -> float:
        """Percent, 0 to 100. Of equal scores the class of lowest number wins; NaN without items or with a NaN score.

        Args:
            scores: (N, C).
            targets: class numbers 0 to C - 1, (N,).

        Raises:
            UserError: shapes do not fit, or a target is no class.
        """
        if scores.ndim != 2 or targets.shape != scores.shape[:1]:
            raise UserError(
                f"scores {scores.shape} and targets {targets.shape}",
                where="metric accuracy",
                expected="(N, C) and (N,)",
            )
        if not len(targets) or np.isnan(scores).any():
            return float("nan")
        if targets.min() < 0 or targets.max() >= scores.shape[1]:
            raise UserError(
                f"targets from {targets.min()} to {targets.max()}",
                where="metric accuracy",
                expected=f"0 to {scores.shape[1] - 1}",
            )
        return 100.0 * float(np.mean(scores.argmax(1) == targets))
