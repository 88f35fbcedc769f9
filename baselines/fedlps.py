"""FedLPS: a frozen encoder that all tasks share, and predictors on it that are averaged within each task.

Paper: Jia, Zhang, Beheshti, Dou, "FedLPS: Heterogeneous Federated Learning for Multiple Tasks with Local Parameter
Sharing", AAAI 2024, arXiv 2402.08578.
Official code: jyzgh/FedLPS (fedml_api/standalone/fedavg/fedlps_api.py). The paper's body could not be read.
Equations: θ = (frozen encoder φ, predictor ψ); after the local phases, ψ_t = Σ_n |D^n| ψ^n / Σ_n |D^n| over the users n
of task t; φ is the same everywhere, and never trained or sent.
Algorithm, each of R rounds:
  1. every user trains its predictor on private data, from the mean of its task on;
  2. users send their predictors; the server returns the mean of each task.
What holds here: it is partial FedAvg. The encoder is what a suite's model freezes (all but the last blocks of a
pretrained net), the predictor is everything that it trains, head included. A net without frozen layers has no
encoder: freezing random layers of it would make no sense, so all of it is the predictor.
What does not hold:
  - One task a user. The encoder's purpose in the paper, to be run once for several tasks on one device, has no effect
    on scores.
  - No channel pruning. The paper prunes predictors by L1 norm to fit weaker devices; here users of one group have
    equal models. So its aggregation of differently pruned predictors is not needed (the official code takes
    the plain weighted mean of all tensors).
  - Steps, optimizer, moments and scores as in FedAvg (see fedavg.py).
Left open by the paper: how deep the encoder is (25, 50 or 75 % of layers there); here the suite's model says it.
Users: those that share architecture and label space with another. The rest trains locally. Where all users of an
architecture have one label space, this is FedAvg.
"""

from __future__ import annotations

from typing import ClassVar

from fedbench_baselines.fedavg import AveragingServer
from fedbench_baselines.shared_weights import BODY, HEAD, Key, SharingMethod, SharingUser, architecture_and_labels


class FedLPS(SharingMethod):
    """FedLPS: frozen encoders, trained parts averaged in each task."""

    revision: ClassVar[int] = 1
    trains_heads: ClassVar[bool] = True
    User = SharingUser
    Server = AveragingServer

    def sharing(self) -> dict[str, Key]:
        return {BODY: architecture_and_labels, HEAD: architecture_and_labels}
