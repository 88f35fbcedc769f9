"""FedProto: users keep their embeddings near the mean prototype of each class.

Paper: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients",
AAAI 2022, arXiv 2105.00243.
Official code: yuetan031/FedProto (lib/update.py, lib/utils.py, exps/federated_main.py).
Equations, z the embedding of a private item (unit row, d numbers), D^nk the items of class k at user n:
  prototype P_n^k = mean of z over D^nk;
  global prototype P̄^k = mean of P_n^k over the users that have class k;
  L = task loss + λ · mean over a batch of ‖z − P̄^y‖², y the item's class.
Algorithm, each of R rounds:
  1. every user trains its whole model on private data with L, in the first round with the task loss alone;
  2. users send the prototypes of the classes they have; the server averages them in each label space.
Users get the means with the next local phase; the last phase has them too.
Average: every user counts alike (`average = "users"`), as in the code. The paper weights users by |D^nk| / Σ_m |D^mk|
(`average = "items"`), which it also divides by their number; we do not, since prototypes would then be no means.
Deviations:
  - Prototypes live in the embedding of unit rows, where users of different models are comparable, not in features
    before the head, which in the paper have one width; how the projection is trained is said in prototypes.py.
  - The code's distance is the mean over d numbers, of features whose numbers we take to be about 1 in size. Those of
    unit rows are about 1/√d, so the sum is taken, which is that mean for √d·z; else λ would count d times less.
  - Multi-label tasks: P_n^k over the items with label k; an item's distance is the mean over the classes that it has.
  - Prototypes come from one pass over the private items after the local phase, as in the paper's equation; the code
    collects them from the last epoch's batches, while weights still move.
  - Scores are the head's, as for every method; the code also reports the nearest prototype among a user's classes.
  - AdamW with the suite's schedule instead of SGD.
As in the code, a class that one user alone has is drawn to that user's own last prototype, and an item without a
global prototype has no such term.
Defaults: λ = 1, the code's (0.1 in its commands for CIFAR-10).
Cost: a forward pass over the private items each round; the number of steps is everyone's.
Users: those with a partner in their label space. The rest trains locally, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedbench.options import positive
from fedbench.ranges import LogRange, Ranges
from fedbench_baselines.prototypes import PrototypeMethod, Prototypes, PrototypeServer, PrototypeUser


def mean_prototypes(sent: Sequence[Prototypes], counts: Sequence[Tensor]) -> Prototypes:
    """P̄ of every class that somebody has; `counts` (K,) are the weights of what each user sent."""
    mask = torch.stack([one["classes"] for one in sent])
    shape = (*mask.shape, sent[0]["prototypes"].shape[1])
    rows = torch.zeros(shape, dtype=sent[0]["prototypes"].dtype)
    weights = torch.zeros(mask.shape, dtype=rows.dtype)
    for place, (one, count) in enumerate(zip(sent, counts, strict=True)):
        rows[place, mask[place]] = one["prototypes"]
        weights[place, mask[place]] = count.to(rows.dtype)
    owned = mask.any(0)
    shares = weights[:, owned] / weights[:, owned].sum(0)
    return {"prototypes": (shares.unsqueeze(-1) * rows[:, owned]).sum(0), "classes": owned}


class ProtoServer(PrototypeServer):
    """Averages prototypes, class by class."""

    method: FedProto

    def request(self) -> dict[str, Any]:
        return {"counts": True} if self.method.average == "items" else {}

    def globals_of(self, users: Sequence[str], sent: Sequence[Prototypes]) -> Prototypes:
        return mean_prototypes(sent, [one.get("counts", torch.ones(len(one["prototypes"]))) for one in sent])


class FedProto(PrototypeMethod):
    """FedProto: embeddings near the mean prototypes of their classes, in each label space.

    Args:
        pull: λ, weight of the squared distance to the global prototypes.
        average: whether users count alike in a mean (`"users"`) or by their items of the class (`"items"`).
    """

    revision: ClassVar[int] = 1
    tunable: ClassVar[Ranges] = {"pull": LogRange(0.03, 10.0)}
    User = PrototypeUser
    Server = ProtoServer

    def __init__(self, *, pull: float = 1.0, average: Literal["users", "items"] = "users") -> None:
        self.pull, self.average = positive("fedproto", "pull", pull), average
