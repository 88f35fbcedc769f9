"""FedAvg: users of one architecture average their weights after every local phase.

Paper: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, arXiv 1602.05629.
Official code: none published with the paper.
Equations: after the local phases, w = Σ_n |D^n| w^n / Σ_n |D^n|, over the users of one architecture for the body, over
those of one architecture and label space for the head.
Algorithm, each of R rounds:
  1. every user trains its whole model on private data, from the mean on;
  2. users send their weights; the server returns the means.
Before round 0 all of a group get the initial weights of its first user.
Deviations:
  - Users have tasks of their own, so only bodies are averaged across tasks; heads have different classes.
  - Every user takes part in every round, and takes equally many local steps instead of epochs, as for all methods.
  - AdamW with the suite's schedule instead of SGD; its moments stay with the user, and are not reset after a download.
  - Scores come after the local phase that follows an average, as for every method here, so they are those of models
    that were personalised for one phase, never of the mean itself. The last phase is not averaged.
Left open by the paper: nothing that is not in the suite's protocol.
Users: those that share their architecture with another. The rest trains locally.
"""

from __future__ import annotations

from typing import ClassVar

from fedbench_baselines.shared_weights import SharingMethod, SharingServer, SharingUser


class AveragingServer(SharingServer):
    """Returns to each user the mean of what its group sent."""

    def round(self, r: int) -> None:
        if r == 0:
            self.start_equally()
        self.ask("fit")
        sent = self.ask("upload", each={user: {"parts": parts} for user, parts in self.parts().items()})
        self.ask("download", each=self.means(sent))


class FedAvg(SharingMethod):
    """FedAvg: averaged bodies in each architecture, averaged heads in each label space of it."""

    revision: ClassVar[int] = 1
    trains_heads: ClassVar[bool] = True
    User = SharingUser
    Server = AveragingServer
