"""Mean average precision of multi-label scores."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedbench.errors import UserError
from fedbench.interfaces import Metric


class MeanAveragePrecision(Metric):
    """Area under precision-recall, mean over classes, in percent."""

    label: ClassVar[str] = "mAP"
    revision: ClassVar[int] = 1

    def __call__(self, scores: np.ndarray, targets: np.ndarray) -> float:
        """Percent, 0 to 100; classes without a positive item are left out.

        A class's average precision is the sum over thresholds of (gain in recall) * precision, items of equal
        score entering together (as scikit-learn's `average_precision_score` has it, no interpolation). NaN where no
        class has a positive item, and with a NaN score.

        Args:
            scores: (N, C), only their order within a class counts.
            targets: 0 or 1, (N, C).

        Raises:
            UserError: shapes do not fit, or a target is neither 0 nor 1.
        """
        if scores.ndim != 2 or targets.shape != scores.shape:
            raise UserError(
                f"scores {scores.shape} and targets {targets.shape}",
                where="metric mean-average-precision",
                expected="both (N, C)",
            )
        positive = targets == 1
        if not (positive | (targets == 0)).all():
            raise UserError("a target is neither 0 nor 1", where="metric mean-average-precision", expected="0 or 1")
        present = positive.any(0)
        if not present.any() or np.isnan(scores).any():
            return float("nan")
        return 100.0 * float(np.mean(_average_precisions(scores[:, present], positive[:, present])))


def _average_precisions(scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """(N, C) scores and truth, a positive in every column -> average precision (C,), 0 to 1."""
    items = len(scores)
    order = np.argsort(scores, axis=0, kind="stable")[::-1]
    ranked, hits = np.take_along_axis(scores, order, 0), np.take_along_axis(positive, order, 0)
    found = np.cumsum(hits, axis=0)
    # Every item counts with the precision at the last item of its own score, so that ties have no order.
    last = np.full(scores.shape, items - 1)
    last[:-1] = np.where(ranked[:-1] != ranked[1:], np.arange(items - 1)[:, None], items - 1)
    last = np.minimum.accumulate(last[::-1], axis=0)[::-1]
    precision = np.take_along_axis(found, last, 0) / (last + 1)
    averages: np.ndarray = (precision * hits).sum(0) / found[-1]
    return averages
