"""FedKD: every user's model (mentor) and a small shared net (mentee) teach each other; its updates cross compressed.

Paper: Wu, Wu, Lyu, Huang, Xie, "Communication-efficient federated learning via knowledge distillation", Nature
Communications 13, 2032 (2022), arXiv 2108.13323.
Official code: wuch15/FedKD (run.py, model_bert.py). Also read: TsingZ0/HtFLlib (FedKD).
Equations, mentor t with features H_t, mentee s with features H_s, W_h a learned linear map, on a private batch:
  L_t = L^task_t + [KL(p_s ‖ p_t) + MSE(H_t, W_h H_s)] / (L^task_t + L^task_s), L_s likewise with KL(p_t ‖ p_s);
  what is minimised is L_t + L_s, gradients through all of it (targets and weights too), as in the official code.
  So the adaptive weight is no constant: where task losses get small, its gradient keeps them from falling further.
  Update of a matrix: U Σ V of the fewest singular values with Σ_{k≤K} σ_k² > T·Σ_k σ_k²;
  T grows linearly: T_r = T_start + (r + 1)/R·(T_end − T_start) in round r of 0..R − 1.
Algorithm, each of R rounds:
  1. every user trains mentor and mentee at once: each local step is one step of both on the same batch;
  2. users send the compressed change of the mentee since the last exchange; the server takes the mean, compresses it
     in the same way, and returns it; all add it to what they had, so the mentee is the same everywhere.
Deviations:
  - The mentee is a small convolutional net on raw pixels, one for each label space, since users' models read
    different inputs and its head has the classes. The paper's is a shallower copy of the mentor's transformer, so
    its hidden loss compares layers and attention maps; ours compares the features before the head, as HtFLlib does.
  - KL is summed over classes (mean over items); the code's is also divided by their number. Multi-label tasks: KL of
    each class's yes or no, mean over classes, as is the task loss.
  - A convolution's weight is compressed as the matrix (out, in·height·width). A matrix crosses as it is where its
    factors would be no smaller. The code cuts a matrix that needs all of its singular values down to rank 0, and
    multiplies U and Σ as vectors; HtFLlib compresses weights, not updates. None of this is followed.
  - The mean is weighted by private items, as for all averages here; the code takes the plain one (equal sets).
  - AdamW with the suite's schedule, as for everyone; its moments of the mentee stay with the user.
Left open by the paper: the mentee's size and learning rate (the user's own times `mentee_rate`).
Cost: a local step trains the mentee as well, so it takes longer; the number of steps is everyone's.
Scores are those of the mentor, the own model, as in the official test code.
Users: those with pictures and a partner in their label space. The rest trains locally: with nobody to exchange
updates with, the mentee would be a second private net, which is no federated learning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.errors import UserError
from fedbench.interfaces import UserSpec
from fedbench.method import Method, label_space, partnered
from fedbench.options import positive
from fedbench.ranges import LogRange, Ranges
from fedbench.user import verb
from fedbench_baselines.averaging import load_trainable, trainable
from fedbench_baselines.mentee import MenteeServer, MenteeUser, checked_width, divergence, seeded

SMALLEST = 1e-8
"""Of the sum of task losses that distillation is divided by, since float32 losses can be 0."""


def rank_of(singular: Tensor, energy: float) -> int:
    """The fewest of the descending singular values (K,) whose squares sum to more than `energy` of all."""
    sums = singular.square().cumsum(0)
    return min(len(singular), int((sums <= energy * sums[-1]).sum()) + 1)


def compressed(update: Mapping[str, Tensor], energy: float) -> dict[str, Tensor]:
    """An update as it crosses: float32 factors of every matrix that they make smaller, the rest as it is.

    Args:
        update: tensors by name; those of two and more dimensions are taken as matrices (first, all others).
        energy: share of the sum of squared singular values to keep, more than 0, at most 1.
    """
    message: dict[str, Tensor] = {}
    for name, value in update.items():
        if value.ndim < 2:
            message[name] = value
            continue
        matrix = value.flatten(1)
        u, singular, v = torch.linalg.svd(matrix.double(), full_matrices=False)
        rank = rank_of(singular, energy)
        if rank * (sum(matrix.shape) + 1) >= matrix.numel():
            message[name] = matrix
            continue
        parts = {"U": u[:, :rank], "S": singular[:rank], "V": v[:rank]}
        message |= {f"{name}:{part}": factor.to(torch.float32).contiguous() for part, factor in parts.items()}
    return message


def expanded(message: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The update of `compressed`, its matrices still flat."""
    update: dict[str, Tensor] = {}
    for key, value in message.items():
        name, _, part = key.partition(":")
        if not part:
            update[name] = value
        elif part == "U":
            update[name] = (value * message[f"{name}:S"]) @ message[f"{name}:V"]
    return update


class MentorUser(MenteeUser):
    """Trains its model and the mentee on each other's predictions and features."""

    method: FedKD

    def setup(self) -> None:
        inside, outside = 4 * self.method.width, self.representation.features
        build = seeded(lambda: nn.Linear(inside, outside, bias=False), "fedkd", "map", self.seed, self.name)
        self.map: nn.Module = build.to(self.device)
        self.attach("fedkd", width=self.method.width, factor=self.method.mentee_rate, private=[self.map])
        self.exchanged = {name: value.clone() for name, value in trainable(self.mentee).items()}

    def mutual_loss(self, x: Tensor, pixels: Tensor, targets: Tensor) -> Tensor:
        multi_label = targets.ndim == 2
        features = self.representation.backbone(x)
        mentor = self.head(self.representation.projection(features) if self.head_on_embedding else features)
        mentee_features, mentee = self.mentee(pixels)
        task = self.task.loss(mentor, targets) + self.task.loss(mentee, targets)
        taught = divergence(mentor, mentee, multi_label=multi_label)
        learned = divergence(mentee, mentor, multi_label=multi_label)
        hidden = F.mse_loss(self.map(mentee_features), features)
        return task + (taught + learned + 2 * hidden) / task.clamp_min(SMALLEST)

    @property
    def head_on_embedding(self) -> bool:
        return self.protocol.head == "embedding"

    @verb
    def upload(self, energy: float) -> dict[str, Any]:
        """The compressed change of the mentee since the last exchange; nothing where the user could not join."""
        if not self.joined:
            return {}
        change = {name: value - self.exchanged[name] for name, value in trainable(self.mentee).items()}
        return dict(compressed(change, energy))

    @verb
    def download(self, **mean: Tensor) -> dict[str, Any]:
        """Add the group's mean change to the mentee of the last exchange, and go on from there."""
        change = expanded(mean)
        self.exchanged = {
            name: value + change[name].reshape(value.shape).to(self.device) for name, value in self.exchanged.items()
        }
        load_trainable(self.mentee, self.exchanged)
        return {}

    def set_training(self, mode: bool) -> None:
        super().set_training(mode)
        self.map.train(mode)

    def save(self) -> dict[str, Any]:
        return {**super().save(), "map": self.map.state_dict(), "exchanged": self.exchanged}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.map.load_state_dict(state["map"])
        self.exchanged = {name: value.to(self.device) for name, value in state["exchanged"].items()}


class FedKDServer(MenteeServer):
    """Averages changes of mentees, and compresses the means."""

    method: FedKD

    def key(self, spec: UserSpec) -> str:
        return label_space(spec)

    def round(self, r: int) -> None:
        energy = self.method.energy(r, self.protocol.rounds)
        if r == 0:
            self.ask("join", users=self.partners())
        self.ask("fit")
        replies = self.ask("upload", users=self.partners(), energy=energy)
        means = self.means({user: expanded(reply) for user, reply in replies.items()})
        messages = [(group, compressed(mean, energy)) for group, mean in means]
        self.ask("download", each={user: message for group, message in messages for user in group})


class FedKD(Method):
    """FedKD: adaptive mutual distillation with a small mentee, whose updates are exchanged as truncated SVDs.

    Args:
        energy_start: T_start, share of an update's energy that its singular values keep at the start.
        energy_end: T_end, the same at the end.
        width: channels of the mentee's first convolution, a multiple of 8.
        mentee_rate: factor of the mentee's learning rate on the user's own.
    """

    revision: ClassVar[int] = 1
    tunable: ClassVar[Ranges] = {"mentee_rate": LogRange(0.25, 4.0)}
    User = MentorUser
    Server = FedKDServer

    def __init__(
        self, *, energy_start: float = 0.95, energy_end: float = 0.98, width: int = 16, mentee_rate: float = 1.0
    ) -> None:
        for name, value in (("energy_start", energy_start), ("energy_end", energy_end)):
            if not 0 < value <= 1:
                raise UserError(f"the option '{name}' of fedkd is {value}", expected="more than 0, at most 1")
        self.energy_start, self.energy_end = energy_start, energy_end
        self.width, self.mentee_rate = checked_width("fedkd", width), positive("fedkd", "mentee_rate", mentee_rate)

    def energy(self, r: int, rounds: int) -> float:
        """T_r of round r, numbered from 0."""
        return self.energy_start + (r + 1) / rounds * (self.energy_end - self.energy_start)

    def touches(self, users: Sequence[UserSpec]) -> list[str]:
        return partnered(users, label_space)
