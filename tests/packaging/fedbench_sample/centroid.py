"""A method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fedbench


class CentroidUser(fedbench.UserProgram):
    """Steps towards the mean of everyone's public embeddings."""

    def setup(self) -> None:
        self.align_optimizer = self.alignment_optimizer()

    @fedbench.verb
    def pull(self, batch: Tensor, centroid: Tensor) -> dict[str, Any]:
        """One gradient step of the representation towards `centroid` (B, d) on the public rows `batch` (B,)."""
        loss = (self.embed(batch) - centroid.to(self.device)).square().sum(-1).mean()
        self.step(self.align_optimizer, loss)
        return {"loss": float(loss.detach())}

    def save(self) -> dict[str, Any]:
        return {"align_optimizer": self.align_optimizer.state_dict()}

    def restore(self, state: Any) -> None:
        self.align_optimizer.load_state_dict(state["align_optimizer"])


class CentroidServer(fedbench.ServerProgram):
    """Sends everyone the mean of all embeddings, T times a round."""

    def round(self, r: int) -> None:
        self.ask("fit")
        for batch in self.public.draw(self.protocol.iterations, self.protocol.batch):
            replies = self.ask("represent", batch=batch)
            centroid = torch.stack([reply["z"] for reply in replies.values()]).mean(0)
            pulled = self.ask("pull", batch=batch, centroid=centroid)
            self.log("alignment loss", {user: reply["loss"] for user, reply in pulled.items()})


class Centroid(fedbench.Method):
    """Everyone moves towards the mean of all embeddings."""

    User = CentroidUser
    Server = CentroidServer
