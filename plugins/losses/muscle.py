"""The Muscle loss: one anchor contrasted with all B^M tuples of M other users, exactly, without the tuples.

Paper: Setayesh, Beitollahi, Khalil, Li, "Toward Enhancing Representation Learning in Federated Multi-Task Settings",
    ICLR 2026, arXiv 2602.01626.
Official code: mahdibeit/FedMuscle (only its description was readable).
Equations: γ = 1/τ′ − 1/τ > 0 with τ = τ^(N), τ′ = τ^(N−1);
    L = mean_i −log [ α_(i…i) exp(z_i·Σ_m z^m_i/τ) / Σ_{j∈[B]^M} α_j exp(z_i·Σ_m z^m_{j_m}/τ) ],
    α_j = exp(−γ Σ_{p<q} z^p_{j_p}·z^q_{j_q}), one term for each unordered pair. M = 1 is InfoNCE.
Deviations: the value is the paper's; the computation is not. The paper's server sends S and α, B^M rows; here the
    denominator is a contraction of B×B matrices made from the M raw B×d matrices (see `contraction.py`).
    With M < N − 1 sampled users τ and τ′ stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedbench.errors import UserError
from fedbench.modules import AlignmentLoss
from fedbench.options import positive
from fedbench_plugins.losses.contraction import Pairs, contract, log_contract, make_tail, tail_length
from fedbench_plugins.losses.info_nce import exact

REACH = 2**30
"""Most terms B^(M+1) that are summed exactly."""
FLOAT32_SPAN = 60.0
FLOAT64_SPAN = 640.0
"""How far apart the logarithms of the pair factors may be: see `_log_partition`."""


class Muscle(AlignmentLoss):
    """The Muscle loss of FedMuscle, exact, for B^(M+1) up to 2^30.

    Losses of different M do not compare: perfect alignment of orthonormal rows costs 0.19 / 1.23 / 3.66 nats for
    M = 1 / 2 / 3 at B = 32.

    Args:
        tau: temperature τ of the anchor's similarities, above tau_prev.
        tau_prev: temperature τ′ > 0 of one user fewer; γ = 1/τ′ − 1/τ weighs the others' agreement down.

    Raises:
        UserError: options out of range, inputs whose shapes do not fit, or B^(M+1) > 2^30.
    """

    revision: ClassVar[int] = 1

    def __init__(self, *, tau: float = 0.2, tau_prev: float = 0.15) -> None:
        super().__init__()
        self.tau = positive("muscle", "tau", tau)
        self.tau_prev = positive("muscle", "tau_prev", tau_prev)
        self.gamma = 1 / self.tau_prev - 1 / self.tau
        if self.gamma <= 0:
            raise UserError(
                f"the options of muscle are tau_prev = {tau_prev} and tau = {tau}", expected="tau_prev below tau"
            )

    def forward(self, anchor: Tensor, others: Tensor) -> Tensor:
        """Anchor (B, d), others (M, B, d), unit rows -> scalar in nats; M·log B where all rows are identical.

        Float32 or float64 as the inputs (half precision is computed in float32). Gradients reach the anchor at no
        extra cost; they also reach `others` where these have a graph, at the memory of all B^M scalars.
        """
        anchor, others = exact("muscle", anchor, others)
        _check_reach(*others.shape[:2])
        # Under autocast the products would be in half precision, whose error a small τ magnifies.
        with torch.autocast(anchor.device.type, enabled=False):
            if others.requires_grad:
                return _muscle(anchor, others, self.tau, self.gamma, marginals=False)[0]
            found: Tensor = _Detached.apply(anchor, others, self.tau, self.gamma)  # type: ignore[no-untyped-call]
            return found

    def bound(self, loss: float, *, batch: int, others: int) -> float:
        """The paper's bound, M·log B − L, in nats.

        It is not an estimate of mutual information: for M ≥ 2 it can exceed I(z^n; {z^m}), since agreement among the
        others counts too. When all users share 100 orthonormal atoms, I = log 100 = 4.605, but at B = 32 this is
        3.1 (M = 1), 5.4 (M = 2) and 6.4 (M = 3).
        """
        return others * math.log(batch) - loss


def _check_reach(models: int, batch: int) -> None:
    if batch ** (models + 1) <= REACH:
        return
    most = max(m for m in range(REACH.bit_length()) if batch ** (m + 1) <= REACH) if batch <= REACH else 0
    rows = int(REACH ** (1 / (models + 1)) + 1e-9)
    raise UserError(
        f"muscle with M = {models} others and B = {batch} rows sums B^(M+1) = {batch ** (models + 1):.3g} terms",
        expected=f"at most 2^30: M ≤ {most} for this B, or B ≤ {rows} for this M",
    )


def _muscle(
    anchor: Tensor, others: Tensor, tau: float, gamma: float, *, marginals: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss, and the marginals of the tuples' softmax if wanted: (B, M, B), [i, m, j] = P(j_m = j | anchor i).

    The loss does not change when logits are shifted, so exponentials are taken of values ≤ 0 and nothing is added
    back: identical rows cancel exactly.
    """
    models, batch, _ = others.shape
    rows = others.flatten(0, 1)
    logits = (anchor @ rows.T / tau).view(batch, models, batch)
    logits = logits - logits.detach().amax(-1, keepdim=True)
    positives = logits.diagonal(dim1=0, dim2=2).sum(0)
    pairs: dict[tuple[int, int], Tensor] = {}
    span = 0.0
    if models > 1:
        between = rows @ rows.T
        low, high = between.detach().aminmax()
        between = ((between - low) * -gamma).view(models, batch, models, batch)
        pairs = {(p, q): between[p, :, q] for p in range(models) for q in range(p + 1, models)}
        positives = positives + between.diagonal(dim1=1, dim2=3).permute(2, 0, 1).triu(1).sum((1, 2))
        span = len(pairs) * gamma * float(high - low)
    partition, found = _log_partition(logits, pairs, span, marginals)
    return (partition.to(logits.dtype) - positives).mean(), found


def _log_partition(logits: Tensor, pairs: Pairs, span: float, marginals: bool) -> tuple[Tensor, Tensor | None]:
    """log Σ_j exp(Σ_m logits[i, m, j_m] + Σ_{p<q} pairs[p, q][j_p, j_q]), (B,), and its gradient if wanted.

    All values are ≤ 0 and row maxima are 0, so the sum is at least exp(−span), span ≥ Σ_{p<q} max |pairs[p, q]|: the
    tuple of the row maxima alone gives that. Every partial product of a term is at least that term, so with a span
    of 60 what underflows in float32 is below e^-27 of the sum, whatever τ is; with 640 the same holds in float64.
    Only beyond is it summed term by term.
    """
    if span > FLOAT32_SPAN:
        logits, pairs = logits.double(), {key: pair.double() for key, pair in pairs.items()}
    if span > FLOAT64_SPAN:
        if not marginals:
            return log_contract(logits.unbind(1), pairs), None
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            summed = log_contract(leaf.unbind(1), pairs)
            return summed.detach(), torch.autograd.grad(summed.sum(), leaf)[0]
    _, models, batch = logits.shape
    factors = {key: pair.exp() for key, pair in pairs.items()}
    kernels = logits.exp().unbind(1)
    tail = make_tail(factors, models, tail_length(models, batch), kernels[0])
    inner, parts = contract(kernels, factors, tail, marginals=marginals)
    return inner.log(), torch.stack(parts, dim=1).div_(inner.view(-1, 1, 1)) if marginals else None


class _Detached(torch.autograd.Function):
    """The loss for others without a graph: the anchor's gradient comes from the same pass as the value.

    dL/dz_i = (Σ_m Σ_j P(j_m = j | i) z^m_j − Σ_m z^m_i) / (τ B).
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, others: Tensor, tau: float, gamma: float) -> Tensor:
        wanted: bool = ctx.needs_input_grad[0]
        loss, marginals = _muscle(anchor, others, tau, gamma, marginals=wanted)
        if marginals is not None:
            marginals.diagonal(dim1=0, dim2=2).sub_(1)
            gradient = marginals.flatten(1).to(anchor.dtype) @ others.flatten(0, 1)
            ctx.save_for_backward(gradient.div_(tau * len(anchor)))
        return loss

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        saved: Sequence[Tensor] = ctx.saved_tensors
        return saved[0] * upstream[0], None, None, None
