"""FedDF: users of one label space are distilled from the ensemble of all of them, on public data.

Paper: Lin, Kong, Stich, Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020,
arXiv 2006.07242.
Official code: epfml/federated-learning-public-code (FedDF-code, aggregation/noise_knowledge_transfer.py). Form in
which every user is a student: WenkeHuang/FCCL (fccl+/models/feddf.py).
Equations, f_k the logits of teacher k of K, f the student's, τ the temperature, x a public row:
  min over the student's weights of KL(softmax(1/K Σ_k f_k(x)/τ) ‖ softmax(f(x)/τ)).
Algorithm, each of R rounds:
  1. every user trains its whole model on private data;
  2. users send logits of T·B public rows; the server returns their mean, the ensemble, itself included;
  3. users of one architecture start from the average of their weights, weighted by private items;
  4. T distillation steps on batches of B of those rows, against the ensemble of the round's start.
Deviations:
  - Every user is a student and distils itself; the paper's server holds one student for each architecture and sends
    it back. Users of one architecture and label space start a distillation from the same weights and take the same
    steps, so they end it with the same model, as in the paper (except for what a model draws at random, or where a
    suite gives them different rates). Users whose architecture nobody shares start from their own weights.
  - Logits cross instead of weights, as float16; weights cross only where they are averaged. What is averaged starts
    equal, too: before round 0 the first user of such a group sends its initial weights to the others.
  - T steps and no early stopping: a server has no labelled validation data here.
  - Multi-label tasks: the mean logits' sigmoid, and KL of each class's yes or no, mean over classes; its gradient is
    that of binary cross-entropy with soft targets.
  - AdamW with the suite's schedule instead of Adam; its moments go on from round to round.
Left open by the paper: the rates of this form (see public_logits.py).
Control `average=false`: no weights cross; every user starts a distillation from its own.
Users: those with a partner in their label space. The rest trains locally.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedbench.interfaces import UserSpec
from fedbench.method import architecture, label_space
from fedbench.options import positive
from fedbench.ranges import ALIGNMENT_RATE, Choice, Ranges
from fedbench.user import verb
from fedbench_baselines.averaging import load_trainable, trainable, weighted_mean
from fedbench_baselines.public_logits import PublicMethod, PublicServer, PublicUser


class Student(PublicUser):
    """Distils the ensemble's predictions into its model."""

    method: FedDF
    wire = torch.float16

    def distance(self, outputs: Tensor, target: Tensor) -> Tensor:
        """KL between ensemble and student at the temperature; target: mean logits."""
        tau = self.method.temperature
        return self.divergence(outputs / tau, self.probabilities(target / tau))

    def parts(self) -> dict[str, nn.Module]:
        """What makes the outputs, by the prefix under which its weights cross."""
        parts = {"backbone.": self.representation.backbone, "head.": self.head}
        if self.protocol.head == "embedding":
            parts["projection."] = self.representation.projection
        return parts

    @verb
    def upload(self) -> dict[str, Any]:
        """The weights of the model that makes the outputs."""
        return {name: value for prefix, part in self.parts().items() for name, value in trainable(part, prefix).items()}

    @verb
    def download(self, **weights: Tensor) -> dict[str, Any]:
        """Go on from these weights."""
        for prefix, part in self.parts().items():
            load_trainable(part, weights, prefix)
        return {}


class FedDFServer(PublicServer):
    """Forms the ensembles, and averages weights where architectures are equal."""

    method: FedDF

    def round(self, r: int) -> None:
        if r == 0:
            self.start_equally()
        self.ask("fit")
        teachers = self.ask("predict", batches=self.draw(), users=self.partners())
        self.average_weights()
        ensembles = self.means(teachers, "outputs")
        replies = self.ask("digest", each={user: {"targets": mean} for user, mean in ensembles.items()})
        self.record("distillation loss", replies)

    def siblings(self) -> list[list[str]]:
        """The living users of one architecture and label space, where there are two or more."""
        groups = self.groups(architecture_and_labels) if self.method.average else []
        return [group for group in groups if len(group) > 1]

    def start_equally(self) -> None:
        """Give all of a group the initial weights of its first user."""
        for first, *others in self.siblings():
            sent = self.ask("upload", users=[first])
            if first in sent:
                self.ask("download", each=dict.fromkeys(others, sent[first]))

    def average_weights(self) -> None:
        """Give all of a group the mean of their weights."""
        for group in self.siblings():
            sent = self.ask("upload", users=group)
            if len(sent) > 1:
                mean = weighted_mean(list(sent.values()), [self.specs[user].train for user in sent])
                self.ask("download", each=dict.fromkeys(sent, mean))


def architecture_and_labels(spec: UserSpec) -> str:
    """What users must share to exchange the weights of representation and head."""
    return f"{architecture(spec)} {label_space(spec)}"


class FedDF(PublicMethod):
    """FedDF: every user distils the mean of all logits on public rows, within each label space.

    Args:
        temperature: τ of the distillation.
        average: users of one architecture and label space start each distillation from their weights' average.
        rate: factor on the learning rates of the distillation.
    """

    revision: ClassVar[int] = 1
    tunable: ClassVar[Ranges] = {"rate": ALIGNMENT_RATE, "temperature": Choice((1.0, 2.0, 4.0))}
    User = Student
    Server = FedDFServer

    def __init__(self, *, temperature: float = 1.0, average: bool = True, rate: float = 1.0) -> None:
        self.temperature, self.average = positive("feddf", "temperature", temperature), average
        self.rate = positive("feddf", "rate", rate)
