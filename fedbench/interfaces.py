"""What a plugin of each kind is: the typed contracts between the core and everything it does not know by name.

This module imports neither torch nor numpy. `AlignmentLoss` and `Model` are `torch.nn.Module`s and are
reached lazily (`fedbench.AlignmentLoss`), see `fedbench/modules.py`.

A plugin's options are the typed keyword-only arguments of its constructor; the first line of its docstring is
its summary in `fedbench list`. A built-in carries `revision: int`, raised whenever its numbers change.
"""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

KINDS = ("user", "task", "model", "loss", "data", "metric", "method", "engine")
"""The kinds of plugin, in the order in which `fedbench list` shows them."""


@dataclass(frozen=True)
class Samples:
    """Items of one split of one task, or of the public set.

    Args:
        key: names everything that determined the arrays; equal keys mean equal arrays (used for caching).
        inputs: by modality. `"image"`: uint8, shape (N, V, H, W, 3), V fixed augmented views, view 0 plain.
            `"text"`: (N,) array of str.
        targets: int64 (N,) class numbers, or uint8 (N, C) for multi-label; None for the public set.
        scenes: int64 (N,): the identity of the scene; no scene occurs in two splits.
        classes: names of the C classes, in the order of the targets; empty for the public set.
        pairs: int64 (N,): a code of (concept, style) for tasks with one concept an item, else None.
    """

    key: str
    inputs: Mapping[str, np.ndarray]
    targets: np.ndarray | None
    scenes: np.ndarray
    classes: tuple[str, ...] = ()
    pairs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.scenes)


class World(ABC):
    """A source of data (kind `data`): private sets of every task it knows, their test sets, and a public set.

    Test and public sets are fixed; a seed redraws training and validation sets. Validation is drawn like test.
    Splits never share a scene. World-wide options are the keyword-only arguments of the constructor.
    """

    manifest: ClassVar[str] = ""
    """SHA-256 over the names and bytes of the files that the data is made from ("" where it is procedural)."""
    tasks: ClassVar[tuple[str, ...]] = ()
    """Ids of the tasks for which this world has data."""
    attribution: ClassVar[str] = ""
    """Authors and licences that must stand beside every published picture of this data."""

    @abstractmethod
    def verify(self) -> None:
        """Check that packages and files are there and unaltered; raise `UserError` naming the command that helps."""

    @abstractmethod
    def train(self, task: str, *, size: int, seed: int, user: str, views: int, **options: Any) -> Samples:
        """A user's private training set; `options` are the suite's `data` table of that user (e.g. style)."""

    @abstractmethod
    def validation(self, task: str, *, size: int, seed: int, user: str) -> Samples:
        """A validation set of one view, drawn like the test set, redrawn by the seed."""

    @abstractmethod
    def test(self, task: str, *, size: int) -> Samples:
        """The test set of a task, one view: the same for all seeds and users."""

    @abstractmethod
    def public(self, *, size: int, views: int) -> Samples:
        """The unlabelled public set, which all users address by row."""


class Task(ABC):
    """What a user wants to be good at (kind `task`): output layer, training loss, scores and metric."""

    metric: ClassVar[str]
    """Name of the metric plugin that scores this task."""
    modality: ClassVar[str] = "image"
    """Which of a sample's inputs the task's model reads."""

    @abstractmethod
    def head(self, features: int, classes: int) -> nn.Module:
        """The output layer: (B, features) -> (B, outputs)."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The scalar training loss; `targets` as in `Samples.targets`, as a tensor."""

    @abstractmethod
    def scores(self, outputs: Tensor) -> np.ndarray:
        """What the metric compares with the targets, as float64 (N, C)."""


class Metric(ABC):
    """How well scores fit targets (kind `metric`): one number with a direction."""

    label: ClassVar[str]
    """How the board names it, e.g. `mAP`."""
    higher_is_better: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, scores: np.ndarray, targets: np.ndarray) -> float:
        """The value (percent for mAP and accuracy). Scores (N, C); targets as in `Samples.targets`."""


@dataclass(frozen=True)
class Fault:
    """What a user did instead of replying: `kind` is raised, gone, timed out or diverged."""

    user: str
    verb: str
    kind: str
    message: str
    trace: str = ""


class UserHandle(typing.Protocol):
    """What an engine holds of a user: verbs that map bytes to bytes, and a state."""

    def call(self, verb: str, message: bytes) -> bytes:
        """Run a verb of the user program; whatever it raises becomes a `Fault`."""

    def save(self) -> bytes:
        """Everything that training changes, packed."""

    def restore(self, state: bytes) -> None:
        """Put back what `save` returned."""


class Engine(ABC):
    """Carries messages between the server program and the users (kind `engine`)."""

    @abstractmethod
    def start(self, users: Mapping[str, UserHandle]) -> None:
        """Take the users, by name, in user order."""

    @abstractmethod
    def ask(
        self, verb: str, messages: Mapping[str, bytes], *, timeout: float | None = None
    ) -> dict[str, bytes | Fault]:
        """Send each named user its encoded message; the encoded replies, or `Fault`s, in user order.

        Messages are opaque bytes to an engine: what it is handed is what is metered.
        """

    @abstractmethod
    def save(self) -> dict[str, bytes]:
        """The packed state of every user."""

    @abstractmethod
    def restore(self, states: Mapping[str, bytes]) -> None:
        """Put back what `save` returned."""

    def stop(self) -> None:  # noqa: B027 - optional to override
        """Release whatever carries the messages."""


class Observer:
    """Watches runs, e.g. for an experiment tracker. Every method may be left out; none may change a number."""

    def cell_started(self, cell: Mapping[str, Any]) -> None:
        """A cell begins (or resumes)."""

    def round_finished(self, cell: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """A round is over; `record` as in the result file's `rounds`."""

    def cell_finished(self, cell: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """A cell ended, done or failed; `result` as in the result file."""


@dataclass(frozen=True)
class Protocol:
    """How every method of a suite trains: the same for all rows of a board.

    Args:
        rounds: R, rounds of fit + alignment; one last fit follows, R + 1 in all.
        steps: optimizer steps of one fit.
        fit_batch: private rows a step.
        iterations: T, alignment iterations a round.
        batch: B, public rows an iteration.
        others: M, other users sampled for each user.
        dimension: d, length of an embedding.
        head: where the head sits, on the `"features"` of the model or on its `"embedding"` (before normalising).
        projection: `"linear"` or `"mlp"` (two layers), features -> d.
        schedule: of all learning rates: `"constant"`, `"cosine"` over the whole run, or `"restarts"`, a cosine over
            each phase, so that users are always scored at the end of an annealing.
        weight_decay: AdamW's, in both phases.
        threads: of every computation of a cell.
        eval_batch: rows of an evaluation batch.
        on_failure: `"stop"` or `"skip"` when a user fails.
        quorum: fewest users that must be left when users are skipped.
    """

    rounds: int = 8
    steps: int = 30
    fit_batch: int = 32
    iterations: int = 60
    batch: int = 32
    others: int = 3
    dimension: int = 128
    head: str = "features"
    projection: str = "mlp"
    schedule: str = "cosine"
    weight_decay: float = 0.01
    threads: int = 1
    eval_batch: int = 256
    on_failure: str = "stop"
    quorum: int = 1


@dataclass(frozen=True)
class UserSpec:
    """One user as its suite writes it.

    Args:
        train: private training items.
        fit_rate: learning rate of the local phase.
        align_rate: of the backbone in the alignment phase.
        projection_rate: of the projection in the alignment phase, which starts from scratch for every user.
    """

    name: str
    task: str
    model: str
    train: int
    fit_rate: float
    align_rate: float
    projection_rate: float
    kind: str = "single"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
