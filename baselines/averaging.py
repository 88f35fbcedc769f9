"""Weighted means, sums and flat vectors of model parts, for the methods that merge weights or updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def trainable(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """The trained parameters of a module as the flat message in which they cross, detached."""
    return {f"{prefix}{name}": value.detach() for name, value in module.named_parameters() if value.requires_grad}


@torch.no_grad()
def load_trainable(module: nn.Module, state: Mapping[str, Tensor], prefix: str = "") -> None:
    """Copy what `trainable` returned back into a module of the same architecture.

    Raises:
        KeyError: a parameter is missing in `state`.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(state[f"{prefix}{name}"])


def weighted_mean(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """The mean of equally shaped states, weighted and summed in the order given.

    Args:
        weights: at least one above 0; they need not sum to 1.
    """
    total = float(sum(weights))
    shares = [weight / total for weight in weights]
    return {
        name: torch.stack([share * state[name] for share, state in zip(shares, states, strict=True)]).sum(0)
        for name in states[0]
    }


def total(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sum of equally shaped states, in the order given."""
    return {name: torch.stack([state[name] for state in states]).sum(0) for name in states[0]}


def flattened(state: Mapping[str, Tensor]) -> Tensor:
    """All numbers of a state as one float64 vector, in its own order; empty where it has none."""
    return torch.cat([torch.empty(0, dtype=torch.float64), *(value.double().flatten() for value in state.values())])


def unflattened(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state whose `flattened` is `vector`, with names, shapes and number formats of `like`."""
    parts = torch.split(vector, [value.numel() for value in like.values()])  # type: ignore[no-untyped-call]
    return {name: part.view(like[name].shape).to(like[name].dtype) for name, part in zip(like, parts, strict=True)}
