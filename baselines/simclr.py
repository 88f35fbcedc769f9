"""SimCLR: what the public set gives a user that trains on it alone.

Paper: Chen, Kornblith, Norouzi, Hinton, "A Simple Framework for Contrastive Learning of Visual Representations",
ICML 2020, as the row "SimCLR" of FedMuscle (ICLR 2026). Official code: google-research/simclr.
Equations: NT-Xent over 2B views, l(i,j) = −log exp(z_i·z_j/τ) / Σ_{k≠i} exp(z_i·z_k/τ), mean over 2B ordered pairs.
Algorithm, each round: local training, then T steps on public batches of B rows, two views each, on w^n only.
Deviations: the two views are two of the V fixed augmented views of the public set, because frozen features of new
pixels could not be cached; τ as the suite says (0.2, the alignment's; the original's default is 0.1 or 0.5).
Exchange: none but the row numbers, so that all methods see the same public batches.
Users: all that can read the public set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.method import Method, ServerProgram
from fedbench.options import positive
from fedbench.ranges import ALIGNMENT_RATE, Ranges
from fedbench.seeds import torch_generator
from fedbench.user import UserProgram, verb
from fedbench_plugins.losses.nt_xent import NTXent


class ContrastingUser(UserProgram):
    """Contrasts two views of its own public embeddings."""

    method: SimCLR

    def setup(self) -> None:
        self.loss = NTXent(tau=self.method.tau).to(self.device)
        self.align_optimizer = self.alignment_optimizer(factor=self.method.rate)
        self.steps = 0
        self.view_generator = torch_generator("views", self.seed, self.name)

    @verb
    def contrast(self, batches: Tensor) -> dict[str, Any]:
        """T gradient steps of w^n on NT-Xent; batches (T, B) int64. Replies the mean loss."""
        self.set_training(True)
        total = 0.0
        for batch in batches:
            done = self.steps / self.protocol.iterations
            self.schedule(self.align_optimizer, done, self.protocol.rounds)
            first, second = self.two_views(len(batch))
            z = self.embed(torch.cat([batch, batch]), torch.cat([first, second]))
            loss = self.loss(z[: len(batch)], z[len(batch) :].unsqueeze(0))
            self.step(self.align_optimizer, loss)
            self.steps += 1
            total += float(loss.detach())
        return {"loss": total / len(batches)}

    def two_views(self, count: int) -> tuple[Tensor, Tensor]:
        """Two different views for each of `count` items; the same one twice where there is only one."""
        views = self.participant.public.views
        first = torch.randint(views, (count,), generator=self.view_generator)
        if views == 1:
            return first, first
        step = torch.randint(1, views, (count,), generator=self.view_generator)
        return first, (first + step) % views

    def save(self) -> dict[str, Any]:
        return {
            "align_optimizer": self.align_optimizer.state_dict(),
            "steps": self.steps,
            "view_generator": self.view_generator.get_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.align_optimizer.load_state_dict(state["align_optimizer"])
        self.steps = state["steps"]
        self.view_generator.set_state(state["view_generator"])


class SimCLRServer(ServerProgram):
    """Draws the public rows; nothing crosses between users."""

    def round(self, r: int) -> None:
        self.ask("fit")
        batches = torch.stack(self.public.draw(self.protocol.iterations, self.protocol.batch))
        replies = self.ask("contrast", batches=batches)
        self.log("alignment loss", {user: reply["loss"] for user, reply in replies.items()})


class SimCLR(Method):
    """SimCLR on the public set, without any exchange.

    Args:
        tau: temperature τ of NT-Xent.
        rate: factor on the suite's alignment rates.
    """

    revision: ClassVar[int] = 1
    tunable: ClassVar[Ranges] = {"rate": ALIGNMENT_RATE}
    User = ContrastingUser
    Server = SimCLRServer

    def __init__(self, *, tau: float = 0.2, rate: float = 1.0) -> None:
        self.tau, self.rate = positive("simclr", "tau", tau), positive("simclr", "rate", rate)
