"""KT-pFL: every user learns from a mixture of soft predictions whose weights, the knowledge coefficients, are learned.

Paper: Zhang, Guo, Ma, Wang, Xu, Wu, "Parameterized Knowledge Transfer for Personalized Federated Learning", NeurIPS
2021, arXiv 2111.02862.
Official code: cugzj/KT-pFL (src/engine_kt_pfl.py, conf/).
Equations, s_n the soft predictions softmax(f_n/τ) of user n of N on public rows, c_n its row of coefficients:
  teacher t_n = Σ_m c_nm s_m, m = n included;
  server: c_n ← c_n − η_n ∇[mean (s_n − t_n)² + ρ · mean_m (c_nm − 1/N)²], then rows back onto the simplex;
  η_n: 1, times or over 5 at most five times, until the mean |η_n ∇| over a row is in (0.01, 0.05];
  user: min over θ^n of KL(t_n ‖ softmax(f_n/τ)).
Algorithm, each of R rounds:
  1. every user trains its whole model on private data;
  2. users send s_n of T·B public rows; the server takes one step on each row of c, and returns t_n;
  3. T distillation steps on batches of B of those rows, towards t_n.
Rows of coefficients: the code takes softmax(5 c_n) (`rows = "softmax"`). Its slope at equal coefficients is 5/N, so
with N = 10 or more, as in its experiments, rows are drawn back to equal ones, but in groups of fewer than 5 they
drift away from them, and, since t_n = s_n has no error, towards the user itself. `rows = "simplex"` (ours) takes the
nearest point of the simplex instead, which leaves alone what is on it, for groups of any size.
Deviations:
  - Users are grouped by label space, since predictions of different classes cannot be mixed: one matrix a group.
  - A round starts with the private phase and ends with the distillation; the same cycle, cut elsewhere.
  - The same number of local steps in all rounds; the code's number of local epochs grows from round to round.
  - KL is summed over classes (mean over items); the code's is also divided by their number.
  - Multi-label tasks: s_n is each class's probability, sigmoid(f_n/τ), and KL that of each class's yes or no.
  - AdamW with the suite's schedule instead of SGD; its moments go on from round to round.
  - Where failed users are skipped, the rows of the others are rescaled to those that are left.
Left open by the paper: the rates of the distillation (see public_logits.py). τ and ρ are the code's for EMNIST.
Users: those with a partner in their label space. The rest trains locally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedbench.method import grouped
from fedbench.options import positive
from fedbench.ranges import ALIGNMENT_RATE, Choice, LogRange, Ranges
from fedbench_baselines.public_logits import PublicMethod, PublicServer, PublicUser

SHARPNESS = 5.0
STEP, RESCALINGS, FACTOR = 0.01, 5, 5.0


def coefficient_gradient(coefficients: Tensor, soft: Tensor, rho: float) -> Tensor:
    """Of mean (s_n − t_n)² + ρ · mean_m (c_nm − 1/N)² in each row c_n: (N, N).

    Args:
        coefficients: c, (N, N).
        soft: s, (N, K), K predictions of every user.
        rho: ρ.
    """
    users, count = soft.shape
    products = soft @ soft.T / count
    fit = 2 * (coefficients @ products - products)
    return fit + 2 * rho / users * (coefficients - 1 / users)


def step_size(gradient: Tensor) -> float:
    """η of one row: brings the mean |η ∇| into (0.01, 0.05] where five factors of 5 are enough."""
    mean, size = float(gradient.abs().mean()), 1.0
    for _ in range(RESCALINGS):
        if mean * size > STEP * FACTOR:
            size /= FACTOR
        elif mean * size <= STEP:
            size *= FACTOR
    return size


def onto_simplex(row: Tensor) -> Tensor:
    """The nearest point, (N,), whose entries are 0 or more and sum to 1."""
    ordered = row.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(row) + 1, dtype=row.dtype)
    kept = int((ordered > excess).sum())
    return (row - excess[kept - 1]).clamp_min(0)


def updated(coefficients: Tensor, soft: Tensor, *, rho: float, rows: str) -> Tensor:
    """The coefficients (N, N) after one step on each row; soft predictions (N, K)."""
    gradient = coefficient_gradient(coefficients, soft, rho)
    moved = [row - step_size(slope) * slope for row, slope in zip(coefficients, gradient, strict=True)]
    return torch.stack([onto_simplex(row) if rows == "simplex" else (SHARPNESS * row).softmax(0) for row in moved])


class KnowledgeUser(PublicUser):
    """Sends soft predictions, and distils its own mixture of them."""

    method: KTpFL

    def message(self, outputs: Tensor) -> Tensor:
        """s_n at the temperature, (B, C)."""
        return self.probabilities(outputs / self.method.temperature)

    def distance(self, outputs: Tensor, target: Tensor) -> Tensor:
        """KL(t_n ‖ s_n) at the temperature; target: t_n."""
        return self.divergence(outputs / self.method.temperature, target)


class KnowledgeServer(PublicServer):
    """Keeps the knowledge coefficient matrices, and mixes soft predictions with them."""

    method: KTpFL

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.order = list(self.specs)
        self.coefficients = torch.zeros(len(self.order), len(self.order), dtype=torch.float64)
        for group in grouped(list(self.specs.values()), self.method.key):
            members = self.places([spec.name for spec in group])
            self.coefficients[members[:, None], members] = 1 / len(group)

    def round(self, r: int) -> None:
        self.ask("fit")
        soft = self.ask("predict", batches=self.draw(), users=self.partners())
        messages: dict[str, dict[str, Tensor]] = {}
        for group in self.senders(soft, "outputs"):
            predictions = torch.stack([soft[user]["outputs"] for user in group])
            rows = self.learn(group, predictions.flatten(1).double())
            for user, row in zip(group, rows, strict=True):
                mixed = torch.tensordot(row.float(), predictions, dims=1)
                messages[user] = {"targets": mixed.clamp(0, 1)}  # rounding may leave it
        replies = self.ask("digest", each=messages)
        self.record("distillation loss", replies)

    def learn(self, group: Sequence[str], soft: Tensor) -> Tensor:
        """One step on the coefficients of a group, given (N, K); its matrix (N, N)."""
        members = self.places(group)
        current = self.coefficients[members[:, None], members]
        total = current.sum(1, keepdim=True)  # less than 1 where a user is gone
        current = torch.where(total > 0, current / total, 1 / len(group))
        new = updated(current, soft, rho=self.method.rho, rows=self.method.rows)
        self.coefficients[members[:, None], members] = new
        self.log("own coefficient", {user: float(new[place, place]) for place, user in enumerate(group)})
        return new

    def places(self, users: Sequence[str]) -> Tensor:
        """Where users are in the matrix."""
        return torch.tensor([self.order.index(user) for user in users])

    def save(self) -> dict[str, Any]:
        return {"coefficients": self.coefficients}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.coefficients = state["coefficients"]


class KTpFL(PublicMethod):
    """KT-pFL: distillation from personal mixtures of soft predictions, with learned knowledge coefficients.

    Args:
        temperature: τ of the soft predictions.
        rho: ρ, weight of the pull towards equal coefficients.
        rows: how rows get back onto the simplex: `"softmax"` as in the official code, `"simplex"` the nearest point.
        rate: factor on the learning rates of the distillation.
    """

    revision: ClassVar[int] = 1
    tunable: ClassVar[Ranges] = {
        "rate": ALIGNMENT_RATE,
        "temperature": Choice((1.0, 3.0, 10.0)),
        "rho": LogRange(0.1, 3.0),
        "rows": Choice(("softmax", "simplex")),
    }
    User = KnowledgeUser
    Server = KnowledgeServer

    def __init__(
        self,
        *,
        temperature: float = 10.0,
        rho: float = 0.7,
        rows: Literal["softmax", "simplex"] = "softmax",
        rate: float = 1.0,
    ) -> None:
        self.temperature, self.rho = positive("kt-pfl", "temperature", temperature), positive("kt-pfl", "rho", rho)
        self.rows = rows
        self.rate = positive("kt-pfl", "rate", rate)
