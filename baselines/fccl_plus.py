"""FCCL+: FCCL's correlation of outputs, and similarities between public items, which need no common label space.

Paper: Huang, Ye, Shi, Du, "Generalizable Heterogeneous Federated Cross-Correlation and Instance Similarity Learning",
IEEE Transactions on Pattern Analysis and Machine Intelligence, 2024, arXiv 2309.16286.
Official code: WenkeHuang/FCCL (fccl+/models/fcclplus.py, fccl+/utils/best_args.py).
Equations, F_n the features before the head of user n on a public batch, rows normalised; q_n its predicted
distribution on a private item of class y, at temperature T_l; both means hold the own part:
  S_n = F_n F_nᵀ / τ without its diagonal (B×(B−1)), S̄ = 1/N Σ_n S_n;
  L_pub = L_col (see fccl.py) + ω · 1/B Σ_b KL(softmax(S̄_b) ‖ softmax(S_n,b));
  L_loc = task loss + T_l² · Σ_{c≠y} q_n,c^prev log(q_n,c^prev / q_n,c), n as it was after the last local phase.
Algorithm, each of R rounds:
  1. every user trains its whole model on private data with L_loc;
  2. T iterations on public batches: user n sends Z_n and S_n; the server returns Z̄ and S̄; user n takes one step on
     L_pub.
Deviations:
  - L_col within each label space only, since Z̄ needs equal columns. S̄ is over all users. A user alone in its label
    space gets S̄ alone, which trains its representation model and leaves its head untouched on public data.
  - The first local phase is plain: there is no earlier exchange to remember. The code starts with an exchange.
  - The reply to a step carries the next batch's Z_n and S_n, so that an iteration costs one exchange; features and
    outputs are computed once, with their graph, and reused for the step.
  - Multi-label tasks: the distillation is KL of each absent class's yes or no; present classes count 0 in the mean
    over items and classes, which is the task loss's.
  - The earlier model answers in evaluation mode.
  - AdamW with the suite's schedule instead of Adam; its moments go on, where the code starts anew for each batch.
As in the code, q is a softmax over all classes of which y is then left out, not renormalised.
Left open by the paper: the rates of this form (see public_logits.py).
Cost: a local step computes the outputs of an earlier model as well; the number of steps is everyone's.
Users: all, where there are two or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.interfaces import UserSpec
from fedbench.method import partnered
from fedbench.options import positive
from fedbench.ranges import ALIGNMENT_RATE, Choice, LogRange, Ranges
from fedbench.user import verb
from fedbench_baselines.fccl import RememberingUser, correlation_loss
from fedbench_baselines.public_logits import PublicMethod, PublicServer


def similarities(features: Tensor, tau: float) -> Tensor:
    """Cosines between the B items of a batch over τ, each row without its item: (B, F) -> (B, B - 1)."""
    rows = F.normalize(features, dim=1)
    others = ~torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    return (rows @ rows.T)[others].view(len(rows), -1) / tau


def similarity_loss(own: Tensor, mean: Tensor) -> Tensor:
    """KL(softmax(mean) ‖ softmax(own)), mean over rows; both (B, B - 1)."""
    return F.kl_div(own.log_softmax(1), mean.softmax(1), reduction="batchmean")


def non_target_loss(outputs: Tensor, earlier: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """What the classes that an item has not contribute to KL(earlier ‖ outputs) at a temperature, times its square.

    Args:
        outputs: (B, C), as `earlier`.
        targets: (B,) class numbers, or (B, C) with 1 where an item has the class.
    """
    own, old = outputs / temperature, earlier / temperature
    if targets.ndim == 1:
        absent = 1 - F.one_hot(targets, outputs.shape[1]).to(outputs.dtype)
        each = F.kl_div(own.log_softmax(1), old.log_softmax(1), log_target=True, reduction="none")
        return temperature**2 * (absent * each).sum(1).mean()
    yes = F.kl_div(F.logsigmoid(own), F.logsigmoid(old), log_target=True, reduction="none")
    no = F.kl_div(F.logsigmoid(-own), F.logsigmoid(-old), log_target=True, reduction="none")
    return temperature**2 * ((1 - targets.to(outputs.dtype)) * (yes + no)).mean()


class SimilarityUser(RememberingUser):
    """Moves its similarities, and its outputs where it has partners, towards the means."""

    method: FCCLPlus

    def setup(self) -> None:
        super().setup()
        self._similarity: Tensor | None = None
        self._z: Tensor | None = None

    @verb
    def share(self, batch: Tensor, outputs: bool) -> dict[str, Any]:
        """S_n (B, B - 1) and, if asked, Z_n (B, C) on the round's first batch; the model becomes the previous one."""
        self.remember()
        return self.contribute(batch, outputs=outputs)

    @verb
    def collaborate(self, similarity: Tensor, z: Tensor | None = None, next: Tensor | None = None) -> dict[str, Any]:
        """One step on L_pub towards S̄ and Z̄; replies the loss, and the parts of the next batch."""
        if self._similarity is None:
            raise RuntimeError("collaborate came before share")
        loss = self.method.similarity * similarity_loss(self._similarity, similarity.to(self.device))
        if z is not None and self._z is not None:
            loss = loss + correlation_loss(self._z, z.to(self.device), self.method.off_diagonal)
        reply = {"loss": self.public_step(loss)}
        self._similarity = self._z = None
        return reply if next is None else {**reply, **self.contribute(next, outputs=z is not None)}

    def contribute(self, batch: Tensor, *, outputs: bool) -> dict[str, Any]:
        """What this user sends of a public batch, kept with its graph for the step that follows."""
        self.set_training(True)
        features = self.representation.backbone(self.public_rows(batch))
        if self.protocol.head == "embedding":
            features = self.representation.projection(features)
        self._similarity = similarities(features, self.method.tau)
        reply = {"similarity": self._similarity.detach()}
        if outputs:
            self._z = self.head(features)
            reply["z"] = self._z.detach()
        return reply

    def private_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        if self.previous is None:
            return super().private_loss(x, targets)
        outputs = self.outputs(x)
        earlier = self.recall(self.previous, x)
        return self.task.loss(outputs, targets) + non_target_loss(
            outputs, earlier, targets, self.method.local_temperature
        )


class FCCLPlusServer(PublicServer):
    """Averages similarities over all users, and outputs within each label space, T times a round."""

    def round(self, r: int) -> None:
        self.ask("fit")
        first, *later = self.draw()
        partners = self.partners()
        asked = self.users if len(self.users) > 1 else []  # where failed users are skipped, one may be left
        replies = self.ask("share", each={user: {"outputs": user in partners} for user in asked}, batch=first)
        for following in [*later, None]:
            messages = self.messages(replies)
            common = {} if following is None else {"next": following}
            replies = self.ask("collaborate", each=messages, **common)
            self.record("public loss", replies)

    def messages(self, replies: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Tensor]]:
        """For each user that replied S̄ and, where somebody else of its label space replied too, Z̄."""
        similarity, z = self.means(replies, "similarity", key=everyone), self.means(replies, "z")
        return {
            user: {"similarity": mean, **({"z": z[user]} if user in z else {})} for user, mean in similarity.items()
        }


def everyone(spec: UserSpec) -> str:
    """What users must share to exchange similarities: nothing."""
    return ""


class FCCLPlus(PublicMethod):
    """FCCL+: similarities of public items among all users, FCCL's correlation within each label space.

    Args:
        similarity: ω, weight of the similarity distillation.
        tau: τ of the similarities.
        off_diagonal: λ, weight of the off-diagonal terms of the correlation.
        local_temperature: T_l of the non-target distillation from the model after the last local phase.
        rate: factor on the learning rates of the public phase.
    """

    revision: ClassVar[int] = 1
    tunable: ClassVar[Ranges] = {
        "rate": ALIGNMENT_RATE,
        "similarity": LogRange(0.3, 30.0),
        "tau": Choice((0.02, 0.05, 0.1, 0.2)),
        "local_temperature": Choice((1.0, 3.0)),
    }
    User = SimilarityUser
    Server = FCCLPlusServer

    def __init__(
        self,
        *,
        similarity: float = 3.0,
        tau: float = 0.02,
        off_diagonal: float = 0.0051,
        local_temperature: float = 3.0,
        rate: float = 1.0,
    ) -> None:
        self.similarity, self.tau = positive("fccl+", "similarity", similarity), positive("fccl+", "tau", tau)
        self.off_diagonal = positive("fccl+", "off_diagonal", off_diagonal)
        self.local_temperature = positive("fccl+", "local_temperature", local_temperature)
        self.rate = positive("fccl+", "rate", rate)

    def touches(self, users: Sequence[UserSpec]) -> list[str]:
        return partnered(users, everyone)
