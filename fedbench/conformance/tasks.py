"""What a task must do: an output layer, a loss that falls, and scores that get better as it falls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.choice import REFERENCE
from fedbench.conformance import Check, Failed, Skipped, Subject
from fedbench.conformance.cells import cell_of, federation, with_users
from fedbench.conformance.heldout import with_task
from fedbench.conformance.runs import steady
from fedbench.seeds import derive, torch_generator
from fedbench.specs import MethodSpec

ITEMS, FEATURES, CLASSES = 48, 12, 4
STEPS = 60


class Lesson:
    """Features from which the targets can be read, for a task of either kind of targets."""

    def __init__(self, task: Any, *, multi_label: bool) -> None:
        generator = torch_generator("conformance", "task")
        self.classes = CLASSES
        numbers = torch.arange(ITEMS) % CLASSES
        plain = torch.nn.functional.one_hot(numbers, CLASSES)
        self.targets = (plain | plain.roll(1, 0)).to(torch.uint8) if multi_label else numbers
        noise = 0.1 * torch.randn(ITEMS, FEATURES, generator=generator)
        read = self.targets.float() if multi_label else plain.float()
        self.features = noise + torch.nn.functional.pad(read, (0, FEATURES - CLASSES))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive("conformance"))
            self.head: nn.Module = task.head(FEATURES, CLASSES)


def lesson(subject: Subject) -> tuple[Any, Lesson]:
    """The task and a lesson with targets that its loss takes: class numbers, else several classes an item."""
    task = subject.create()
    refusals = []
    for multi_label in _kinds(subject):
        given = Lesson(task, multi_label=multi_label)
        try:
            task.loss(given.head(given.features), given.targets)
        except Exception as error:
            refusals.append(error)
            continue
        return task, given
    raise refusals[0]


def outputs_and_loss(subject: Subject) -> None:
    """The head gives outputs of which the loss makes a finite scalar with a gradient, also for one item."""
    task, given = lesson(subject)
    if not isinstance(given.head, nn.Module):
        raise Failed(f"head() returned a {type(given.head).__name__}, no nn.Module", at=subject.target.head)
    for items in (1, 2, ITEMS):
        outputs = given.head(given.features[:items])
        if len(outputs) != items:
            raise Failed(f"{items} items gave outputs {tuple(outputs.shape)}", at=subject.target.head)
        loss = task.loss(outputs, given.targets[:items])
        _check_loss(subject, f"{items} items", loss, given.head)


def one_sided(subject: Subject) -> None:
    """A batch of one class, of no class or of all is no error."""
    task, given = lesson(subject)
    first = given.targets[:1].expand_as(given.targets)
    batches = {"one class": first}
    if given.targets.ndim == 2:
        batches |= {"no class": torch.zeros_like(given.targets), "every class": torch.ones_like(given.targets)}
    for name, targets in batches.items():
        _check_loss(subject, f"a batch of {name}", task.loss(given.head(given.features), targets), given.head)


def scores(subject: Subject) -> None:
    """Scores are finite float64 (N, C), item by item."""
    task, given = lesson(subject)
    with torch.no_grad():
        outputs = given.head(given.features)
    found = task.scores(outputs)
    if not isinstance(found, np.ndarray) or found.dtype != np.float64 or found.shape != (ITEMS, CLASSES):
        shape = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else f"a {type(found).__name__}"
        raise Failed(f"scores() returned {shape}, expected float64 ({ITEMS}, {CLASSES})", at=subject.target.scores)
    if not np.isfinite(found).all():
        raise Failed("its scores are not finite", at=subject.target.scores)
    apart = np.concatenate([task.scores(part) for part in outputs.split(7)])
    if not np.allclose(found, apart, rtol=1e-6, atol=1e-9):
        raise Failed("an item's scores depend on the other items", at=subject.target.scores)


def direction(subject: Subject) -> str:
    """As the loss falls, the metric moves in the direction that it calls better."""
    task, given = lesson(subject)
    metric = subject.registry.create("metric", task.metric)
    before, start = _scored(task, metric, given), _loss(task, given)
    optimizer = torch.optim.Adam(given.head.parameters(), lr=0.05)
    for _ in range(STEPS):
        optimizer.zero_grad()
        task.loss(given.head(given.features), given.targets).backward()
        optimizer.step()
    after, end = _scored(task, metric, given), _loss(task, given)
    if not end < start:
        raise Failed(f"{STEPS} steps of Adam took its loss from {start:.4g} to {end:.4g}", at=subject.target.loss)
    moved = f"{metric.label} went from {before:.4g} to {after:.4g} as the loss fell"
    if not (after > before if metric.higher_is_better else after < before):
        raise Failed(f"{moved}; better is {'higher' if metric.higher_is_better else 'lower'}", at=subject.target.scores)
    return moved


def training(subject: Subject) -> None:
    """Users that have it train for two rounds, straight and resumed alike."""
    task, given = lesson(subject)
    suite = with_users(federation(), task=subject.name)
    world = subject.registry.resolve("data", suite.data_name)
    if task.modality != "image":
        raise Skipped(f"the kit's models read no '{task.modality}'")
    if subject.name not in world.tasks:
        sets = {name: world(**suite.data_options).test(name, size=2) for name in world.tasks}
        like = next(name for name, samples in sets.items() if samples.targets.ndim == given.targets.ndim)
        world = with_task(world, subject.name, like)
    steady(cell_of(subject.registry, MethodSpec(REFERENCE, {}), suite), subject.registry, world=world)


def _kinds(subject: Subject) -> tuple[bool, ...]:
    """Whether to try several classes an item first: as the kit's world has the task, else class numbers first."""
    suite = federation()
    world = subject.registry.create("data", suite.data_name, suite.data_options)
    if subject.name in world.tasks and world.test(subject.name, size=2).targets.ndim == 2:
        return (True,)
    return (False, True)


def _check_loss(subject: Subject, what: str, loss: Any, head: nn.Module) -> None:
    if not isinstance(loss, Tensor) or loss.ndim != 0 or not torch.isfinite(loss):
        shown = loss if isinstance(loss, Tensor) and loss.ndim == 0 else type(loss).__name__
        raise Failed(f"the loss of {what} is {shown}, no finite scalar", at=subject.target.loss)
    gradients = torch.autograd.grad(loss, list(head.parameters()), allow_unused=True)
    if all(gradient is None for gradient in gradients):
        raise Failed(f"no gradient of the loss of {what} reaches the head", at=subject.target.loss)
    if not all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None):
        raise Failed(f"the gradient of the loss of {what} is not finite", at=subject.target.loss)


def _scored(task: Any, metric: Any, given: Lesson) -> float:
    with torch.no_grad():
        return float(metric(task.scores(given.head(given.features)), given.targets.numpy()))


def _loss(task: Any, given: Lesson) -> float:
    with torch.no_grad():
        return float(task.loss(given.head(given.features), given.targets))


_FIRST = ("outputs and loss",)

CHECKS = (
    Check("outputs and loss", outputs_and_loss, "return an nn.Module from head() and one finite number from loss()"),
    Check("one-sided batches", one_sided, "let a batch hold any classes: do not divide by how many there are", _FIRST),
    Check("scores", scores, "return the scores of each item by itself, as float64 numpy (N, C)", _FIRST),
    Check(
        "direction", direction, "the loss must be minimised, and the metric's higher_is_better must be right", _FIRST
    ),
    Check("training", training, "keep no state in the task", ("scores",)),
)
