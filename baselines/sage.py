"""SAGE: pseudo-labels of a user's own model, corrected by a global one where the two differ in confidence.

Paper: Liu, Shang, Zhang, Lu, Gong, Xue, Wang, "Mind the Gap: Confidence Discrepancy Can Guide Federated
Semi-Supervised Learning Across Pseudo-Mismatch", CVPR 2025, arXiv 2503.13227. That this is the row "SAGE" of FedMuscle
is our reading of its name (Semi-supervised Aggregation for Globally-Enhanced Ensemble).
Official code: Jay-Codeman/SAGE (SAGE.py).
Equations, for a public item u, p_l = f_l(weak u) of the model in training, p_g = f_g(weak u) of the global model of
this round's start, both detached; c = max p, h = one-hot argmax p, mask = [c ≥ τ]:
  λ = exp(−κ ΔC), ΔC = clip(|c_l − c_g| + 1e-6, 1e-6, 1), κ = ln 2 / 0.05, so λ = 1/2 at ΔC = 0.05;
  q = λ h_l + (1 − λ) h_g where mask_l, else h_g;
  L_u = mean over u of max(mask_l, mask_g) · KL(q ‖ f_l(strong u));   L = L_task(private batch) + λ_u L_u.
Multi-label form: every class is a distribution (1 − p, p) of its own, and the mean goes over items and classes; the KL
has the gradient of the BCE between q and f_l(strong u).
What f_g is depends on whom a user shares its label space with:
  - with others of its architecture: the original, f_g is the mean of their models, weighted by private items;
  - only with others of other architectures: p_g is the mean over those other users (its peers) of their p;
  - with nobody: p_g := p_l, so λ ≈ 1 and this is FixMatch, alone.
Algorithm, each of R rounds:
  1. users that share label space and architecture send their models, get the mean and go on from it; in round 0 they
     get the first one's initial weights, since weights that start apart have no meaningful mean;
  2. every user trains its whole model on private data;
  3. peers send p (float16) of this round's T·B public rows, once a round; the server returns each user's mean;
  4. every user takes T steps on L, each with B public rows and one private batch.
Before the last local phase, models are averaged once more.
Budget: R·T steps beside the local phases, as the public phases of all methods, but each of them sees labels too:
compare with local-long, whose R·T extra steps have as many private batches.
Deviations:
  - The ensemble of peers and the multi-label form are ours, since heterogeneous models have no global model.
  - The paper trains on L alone; the local phase that comes first is every method's, so p_l has moved on from f_g.
  - Unlabelled data are the public set, the same for all, instead of private and with the labelled images among them.
  - The weak view is the plain picture, the strong one another of its V fixed views at random (view 0 where V = 1).
  - AdamW at the rates of a public phase (see public_logits.py); moments stay with the user. Scores come after a local
    phase, so they are never those of the mean model itself. Only weights that a loss reaches cross.
  - log-softmax instead of adding 1e-10 to probabilities.
Users: all that can read the public set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.errors import UserError
from fedbench.interfaces import UserSpec
from fedbench.method import architecture, label_space
from fedbench.options import positive
from fedbench.ranges import ALIGNMENT_RATE, Choice, Ranges
from fedbench.seeds import torch_generator
from fedbench.user import verb
from fedbench_baselines.averaging import load_trainable, trainable, weighted_mean
from fedbench_baselines.public_logits import PublicMethod, PublicServer, PublicUser


def corrected(local: Tensor, other: Tensor, *, threshold: float, kappa: float) -> tuple[Tensor, Tensor]:
    """Soft pseudo-labels q (..., C) and where they count (...), 0 or 1, from distributions p_l and p_g (..., C)."""
    (c_local, h_local), (c_other, h_other) = local.max(-1), other.max(-1)
    gap = ((c_local - c_other).abs() + 1e-6).clamp(1e-6, 1.0)
    trust = torch.where(c_local >= threshold, torch.exp(-kappa * gap), 0.0).unsqueeze(-1)
    one_hot = (F.one_hot(h, local.shape[-1]).to(local.dtype) for h in (h_local, h_other))
    mine, theirs = one_hot
    confident = (c_local >= threshold) | (c_other >= threshold)
    return trust * mine + (1 - trust) * theirs, confident.to(local.dtype)


def correction_loss(log_probabilities: Tensor, targets: Tensor, confident: Tensor) -> Tensor:
    """L_u: KL(q ‖ p_s) where confident, mean over all; log p_s and q (..., C), confident (...)."""
    divergence = F.kl_div(log_probabilities, targets, reduction="none").sum(-1)
    return (divergence * confident).mean()


def distributions(probabilities: Tensor, *, multi_label: bool) -> Tensor:
    """Probabilities (B, C) as rows that sum to 1: themselves, or no and yes of every class, (B, C, 2)."""
    return torch.stack([1 - probabilities, probabilities], -1) if multi_label else probabilities


def log_distributions(outputs: Tensor, *, multi_label: bool) -> Tensor:
    """The logarithm of the same, of logits (B, C)."""
    if multi_label:
        return torch.stack([F.logsigmoid(-outputs), F.logsigmoid(outputs)], -1)
    return outputs.log_softmax(-1)


class SemiSupervisedUser(PublicUser):
    """Learns private batches and pseudo-labels of public ones together."""

    method: SAGE
    wire = torch.float16

    def setup(self) -> None:
        super().setup()
        self.view_generator = torch_generator("strong views", self.seed, self.name)
        self._guide: Tensor | None = None

    def message(self, outputs: Tensor) -> Tensor:
        """Peers tell probabilities."""
        return self.probabilities(outputs)

    def parts(self) -> dict[str, nn.Module]:
        """The model that is averaged, by the prefix under which its weights cross."""
        found: dict[str, nn.Module] = {"backbone.": self.representation.backbone, "head.": self.head}
        if self.protocol.head == "embedding":
            found["projection."] = self.representation.projection
        return found

    @verb
    def upload(self) -> dict[str, Any]:
        """The weights of the whole model."""
        return {name: value for prefix, part in self.parts().items() for name, value in trainable(part, prefix).items()}

    @verb
    def download(self, batches: Tensor | None = None, **mean: Tensor) -> dict[str, Any]:
        """Go on from the global model, and keep what it says of this round's public batches: it is frozen till then."""
        for prefix, part in self.parts().items():
            load_trainable(part, mean, prefix)
        if batches is not None:
            self._guide = self.predict(batches)["outputs"]
        return {}

    @verb
    def learn(self, batches: Tensor | None = None, probabilities: Tensor | None = None) -> dict[str, Any]:
        """T steps on L. Replies the means of L and of the share of pseudo-labels that counted.

        Args:
            batches: (T, B) int64, where the user has not been told yet.
            probabilities: the peers' mean p_g, (T, B, C).
        """
        if batches is not None:
            self._batches = batches
        guide = self._guide if probabilities is None else probabilities
        self.set_training(True)
        total = share = 0.0
        for t, batch in enumerate(self._batches):
            x, targets = self.private_batch()
            supervised = self.private_loss(x, targets)
            unsupervised, confident = self.public_loss(batch, None if guide is None else guide[t])
            total += self.public_step(supervised + self.method.lambda_u * unsupervised)
            share += confident
        self._guide = None
        return {"loss": total / len(self._batches), "confident": share / len(self._batches)}

    def public_loss(self, batch: Tensor, other: Tensor | None) -> tuple[Tensor, float]:
        """L_u of a public batch and the share of it that counted; `other` is p_g (B, C), None where p_g := p_l."""
        multi_label, method = self.multi_label, self.method
        with torch.no_grad():
            local = self.probabilities(self.outputs(self.public_rows(batch)))
        other = local if other is None else other.to(local)
        targets, confident = corrected(
            distributions(local, multi_label=multi_label),
            distributions(other, multi_label=multi_label),
            threshold=method.threshold,
            kappa=method.kappa,
        )
        strong = self.outputs(self.participant.public.rows(batch, self.strong_views(len(batch))))
        loss = correction_loss(log_distributions(strong, multi_label=multi_label), targets, confident)
        return loss, float(confident.mean())

    def strong_views(self, count: int) -> Tensor:
        """For each of `count` items one of its views other than the plain one, where there is another."""
        views = self.participant.public.views
        return torch.randint(min(1, views - 1), views, (count,), generator=self.view_generator)

    def save(self) -> dict[str, Any]:
        return {**super().save(), "view_generator": self.view_generator.get_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.view_generator.set_state(state["view_generator"])


class SAGEServer(PublicServer):
    """Averages models where they are alike, and what they say of public rows where they are not."""

    method: SAGE

    def round(self, r: int) -> None:
        batches = self.draw()
        told = self.average(batches, initial=r == 0)
        self.ask("fit")
        spoken = self.ask("predict", users=self.speakers(), batches=batches)
        messages = {user: {} if user in told or user in spoken else {"batches": batches} for user in self.users}
        for user, mean in self.ensembles(spoken).items():
            messages[user]["probabilities"] = mean
        replies = self.ask("learn", each=messages)
        self.record("semi-supervised loss", replies)
        self.log("confident share", {user: reply["confident"] for user, reply in replies.items()})

    def finish(self) -> None:
        self.average()
        super().finish()

    def average(self, batches: Tensor | None = None, *, initial: bool = False) -> list[str]:
        """Give users with equal models their mean, or the first one's initial weights; who got them."""
        groups = self.twins()
        sent = self.ask("upload", users=[user for user in self.users if any(user in group for group in groups)])
        means: dict[str, dict[str, Tensor]] = {}
        for group in groups:
            heard = [user for user in group if user in sent]
            if counted := heard[:1] if initial else heard:
                mean = weighted_mean([sent[user] for user in counted], [self.specs[user].train for user in counted])
                means |= dict.fromkeys(heard, mean)
        common = {} if batches is None else {"batches": batches}
        return list(self.ask("download", each={user: {**common, **mean} for user, mean in means.items()}))

    def twins(self) -> list[list[str]]:
        """The living users whose label space and architecture others share, in groups."""
        groups = self.groups(lambda spec: (label_space(spec), architecture(spec)))
        return [group for group in groups if len(group) > 1]

    def peers(self) -> dict[str, list[str]]:
        """For each living user without a global model: the others of its label space."""
        twins = {user for group in self.twins() for user in group}
        return {
            user: [other for other in group if other != user]
            for group in self.groups(label_space)
            for user in group
            if user not in twins
        }

    def speakers(self) -> list[str]:
        """The living users that are someone's peers."""
        heard = {peer for peers in self.peers().values() for peer in peers}
        return [user for user in self.users if user in heard]

    def ensembles(self, spoken: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        """For each user with peers the mean of what they said, in the number format that they said it in."""
        found: dict[str, Tensor] = {}
        for user, peers in self.peers().items():
            if heard := [spoken[peer]["outputs"] for peer in peers if peer in spoken]:
                found[user] = torch.stack(heard).float().mean(0).to(heard[0].dtype)
        return found


class SAGE(PublicMethod):
    """SAGE: pseudo-labels on public rows, corrected by the users of the same label space.

    Args:
        threshold: confidence τ from which a pseudo-label counts, 0 to 1.
        kappa: κ, how fast trust in one's own pseudo-label falls with the difference in confidence.
        lambda_u: weight λ_u of the loss on public rows.
        rate: factor on the learning rates of the T steps.
    """

    revision: ClassVar[int] = 1
    tunable: ClassVar[Ranges] = {
        "rate": ALIGNMENT_RATE,
        "threshold": Choice((0.6, 0.7, 0.8, 0.9, 0.95)),
        "lambda_u": Choice((0.3, 1.0, 3.0)),
    }
    User = SemiSupervisedUser
    Server = SAGEServer

    def __init__(
        self,
        *,
        threshold: float = 0.95,
        kappa: float = math.log(2) / 0.05,
        lambda_u: float = 1.0,
        rate: float = 1.0,
    ) -> None:
        if not 0 <= threshold <= 1:
            raise UserError(f"the option 'threshold' of sage is {threshold}", expected="0 to 1")
        self.threshold, self.kappa = float(threshold), positive("sage", "kappa", kappa)
        self.lambda_u, self.rate = positive("sage", "lambda_u", lambda_u), positive("sage", "rate", rate)

    def touches(self, users: Sequence[UserSpec]) -> list[str]:
        """Everyone: who is alone in its label space trains itself."""
        return [user.name for user in users]
