"""The Gramian loss: aligned embeddings span a parallelotope of small volume.

Paper: Cicchetti, Grassucci, Sigillo, Comminiello, "Gramian Multimodal Representation Learning and Alignment",
    ICLR 2025, arXiv 2412.11959.
Official code: ispamm/GRAM, model/gram.py and utils/volume.py.
Equations: V[i, j] = sqrt(det G), G the Gram matrix of (z_i, z^1_j … z^M_j); anchor → others: cross-entropy of −V/τ
    over j; others → anchor: of −Vᵀ/τ over i; the symmetric loss is their mean.
Deviations: τ = 0.2 fixed and no label smoothing by default, so that losses compare under one setting (the code: τ
    learned from 0.07, `learn_tau`, smoothing 0.1); no matching loss, since there is no cross-encoder. With
    `tuples = "all"`, our reading of its cost in the FedMuscle paper, the anchor's negatives are all B^M tuples.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbench.errors import UserError
from fedbench.modules import AlignmentLoss
from fedbench.options import positive
from fedbench_plugins.losses.info_nce import exact

FLOOR = 1e-12
"""Added to the diagonal of G; the least squared distance under the root."""
REACH = 2**22
"""Most volumes B^(M+1) of all tuples: each takes M + 1 numbers in memory."""


class Gramian(AlignmentLoss):
    """Contrast by the volume that the anchor and the others' rows span (GRAM).

    Args:
        tau: temperature τ > 0, or its start where it is learned.
        direction: "anchor" contrasts tuples for each anchor, "others" anchors for each tuple, "symmetric" is the mean.
        smoothing: label smoothing, 0 ≤ smoothing < 1.
        learn_tau: whether τ is learned (as its logarithm).
        tuples: "diagonal" for tuples of one public item, "all" for all B^M as the anchor's negatives.

    Raises:
        UserError: an option out of range, inputs whose shapes do not fit, or more than 2^22 volumes.
    """

    revision: ClassVar[int] = 1

    def __init__(
        self,
        *,
        tau: float = 0.2,
        direction: Literal["symmetric", "anchor", "others"] = "symmetric",
        smoothing: float = 0.0,
        learn_tau: bool = False,
        tuples: Literal["diagonal", "all"] = "diagonal",
    ) -> None:
        super().__init__()
        log_tau = torch.tensor(math.log(positive("gramian", "tau", tau)))
        _among("direction", direction, ("symmetric", "anchor", "others"))
        _among("tuples", tuples, ("diagonal", "all"))
        if not 0 <= smoothing < 1:
            raise UserError(f"the option 'smoothing' of gramian is {smoothing}", expected="at least 0 and below 1")
        self.fixed_tau = float(tau)
        self.log_tau = nn.Parameter(log_tau) if learn_tau else None
        self.direction, self.smoothing, self.tuples = direction, float(smoothing), tuples

    def forward(self, anchor: Tensor, others: Tensor) -> Tensor:
        """Anchor (B, d), others (M, B, d), unit rows -> scalar in nats; log B where all rows are identical."""
        anchor, others = exact("gramian", anchor, others)
        logits = -volumes(anchor, others.transpose(0, 1)) / self._tau()
        of_item = torch.arange(len(anchor), device=anchor.device)
        found = []
        if self.direction != "others":
            choices, at = logits, of_item
            if self.tuples == "all":
                choices, at = -volumes(anchor, _all_tuples(others)) / self._tau(), of_item * _stride(others)
            found.append(functional.cross_entropy(choices, at, label_smoothing=self.smoothing))
        if self.direction != "anchor":
            found.append(functional.cross_entropy(logits.T, of_item, label_smoothing=self.smoothing))
        return torch.stack(found).mean().to(anchor.dtype)

    def _tau(self) -> Tensor | float:
        return self.fixed_tau if self.log_tau is None else self.log_tau.double().exp()


def volumes(anchor: Tensor, tuples: Tensor) -> Tensor:
    """Vol(z_i, tuple j) in 0..1, float64: anchor (B, d), tuples (J, M, d), unit rows -> (B, J).

    det G factorises into det G_j of the tuple alone, one Cholesky factor each, times the anchor's squared distance
    from the span of the tuple, 1 − |L_j⁻¹ g|². In float64, since det G is a *squared* volume: a rounding of 1e-7
    would be 3e-4 in the volume. The root has an infinite slope at 0, which identical rows reach. FLOOR on the
    diagonal keeps the factors' gradients finite (it is the volume of the rows, each longer by sqrt(FLOOR) in a
    direction of its own); the last factor is clamped too, as rounding may carry it below 0: its gradient there is 0.
    """
    anchor, tuples = anchor.double(), tuples.double()
    with torch.autocast(anchor.device.type, enabled=False):
        gram = tuples @ tuples.transpose(1, 2)
        gram = gram + FLOOR * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        factor = torch.linalg.cholesky_ex(gram).L  # embeddings that diverged give a NaN, as in every loss
        inside = torch.linalg.solve_triangular(factor, tuples @ anchor.T, upper=False)
    square = (anchor.square().sum(-1) + FLOOR - inside.square().sum(1)).clamp_min(FLOOR)
    spanned: Tensor = factor.diagonal(dim1=1, dim2=2).prod(-1, keepdim=True) * square.sqrt()
    return spanned.T


def _all_tuples(others: Tensor) -> Tensor:
    models, batch, _ = others.shape
    if batch ** (models + 1) > REACH:
        raise UserError(
            f"gramian of all tuples with M = {models} others and B = {batch} rows needs B^(M+1) volumes",
            expected='at most 2^22; fewer others or rows, or tuples = "diagonal"',
        )
    index = torch.arange(batch, device=others.device)
    grid = torch.cartesian_prod(*[index] * models).view(-1, models)
    return torch.stack([rows[grid[:, m]] for m, rows in enumerate(others)], dim=1)


def _stride(others: Tensor) -> int:
    """The tuple (i, …, i) is number i times this."""
    models, batch, _ = others.shape
    return int(sum(batch**m for m in range(models)))


def _among(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"the option '{option}' of gramian is '{value}'", expected="one of " + ", ".join(choices))
