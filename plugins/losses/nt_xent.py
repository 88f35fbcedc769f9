"""SimCLR's loss: two views of the same items, every view contrasted with all 2B − 1 others.

Paper: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020,
    arXiv 2002.05709, equation 1.
Official code: google-research/simclr (not read).
Equation: with 2B views z_1 … z_2B, l(i, j) = −log [ exp(z_i·z_j/τ) / Σ_{k≠i} exp(z_i·z_k/τ) ]; L is the mean of
    l over the 2B ordered positive pairs.
Deviations: τ = 0.2 by default, as for the other losses here (the paper: 0.1 on ImageNet, 0.5 on CIFAR-10).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedbench.errors import UserError
from fedbench.modules import AlignmentLoss
from fedbench.options import positive
from fedbench_plugins.losses.info_nce import exact, similarities


class NTXent(AlignmentLoss):
    """SimCLR's NT-Xent between two views of one user's items.

    Unlike the other losses it compares a user with itself: `others` is the second view, and both views carry
    gradients where both have a graph.

    Args:
        tau: temperature τ > 0.

    Raises:
        UserError: an option out of range, inputs whose shapes do not fit, or more than one second view.
    """

    revision: ClassVar[int] = 1

    def __init__(self, *, tau: float = 0.2) -> None:
        super().__init__()
        self.tau = positive("nt_xent", "tau", tau)

    def forward(self, anchor: Tensor, others: Tensor) -> Tensor:
        """First view (B, d), second view (1, B, d), unit rows -> scalar in nats; log(2B − 1) where all are equal."""
        anchor, others = exact("nt_xent", anchor, others)
        if len(others) != 1:
            raise UserError(
                f"nt_xent got {len(others)} second views", expected="exactly one: others of shape (1, B, d)"
            )
        batch = len(anchor)
        views = torch.cat([anchor, others[0]])
        logits = similarities(views, views.unsqueeze(0))[0] / self.tau
        itself = torch.eye(2 * batch, dtype=torch.bool, device=logits.device)
        partner = torch.arange(2 * batch, device=logits.device).roll(batch)
        return functional.cross_entropy(logits.masked_fill(itself, -torch.inf), partner)
