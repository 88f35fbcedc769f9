"""A small net that users of one label space share and train beside their own models: the meme of FML, FedKD's mentee.

Users read different inputs (frozen features of their own trunk, or pixels), so the net reads what all image users
have: the raw pixels of their private pictures. It starts from the same weights for all users that share it. Three
strided convolutions, the first on patches of 4 by 4, take about 4 ms a step on one core (B = 32, 64 px, width 16).

Users without pictures, and users without a partner, never join: they train locally, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.errors import UserError
from fedbench.interfaces import Task, UserSpec
from fedbench.method import ServerProgram, partnered
from fedbench.modules import scaled_pixels
from fedbench.seeds import Coordinate, derive
from fedbench.user import UserProgram, verb
from fedbench_baselines.averaging import weighted_mean

GROUPS = 8

State = Mapping[str, Tensor]


class SmallNet(nn.Module):
    """Pixels -> features: three strided convolutions with group norm, and the mean over the last map.

    Args:
        width: channels of the first convolution; the others double them, so there are 4 * width features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *_convolution(3, width, size=4, stride=4, padding=0),
            *_convolution(width, 2 * width, size=3, stride=2, padding=1),
            *_convolution(2 * width, 4 * width, size=3, stride=2, padding=1),
        )
        self.features = 4 * width

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, H, W, 3) pixels in 0..255 -> (B, features)."""
        features: Tensor = self.net(scaled_pixels(pixels)).mean((2, 3))
        return features


class Mentee(nn.Module):
    """The shared net: a small body, and a head of the task."""

    def __init__(self, body: SmallNet, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """(B, H, W, 3) pixels in 0..255 -> features (B, F) and outputs (B, C)."""
        features = self.body(pixels)
        return features, self.head(features)


def checked_width(owner: str, width: int) -> int:
    """The value of an option `width`.

    Raises:
        UserError: group norm cannot divide it.
    """
    if width < GROUPS or width % GROUPS:
        raise UserError(f"the option 'width' of {owner} is {width}", expected=f"a positive multiple of {GROUPS}")
    return width


def seeded(build: Callable[[], Any], *coordinates: Coordinate) -> Any:
    """A module whose initial weights are a function of the coordinates alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(*coordinates))
        return build()


def small_mentee(name: str, task: Task, spec: UserSpec, classes: int, *, width: int, seed: int) -> Mentee:
    """A shared net with the initial weights of its method and seed; those of the head depend on the task too."""
    body: SmallNet = seeded(lambda: SmallNet(width), name, "body", seed)
    return Mentee(body, seeded(lambda: task.head(body.features, classes), name, "head", seed, spec.task))


def divergence(student: Tensor, teacher: Tensor, *, multi_label: bool) -> Tensor:
    """KL(teacher ‖ student) in nats between outputs (B, C), mean over items, with a graph for both.

    Args:
        multi_label: every class is a yes or no of its own; the mean then goes over classes too, as in the task loss.
    """
    if not multi_label:
        return F.kl_div(student.log_softmax(1), teacher.log_softmax(1), log_target=True, reduction="batchmean")
    yes = teacher.sigmoid() * (F.logsigmoid(teacher) - F.logsigmoid(student))
    no = (-teacher).sigmoid() * (F.logsigmoid(-teacher) - F.logsigmoid(-student))
    return (yes + no).mean()


class MenteeUser(UserProgram):
    """Once it has joined, trains the shared net beside its own model: both see every private batch.

    Both nets are in the fit optimizer, so that a step of one is a step of the other. The loss that `fit` replies is the
    sum of both; scores are those of the own model.
    """

    def attach(self, name: str, *, width: int, factor: float, private: Sequence[nn.Module] = ()) -> None:
        """Build the shared net and put it into the local phase; call it in `setup`.

        Args:
            name: of the method, a coordinate of the initial weights.
            factor: of the shared net's learning rate on the user's fit rate.
            private: further modules that train at the user's fit rate and stay here.
        """
        spec, samples = self.participant.spec, self.participant.train.samples
        mentee = small_mentee(name, self.task, spec, len(samples.classes), width=width, seed=self.seed)
        self.mentee = mentee.to(self.device)
        own = [p for module in (self.representation, self.head, *private) for p in module.parameters()]
        self.fit_optimizer = self._optimizer((own, spec.fit_rate), (self.mentee.parameters(), spec.fit_rate * factor))
        self.joined = False
        self._pixels = torch.empty(0)

    @verb
    def join(self) -> dict[str, Any]:
        """Take part from now on, where there are pictures that the shared net can read."""
        self.joined = "image" in self.participant.train.samples.inputs
        return {"joined": self.joined}

    def private_batch(self) -> tuple[Tensor, Tensor]:
        """The next private batch, the same as in local training; its pixels are kept for the shared net."""
        data = self.participant.train
        size = min(self.protocol.fit_batch, len(data))
        while len(self._order) < size:
            order = torch.randperm(len(data), generator=self.fit_generator)
            self._order = torch.cat([self._order, order])
        rows, self._order = self._order[:size], self._order[size:]
        view = torch.randint(data.views, (size,), generator=self.fit_generator)
        if self.joined:
            pixels = data.samples.inputs["image"][rows.numpy(), view.numpy()]
            self._pixels = torch.from_numpy(pixels).to(self.device)
        return data.rows(rows, view), data.targets(rows)

    def private_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of both nets on one private batch; the task's own before the user has joined."""
        if not self.joined:
            return super().private_loss(x, targets)
        return self.mutual_loss(x, self._pixels, targets)

    def mutual_loss(self, x: Tensor, pixels: Tensor, targets: Tensor) -> Tensor:
        """The sum of the own model's loss and the shared net's; (B, ...) as the model reads it, (B, H, W, 3) pixels."""
        raise NotImplementedError

    def set_training(self, mode: bool) -> None:
        super().set_training(mode)
        self.mentee.train(mode)

    def save(self) -> dict[str, Any]:
        return {"joined": self.joined, "mentee": self.mentee.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.joined = state["joined"]
        self.mentee.load_state_dict(state["mentee"])


class MenteeServer(ServerProgram):
    """Knows who shares a net, and averages what they send."""

    def key(self, spec: UserSpec) -> str:
        """What users must have in common to share a net."""
        raise NotImplementedError

    def partners(self) -> list[str]:
        """The living users that have somebody to share a net with."""
        return partnered([self.specs[user] for user in self.users], self.key)

    def means(self, states: Mapping[str, State]) -> list[tuple[list[str], dict[str, Tensor]]]:
        """Each group that sent two states or more, and the mean of what it sent, weighted by private items."""
        senders = [[user for user in group if states.get(user)] for group in self.groups(self.key)]
        return [
            (group, weighted_mean([states[user] for user in group], [self.specs[user].train for user in group]))
            for group in senders
            if len(group) > 1
        ]


def _convolution(channels: int, out: int, *, size: int, stride: int, padding: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels, out, size, stride, padding, bias=False)
    return convolution, nn.GroupNorm(GROUPS, out), nn.ReLU()
