"""Class prototypes as what crosses: the exchange and the local phase of FedProto and FedTGP.

A prototype is the mean embedding of a user's private items of one class, a d-vector of length 1 at most. Items of a
multi-label task count for each class that they have. Prototypes go up and down as the rows (K, d) of K classes in
class order and a mask (C,) that says which classes these are.

A local phase with global prototypes adds λ times their squared distance to the embeddings. It trains the projection
together with everything else: the fit optimizer holds the whole representation model, at the user's fit rate. Where
the head sits on features nothing but this term reaches the projection, so the first prototypes, which come after a
phase without any, are those of its initial weights.

Users without a partner in their label space are asked for nothing but plain local phases: they train locally, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.interfaces import UserSpec
from fedbench.method import Method, ServerProgram, label_space, partnered
from fedbench.user import UserProgram, verb

Prototypes = Mapping[str, Tensor]
"""`prototypes` (K, d) of the K classes that the mask `classes` (C,) names; a user's may have `counts` (K,) of items."""


def memberships(targets: Tensor, classes: int) -> Tensor:
    """1 where an item has a class, else 0: float32 (B, C) of class numbers (B,) or of zeros and ones (B, C)."""
    members = F.one_hot(targets, classes) if targets.ndim == 1 else targets
    return members.float()


def class_means(z: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of rows (N, d) over the items of each class that has any: (K, d), and how many items (C,) int64."""
    counts = members.sum(0)
    owned = counts > 0
    return (members.T @ z)[owned] / counts[owned].unsqueeze(1), counts.long()


def squared_distance(z: Tensor, prototypes: Tensor, members: Tensor) -> Tensor:
    """Squared distance of embeddings to the prototypes of their classes, mean over items.

    Args:
        z: (B, d), with a graph.
        prototypes: (K, d).
        members: (B, K); an item of several classes counts the mean over them, one of none counts 0.
    """
    shares = members / members.sum(1, keepdim=True).clamp_min(1)
    distances = (z.unsqueeze(1) - prototypes).square().sum(-1)
    return (shares * distances).sum(1).mean()


class PrototypeMethod(Method):
    """A method whose users exchange class prototypes within each label space."""

    pull: float

    def touches(self, users: Sequence[UserSpec]) -> list[str]:
        return partnered(users, label_space)


class PrototypeUser(UserProgram):
    """Sends its class prototypes, and stays near the global ones in local training."""

    method: PrototypeMethod

    def setup(self) -> None:
        self._prototypes: Tensor | None = None
        self._classes = torch.empty(0, dtype=torch.bool)
        self._distance = torch.zeros(())

    @verb
    def fit(self, prototypes: Tensor | None = None, classes: Tensor | None = None) -> dict[str, Any]:
        """The local phase, near global prototypes where there are any. Replies the mean loss and squared distance.

        Args:
            prototypes: (K, d).
            classes: (C,) bool, the K classes that they are of.
        """
        if prototypes is None or classes is None:
            return super().fit()
        self._prototypes, self._classes = prototypes.to(self.device), classes.to(self.device)
        self._distance = torch.zeros((), device=self.device)
        reply = super().fit()
        self._prototypes = None
        return {**reply, "distance": float(self._distance) / self.fit_steps()}

    def private_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The task's loss, plus λ times the squared distance to the global prototypes."""
        if self._prototypes is None:
            return super().private_loss(x, targets)
        features = self.representation.backbone(x)
        projected = self.representation.projection(features)
        outputs = self.head(projected if self.protocol.head == "embedding" else features)
        members = memberships(targets, len(self._classes))[:, self._classes]
        distance = squared_distance(F.normalize(projected, dim=-1), self._prototypes, members)
        self._distance += distance.detach()
        return self.task.loss(outputs, targets) + self.method.pull * distance

    @verb
    def summarise(self, counts: bool = False) -> dict[str, Any]:
        """The prototypes of all classes of which there are private items, in the plain view, in evaluation mode.

        Args:
            counts: tell as well of how many items each is the mean.
        """
        data = self.participant.train
        rows = torch.arange(len(data))
        batches = torch.split(rows, self.protocol.eval_batch)  # type: ignore[no-untyped-call]
        self.set_training(False)
        with torch.no_grad():
            parts = [self.representation(data.rows(batch, 0)) for batch in batches]
        self.set_training(True)
        members = memberships(data.targets(rows), len(data.samples.classes))
        prototypes, numbers = class_means(torch.cat(parts), members)
        owned = numbers > 0
        reply = {"prototypes": prototypes, "classes": owned}
        return {**reply, "counts": numbers[owned]} if counts else reply


class PrototypeServer(ServerProgram):
    """Makes global prototypes of what users send, one set for each label space."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.prototypes: dict[str, Prototypes] = {}

    def round(self, r: int) -> None:
        self.train_locally()
        sent = self.ask("summarise", users=self.partners(), **self.request())
        self.prototypes = {}
        for group in self.groups(label_space):
            senders = [user for user in group if user in sent and len(sent[user]["prototypes"])]
            if len(senders) > 1:
                found = self.globals_of(senders, [sent[user] for user in senders])
                self.prototypes[label_space(self.specs[senders[0]])] = found

    def finish(self) -> None:
        self.train_locally()

    def train_locally(self) -> None:
        """The local phase of everyone, near the last global prototypes of its label space."""
        replies = self.ask(
            "fit", each={user: self.prototypes.get(label_space(self.specs[user]), {}) for user in self.users}
        )
        distances = {user: reply["distance"] for user, reply in replies.items() if "distance" in reply}
        self.log("prototype distance", distances)

    def partners(self) -> list[str]:
        """The living users whose label space somebody shares."""
        return partnered([self.specs[user] for user in self.users], label_space)

    def request(self) -> dict[str, Any]:
        """What users are asked to tell beside their prototypes."""
        return {}

    def globals_of(self, users: Sequence[str], sent: Sequence[Prototypes]) -> Prototypes:
        """The global prototypes of a label space, of what two or more of its users sent."""
        raise NotImplementedError

    def save(self) -> dict[str, Any]:
        return {"prototypes": self.prototypes}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.prototypes = dict(state["prototypes"])
