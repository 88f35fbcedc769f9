"""FedMuscle: contrastive alignment of different models on a public set.

Paper: "Toward Enhancing Representation Learning in Federated Multi-Task Settings", ICLR 2026, arXiv 2602.01626.
Official code: none published with the paper; equations after the paper.
Algorithm, each of R rounds:
  1. every user n trains its whole model θ^n on private data;
  2. T iterations on public batches of B rows: user n sends Z^n (B×d, unit rows); the server samples M of the other
     users for each user; user n takes one gradient step on the alignment loss, on its representation model w^n only.
Deviations:
  - The server forwards the M raw matrices instead of the B^M tuple sums S^n and weights α: the same loss and
    gradient, linear instead of exponential bytes (the exact contraction is in the loss).
  - The reply to `align` carries the embeddings of the next batch, so that an iteration costs one exchange; they are
    computed once, with their graph, and reused for the gradient step.
Left open by the paper, hence options of the suite: R, local steps, T, both learning rates.
Control `shuffle`: every user's public rows are permuted differently, so that the same row number names different
items: same cost, same loss, nothing to learn from others.
Users: all that can read the public set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedbench.interfaces import Protocol
from fedbench.method import Method, ServerProgram
from fedbench.options import positive
from fedbench.ranges import ALIGNMENT_RATE, Ranges
from fedbench.seeds import torch_generator
from fedbench.user import UserProgram, verb


class AligningUser(UserProgram):
    """Embeds public batches, and steps towards what the others embedded."""

    method: FedMuscle

    def setup(self) -> None:
        self.loss = self.method.create_loss().to(self.device)
        self.align_optimizer = self.alignment_optimizer(self.loss, factor=self.method.rate)
        self.steps = 0
        self._z: Tensor | None = None
        self._rows: Tensor | None = None
        self.view_generator = torch_generator("views", self.seed, self.name)
        if self.method.shuffle:
            generator = torch_generator("shuffle", self.seed, self.name)
            self._rows = torch.randperm(len(self.participant.public), generator=generator)

    @verb
    def represent(self, batch: Tensor) -> dict[str, Any]:
        """The embeddings Z^n of a public batch, kept with their graph for the step that follows."""
        self.set_training(True)
        rows = batch if self._rows is None else self._rows[batch]
        self._z = self.embed(rows, self.views(len(rows)))
        return {"z": self._z.detach()}

    def views(self, count: int) -> Tensor | int:
        """One view for each of `count` rows: drawn by each user for itself, or the plain one."""
        if self.method.views == "plain":
            return 0
        return torch.randint(self.participant.public.views, (count,), generator=self.view_generator)

    @verb
    def align(self, others: Tensor, next: Tensor | None = None) -> dict[str, Any]:
        """One gradient step of w^n on the alignment loss; replies the loss and the next batch's embeddings."""
        if self._z is None:
            raise RuntimeError("align came before represent")
        done = self.steps / self.protocol.iterations
        self.schedule(self.align_optimizer, done, self.protocol.rounds)
        loss = self.loss(self._z, others.to(self.device))
        self.step(self.align_optimizer, loss)
        self.steps += 1
        self._z = None
        reply = {"loss": float(loss.detach())}
        return reply if next is None else {**reply, **self.represent(next)}

    def save(self) -> dict[str, Any]:
        return {
            "loss": self.loss.state_dict(),
            "align_optimizer": self.align_optimizer.state_dict(),
            "steps": self.steps,
            "view_generator": self.view_generator.get_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.loss.load_state_dict(state["loss"])
        self.align_optimizer.load_state_dict(state["align_optimizer"])
        self.steps = state["steps"]
        self.view_generator.set_state(state["view_generator"])


class MuscleServer(ServerProgram):
    """Forwards to each user the public embeddings of M sampled others, T times a round."""

    def round(self, r: int) -> None:
        T, B, M = self.protocol.iterations, self.protocol.batch, self.protocol.others
        self.ask("fit")
        if len(self.users) < 2:  # where failed users are skipped, the last one has nobody to learn from
            return
        batches = self.public.draw(T, B)
        z = {user: reply["z"] for user, reply in self.ask("represent", batch=batches[0]).items()}
        for t in range(T):
            sampled = {user: self.sample_others(user, M) for user in self.users}
            messages: dict[str, dict[str, Any]] = {
                user: {"others": torch.stack([z[other] for other in others])} for user, others in sampled.items()
            }
            if t + 1 < T:
                for message in messages.values():
                    message["next"] = batches[t + 1]
            replies = self.ask("align", each=messages)
            z = {user: reply["z"] for user, reply in replies.items() if "z" in reply}
            self.record(replies, {user: len(others) for user, others in sampled.items()})

    def record(self, replies: Mapping[str, Mapping[str, Any]], others: Mapping[str, int]) -> None:
        """Log the alignment loss and, where the loss has one, the paper's bound M·log B − L, M = others[user]."""
        losses = {user: reply["loss"] for user, reply in replies.items()}
        self.log("alignment loss", losses)
        bounds = {
            user: self.reference.bound(loss, batch=self.protocol.batch, others=others[user])
            for user, loss in losses.items()
        }
        self.log("paper's bound", {user: bound for user, bound in bounds.items() if bound is not None})

    @property
    def reference(self) -> Any:
        """A loss object that only answers for its bound."""
        if not hasattr(self, "_reference"):
            self._reference = self.method.create_loss()
        return self._reference


class FedMuscle(Method):
    """FedMuscle: Muscle, Gramian, pairwise or your own loss, in the same algorithm.

    Args:
        loss: the alignment loss; its own options are written `loss.tau` and so on.
        views: `"plain"`: all users see the plain picture; `"own"`: each draws one of an item's augmented views.
        shuffle: control: permute the public rows differently for each user.
        rate: factor on the suite's alignment rates.
    """

    revision: ClassVar[int] = 1
    tunable: ClassVar[Ranges] = {"rate": ALIGNMENT_RATE}
    User = AligningUser
    Server = MuscleServer

    def __init__(
        self,
        *,
        loss: str = "muscle",
        views: Literal["own", "plain"] = "plain",
        shuffle: bool = False,
        rate: float = 1.0,
    ) -> None:
        self.loss, self.views, self.shuffle = loss, views, shuffle
        self.rate = positive("fedmuscle", "rate", rate)

    def paper_bytes(self, protocol: Protocol, users: int) -> int:
        """T iterations of Z^n up, S^n (B^M × d) and α (B^M) down, float32, for every user."""
        tuples: int = protocol.batch**protocol.others
        up = protocol.batch * protocol.dimension
        down = tuples * protocol.dimension + tuples
        return 4 * users * protocol.iterations * (up + down)
