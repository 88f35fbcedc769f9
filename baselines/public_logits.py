"""Outputs on public rows as what crosses: the exchange and the public phase of FedDF, FedMD, FCCL(+) and KT-pFL.

Outputs are a head's logits, of equal meaning for all users of one label space. The public phase trains the whole
model that makes them, with an optimizer of its own: the backbone at the user's alignment rate, the projection at its
projection rate where the head sits on it, the head at its fit rate, all times the method's `rate`. A round has at
most T steps of B public rows in the plain view. Who has nobody to exchange with is never asked, so it trains locally,
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.interfaces import UserSpec
from fedbench.method import Method, ServerProgram, label_space, partnered
from fedbench.ranges import ALIGNMENT_RATE, Ranges
from fedbench.user import UserProgram, verb

Replies = Mapping[str, Mapping[str, Any]]


def probabilities(outputs: Tensor, *, multi_label: bool) -> Tensor:
    """Of C classes: rows that sum to 1, or each class by itself where an item may have any number of them."""
    return outputs.sigmoid() if multi_label else outputs.softmax(-1)


def divergence(outputs: Tensor, target: Tensor, *, multi_label: bool) -> Tensor:
    """KL(target ‖ the distribution that outputs give), in nats, mean over items; outputs and target (B, C).

    Args:
        target: probabilities.
        multi_label: every class is a yes or no of its own; the mean then goes over classes too, as in the task loss.
    """
    if not multi_label:
        return F.kl_div(outputs.log_softmax(1), target, reduction="batchmean")
    yes = F.kl_div(F.logsigmoid(outputs), target, reduction="none")
    no = F.kl_div(F.logsigmoid(-outputs), 1 - target, reduction="none")
    return (yes + no).mean()


class PublicMethod(Method):
    """A method whose users exchange on public rows, by default within each label space."""

    tunable: ClassVar[Ranges] = {"rate": ALIGNMENT_RATE}
    trains_heads: ClassVar[bool] = True
    rate: float

    def key(self, spec: UserSpec) -> str:
        """What users must have in common to exchange."""
        return label_space(spec)

    def touches(self, users: Sequence[UserSpec]) -> list[str]:
        return partnered(users, self.key)


class PublicUser(UserProgram):
    """Tells its outputs on public rows, and steps towards targets for them.

    A subclass says how far outputs are from a target (`distance`) and in which number format outputs cross (`wire`).
    """

    method: PublicMethod
    wire: ClassVar[torch.dtype] = torch.float32

    def setup(self) -> None:
        self.public_optimizer = self.optimizer_of_public_phase()
        self.public_steps = 0
        self._batches = torch.empty(0, self.protocol.batch, dtype=torch.int64)

    def optimizer_of_public_phase(self) -> torch.optim.Optimizer:
        """For the whole model; what gets no gradient, such as a projection that no head sits on, stays as it is."""
        spec, rate, representation = self.participant.spec, self.method.rate, self.representation
        return self._optimizer(
            (representation.backbone.parameters(), spec.align_rate * rate),
            (representation.projection.parameters(), spec.projection_rate * rate),
            (self.head.parameters(), spec.fit_rate * rate),
        )

    @property
    def multi_label(self) -> bool:
        """Whether an item may have any number of classes."""
        targets = self.participant.train.samples.targets
        return targets is not None and targets.ndim == 2

    def probabilities(self, outputs: Tensor) -> Tensor:
        """What outputs say of the user's classes, (B, C)."""
        return probabilities(outputs, multi_label=self.multi_label)

    def divergence(self, outputs: Tensor, target: Tensor) -> Tensor:
        """KL from probabilities to outputs, both (B, C), in nats."""
        return divergence(outputs, target, multi_label=self.multi_label)

    def public_rows(self, batch: Tensor) -> Tensor:
        """Public rows (B,) in the plain view, as the model reads them."""
        return self.participant.public.rows(batch, 0)

    @verb
    def predict(self, batches: Tensor) -> dict[str, Any]:
        """What the model says of public batches, in evaluation mode: (T, B) int64 -> (T, B, C)."""
        self._batches = batches
        self.set_training(False)
        with torch.no_grad():
            outputs = torch.stack([self.message(self.outputs(self.public_rows(batch))) for batch in batches])
        return {"outputs": outputs.to(self.wire)}

    def message(self, outputs: Tensor) -> Tensor:
        """What crosses of outputs (B, C); by default the logits themselves."""
        return outputs

    @verb
    def digest(self, targets: Tensor) -> dict[str, Any]:
        """One gradient step a batch of the last `predict` towards (T, B, C). Replies the mean loss."""
        self.set_training(True)
        total = 0.0
        for batch, target in zip(self._batches, targets.to(self.device, torch.float32), strict=True):
            total += self.public_step(self.distance(self.outputs(self.public_rows(batch)), target))
        return {"loss": total / len(targets)}

    def distance(self, outputs: Tensor, target: Tensor) -> Tensor:
        """The loss of one public batch; outputs with a graph and target (B, C)."""
        raise NotImplementedError

    def public_step(self, loss: Tensor) -> float:
        """One gradient step of the public phase; the loss as a number."""
        self.schedule(self.public_optimizer, self.public_steps / self.protocol.iterations, self.protocol.rounds)
        self.step(self.public_optimizer, loss)
        self.public_steps += 1
        return float(loss.detach())

    def save(self) -> dict[str, Any]:
        return {"public_optimizer": self.public_optimizer.state_dict(), "public_steps": self.public_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.public_optimizer.load_state_dict(state["public_optimizer"])
        self.public_steps = state["public_steps"]


class PublicServer(ServerProgram):
    """Knows who exchanges with whom, and averages what they send."""

    method: PublicMethod

    def partners(self) -> list[str]:
        """The living users that have somebody to exchange with."""
        return partnered([self.specs[user] for user in self.users], self.method.key)

    def draw(self) -> Tensor:
        """The public batches of a round, (T, B) int64."""
        return torch.stack(self.public.draw(self.protocol.iterations, self.protocol.batch))

    def senders(self, replies: Replies, name: str, key: Callable[[UserSpec], str] | None = None) -> list[list[str]]:
        """Those whose reply holds `name`, in groups of equal key; groups of one are left out."""
        groups = [
            [user for user in group if name in replies.get(user, {})] for group in self.groups(key or self.method.key)
        ]
        return [group for group in groups if len(group) > 1]

    def means(self, replies: Replies, name: str, key: Callable[[UserSpec], str] | None = None) -> dict[str, Tensor]:
        """For each sender the mean over its group, itself included, in the number format that was sent."""
        found: dict[str, Tensor] = {}
        for group in self.senders(replies, name, key):
            sent = torch.stack([replies[user][name] for user in group])
            found |= dict.fromkeys(group, sent.float().mean(0).to(sent.dtype))
        return found

    def record(self, name: str, replies: Replies) -> None:
        """Log the losses of a public phase."""
        self.log(name, {user: reply["loss"] for user, reply in replies.items()})
