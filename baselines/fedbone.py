"""FedBone: users of one architecture merge the updates of their bodies after projecting conflicts away.

Paper: Chen, Zhang, Jiang, Chen, Gao, Huang, "FedBone: Towards Large-Scale Federated Multi-Task Learning", Journal of
Computer Science and Technology 39(5), 2024, arXiv 2306.17465. Its projection is that of Yu, Kumar, Gupta, Levine,
Hausman, Finn, "Gradient Surgery for Multi-Task Learning" (PCGrad), NeurIPS 2020, arXiv 2001.06782.
Official code: none found. Of the paper, only the abstract could be read.
Equations, g_n the change of user n's body in a local phase, N users of one architecture:
  for each n, in user order over m ≠ n: where g_n·g_m < 0, g_n ← g_n − (g_n·g_m / ‖g_m‖²) g_m (g_m as sent);
  w ← w + 1/N Σ_n g_n.
Algorithm, each of R rounds:
  1. every user trains body and head on private data;
  2. users send the change of their bodies; the server projects and averages, and all add the result to what they had.
Before round 0 all of a group get the body of its first user.
What holds here: one general model, the body, with the task-specific heads at the users, merged by projection.
What does not hold:
  - Split learning. In the paper a large general model runs on the server only, since devices are too weak for it, and
    features and gradients cross in every step. Here every user can run its body, so it trains a copy, and the change
    of a whole local phase takes the place of a gradient; it is exchanged once a round.
  - Reports of the paper's aggregation (GPAggregation) say that it first scales gradients by their attention to past
    ones. Its equation was not readable, so there is none of it.
  - Steps, optimizer, moments and scores as in FedAvg (see fedavg.py): scores are those of bodies that were trained on
    private data for one phase after the merge.
Left open: the order of projections, random in PCGrad, user order here, so that a run can be repeated; the weights of
the mean, equal here since every change comes from equally many steps.
Users: those that share their architecture with another. The rest trains locally.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fedbench.method import architecture
from fedbench_baselines.averaging import flattened, unflattened
from fedbench_baselines.shared_weights import BODY, Key, SharingMethod, SharingServer, UpdatingUser


def without_conflicts(updates: Sequence[Tensor]) -> list[Tensor]:
    """Each update (P,) after taking out, one by one, what it has against the others."""
    squares = [update.square().sum() for update in updates]
    projected: list[Tensor] = []
    for n, update in enumerate(updates):
        for m, (other, square) in enumerate(zip(updates, squares, strict=True)):
            along = update @ other
            if m != n and along < 0:
                update = update - along / square * other
        projected.append(update)
    return projected


class ProjectingServer(SharingServer):
    """Merges the updates of each group's bodies."""

    def round(self, r: int) -> None:
        if r == 0:
            self.start_equally()
        self.ask("fit")
        updates = self.ask("upload_update", users=list(self.parts()), parts=[BODY])
        merged: dict[str, dict[str, Tensor]] = {}
        for users, bodies in self.shared(updates):
            vectors = without_conflicts([flattened(body) for body in bodies])
            mean = unflattened(torch.stack(vectors).mean(0), like=bodies[0])
            merged |= dict.fromkeys(users, mean)
        self.ask("add_update", each={user: merged[user] for user in self.users if user in merged})


class FedBone(SharingMethod):
    """FedBone: bodies merged by conflict-free updates in each architecture, own heads."""

    revision: ClassVar[int] = 1
    User = UpdatingUser
    Server = ProjectingServer

    def sharing(self) -> dict[str, Key]:
        return {BODY: architecture}
