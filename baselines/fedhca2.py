"""FedHCA²: users of one architecture merge updates against conflicts, and learn how much of the merger to take.

Paper: Lu, Huang, Yang, Sirejiding, Ding, Lu, "FedHCA²: Towards Hetero-Client Federated Multi-Task Learning", CVPR 2024,
arXiv 2311.13250. Its merger is that of Liu, Liu, Jin, Stone, Liu, "Conflict-Averse Gradient Descent for Multi-task
Learning" (CAGrad), NeurIPS 2021, arXiv 2110.14048.
Official code: innovator-zero/FedHCA2 (aggregate.py, models/hyperweight.py).
Equations, D_n the change of user n's body in a local phase, A = D Dᵀ over the N users of one architecture, ḡ = mean of
D_n, c₀ = c·√(mean of A):
  w = argmin over the simplex of 1/N·1ᵀA w + c₀·√(wᵀA w),  g = Σ_n w_n D_n,  U = (ḡ + c₀·g/‖g‖) / (1 + c²);
  θ_n ← θ_n + D̃_n + clip(α_n, 0, 1)·U, with D̃_n the mean of D over the users of n's task;
  for each tensor of a head, H_k its change at user k, flat, of P numbers, over users whose heads have equal shapes:
  θ_k ← θ_k + H_k + clip(β_k, 0, 1)·Σ_j softmax_j(H_k·H_j/√P) H_j, one β for each layer and user.
  α_n and β_k are learned by SGD; the gradient is −⟨the change in the next local phase, ∂θ/∂α⟩ (∂θ/∂β alike): what
  training goes on to do was right.
Algorithm, each of R rounds:
  1. every user trains its whole model on private data;
  2. users send their changes; the server first learns α and β from them (not in round 0), then merges;
  3. users add what they get to what they had before the local phase.
Before round 0 all of a group get the body of its first user; heads start apart.
Deviations:
  - The paper's decoders have layers before the output layer, which are what crosses; output layers stay with the users.
    Here a head is nothing but the output layer, and the decoders' rule is applied to it, where shapes match. Shapes
    alone decide, as in the paper, so users of different tasks with equally many classes are among each other. A head
    that matches no other stays as trained.
  - The simplex problem is solved (SLSQP) with A divided by its mean and without the code's small constants.
  - Users of one task are averaged wherever they stand; the code compares neighbours in a sorted list.
  - Steps, optimizer, moments and scores as in FedAvg (see fedavg.py).
Left open by the paper for such users: nothing; c = 0.4, α = β = 0.1 and SGD (0.01, momentum 0.9, decay 1e-4) are the
code's defaults.
Users: those that share their architecture with another. The rest trains locally.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.optimize import LinearConstraint, minimize
from torch import Tensor

from fedbench.errors import UserError
from fedbench.method import architecture
from fedbench.options import positive
from fedbench.ranges import Choice, LogRange, Ranges
from fedbench_baselines.averaging import flattened, unflattened, weighted_mean
from fedbench_baselines.shared_weights import (
    BODY,
    HEAD,
    Key,
    SharingMethod,
    SharingServer,
    State,
    UpdatingUser,
    architecture_and_labels,
    of_part,
)

Vector = np.ndarray[Any, Any]

MOMENTUM, DECAY = 0.9, 1e-4
"""Of the SGD on aggregation weights, as in the official code."""


def simplex_weights(gram: Vector, c: float) -> Vector:
    """The w ≥ 0 of sum 1 with the least 1/N·1ᵀA w + c·√(mean of A)·√(wᵀA w), for a Gram matrix A (N, N)."""
    count, mean = len(gram), float(gram.mean())
    equal = np.full(count, 1 / count)
    if mean <= 0:
        return equal
    scaled, b = gram / mean, gram.mean(0) / mean

    def value(w: Vector) -> float:
        return float(b @ w) + c * math.sqrt(max(0.0, float(w @ scaled @ w)))

    def slope(w: Vector) -> Vector:
        return np.asarray(b + c * (scaled @ w) / math.sqrt(max(1e-12, float(w @ scaled @ w))))

    found = minimize(
        value,
        equal,
        jac=slope,
        bounds=[(0, 1)] * count,
        constraints=LinearConstraint(np.ones((1, count)), 1, 1),
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 500},
    )
    w = np.clip(found.x, 0, None)
    return np.asarray(w / w.sum())


def conflict_averse(updates: Tensor, c: float) -> Tensor:
    """U (P,), the merger of updates (N, P), both float64."""
    gram = updates @ updates.T
    g = torch.from_numpy(simplex_weights(gram.numpy(), c)) @ updates
    radius, length = c * gram.mean().clamp_min(0).sqrt(), g.norm()
    step: Tensor = updates.mean(0)
    if length > 0:
        step = step + radius * g / length
    return step / (1 + c**2)


def cross_attention(changes: Tensor) -> Tensor:
    """What each of K flat changes (K, P) finds in all of them, itself included: (K, P)."""
    scores = changes @ changes.T / math.sqrt(changes.shape[1])
    return scores.softmax(-1) @ changes


class AggregationWeights:
    """α and β of all users: how much each takes of what the server merged, a number for each user and layer.

    Args:
        initial: α, for bodies, and β, for every layer of a head.
        rate: learning rate of their SGD.
    """

    def __init__(self, initial: Mapping[str, float], rate: float) -> None:
        self.initial, self.rate = dict(initial), rate
        self.values: dict[str, dict[str, float]] = {}
        self.momenta: dict[str, dict[str, float]] = {}
        self.directions: dict[str, dict[str, Tensor]] = {}

    def value(self, user: str, layer: str) -> float:
        """The weight as it is learned; what is used is clipped to 0..1."""
        part = BODY if layer == BODY else HEAD
        return self.values.setdefault(user, {}).setdefault(layer, self.initial[part])

    def scaled(self, user: str, directions: State) -> dict[str, Tensor]:
        """What a user takes of the directions, which are kept to learn from."""
        self.directions[user] = dict(directions)
        return {
            name: min(1.0, max(0.0, self.value(user, layer_of(name)))) * value for name, value in directions.items()
        }

    def learn(self, user: str, update: State) -> None:
        """One SGD step on each weight of a user, given the update that followed its directions."""
        gains: dict[str, float] = {}
        for name, direction in self.directions.pop(user, {}).items():
            layer = layer_of(name)
            along = float((update[name].double() * direction.double()).sum()) if name in update else 0.0
            gains[layer] = gains.get(layer, 0.0) + along
        for layer, gain in gains.items():
            value, momenta = self.value(user, layer), self.momenta.setdefault(user, {})
            gradient = -gain if 0 <= value <= 1 else 0.0  # clipping passes none from beyond its ends
            momenta[layer] = MOMENTUM * momenta.get(layer, 0.0) + gradient + DECAY * value
            self.values[user][layer] = value - self.rate * momenta[layer]


def layer_of(name: str) -> str:
    """The layer that a weight belongs to, for which one number is learned: a head's own, or the whole body."""
    return name.rpartition(".")[0] if of_part({name: torch.empty(0)}, HEAD) else BODY


class HyperServer(SharingServer):
    """Merges changes, and learns for each user how much of the merger it should take."""

    method: FedHCA2

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        initial = {BODY: self.method.alpha, HEAD: self.method.beta}
        self.weights = AggregationWeights(initial, self.method.hyper_rate)

    def round(self, r: int) -> None:
        if r == 0:
            self.start_equally()
        self.ask("fit")
        changes = self.ask("upload_update", users=list(self.parts()), parts=[BODY, HEAD])
        for user, change in changes.items():
            self.weights.learn(user, change)
        self.log("alpha", {user: self.weights.value(user, BODY) for user in changes})
        bases, directions = self.merge(changes)
        self.ask("add_update", each={user: self.taken(user, bases[user], directions[user]) for user in bases})

    def merge(self, changes: Mapping[str, State]) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Tensor]]]:
        """What each user takes in any case, and what it takes a learned share of."""
        bases: dict[str, dict[str, Tensor]] = {}
        directions: dict[str, dict[str, Tensor]] = {}
        for users, bodies in self.shared(changes):
            stacked = torch.stack([flattened(body) for body in bodies])
            common = unflattened(conflict_averse(stacked, self.method.c), like=bodies[0])
            for user, mean in self.means_of_tasks(dict(zip(users, bodies, strict=True))).items():
                bases[user], directions[user] = mean, dict(common)
            for alike in same_shapes({user: of_part(changes[user], HEAD) for user in users}):
                found = attended([of_part(changes[user], HEAD) for user in alike])
                for user, attention in zip(alike, found, strict=True):
                    bases[user] |= of_part(changes[user], HEAD)
                    directions[user] |= attention
        return bases, directions

    def means_of_tasks(self, bodies: Mapping[str, State]) -> dict[str, dict[str, Tensor]]:
        """D̃: each user's change, averaged over the users of its task."""
        found: dict[str, dict[str, Tensor]] = {}
        for group in self.groups(architecture_and_labels):
            users = [user for user in group if user in bodies]
            if users:
                mean = weighted_mean([bodies[user] for user in users], [1.0] * len(users))
                found |= {user: dict(mean) for user in users}
        return found

    def taken(self, user: str, base: State, directions: State) -> dict[str, Tensor]:
        """The update that a user gets."""
        share = self.weights.scaled(user, directions)
        return {name: value + share[name] for name, value in base.items()}

    def save(self) -> dict[str, Any]:
        weights = self.weights
        return {"values": weights.values, "momenta": weights.momenta, "directions": weights.directions}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in ("values", "momenta", "directions"):
            setattr(self.weights, name, {user: dict(items) for user, items in state[name].items()})


def same_shapes(states: Mapping[str, State]) -> list[list[str]]:
    """Users in groups of two or more whose states have equal names and shapes; those without numbers are left out."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for user, state in states.items():
        shapes = tuple((name, tuple(value.shape)) for name, value in state.items())
        if shapes:
            groups.setdefault(shapes, []).append(user)
    return [group for group in groups.values() if len(group) > 1]


def attended(states: Sequence[State]) -> list[dict[str, Tensor]]:
    """Cross attention between equally shaped states, tensor by tensor."""
    found: list[dict[str, Tensor]] = [{} for _ in states]
    for name, first in states[0].items():
        rows = cross_attention(torch.stack([state[name].double().flatten() for state in states]))
        for one, row in zip(found, rows, strict=True):
            one[name] = row.view(first.shape).to(first.dtype)
    return found


class FedHCA2(SharingMethod):
    """FedHCA²: conflict-averse bodies and cross-attending heads in each architecture, learned shares.

    Args:
        c: how far the merger may lie from the mean update, in lengths of it, more than 0, less than 1.
        alpha: initial share α of a body's merger that a user takes, 0 to 1.
        beta: initial share β of a head's merger that a user takes, 0 to 1.
        hyper_rate: learning rate of α and β.
    """

    revision: ClassVar[int] = 1
    trains_heads: ClassVar[bool] = True
    tunable: ClassVar[Ranges] = {
        "c": Choice((0.2, 0.4, 0.6)),
        "alpha": LogRange(0.03, 1.0),
        "hyper_rate": LogRange(0.001, 0.1),
    }
    User = UpdatingUser
    Server = HyperServer

    def __init__(self, *, c: float = 0.4, alpha: float = 0.1, beta: float = 0.1, hyper_rate: float = 0.01) -> None:
        self.c = positive("fedhca2", "c", c)
        if c >= 1:
            raise UserError(f"the option 'c' of fedhca2 is {c}", expected="more than 0, less than 1")
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not 0 <= value <= 1:
                raise UserError(f"the option '{name}' of fedhca2 is {value}", expected="0 to 1")
        self.alpha, self.beta = alpha, beta
        self.hyper_rate = positive("fedhca2", "hyper_rate", hyper_rate)

    def sharing(self) -> dict[str, Key]:
        return {BODY: architecture}
