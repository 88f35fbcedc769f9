"""LG-FedAvg: users keep their representations to themselves and average their heads.

Paper: Liang, Liu, Liu, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", arXiv 2001.01523 (NeurIPS 2019 Workshop on Federated Learning).
Official code: pliang279/LG-FedAvg (main_lg.py). Form for different models: TsingZ0/HtFLlib (LG_FedAvg).
Equations: user n's model is a local part (representation) and a global part θ_g (head); after a local phase of the
task loss over both, θ_g = Σ_n |D^n| θ_g^n / Σ_n |D^n| over the users of one label space.
Algorithm, each of R rounds:
  1. every user trains its whole model on private data, from the heads' mean on;
  2. users send their heads; the server returns the mean of each label space.
Deviations:
  - Only heads of equal input width can be averaged, and features differ in width between models. As HtFLlib brings
    all models to one feature dimension (by pooling), partners put a head of their own on the projection's output, d
    numbers, whatever `head` in the protocol says; all of one label space and seed start from the same head.
  - Weights |D^n| as in HtFLlib; the official code takes the plain mean (of equal sets).
  - No model is trained by FedAvg first (the official code starts from one); heterogeneous models cannot be.
  - Scores come after the local phase that follows an average, as for every method here; HtFLlib scores the mean head.
  - AdamW with the suite's schedule, as for everyone; its moments of the head stay with the user.
Fairness: where the protocol puts heads on features, a partner's model has the projection as one more trained layer
before its head, which Local's model has not, so its change against Local is that of the head's place and of the
averaging together. Control `average=false` keeps the place and exchanges nothing: what averaging gives is the
difference to that row. Where the protocol puts heads on the embedding, the two models are alike.
Users: those with a partner in their label space. The others keep their ordinary head and train locally, bit for bit:
a head at another place would change their score without any collaboration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.interfaces import UserSpec
from fedbench.method import Method, ServerProgram, label_space, partnered
from fedbench.seeds import derive
from fedbench.user import UserProgram, verb
from fedbench_baselines.averaging import load_trainable, trainable, weighted_mean


class HeadSharingUser(UserProgram):
    """Once it has joined, has the shared head on its projection's output instead of its ordinary head."""

    method: LGFedAvg

    def setup(self) -> None:
        spec, classes = self.participant.spec, len(self.participant.train.samples.classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive("lg-fedavg", "head", self.seed, spec.task))
            head = self.task.head(self.protocol.dimension, classes)
        self.shared_head = head.to(self.device)
        self.joined = False
        # Whichever head is not in use gets no gradient, so the optimizer leaves it alone.
        whole = [p for part in (self.representation, self.head, self.shared_head) for p in part.parameters()]
        self.fit_optimizer = self._optimizer((whole, spec.fit_rate))

    @verb
    def join(self) -> dict[str, Any]:
        """Use the shared head from now on."""
        self.joined = True
        return {}

    def outputs(self, x: Tensor) -> Tensor:
        if not self.joined:
            return super().outputs(x)
        projected = self.representation.projection(self.representation.backbone(x))
        return self.shared_head(projected)  # type: ignore[no-any-return]

    @verb
    def upload(self) -> dict[str, Any]:
        """The shared head as trained here, θ_g^n."""
        return dict(trainable(self.shared_head))

    @verb
    def download(self, **mean: Tensor) -> dict[str, Any]:
        """Go on from the mean θ_g."""
        load_trainable(self.shared_head, mean)
        return {}

    def set_training(self, mode: bool) -> None:
        super().set_training(mode)
        self.shared_head.train(mode)

    def save(self) -> dict[str, Any]:
        return {"joined": self.joined, "shared_head": self.shared_head.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.joined = state["joined"]
        self.shared_head.load_state_dict(state["shared_head"])


class LGServer(ServerProgram):
    """Averages heads within each label space."""

    method: LGFedAvg

    def round(self, r: int) -> None:
        if r == 0:
            self.ask("join", users=self.partners())
        self.ask("fit")
        if self.method.average:
            heads = self.ask("upload", users=self.partners())
            self.ask("download", each=self.means(heads))

    def partners(self) -> list[str]:
        """The living users whose label space somebody shares."""
        return partnered([self.specs[user] for user in self.users], label_space)

    def means(self, heads: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """For each user the mean head of its label space, where two users or more sent theirs."""
        found: dict[str, dict[str, Tensor]] = {}
        for group in self.groups(label_space):
            senders = [user for user in group if user in heads]
            if len(senders) > 1:
                sizes = [self.specs[user].train for user in senders]
                mean = weighted_mean([heads[user] for user in senders], sizes)
                found |= dict.fromkeys(senders, mean)
        return found


class LGFedAvg(Method):
    """LG-FedAvg: local representations, averaged heads.

    Args:
        average: false is a control: the same heads at the same place, never averaged.
    """

    revision: ClassVar[int] = 1
    trains_heads: ClassVar[bool] = True
    User = HeadSharingUser
    Server = LGServer

    def __init__(self, *, average: bool = True) -> None:
        self.average = average

    def touches(self, users: Sequence[UserSpec]) -> list[str]:
        return partnered(users, label_space)
