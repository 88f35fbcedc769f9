"""Pairwise alignment: InfoNCE between the anchor and each other user by itself, summed.

Paper: the pairwise baseline of "Toward Enhancing Representation Learning in Federated Multi-Task Settings",
    ICLR 2026, arXiv 2602.01626; InfoNCE is from van den Oord et al. 2018, arXiv 1807.03748.
Official code: none read.
Equation: L = Σ_m mean_i −log [ exp(z_i·z^m_i/τ) / Σ_j exp(z_i·z^m_j/τ) ].
Deviations: none known. One direction only (anchor → other): the others' rows are constants here, each other user
    minimises its own direction. A sum, not a mean, over the others, as in the exponent of the Muscle loss's numerator.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedbench.modules import AlignmentLoss
from fedbench.options import positive
from fedbench_plugins.losses.info_nce import exact, info_nce, similarities


class Pairwise(AlignmentLoss):
    """InfoNCE from the anchor to each other user, summed over the others.

    Args:
        tau: temperature τ > 0.

    Raises:
        UserError: an option out of range, or inputs whose shapes do not fit.
    """

    revision: ClassVar[int] = 1

    def __init__(self, *, tau: float = 0.2) -> None:
        super().__init__()
        self.tau = positive("pairwise", "tau", tau)

    def forward(self, anchor: Tensor, others: Tensor) -> Tensor:
        """Anchor (B, d), others (M, B, d), unit rows -> scalar in nats; M·log B where all rows are identical."""
        anchor, others = exact("pairwise", anchor, others)
        logits = similarities(anchor, others) / self.tau
        return torch.stack([info_nce(each) for each in logits]).sum()
