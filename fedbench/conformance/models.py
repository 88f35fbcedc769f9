"""What a model must do: features of the promised shape, row by row, from weights that train and can be kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.cache import Cache
from fedbench.choice import REFERENCE
from fedbench.conformance import Check, Failed, Skipped, Subject
from fedbench.conformance.cells import cell_of, federation, with_users
from fedbench.conformance.runs import steady
from fedbench.interfaces import Samples
from fedbench.seeds import derive
from fedbench.specs import MethodSpec

SIZE, VIEWS = 12, 2
_DTYPES = (np.float16, np.float32, np.uint8)


def made(subject: Subject, seed: int = 0) -> Any:
    """The model with the initial weights of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive("conformance", seed))
        return subject.create()


def read(subject: Subject) -> tuple[Any, Samples, Tensor]:
    """A model, samples of its modality, and what it makes of them: (N, V, ...)."""
    if "read" not in subject.kept:
        subject.target.verify()
        suite, model = federation(), made(subject)
        world = subject.registry.create("data", suite.data_name, suite.data_options)
        samples = world.public(size=SIZE, views=VIEWS)
        if model.modality not in samples.inputs:
            raise Skipped(f"the kit's world has no inputs of the modality '{model.modality}'")
        prepared = np.array(model.prepare(samples, Cache()))
        subject.kept["read"] = model, samples, torch.from_numpy(prepared)
    found: tuple[Any, Samples, Tensor] = subject.kept["read"]
    return found


def features(subject: Subject) -> str:
    """`prepare` gives rows for every item and view, and the model features of the stated length."""
    model, _, prepared = read(subject)
    at = subject.target.prepare
    if prepared.numpy().dtype not in _DTYPES:
        raise Failed(f"prepare() returned {prepared.dtype}, expected float16, float32 or uint8", at=at)
    views = VIEWS if model.modality == "image" else prepared.shape[1] if prepared.ndim > 1 else 0
    if prepared.ndim < 2 or tuple(prepared.shape[:2]) != (SIZE, views):
        raise Failed(f"prepare() returned {tuple(prepared.shape)}, expected ({SIZE}, {VIEWS}, ...)", at=at)
    if not isinstance(getattr(model, "features", None), int) or model.features < 1:
        raise Failed(f"features is {getattr(model, 'features', None)!r}, no whole number", at=subject.target)
    for rows in (1, 2, SIZE):
        found = model(_rows(prepared)[:rows])
        if tuple(found.shape) != (rows, model.features) or found.dtype != torch.float32:
            what = f"{rows} rows gave {tuple(found.shape)} {found.dtype}, expected ({rows}, {model.features}) float32"
            raise Failed(what, at=subject.target.forward)
        if not torch.isfinite(found).all():
            raise Failed(f"the features of {rows} rows are not finite", at=subject.target.forward)
    return f"{model.features} features"


def row_by_row(subject: Subject) -> None:
    """In evaluation mode an item's features do not depend on its batch."""
    model, _, prepared = read(subject)
    model.eval()
    rows = _rows(prepared)
    with torch.no_grad():
        whole = model(rows)
        single = torch.cat([model(row.unsqueeze(0)) for row in rows])
    if not torch.allclose(whole, single, rtol=1e-3, atol=1e-4 * (1 + float(whole.abs().max()))):
        raise Failed("in evaluation mode features depend on the other rows of a batch", at=subject.target.forward)


def same_weights(subject: Subject) -> None:
    """The global generator's seed, which the core sets, decides the initial weights; `prepare` gives the same again."""
    model, samples, prepared = read(subject)
    if differs := _differs(made(subject, 0).state_dict(), made(subject, 0).state_dict()):
        raise Failed(f"made twice with one seed, '{differs}' differs", at=subject.target)
    if not np.array_equal(np.array(model.prepare(samples, Cache())), prepared.numpy()):
        raise Failed("prepare() gives something else the second time", at=subject.target.prepare)


def state(subject: Subject) -> None:
    """`state_dict()` holds the model: another with its state gives the same features."""
    model, _, prepared = read(subject)
    other = made(subject, 1)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        one, two = (each.eval()(_rows(prepared)) for each in (model, other))
    if not torch.equal(one, two):
        raise Failed("another model with its state_dict() gives other features", at=subject.target)


def gradients(subject: Subject) -> str:
    """Some of it trains, and all that trains gets a finite gradient; the rows that it reads stay as they are."""
    _, _, prepared = read(subject)
    model, rows = made(subject), _rows(prepared)
    kept, before = rows.clone(), {name: value.clone() for name, value in model.named_buffers()}
    model.train()
    model(rows).square().mean().backward()
    if not torch.equal(rows, kept):
        raise Failed("it changed the rows that it was given", at=subject.target.forward)
    if subject.target.weights and (moved := _differs(before, dict(model.named_buffers()))):
        raise Failed(f"a pretrained model's '{moved}' moved in training mode", at=subject.target.forward)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not trained:
        raise Failed("none of its parameters trains", at=subject.target)
    for name, parameter in trained.items():
        if parameter.grad is None or not torch.isfinite(parameter.grad).all():
            what = "no gradient reaches" if parameter.grad is None else "the gradient is not finite at"
            raise Failed(f"{what} '{name}'", at=subject.target.forward)
    return f"{sum(value.numel() for value in trained.values()):,} trained numbers"


def training(subject: Subject) -> None:
    """Users that have it train for two rounds, straight and resumed alike."""
    read(subject)
    suite = with_users(federation(), model=subject.name, model_options=dict(subject.options))
    steady(cell_of(subject.registry, MethodSpec(REFERENCE, {}), suite), subject.registry)


def _rows(prepared: Tensor) -> Tensor:
    """The plain view, as the core hands it over."""
    return prepared[:, 0].to(torch.float32)


def _differs(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> str | None:
    """The first name whose value differs."""
    return next((name for name in one if name not in two or not torch.equal(one[name], two[name])), None)


_FIRST = ("features",)

CHECKS = (
    Check("features", features, "return (N, V, ...) from prepare() and (B, features) from forward()"),
    Check("row by row", row_by_row, "normalise over an item's own map, or use fixed statistics in eval mode", _FIRST),
    Check(
        "same twice", same_weights, "draw initial weights from torch's global generator, which the core seeds", _FIRST
    ),
    Check("state", state, "keep weights in parameters, and what else changes in buffers", _FIRST),
    Check(
        "gradients",
        gradients,
        "freeze (requires_grad_(False)) what does not train, and batch-norm statistics of pretrained nets",
        _FIRST,
    ),
    Check("training", training, "keep what changes in training in parameters or buffers", ("same twice", "gradients")),
)
