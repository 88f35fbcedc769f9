"""FedHeNN: users train near the mean of everybody's Gram matrices on an alignment set.

Paper: Makhija, Han, Ho, Ghosh, "Architecture Agnostic Federated Learning for Neural Networks", ICML 2022, arXiv
2202.07757.
Official code: dishamakhija/FedHeNN (scripts/heterogeneous_clients.py).
Equations, Z_n the embeddings of user n of N on an alignment set of l rows (l×d), H = I − 11ᵀ/l:
  K_n = Z_n Z_nᵀ;   K̄ = 1/N Σ_n K_n, own matrix included;
  CKA(K, L) = ⟨HKH, HLH⟩ / (‖HKH‖ ‖HLH‖), Frobenius;
  L = task loss + η_t (1 − CKA(K̄, K_n)), η_t = η_0 √t, t the round from 0; K̄ has no gradient.
Algorithm, each of R rounds, and once more before the last local phase, t = R:
  1. the server draws an alignment set from the public set; users send K_n, the server returns K̄;
  2. every user trains its whole model on private data with L.
Round 0 is local training, to the last bit, since η_0 √0 = 0. It exchanges as every other does, although nothing comes
of it, so that the bytes a round are those of one exchange for any R; the one before the last phase is not in them.
Deviations:
  - A local step embeds a block of B rows of the alignment set, in passes over it in random order, and takes CKA from
    the block's rows and columns of K̄, centred in the block. The code embeds all l rows in each step: at 1000 rows and
    batches of 32 that would cost 32 times what local training does. A block's diagonal, which is the same for all unit
    rows, is 1/B of it instead of 1/l: its CKA is nearer to 1, and its gradient is not on average the whole set's
    (features made up: 0.5 to 1.6 times as long, at a cosine of 0.5 to 0.96, B = 32). So η_0 is tuned over a wide range.
  - Z_n are the embeddings of unit rows. The code's layers are returned in the other order than its script reads them,
    so that as released it compares log-probabilities; its script means the layer before the output.
  - The alignment set comes from the public set, in the plain view; the code's is a part of all users' training data.
  - K_n is computed in evaluation mode, in which dropout draws nothing.
  - Matrices cross as their upper triangles: they are symmetric, so that half the bytes say the same.
  - `kernel = "rbf"`: K_ij = exp(−‖z_i − z_j‖² / 2σ²), σ a fraction of the median distance between the rows at hand
    (of all l² pairs), a constant in the gradient, after Kornblith, Norouzi, Lee, Hinton, "Similarity of Neural Network
    Representations Revisited", ICML 2019, arXiv 1905.00414. The code has the linear kernel alone.
  - All users take part in each round, not a fifth of them; AdamW with the suite's schedule instead of SGD.
As in the code, the last local phase has the term too. A Gram matrix without any contrast has no CKA, and no term.
The term trains the projection, at the user's fit rate. Where the head sits on features nothing else does so in local
training; the first K_n are those of its initial weights.
Defaults: η_0 and l as in the code; the fraction of the median distance is ours.
Cost: a local step embeds B public rows as well; the number of steps is everyone's.
Users: all, where there are two or more. CKA compares rows with rows, so that tasks, models and widths may differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedbench.errors import UserError
from fedbench.interfaces import Protocol, UserSpec
from fedbench.method import Method, PublicRows, ServerProgram
from fedbench.options import positive
from fedbench.ranges import LogRange, Ranges
from fedbench.seeds import torch_generator
from fedbench.user import UserProgram, verb

ROUNDING = 1e-5
"""The share of a Gram matrix that must be left after centring for it to be more than float32's rounding."""
CLOSEST = 1e-6
"""The least squared distance of unit rows that float32 tells from 0."""
FEWEST = 3
"""Rows of the smallest alignment set: any two Gram matrices of two rows have CKA 1."""


def gram_matrix(z: Tensor, kernel: str = "linear", sigma: float = 0.5) -> Tensor:
    """K of rows (l, d): (l, l); sigma is the RBF kernel's width over the median distance."""
    products = z @ z.T
    if kernel == "linear":
        return products
    squares = products.diagonal()
    distances = (squares.unsqueeze(1) + squares - 2 * products).clamp_min(0)
    median = distances.detach().median().clamp_min(CLOSEST)
    return torch.exp(-distances / (2 * sigma**2 * median))


def direction(gram: Tensor) -> Tensor:
    """HKH / ‖HKH‖ of a symmetric (l, l); 0, also in its gradient, where nothing but rounding is left of HKH."""
    means = gram.mean(0)
    centred = gram - means - means.unsqueeze(1) + means.mean()
    norm = centred.norm()
    return centred / torch.where(norm > ROUNDING * gram.detach().norm(), norm, torch.inf)


def alignment(one: Tensor, two: Tensor) -> Tensor:
    """CKA of two symmetric Gram matrices (l, l), from 0 to 1 where they are those of a kernel."""
    return (direction(one) * direction(two)).sum()


def triangle(matrix: Tensor) -> Tensor:
    """The upper triangle of (l, l), with the diagonal, row by row: (l (l + 1) / 2,)."""
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


def symmetric(upper: Tensor, size: int) -> Tensor:
    """The symmetric matrix (size, size) whose `triangle` this is."""
    rows, columns = torch.triu_indices(size, size, device=upper.device)
    matrix = upper.new_empty(size, size)
    matrix[rows, columns] = upper
    matrix[columns, rows] = upper
    return matrix


class GramUser(UserProgram):
    """Sends the Gram matrix of an alignment set, and stays near the mean one in local training."""

    method: FedHeNN

    def setup(self) -> None:
        self.block_generator = torch_generator("alignment blocks", self.seed, self.name)
        self._rows: Tensor | None = None
        self._mean: Tensor | None = None
        self._weight = 0.0
        self._blocks: Iterator[Tensor] = iter(())

    @verb
    def compare(self, rows: Tensor) -> dict[str, Any]:
        """The upper triangle of K_n, (l (l + 1) / 2,) float32, of an alignment set (l,) of public rows."""
        self._rows = rows
        self.set_training(False)
        with torch.no_grad():
            parts = torch.split(rows, self.protocol.eval_batch)  # type: ignore[no-untyped-call]
            gram = self.gram(torch.cat([self.embed(part) for part in parts]))
        self.set_training(True)
        return {"gram": triangle(gram)}

    def gram(self, z: Tensor) -> Tensor:
        """The Gram matrix of embeddings (l, d) in the method's kernel."""
        return gram_matrix(z, self.method.kernel, self.method.sigma)

    @verb
    def fit(self, mean: Tensor | None = None, weight: float = 0.0) -> dict[str, Any]:
        """The local phase, near the mean Gram matrix of the last alignment set. Replies the mean loss.

        Args:
            mean: upper triangle of K̄; None for local training.
            weight: η_t; local training where it is 0.
        """
        if mean is None or weight == 0:
            return super().fit()
        if self._rows is None:
            raise RuntimeError("a mean came before compare")
        self._mean, self._weight = symmetric(mean, len(self._rows)).to(self.device), weight
        places = PublicRows(len(self._rows), self.block_generator)
        self._blocks = iter(places.draw(self.fit_steps(), self.protocol.batch))
        reply = super().fit()
        self._rows = self._mean = None
        return reply

    def private_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The task's loss, plus η_t (1 − CKA) of the next block of the alignment set."""
        loss = super().private_loss(x, targets)
        if self._rows is None or self._mean is None:
            return loss
        block = next(self._blocks)
        own = self.gram(self.embed(self._rows[block]))
        return loss + self._weight * (1 - alignment(self._mean[block][:, block], own))

    def save(self) -> dict[str, Any]:
        return {"block_generator": self.block_generator.get_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.block_generator.set_state(state["block_generator"])


class GramServer(ServerProgram):
    """Averages Gram matrices."""

    method: FedHeNN

    def round(self, r: int) -> None:
        rows = self.public.draw(1, min(self.method.alignment, self.public.size))[0]
        replies = self.ask("compare", rows=rows) if len(self.users) > 1 else {}
        grams = {user: reply["gram"] for user, reply in replies.items()}
        if len(grams) < 2:  # where failed users are skipped, the last one would only be held where it is
            self.ask("fit")
            return
        mean = torch.stack(list(grams.values())).mean(0)
        self.record(grams, mean, len(rows))
        self.ask("fit", mean=mean, weight=self.method.eta0 * math.sqrt(r))

    def finish(self) -> None:
        self.round(self.protocol.rounds)

    def record(self, grams: Mapping[str, Tensor], mean: Tensor, size: int) -> None:
        """Log how near to the mean users are before the local phase, on the whole alignment set."""
        centre = symmetric(mean, size)
        self.log("CKA", {user: float(alignment(symmetric(gram, size), centre)) for user, gram in grams.items()})


class FedHeNN(Method):
    """FedHeNN: representations near the mean Gram matrix of an alignment set, for users of any task and model.

    Args:
        eta0: η_0, weight of 1 − CKA; in round t it is η_0 √t.
        alignment: l, rows of the alignment set that is drawn for each round; at most the public set.
        kernel: of the Gram matrices: `"linear"` as in the official code, or `"rbf"`.
        sigma: width of the RBF kernel, as a fraction of the median distance.
    """

    revision: ClassVar[int] = 1
    tunable: ClassVar[Ranges] = {"eta0": LogRange(0.01, 10.0)}
    User = GramUser
    Server = GramServer

    def __init__(
        self,
        *,
        eta0: float = 0.01,
        alignment: int = 1000,
        kernel: Literal["linear", "rbf"] = "linear",
        sigma: float = 0.5,
    ) -> None:
        if alignment < FEWEST:
            raise UserError(
                f"the option 'alignment' of fedhenn is {alignment}", expected=f"a whole number of {FEWEST} or more"
            )
        self.eta0, self.sigma = positive("fedhenn", "eta0", eta0), positive("fedhenn", "sigma", sigma)
        self.alignment, self.kernel = alignment, kernel

    def touches(self, users: Sequence[UserSpec]) -> list[str]:
        return super().touches(users) if len(users) > 1 else []

    def paper_bytes(self, protocol: Protocol, users: int) -> int:
        """K_n up and K̄ down for every user, l × l float32 as in the code, of an alignment set of full size."""
        return 2 * 4 * users * self.alignment**2
