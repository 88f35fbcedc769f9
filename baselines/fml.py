"""FML, federated mutual learning: every user's model and a small shared net teach each other on private data.

Paper: Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu, "Federated Mutual Learning", arXiv 2006.16765; journal
version "Federated mutual learning: a collaborative machine learning method for heterogeneous data, models, and
objectives", Frontiers of Information Technology and Electronic Engineering, 2023.
Official code: ZJU-DAI/Federated-Mutual-Learning (Trainer.py, Node.py, Args.py). Also read: TsingZ0/HtFLlib (FML).
Equations, own model θ^n, meme model φ^n, a private batch, p = predicted distribution, targets of KL detached:
  L(θ^n) = α·task loss(θ^n) + (1 − α)·KL(p_φ ‖ p_θ),   L(φ^n) = β·task loss(φ^n) + (1 − β)·KL(p_θ ‖ p_φ).
Algorithm, each of R rounds:
  1. every user trains θ^n and φ^n at once: each local step is one step of both on the same batch;
  2. users send φ^n; the server returns the mean over the group, from which the next local phase starts.
Deviations:
  - The meme is a small convolutional net on raw pixels, since users' models read different inputs.
  - One meme for each label space, since the meme's head has its classes. `share = "body"` is the paper's answer to
    users of different tasks: all users share the meme's convolutions, and each keeps a head of its own on them.
  - The mean is weighted by private items, as for all averages here; the code takes the plain one (equal sets).
  - AdamW with the suite's schedule, as for everyone, instead of SGD; its moments of the meme stay with the user,
    where the code starts a new optimizer each round.
  - Multi-label tasks: KL of each class's yes or no, mean over classes, as is the task loss.
  - HtFLlib averages KL over classes too and defaults to α = β = 1, which turns mutual learning off: not followed.
Left open by the paper: α, β (0.5, the code's), the meme's size and learning rate (the user's own times `meme_rate`).
Cost: a local step trains the meme as well, so it takes longer; the number of steps is everyone's.
Scores are those of the own model θ^n, which is what a user deploys.
Users: those with pictures and a partner in their label space (`share = "body"`: all with pictures). The rest trains
locally: with nobody to average with, the meme would be a second private net, which is no federated learning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedbench.errors import UserError
from fedbench.interfaces import UserSpec
from fedbench.method import Method, label_space, partnered
from fedbench.options import positive
from fedbench.ranges import Choice, LogRange, Ranges
from fedbench.user import verb
from fedbench_baselines.averaging import load_trainable, trainable
from fedbench_baselines.mentee import MenteeServer, MenteeUser, checked_width, divergence


class MutualUser(MenteeUser):
    """Trains its model and the meme on each other's predictions."""

    method: FML

    def setup(self) -> None:
        self.attach("fml", width=self.method.width, factor=self.method.meme_rate)
        self.shared = self.mentee if self.method.share == "model" else self.mentee.body

    def mutual_loss(self, x: Tensor, pixels: Tensor, targets: Tensor) -> Tensor:
        alpha, beta, multi_label = self.method.alpha, self.method.beta, targets.ndim == 2
        own, meme = self.outputs(x), self.mentee(pixels)[1]
        to_own = divergence(own, meme.detach(), multi_label=multi_label)
        to_meme = divergence(meme, own.detach(), multi_label=multi_label)
        own_loss = alpha * self.task.loss(own, targets) + (1 - alpha) * to_own
        meme_loss = beta * self.task.loss(meme, targets) + (1 - beta) * to_meme
        return own_loss + meme_loss

    @verb
    def upload(self) -> dict[str, Any]:
        """The weights of the meme, or of its body; nothing where the user could not join."""
        return trainable(self.shared) if self.joined else {}

    @verb
    def download(self, **mean: Tensor) -> dict[str, Any]:
        """Go on from the mean over the group."""
        load_trainable(self.shared, mean)
        return {}


class FMLServer(MenteeServer):
    """Averages memes."""

    method: FML

    def key(self, spec: UserSpec) -> str:
        return self.method.key(spec)

    def round(self, r: int) -> None:
        if r == 0:
            self.ask("join", users=self.partners())
        self.ask("fit")
        memes = self.ask("upload", users=self.partners())
        self.ask("download", each={user: mean for group, mean in self.means(memes) for user in group})


class FML(Method):
    """FML: mutual learning of the own model and a small averaged meme model.

    Args:
        alpha: α, weight of the task loss in the own model's loss, 0 to 1; the rest is distillation from the meme.
        beta: β, weight of the task loss in the meme's loss, 0 to 1.
        width: channels of the meme's first convolution, a multiple of 8.
        meme_rate: factor of the meme's learning rate on the user's own.
        share: `"model"`: the whole meme, in each label space; `"body"`: all but its head, among all users.
    """

    revision: ClassVar[int] = 1
    tunable: ClassVar[Ranges] = {
        "alpha": Choice((0.3, 0.5, 0.7, 0.9)),
        "beta": Choice((0.3, 0.5, 0.7, 0.9)),
        "meme_rate": LogRange(0.25, 4.0),
    }
    User = MutualUser
    Server = FMLServer

    def __init__(
        self,
        *,
        alpha: float = 0.5,
        beta: float = 0.5,
        width: int = 16,
        meme_rate: float = 1.0,
        share: Literal["model", "body"] = "model",
    ) -> None:
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not 0 <= value <= 1:
                raise UserError(f"the option '{name}' of fml is {value}", expected="0 to 1")
        self.alpha, self.beta, self.share = alpha, beta, share
        self.width, self.meme_rate = checked_width("fml", width), positive("fml", "meme_rate", meme_rate)

    def key(self, spec: UserSpec) -> str:
        """What users must have in common to share a meme."""
        return label_space(spec) if self.share == "model" else ""

    def touches(self, users: Sequence[UserSpec]) -> list[str]:
        return partnered(users, self.key)
