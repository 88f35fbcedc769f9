"""FedProx: FedAvg whose local phases are held near the mean that they started from.

Paper: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
arXiv 1812.06127.
Official code: litian96/FedProx.
Equations: user n minimises its task loss + (μ/2)·‖w − w_global‖² in every local step, over all weights that it shares;
w_global is what it got last. Averages as in FedAvg (see fedavg.py).
Algorithm, each of R rounds: as FedAvg's, with that term in step 1.
Deviations: those of FedAvg, and
  - weights that a user shares with nobody (its head, where no other has its label space) have no w_global and no term;
  - the term is part of the loss, as in the paper, so AdamW rescales its gradient together with that of the task;
  - no stragglers: everybody does the whole local phase.
  - The last local phase has the term too; it starts from the last mean as every phase does.
Left open by the paper: μ, which it tunes over {0.001, 0.01, 0.1, 1}; 0.01 here.
Users: those that share their architecture with another. The rest trains locally.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.options import positive
from fedbench.ranges import Choice, Ranges
from fedbench.user import verb
from fedbench_baselines.fedavg import AveragingServer
from fedbench_baselines.shared_weights import BODY, HEAD, SharingMethod, SharingUser, State


def squared_distance(weights: State, reference: State) -> Tensor:
    """‖w − w_global‖² over the weights that are in `reference`, with the graph of `weights`."""
    return torch.stack([(weights[name] - value).square().sum() for name, value in reference.items()]).sum()


class ProximalUser(SharingUser):
    """Stays near what it got last."""

    method: FedProx

    def setup(self) -> None:
        self.reference: dict[str, Tensor] = {}

    @verb
    def download(self, **weights: Tensor) -> dict[str, Any]:
        """Go on from these weights, and stay near them."""
        self.load(weights)
        self.reference = {name: value.to(self.device) for name, value in weights.items()}
        return {}

    def private_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        loss = super().private_loss(x, targets)
        if not self.reference:
            return loss
        distance = squared_distance(self.parameters([BODY, HEAD]), self.reference)
        return loss + self.method.mu / 2 * distance

    def save(self) -> dict[str, Any]:
        return {"reference": self.reference}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.reference = {name: value.to(self.device) for name, value in state["reference"].items()}


class FedProx(SharingMethod):
    """FedProx: FedAvg with a proximal term in local training.

    Args:
        mu: μ, weight of half the squared distance to the last mean.
    """

    revision: ClassVar[int] = 1
    trains_heads: ClassVar[bool] = True
    tunable: ClassVar[Ranges] = {"mu": Choice((0.001, 0.01, 0.1, 1.0))}
    User = ProximalUser
    Server = AveragingServer

    def __init__(self, *, mu: float = 0.01) -> None:
        self.mu = positive("fedprox", "mu", mu)
