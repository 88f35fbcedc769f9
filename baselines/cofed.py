"""CoFED: users label the public set for each other, pool their votes class by class, and train on what was accepted.

Paper: Cao, Li, Sun, Yu, Guizani, "Cross-Silo Heterogeneous Model Federated Multitask Learning" (earlier: "CoFED:
Cross-silo Heterogeneous Federated Multi-task Learning via Co-training"), arXiv 2202.08603.
Official code: flcao/CoFED (fed_cifar100_cifar10_pub_iid.m).
Equations, p_n(x) the class probabilities of user n, O_k the users that own class k, weights ω_n = 1/|O_k|:
  vote: n votes the class k = argmax p_n(x) where its two largest probabilities differ by more than `margin`;
  pooling: x is accepted in class k iff s_k(x) = Σ_{n ∈ O_k, n voted k on x} ω_n > α; who abstains counts in O_k too;
  overlap: what is accepted in more than one of a user's classes is dropped;
  co-training: min over θ^n of w_y · CE on D^n ∪ {(x, k) accepted}, w_k = (1/count_k) / max_c (1/count_c), counts over
  the union.
Multi-label form, each class k a question of its own with probabilities (1 − p, p):
  vote: yes where p > 0.5 + margin/2, no where p < 0.5 − margin/2, else none;
  pooling: yes or no where its share is above α and above the other's; else (image, class) stays undecided;
  overlap: an image may have several classes, so nothing is dropped;
  co-training: BCE over the decided pairs alone, w_k of yes and no from the counts of that class's yes and no.
Algorithm, each of R rounds:
  1. every user trains its whole model on private data;
  2. every user votes on the whole public set (plain view, evaluation mode); the server pools the votes;
  3. every user takes T steps of B rows on the union of its private data and the accepted public rows.
Option `oneshot`: steps 2 and 3 in round R // 2 alone (from 0), as in the official code, which has no rounds.
Deviations:
  - By default in every round, since everyone exchanges in every round here.
  - Votes pool within a label space, whose users all own all of its classes; a user alone in it gets its own votes back
    (self-training). So overlaps are dropped on the server: the same rows, and one class number crosses for each.
    Class names stay at home: the map between like-named classes of different label spaces is left out.
  - T steps of B instead of epochs of 1000 rows with early stopping on the test set, the same for all methods.
  - AdamW at the rates of a public phase (see public_logits.py), instead of the best of 0.1 and 2 times the local rate.
  - Private rows come in one of their views at random, as in local training; public rows in the view that was labelled.
  - A class that the union lacks has weight 0 (the official code divides by 0).
Left open: the weighted loss (its layer is not in the repository) is here the mean over a batch of w_y · CE; the
multi-label form is ours. Votes and labels cross as one byte a row (two beyond 128 classes), multi-label a byte a pair.
Users: all that can read the public set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.errors import UserError
from fedbench.interfaces import UserSpec
from fedbench.method import PublicRows
from fedbench.options import positive
from fedbench.ranges import ALIGNMENT_RATE, Choice, Ranges
from fedbench.seeds import torch_generator
from fedbench.user import verb
from fedbench_baselines.public_logits import PublicMethod, PublicServer, PublicUser

NONE = -1
"""No vote; no label. As a vote or label for a (row, class) pair, 1 is yes and 0 is no."""


def class_votes(probabilities: Tensor, margin: float) -> Tensor:
    """(N, C) -> the class voted for or NONE, (N,), in as few bytes as C class numbers need."""
    (first, second), classes = probabilities.topk(2, dim=1).values.T, probabilities.argmax(1)
    votes = torch.where(first - second > margin, classes, NONE)
    return votes.to(torch.int8 if probabilities.shape[1] <= 128 else torch.int16)


def pair_votes(probabilities: Tensor, margin: float) -> Tensor:
    """(N, C), each class by itself -> int8 (N, C): yes, no or NONE."""
    votes = torch.full_like(probabilities, NONE, dtype=torch.int8)
    votes[probabilities > 0.5 + margin / 2] = 1
    votes[probabilities < 0.5 - margin / 2] = 0
    return votes


def pooled_classes(votes: Sequence[Tensor], alpha: float) -> Tensor:
    """Votes (N,) of all owners -> the one class each row is accepted in, or NONE where there is none or several."""
    cast = torch.stack(list(votes))
    classes = max(1, int(cast.max()) + 1)
    shares = torch.stack([(cast == k).sum(0) for k in range(classes)], dim=1).double() / len(votes)
    accepted = (shares > alpha).int()
    return torch.where(accepted.sum(1) == 1, accepted.argmax(1), NONE).to(cast.dtype)


def pooled_pairs(votes: Sequence[Tensor], alpha: float) -> Tensor:
    """Votes (N, C) of all owners -> int8 (N, C): what each pair is accepted as, or NONE."""
    cast = torch.stack(list(votes))
    yes, no = ((cast == vote).sum(0).double() / len(votes) for vote in (1, 0))
    labels = torch.full_like(cast[0], NONE)
    labels[(yes > alpha) & (yes > no)] = 1
    labels[(no > alpha) & (no > yes)] = 0
    return labels


def class_weights(targets: Tensor, classes: int) -> Tensor:
    """Inverse counts, the largest scaled to 1: of classes (N,) -> (C,); of pairs (N, C) -> no and yes, (2, C)."""
    if targets.ndim == 1:
        counts = targets.bincount(minlength=classes)
    else:
        counts = torch.stack([(targets == answer).sum(0) for answer in (0, 1)])
    # The rarest class that occurs has weight 1; one that does not occur has none to give.
    rarest = counts.double().masked_fill(counts == 0, torch.inf).amin(0)
    return torch.where(counts > 0, rarest / counts.clamp(min=1), 0.0).float()


def weighted_loss(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Of logits (B, C): for classes (B,) w · CE, mean over rows; for pairs (B, C) w · BCE, mean over decided ones."""
    weights = weights.to(outputs.dtype)
    if targets.ndim == 1:
        return (weights[targets] * F.cross_entropy(outputs, targets, reduction="none")).mean()
    decided, answers = targets != NONE, targets.clamp(min=0)
    losses = F.binary_cross_entropy_with_logits(outputs, answers.to(outputs.dtype), reduction="none")
    return (weights.gather(0, answers) * losses * decided).sum() / decided.sum()


class CoTrainingUser(PublicUser):
    """Votes on the public set, and trains on what the pooled votes accepted."""

    method: CoFED

    def setup(self) -> None:
        super().setup()
        self.union_generator = torch_generator("union", self.seed, self.name)

    @verb
    def label(self) -> dict[str, Any]:
        """This user's votes on the whole public set."""
        self.set_training(False)
        vote = pair_votes if self.multi_label else class_votes
        size, step = len(self.participant.public), self.protocol.eval_batch
        parts = [torch.arange(start, min(start + step, size)) for start in range(0, size, step)]
        with torch.no_grad():
            found = [self.probabilities(self.outputs(self.public_rows(part))) for part in parts]
        return {"votes": vote(torch.cat(found), self.method.margin)}

    @verb
    def cotrain(self, labels: Tensor) -> dict[str, Any]:
        """T steps of B rows on private data and accepted public rows; labels of the whole public set.

        Replies the mean loss and how many public rows were accepted.
        """
        decided = labels != NONE
        accepted = (decided if decided.ndim == 1 else decided.any(1)).nonzero().squeeze(1)
        own = self.participant.train
        targets = torch.cat([own.targets(torch.arange(len(own))).long(), labels[accepted].to(self.device).long()])
        weights = class_weights(targets, len(own.samples.classes))
        # Where the phase happens once, the schedule stands where it does for all methods in that round.
        self.public_steps = (self.fits - 1) * self.protocol.iterations
        self.set_training(True)
        total, size = 0.0, min(self.protocol.batch, len(targets))
        for batch in PublicRows(len(targets), self.union_generator).draw(self.protocol.iterations, size):
            private, public = batch[batch < len(own)], batch[batch >= len(own)]
            view = torch.randint(own.views, (len(private),), generator=self.union_generator)
            x = torch.cat([own.rows(private, view), self.public_rows(accepted[public - len(own)])])
            total += self.public_step(weighted_loss(self.outputs(x), targets[torch.cat([private, public])], weights))
        return {"loss": total / self.protocol.iterations, "accepted": len(accepted)}

    def save(self) -> dict[str, Any]:
        return {**super().save(), "union_generator": self.union_generator.get_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.union_generator.set_state(state["union_generator"])


class CoFEDServer(PublicServer):
    """Pools votes within each label space."""

    method: CoFED

    def round(self, r: int) -> None:
        self.ask("fit")
        if self.method.oneshot and r != self.protocol.rounds // 2:
            return
        votes = {user: reply["votes"] for user, reply in self.ask("label").items()}
        labels = self.pooled(votes)
        replies = self.ask("cotrain", each={user: {"labels": labels[user]} for user in self.users})
        self.record("co-training loss", replies)
        self.log("accepted public rows", {user: reply["accepted"] for user, reply in replies.items()})

    def pooled(self, votes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What each user is to learn: the labels of its label space."""
        found: dict[str, Tensor] = {}
        for group in self.groups(self.method.key):
            cast = [votes[user] for user in group]
            pool = pooled_classes if cast[0].ndim == 1 else pooled_pairs
            found |= dict.fromkeys(group, pool(cast, self.method.alpha))
        return found


class CoFED(PublicMethod):
    """CoFED: co-training on public rows whose labels the users of a label space vote for.

    Args:
        margin: by how much a class must be more probable than the next one to get a vote, 0 to less than 1.
        alpha: share α of its owners' votes above which a class is accepted, 0 to less than 1.
        oneshot: vote and co-train once, in round R // 2, instead of in every round.
        rate: factor on the learning rates of the co-training.
    """

    revision: ClassVar[int] = 1
    tunable: ClassVar[Ranges] = {
        "rate": ALIGNMENT_RATE,
        "margin": Choice((0.1, 0.3, 0.5, 0.7)),
        "alpha": Choice((0.3, 0.5, 0.7)),
    }
    User = CoTrainingUser
    Server = CoFEDServer

    def __init__(self, *, margin: float = 0.3, alpha: float = 0.3, oneshot: bool = False, rate: float = 1.0) -> None:
        for option, value in (("margin", margin), ("alpha", alpha)):
            if not 0 <= value < 1:
                raise UserError(f"the option '{option}' of cofed is {value}", expected="0 to less than 1")
        self.margin, self.alpha, self.oneshot = float(margin), float(alpha), oneshot
        self.rate = positive("cofed", "rate", rate)

    def touches(self, users: Sequence[UserSpec]) -> list[str]:
        """Everyone: who is alone in its label space trains itself."""
        return [user.name for user in users]
