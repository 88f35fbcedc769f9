"""FedMD: users of one label space move towards the mean of their class scores on public data.

Paper: Li, Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS 2019 Workshop on Federated
Learning for Data Privacy and Confidentiality, arXiv 1910.03581.
Official code: diogenes0319/FedMD_clean (FedMD.py, Neural_Networks.py). Also read: WenkeHuang/FCCL (fedmd.py).
Equations, f_n(x) the class scores (logits, before the softmax) of user n, x of this round's public rows:
  consensus f̃(x) = 1/N Σ_n f_n(x), own scores included; digest: min over θ^n of mean |f_n(x) − f̃(x)|.
Algorithm, each of R rounds:
  1. revisit: every user trains its whole model on private data;
  2. communicate and aggregate: users send scores of T·B public rows; the server returns their mean, the consensus;
  3. digest: T steps on batches of B of those rows, towards the consensus of the round's start.
Deviations:
  - No transfer learning on public data first: the public set has no labels here.
  - A round starts with the private phase and ends with the digest; the same cycle, cut elsewhere, since users are
    scored after a private phase.
  - Users are grouped by label space, since scores of different classes cannot be averaged.
  - AdamW with the suite's schedule instead of Adam; its moments go on from round to round.
Left open by the paper: rows a round (5000 in its code, T·B here), passes over them (1, as in its code), the rates of
the digest (see public_logits.py). Multi-label tasks need no other form: the scores are those of each class.
Users: those with a partner in their label space. The rest trains locally.
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedbench.options import positive
from fedbench_baselines.public_logits import PublicMethod, PublicServer, PublicUser


class DigestingUser(PublicUser):
    """Digests the consensus."""

    def distance(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Mean absolute error of the scores."""
        return F.l1_loss(outputs, target)


class FedMDServer(PublicServer):
    """Averages class scores."""

    def round(self, r: int) -> None:
        self.ask("fit")
        scores = self.ask("predict", batches=self.draw(), users=self.partners())
        consensus = self.means(scores, "outputs")
        replies = self.ask("digest", each={user: {"targets": mean} for user, mean in consensus.items()})
        self.record("digest loss", replies)


class FedMD(PublicMethod):
    """FedMD: class scores on public rows are pulled towards their mean, within each label space.

    Args:
        rate: factor on the learning rates of the digest.
    """

    revision: ClassVar[int] = 1
    User = DigestingUser
    Server = FedMDServer

    def __init__(self, *, rate: float = 1.0) -> None:
        self.rate = positive("fedmd", "rate", rate)
