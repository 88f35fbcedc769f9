"""A loss."""

from __future__ import annotations

from torch import Tensor

import fedbench


class Squared(fedbench.AlignmentLoss):
    """Squared distance to every other user's row.

    Args:
        weight: factor of the loss, above 0.
    """

    def __init__(self, *, weight: float = 1.0) -> None:
        super().__init__()
        if weight <= 0:
            raise fedbench.UserError(f"weight is {weight}", where="loss 'squared'", expected="above 0")
        self.weight = weight

    def forward(self, anchor: Tensor, others: Tensor) -> Tensor:
        """(B, d) and (M, B, d), unit rows, to a scalar."""
        return self.weight * (anchor - others).square().sum(-1).mean()
