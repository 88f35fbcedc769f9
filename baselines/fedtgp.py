"""FedTGP: as FedProto, but the server learns global prototypes that lie apart, instead of averaging.

Paper: Zhang, Liu, Hua, Cao, "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for
Data and Model Heterogeneity in Federated Learning", AAAI 2024, arXiv 2401.03230.
Official code: TsingZ0/FedTGP (servertgp.py, clienttgp.py, run_me.sh).
Equations, P_n^k the prototype of class k at user n (see fedproto.py), φ the Euclidean distance, C classes:
  trainable prototypes P̂^k = F(v^k): a vector v^k a class, and F of two layers with a ReLU that all share;
  margin δ = min(max_{k≠l} φ(Q^k, Q^l), τ), Q^k the mean of P_n^k over users;
  ACL: mean over all P_n^k of −log softmax_k, of the C logits −(φ(P_n^k, P̂^l) + δ·[l = k]);
  user: L = task loss + λ · mean over a batch of ‖z − P̂^y‖².
Algorithm, each of R rounds:
  1. every user trains its whole model on private data with L, in the first round with the task loss alone;
  2. users send the prototypes of the classes they have;
  3. in each label space the server takes δ from them, trains v and F on them with ACL, S epochs of SGD, and goes on
     from the last round's v and F. P̂^k of the classes that somebody has go down.
Users get P̂ with the next local phase; the last phase has it too.
Margin: `"farthest"` is the paper's (above). The code takes the largest distance of a class to its nearest other class
instead, max_k min_{l≠k} φ(Q^k, Q^l) (`margin = "nearest"`).
Deviations:
  - Those of FedProto's embedding, distance, labels, scores and optimizer (see fedproto.py); how the projection is
    trained is said in prototypes.py. P_n^k is one pass after the local phase, as in the code.
  - The server learns on √d·P_n^k and sends P̂ / √d: numbers of about 1, the size that we take the code's features to
    have, for which its initial weights, η and τ were set. On unit rows P̂ would remain what F was initialised to:
    distances of at most 2 say little in ACL, and steps of η = 0.01 are small beside an initial length of 2.7
    (d = 128).
  - P̂^k of a class that nobody has takes part in ACL, as in the code, but is not sent.
Where paper and code differ beside the margin: λ = 10, as in the code's commands for this very distance (its own default
is 1; the paper says 0.1, of a distance that is not squared); S = 100, as in the commands and the paper (code: 1000).
Defaults of both: τ = 100, batches of 10 prototypes, η = 0.01, the users' rate there and an option of its own here.
Cost: a forward pass over the private items each round; the number of users' steps is everyone's. The server takes
about 2 s a round on one core for 200 prototypes of 100 classes, d = 128.
Users: those with a partner in their label space. The rest trains locally, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.errors import UserError
from fedbench.method import label_space
from fedbench.options import positive
from fedbench.ranges import LogRange, Ranges
from fedbench_baselines.prototypes import PrototypeMethod, Prototypes, PrototypeServer, PrototypeUser


class TrainablePrototypes(nn.Module):
    """P̂ of C classes: vectors v (C, d) through F."""

    def __init__(self, classes: int, dimension: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(classes, dimension)
        self.network = nn.Sequential(nn.Linear(dimension, dimension), nn.ReLU(), nn.Linear(dimension, dimension))

    def forward(self) -> Tensor:
        """(C, d)."""
        return self.network(self.vectors.weight)  # type: ignore[no-any-return]


def adaptive_margin(prototypes: Tensor, labels: Tensor, *, threshold: float, between: str) -> float:
    """δ of prototypes (P, d) of classes (P,); the threshold where they are of one class.

    Args:
        threshold: τ.
        between: `"farthest"`: the largest distance of two classes; `"nearest"`: of a class to its nearest other.
    """
    centres = torch.stack([prototypes[labels == label].mean(0) for label in sorted(set(labels.tolist()))])
    if len(centres) < 2:
        return threshold
    distances = (centres.unsqueeze(1) - centres).norm(dim=-1)
    if between == "nearest":
        distances = distances.fill_diagonal_(math.inf).min(1).values
    return min(float(distances.max()), threshold)


def contrastive_loss(prototypes: Tensor, labels: Tensor, trained: Tensor, margin: float) -> Tensor:
    """ACL of users' prototypes (P, d) of classes (P,) against P̂ (C, d), with the graph of P̂."""
    distances = (prototypes.unsqueeze(1) - trained).norm(dim=-1)
    return F.cross_entropy(-(distances + margin * F.one_hot(labels, len(trained))), labels)


class TrainableServer(PrototypeServer):
    """Keeps trainable prototypes for each label space, and trains them on what users send."""

    method: FedTGP

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.trainable: dict[str, TrainablePrototypes] = {}

    def globals_of(self, users: Sequence[str], sent: Sequence[Prototypes]) -> Prototypes:
        scale = math.sqrt(self.protocol.dimension)
        masks = torch.stack([one["classes"] for one in sent])
        space, classes = label_space(self.specs[users[0]]), masks.shape[1]
        if space not in self.trainable:
            self.trainable[space] = self.initial(classes)
        rows = scale * torch.cat([one["prototypes"] for one in sent])
        labels = torch.cat([mask.nonzero().flatten() for mask in masks])
        margin = adaptive_margin(rows, labels, threshold=self.method.threshold, between=self.method.margin)
        loss = self.learn(self.trainable[space], rows, labels, margin)
        self.log("margin", dict.fromkeys(users, margin))
        self.log("server loss", dict.fromkeys(users, loss))
        owned = masks.any(0)
        with torch.no_grad():
            return {"prototypes": self.trainable[space]()[owned] / scale, "classes": owned}

    def initial(self, classes: int) -> TrainablePrototypes:
        """Fresh trainable prototypes, drawn from the server's generator."""
        seed = int(torch.randint(2**62, (), generator=self._generator))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return TrainablePrototypes(classes, self.protocol.dimension)

    def learn(self, trainable: TrainablePrototypes, rows: Tensor, labels: Tensor, margin: float) -> float:
        """S epochs of ACL on users' prototypes (P, d) of classes (P,); the mean loss of the last one."""
        optimizer = torch.optim.SGD(trainable.parameters(), lr=self.method.server_rate)
        total = 0.0
        for _ in range(self.method.epochs):
            total = 0.0
            order = torch.randperm(len(rows), generator=self._generator)
            for batch in torch.split(order, self.method.batch):  # type: ignore[no-untyped-call]
                loss = contrastive_loss(rows[batch], labels[batch], trainable(), margin)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total += len(batch) * float(loss.detach())
        return total / max(1, len(rows))

    def save(self) -> dict[str, Any]:
        trainable = {space: module.state_dict() for space, module in self.trainable.items()}
        return {**super().save(), "trainable": trainable}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.trainable = {}
        for space, weights in state["trainable"].items():
            with torch.random.fork_rng(devices=[]):
                module = TrainablePrototypes(*weights["vectors.weight"].shape)
            module.load_state_dict(weights)
            self.trainable[space] = module


class FedTGP(PrototypeMethod):
    """FedTGP: embeddings near global prototypes that the server trains to lie apart, in each label space.

    Args:
        pull: λ, weight of the squared distance to the global prototypes.
        margin: δ from the `"farthest"` two classes, as in the paper, or from `"nearest"` ones, as in the code.
        threshold: τ, the largest margin, in lengths of √d times a prototype.
        epochs: S, the server's passes over the prototypes of a round.
        batch: prototypes a step of the server.
        server_rate: η, learning rate of the server.
    """

    revision: ClassVar[int] = 1
    tunable: ClassVar[Ranges] = {"pull": LogRange(0.1, 30.0), "server_rate": LogRange(0.003, 0.1)}
    User = PrototypeUser
    Server = TrainableServer

    def __init__(
        self,
        *,
        pull: float = 10.0,
        margin: Literal["farthest", "nearest"] = "farthest",
        threshold: float = 100.0,
        epochs: int = 100,
        batch: int = 10,
        server_rate: float = 0.01,
    ) -> None:
        for name, value in (("epochs", epochs), ("batch", batch)):
            if value < 1:
                raise UserError(f"the option '{name}' of fedtgp is {value}", expected="1 or more")
        self.pull, self.margin, self.epochs, self.batch = positive("fedtgp", "pull", pull), margin, epochs, batch
        self.threshold = positive("fedtgp", "threshold", threshold)
        self.server_rate = positive("fedtgp", "server_rate", server_rate)
