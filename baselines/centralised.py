"""Centralised training: one body for all users of an architecture, trained on all their data. A reference, no method.

Paper: none; the usual reference of federated learning, here as multi-task training. It shows what the data would give
if it lay in one place, under the suite's model and number of steps; nothing in it respects that data is private.
Equations, b the body, h_n the head of user n: in every step, b takes the gradient of Σ_n L_n(h_n ∘ b) on one batch of
each user's private data, and h_n that of L_n.
Algorithm, all R + 1 phases alike: as many optimizer steps on that sum as a local phase has. Before, all of a group get
the body of its first user.
How it is computed: summing the gradients of all users and taking the same step everywhere is training on all data in
one place, on batches of which every user gives its share (see joint_steps.py). So no private row is sent anywhere. Its
bytes are those of this computation, 4 for each shared parameter, direction and step; whoever centralises would send
every private row once instead. They say nothing about a federated method.
What differs from FeSTA here, which also trains one body on summed losses: the last phase is a joint one as well, so no
user ever trains its body alone, and all have one body in the end; and heads are never averaged.
Option `heads="task"`: one head for each label space, trained on the data of all its users in every step, as if they
had pooled their labels too; equal start.
Budget: as many optimizer steps as in local training, (R + 1)·steps, each on as many times as many rows as there are
users. Every user computes on as many rows as in local training.
Left open: weights of the tasks, all 1, so that tasks with a larger loss, and with more users, weigh more in the body.
Users: those that share their architecture with another; one body for all cannot have several architectures. The rest
trains locally.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from fedbench.method import architecture
from fedbench_baselines.joint_steps import JointServer, JointUser
from fedbench_baselines.shared_weights import BODY, HEAD, Key, SharingMethod, architecture_and_labels


class CentralServer(JointServer):
    """Sums the gradients of everything that is shared, in every step of every phase."""

    def round(self, r: int) -> None:
        if r == 0:
            self.start_equally()
            self.join(list(self.method.sharing()))
        self.joint_phase()

    def finish(self) -> None:
        self.joint_phase()


class Centralised(SharingMethod):
    """Reference: one body trained on all data of an architecture's users.

    Args:
        heads: `"own"`: one head for each user; `"task"`: one for each label space, trained on all its users' data.
    """

    revision: ClassVar[int] = 1
    trains_heads: ClassVar[bool] = True
    reference: ClassVar[bool] = True
    """A bound to compare with, not a federated method: boards mark it."""
    User = JointUser
    Server = CentralServer

    def __init__(self, *, heads: Literal["own", "task"] = "own") -> None:
        self.heads = heads

    def sharing(self) -> dict[str, Key]:
        return {BODY: architecture, **({HEAD: architecture_and_labels} if self.heads == "task" else {})}
