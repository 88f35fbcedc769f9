"""FCCL: users correlate their outputs on public data column by column, and remember what they knew while they train.

Paper: Huang, Ye, Du, "Learn From Others and Be Yourself in Heterogeneous Federated Learning", CVPR 2022.
Official code: WenkeHuang/FCCL (fccl+/models/fccl.py, the later of two versions).
Equations, Z_n the outputs of user n on a public batch (B×C), Z̄ = 1/N Σ_n Z_n, own outputs included, both with columns
standardised over the batch; q_n its predicted distribution on private data:
  M = Z_nᵀ Z̄ / B;   L_col = Σ_u (M_uu − 1)² + λ Σ_{u≠v} (M_uv + 1)², λ = 0.0051, so off-diagonals are pushed to −1;
  L_loc = task loss + KL(q_n^prev ‖ q_n) + KL(q_n^pre ‖ q_n), n as it was after the last local phase, and after the
  first ("pretrained").
Algorithm, each of R rounds:
  1. every user trains its whole model on private data with L_loc;
  2. T iterations on public batches: user n sends Z_n; the server returns Z̄; user n takes one step on L_col.
Deviations:
  - Users are grouped by label space, since Z̄ needs equal columns. `on = "embedding"` (ours, "FCCL-rep") instead
    correlates the d columns of the projection's output, before it is normalised, as logits are not either: then all
    users are one group, only the representation model is trained on public data, with the alignment rates, and the
    head is untouched there. Local training is as in FCCL.
  - The pretrained model is the one after the first local phase, which is plain, instead of 50 epochs before round 0.
  - The reply to a step carries the next batch's Z_n, so that an iteration costs one exchange; it is computed once,
    with its graph, and reused for the step.
  - Multi-label tasks: KL of each class's yes or no, mean over classes, as is the task loss. L_col is the same.
  - A column that is constant over a batch counts as zero instead of dividing by zero.
  - Earlier models answer in evaluation mode, as in the older version of the code.
  - AdamW with the suite's schedule instead of Adam; its moments go on, where the code starts anew for each batch.
Left open by the paper: the rates of this form (see public_logits.py).
Cost: a local step computes the outputs of two earlier models as well; the number of steps is everyone's.
Users: those with a partner in their label space (`on = "embedding"`: all). The rest trains locally, without the KL
terms too: these keep what an exchange taught, or would have made one forget, and there was none. With them, the score
of a user alone would change by self-distillation, which is no collaboration.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedbench.errors import UserError
from fedbench.interfaces import UserSpec
from fedbench.method import label_space
from fedbench.options import positive
from fedbench.ranges import ALIGNMENT_RATE, Choice, LogRange, Ranges
from fedbench.user import Representation, verb
from fedbench_baselines.public_logits import PublicMethod, PublicServer, PublicUser

Whole = tuple[Representation, nn.Module]
"""A representation model and a head."""


def standardised(z: Tensor) -> Tensor:
    """(B, C) with columns of mean 0 and (unbiased) deviation 1; a constant column becomes 0."""
    deviation = z.std(0)
    return (z - z.mean(0)) / torch.where(deviation > 1e-6, deviation, torch.inf)


def correlation_loss(z: Tensor, mean: Tensor, off_diagonal: float) -> Tensor:
    """L_col of own outputs and the mean's, both (B, C); off_diagonal is λ."""
    matrix = standardised(z).T @ standardised(mean) / len(z)
    diagonal = matrix.diagonal()
    others = (matrix + 1).square().sum() - (diagonal + 1).square().sum()
    return (diagonal - 1).square().sum() + off_diagonal * others


class RememberingUser(PublicUser):
    """Can answer as its own model did after the last local phase, once it has taken part in an exchange."""

    def setup(self) -> None:
        super().setup()
        self.previous: Whole | None = None

    def remember(self) -> None:
        """Keep the model as it is now."""
        self.previous = self.frozen_copy()

    def frozen_copy(self) -> Whole:
        """The model as it is now, in evaluation mode, without gradients."""
        representation, head = copy.deepcopy(self.representation), copy.deepcopy(self.head)
        for module in (representation, head):
            module.eval().requires_grad_(False)
        return representation, head

    @torch.no_grad()
    def recall(self, model: Whole, x: Tensor) -> Tensor:
        """What an earlier model makes of (B, ...): outputs (B, C)."""
        current = self.representation, self.head
        self.representation, self.head = model
        try:
            return self.outputs(x)
        finally:
            self.representation, self.head = current

    def save(self) -> dict[str, Any]:
        return {**super().save(), "previous": packed(self.previous)}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.previous = self.unpacked_copy(state["previous"])

    def unpacked_copy(self, state: list[dict[str, Tensor]] | None) -> Whole | None:
        """The earlier model that `packed` made a state of."""
        if state is None:
            return None
        model = self.frozen_copy()
        for module, values in zip(model, state, strict=True):
            module.load_state_dict(values)
        return model


def packed(model: Whole | None) -> list[dict[str, Tensor]] | None:
    """An earlier model as a state for the checkpoint."""
    return None if model is None else [dict(module.state_dict()) for module in model]


class CorrelatingUser(RememberingUser):
    """Correlates its outputs or embedding with the mean, and distils from its earlier models while it trains."""

    method: FCCL

    def setup(self) -> None:
        super().setup()
        self.pretrained: Whole | None = None
        self._z: Tensor | None = None

    def optimizer_of_public_phase(self) -> torch.optim.Optimizer:
        if self.method.on == "embedding":
            return self.alignment_optimizer(factor=self.method.rate)
        return super().optimizer_of_public_phase()

    @verb
    def share(self, batch: Tensor) -> dict[str, Any]:
        """Z_n on the round's first public batch, (B, C) or (B, d); the model as it is becomes the previous one."""
        self.remember()
        if self.pretrained is None:
            self.pretrained = self.previous
        return self.contribute(batch)

    @verb
    def correlate(self, mean: Tensor, next: Tensor | None = None) -> dict[str, Any]:
        """One step on L_col towards the mean (B, C) or (B, d); replies the loss, and Z_n on the next batch."""
        if self._z is None:
            raise RuntimeError("correlate came before share")
        loss = self.public_step(correlation_loss(self._z, mean.to(self.device), self.method.off_diagonal))
        self._z = None
        return {"loss": loss} if next is None else {"loss": loss, **self.contribute(next)}

    def contribute(self, batch: Tensor) -> dict[str, Any]:
        """Z_n on a public batch, kept with its graph for the step that follows."""
        self.set_training(True)
        x = self.public_rows(batch)
        if self.method.on == "embedding":
            self._z = self.representation.projection(self.representation.backbone(x))
        else:
            self._z = self.outputs(x)
        return {"z": self._z.detach()}

    def private_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        outputs = self.outputs(x)
        loss = self.task.loss(outputs, targets)
        for model, weight in ((self.previous, self.method.inter), (self.pretrained, self.method.intra)):
            if model is not None and weight > 0:
                loss = loss + weight * self.divergence(outputs, self.probabilities(self.recall(model, x)))
        return loss

    def save(self) -> dict[str, Any]:
        return {**super().save(), "pretrained": packed(self.pretrained)}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.pretrained = self.unpacked_copy(state["pretrained"])


class FCCLServer(PublicServer):
    """Averages outputs, T times a round."""

    def round(self, r: int) -> None:
        self.ask("fit")
        first, *later = self.draw()
        replies = self.ask("share", users=self.partners(), batch=first)
        for following in [*later, None]:
            means = self.means(replies, "z")
            common = {} if following is None else {"next": following}
            replies = self.ask("correlate", each={user: {"mean": mean} for user, mean in means.items()}, **common)
            self.record("correlation loss", replies)


class FCCL(PublicMethod):
    """FCCL: cross-correlation of outputs on public rows, and distillation from earlier models on private ones.

    Args:
        on: `"logits"`: outputs are correlated within each label space; `"embedding"`: the projection, among all users.
        off_diagonal: λ, weight of the off-diagonal terms.
        inter: weight of the distillation from the model after the last local phase.
        intra: weight of the distillation from the model after the first local phase.
        rate: factor on the learning rates of the public phase.
    """

    revision: ClassVar[int] = 1
    tunable: ClassVar[Ranges] = {
        "rate": ALIGNMENT_RATE,
        "off_diagonal": LogRange(0.0005, 0.05),
        "inter": Choice((0.0, 0.3, 1.0)),
        "intra": Choice((0.0, 0.3, 1.0)),
    }
    User = CorrelatingUser
    Server = FCCLServer

    def __init__(
        self,
        *,
        on: Literal["logits", "embedding"] = "logits",
        off_diagonal: float = 0.0051,
        inter: float = 1.0,
        intra: float = 1.0,
        rate: float = 1.0,
    ) -> None:
        for name, value in (("inter", inter), ("intra", intra)):
            if not 0 <= value < float("inf"):
                raise UserError(f"the option '{name}' of fccl is {value}", expected="a finite number, 0 or more")
        self.on, self.inter, self.intra = on, inter, intra
        self.off_diagonal = positive("fccl", "off_diagonal", off_diagonal)
        self.rate = positive("fccl", "rate", rate)

    def key(self, spec: UserSpec) -> str:
        return label_space(spec) if self.on == "logits" else ""
