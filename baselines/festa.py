"""FeSTA: one body for all users of an architecture, trained step by step on the sum of their losses; own heads.

Paper: Park, Kim, Kim, Kim, Ye, "Federated Split Task-Agnostic Vision Transformer for COVID-19 CXR Diagnosis", NeurIPS
2021, arXiv 2111.01338.
Official code: none found. Of the paper, only the abstract could be read; the rest is from descriptions of it.
Equations, b the body, h_n the head of user n: in every step, b takes the gradient of Σ_n L_n(h_n ∘ b) on one private
batch of each user, and h_n that of L_n; after each round, heads of one label space are averaged, weighted by |D^n|
(the paper's unifying rounds).
Algorithm, each of R rounds:
  1. as many times as a local phase has steps: users send gradients of the body, the server returns their sum, all
     take one step of body and head;
  2. heads of one label space are averaged.
Before round 0 all of a group get the body of its first user, and the head of the first of their label space.
What holds here: one body that is trained on all tasks at once, tails of their own, averaged now and then within a task.
The own first layers (the paper's heads) are a model's frozen layers, which are the same for all.
What does not hold:
  - The paper's server holds the body; users send it features and get its outputs, and gradients the other way. Here
    every user holds a copy that is equal to the last bit, and gradients of the body cross instead. That is the same
    computation (but for what a model draws at random) at other costs: 4 bytes a body parameter and direction in every
    step. Split learning would send maps of features instead, which depends on the model, so no bytes in the paper's
    format are given.
  - One AdamW with the suite's schedule for body and head, as for everyone, in place of one at the server and one at
    every user; where users of a group have different rates, the body has the lowest.
  - The round is a local phase (see joint_steps.py) and users have as many optimizer steps as in local training. The
    last phase, after the R rounds, is an ordinary local one, as for every method: it personalises the body.
Left open by the paper: weights of the tasks, all 1, so that tasks with a larger loss weigh more in the body.
Control `unify=false`: heads are never averaged.
Users: those that share their architecture with another. The rest trains locally.
"""

from __future__ import annotations

from typing import ClassVar

from fedbench.method import architecture
from fedbench_baselines.joint_steps import JointServer, JointUser
from fedbench_baselines.shared_weights import BODY, HEAD, Key, SharingMethod, architecture_and_labels


class FeSTAServer(JointServer):
    """Sums gradients of bodies, and averages heads."""

    method: FeSTA

    def round(self, r: int) -> None:
        if r == 0:
            self.start_equally()
            self.join([BODY])
        self.joint_phase()
        if self.method.unify:
            heads = self.ask("upload", users=[user for group in self.sharers(HEAD) for user in group], parts=[HEAD])
            self.ask("download", each=self.means(heads))


class FeSTA(SharingMethod):
    """FeSTA: one body trained on the summed losses of an architecture's users, own heads.

    Args:
        unify: average heads within each label space after every round.
    """

    revision: ClassVar[int] = 1
    trains_heads: ClassVar[bool] = True
    User = JointUser
    Server = FeSTAServer

    def __init__(self, *, unify: bool = True) -> None:
        self.unify = unify

    def sharing(self) -> dict[str, Key]:
        return {BODY: architecture, **({HEAD: architecture_and_labels} if self.unify else {})}
