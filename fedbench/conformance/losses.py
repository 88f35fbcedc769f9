"""What an alignment loss must do: a finite scalar and gradient on whatever users may send, and nothing besides."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedbench.conformance import Check, Failed, Skipped, Subject
from fedbench.conformance.cells import cell_of, federation
from fedbench.conformance.generators import watched
from fedbench.conformance.rows import (
    Result,
    aligned_rows,
    equal_rows,
    opposite_rows,
    orthogonal_rows,
    outcome,
    random_rows,
    rounded,
    turned_rows,
)
from fedbench.conformance.runs import steady
from fedbench.errors import UserError
from fedbench.plan import check_method
from fedbench.specs import MethodSpec, parse_loss

Shapes = Sequence[tuple[int, int]]

ALL: Shapes = tuple(itertools.product((2, 3, 8, 32, 64), (1, 2, 3, 4, 5)))
"""B and M that a suite may have."""
SMALL: Shapes = tuple(itertools.product((2, 8, 16), (1, 2, 3)))
"""B and M where the numbers matter and not the size."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 8e-2}
"""How far a value may be from that in float64 on the same rows, relative to 1 + the value."""
ALLOWANCE = 50
"""How many times as long as the Muscle loss a loss may take: then it dominates an alignment step."""


def scalar(subject: Subject) -> None:
    """One number with a gradient at the anchor, though the others arrive detached."""
    for shape, result in _accepted(subject, ((8, 1), (8, 2), (8, 3))):
        if not result.gradient.count_nonzero():
            raise Failed(f"{shape}: the anchor's gradient is zero", at=subject.target.forward)


def sizes(subject: Subject) -> str | None:
    """Finite for B = 2 … 64 and M = 1 … 5; it may refuse some with a `UserError`."""
    done = [shape for shape, _ in _finite(subject, ALL)]
    refused = [shape for shape in map(_name, ALL) if shape not in done]
    return f"it refuses {len(refused)} of {len(ALL)} shapes, the first is {refused[0]}" if refused else None


def identical_rows(subject: Subject) -> None:
    """All rows equal, as after a collapse."""
    list(_finite(subject, [*SMALL, (32, 3)], rows=equal_rows))


def orthogonal(subject: Subject) -> None:
    """Rows that agree perfectly, not at all, or point apart."""
    for rows in (aligned_rows, orthogonal_rows, opposite_rows):
        list(_finite(subject, [*SMALL, (32, 3)], rows=rows))


def number_formats(subject: Subject) -> None:
    """Finite numbers in every format, which agree as far as its digits go."""
    for dtype, tolerance in TOLERANCES.items():
        exact = dict(_accepted(subject, SMALL, rows=rounded(dtype), dtype=torch.float64))
        for shape, result in _finite(subject, SMALL, dtype=dtype):
            value, wanted = float(result.value.detach()), float(exact[shape].value.detach())
            if abs(value - wanted) > tolerance * (1 + abs(wanted)):
                what = f"{shape}: {value:.6g} in {dtype}, {wanted:.6g} in float64"
                raise Failed(what, at=subject.target.forward)


def order_of_others(subject: Subject) -> None:
    """The other users are a set: their order changes nothing."""
    if most_others(subject) == 1:
        raise Skipped("it takes one other only")
    shapes = ((8, 2), (8, 3), (8, 4))
    usual = dict(_accepted(subject, shapes))
    for shape, turned in _accepted(subject, shapes, rows=turned_rows):
        for what in ("value", "gradient"):
            one, two = getattr(usual[shape], what), getattr(turned, what)
            if not torch.allclose(one, two, rtol=1e-3, atol=1e-5):
                raise Failed(f"{shape}: its {what} depends on the order of the others", at=subject.target.forward)


def inputs(subject: Subject) -> None:
    """It leaves what it gets as it is."""
    shapes = {_name(shape): shape for shape in SMALL}
    for shape, result in _accepted(subject, SMALL):
        before = [functional.normalize(rows, dim=-1) for rows in random_rows(*shapes[shape], torch.float32)]
        for name, now, wanted in zip(("anchor", "others"), (result.anchor, result.others), before, strict=True):
            if not torch.equal(now, wanted) or now._version:
                raise Failed(f"{shape}: it changed its input '{name}'", at=subject.target.forward)
        if result.others.requires_grad:
            raise Failed(f"{shape}: it turned gradients of its input 'others' on", at=subject.target.forward)


def global_generators(subject: Subject) -> None:
    """It draws from no global generator."""
    with watched() as drawn:
        for _, result in _accepted(subject, SMALL):
            result.value.backward()  # type: ignore[no-untyped-call]
    if drawn:
        raise Failed(f"it drew from the global generator of {' and '.join(drawn)}", at=subject.target.forward)


def parameters(subject: Subject) -> str:
    """What it learns is a parameter from the start, gets a gradient, and goes into a checkpoint."""
    loss, fresh, others = subject.create(), subject.create(), most_others(subject)
    known = dict(loss.named_parameters())
    value = outcome(loss, 8, others).value
    for name, parameter in loss.named_parameters():
        if known.get(name) is not parameter:
            raise Failed(f"the parameter '{name}' came with a call: no optimizer has it", at=type(loss).forward)
    for module in loss.modules():
        for name, tensor in vars(module).items():
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.is_leaf:
                raise Failed(f"'{name}' has a gradient but is no nn.Parameter", at=type(loss))
    trained = {name: parameter for name, parameter in known.items() if parameter.requires_grad}
    if not trained:
        raise Skipped("it has none")
    value.backward()  # type: ignore[no-untyped-call]
    for name, parameter in trained.items():
        if parameter.grad is None:
            raise Failed(f"no gradient reaches the parameter '{name}'", at=type(loss).forward)
        if not torch.isfinite(parameter.grad).all():
            raise Failed(f"the gradient of the parameter '{name}' is not finite", at=type(loss).forward)
        parameter.data -= 0.01 * parameter.grad
    fresh.load_state_dict(loss.state_dict())
    if not torch.equal(outcome(loss, 8, others).value, outcome(fresh, 8, others).value):
        raise Failed("a fresh loss with its state gives another value", at=type(loss))
    return ", ".join(trained)


def cost(subject: Subject) -> str:
    """Forward and backward at B = 32 and M = 3, or as many others as it takes, against Muscle and InfoNCE."""
    others = most_others(subject, batch=32)
    usual = subject.registry.declared("method", parse_loss(subject.name).name).defaults["loss"]
    muscle = _fastest(subject.registry.create("loss", usual), others)
    own, plain = _fastest(subject.create(), others), _fastest(_info_nce, others)
    shown = f"{1e3 * own:.1f} ms at M = {others}; Muscle {1e3 * muscle:.1f}, InfoNCE {1e3 * plain:.1f}"
    if own > ALLOWANCE * muscle:
        raise Failed(shown, at=subject.target.forward)
    return shown


def training(subject: Subject) -> None:
    """Two rounds of the method that takes losses, straight and resumed, end alike."""
    suite = federation()
    others = min(suite.protocol.others, most_others(subject))
    suite = replace(suite, protocol=replace(suite.protocol, others=others))
    options = {f"loss.{name}": value for name, value in subject.options.items()}
    spec = MethodSpec(parse_loss(subject.name).name, {"loss": subject.name, **options})
    check_method(suite, subject.registry, spec)
    steady(cell_of(subject.registry, spec, suite), subject.registry)


def most_others(subject: Subject, *, batch: int = 8) -> int:
    """The largest M up to 3 that the loss does not refuse."""
    loss = subject.create()
    for others in (3, 2):
        try:
            outcome(loss, batch, others)
        except UserError:
            continue
        return others
    return 1


def _accepted(subject: Subject, shapes: Shapes, **given: Any) -> Iterator[tuple[str, Result]]:
    """The outcome at every shape that the loss does not refuse, with the shape's name.

    Raises:
        Failed: it refuses them all.
    """
    loss, refusal, taken = subject.create(), "", False
    for shape in shapes:
        try:
            result = outcome(loss, *shape, **given)
        except UserError as error:
            refusal = refusal or str(error)
            continue
        taken = True
        yield _name(shape), result
    if not taken:
        raise Failed(f"it refuses every shape: {refusal}", at=subject.target.forward)


def _finite(subject: Subject, shapes: Shapes, **given: Any) -> Iterator[tuple[str, Result]]:
    for shape, result in _accepted(subject, shapes, **given):
        if not torch.isfinite(result.value):
            value = f"{float(result.value.detach())} in {result.value.dtype}"
            raise Failed(f"{shape}: its value is {value}", at=subject.target.forward)
        if not torch.isfinite(result.gradient).all():
            raise Failed(f"{shape}: its gradient is not finite in {result.gradient.dtype}", at=subject.target.forward)
        yield shape, result


def _name(shape: tuple[int, int]) -> str:
    return f"B = {shape[0]}, M = {shape[1]}"


def _fastest(loss: Any, others: int) -> float:
    """Seconds of the fastest of some passes: what else the machine does only makes it slower."""
    anchor, rows = random_rows(32, others, torch.float32)
    fixed = functional.normalize(rows, dim=-1)
    spent = []
    for _ in range(7):
        leaf = anchor.clone().requires_grad_()
        started = time.perf_counter()
        loss(functional.normalize(leaf, dim=-1), fixed).backward()
        spent.append(time.perf_counter() - started)
    return min(spent)


def _info_nce(anchor: Tensor, others: Tensor) -> Tensor:
    """InfoNCE with each other user, summed."""
    items = torch.arange(len(anchor))
    return torch.stack([functional.cross_entropy(anchor @ rows.T / 0.2, items) for rows in others]).sum()


_FIRST = ("scalar",)

CHECKS = (
    Check(
        "scalar", scalar, "return one number made from the anchor; do not detach it: the others are detached already"
    ),
    Check("sizes", sizes, "stay finite also for few rows; refuse with a UserError what cannot be computed", _FIRST),
    Check("identical rows", identical_rows, "rows may all be equal: keep roots and logarithms off 0", _FIRST),
    Check(
        "orthogonal rows", orthogonal, "similarities may be just 0, 1 or -1: keep roots and logarithms off 0", _FIRST
    ),
    Check(
        "number formats",
        number_formats,
        "make tensors with the anchor's dtype (new_zeros), and compute half precision in float32",
        _FIRST,
    ),
    Check("order of others", order_of_others, "sum or average over the others: they come in random order", _FIRST),
    Check("inputs", inputs, "change nothing that was given in place (add_, out=, requires_grad_)", _FIRST),
    Check("global generators", global_generators, "draw from a generator of your own, kept in a buffer", _FIRST),
    Check("parameters", parameters, "make what is learned an nn.Parameter in __init__", _FIRST),
    Check("cost", cost, f"vectorise: {ALLOWANCE} times Muscle's time dominates an alignment step", _FIRST),
    Check(
        "training", training, "keep what changes between calls in buffers or parameters, so that it is saved", _FIRST
    ),
)
