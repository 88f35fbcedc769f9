"""The user runtime: a user's own model, head, optimizers, data and generators, and the verbs every method builds on."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from fedbench import messages
from fedbench.examiner import Examiner
from fedbench.inputs import Inputs
from fedbench.interfaces import Protocol, Task, UserSpec
from fedbench.seeds import derive, torch_generator

if TYPE_CHECKING:
    from fedbench.method import Method

Verb = TypeVar("Verb", bound=Callable[..., Any])


def verb(function: Verb) -> Verb:
    """Mark a method of a user program as something the server may ask for; its arguments are the message."""
    function.is_verb = True  # type: ignore[attr-defined]
    return function


class Representation(nn.Module):
    """The representation model w: backbone and projection, input -> embedding.

    Args:
        backbone: a `Model`, input -> (B, features).
        dimension: d.
        projection: `"linear"` or `"mlp"`, two layers with a ReLU between them.
    """

    def __init__(self, backbone: nn.Module, dimension: int, projection: str) -> None:
        super().__init__()
        self.backbone = backbone
        features = int(backbone.features)  # type: ignore[arg-type]
        if projection == "linear":
            self.projection: nn.Module = nn.Linear(features, dimension)
        else:
            self.projection = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, dimension))
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> unit rows (B, d)."""
        return nn.functional.normalize(self.projection(self.backbone(x)), dim=-1)


@dataclass
class Participant:
    """What a user consists of before a method gives it verbs: built by a plugin of kind `user`."""

    spec: UserSpec
    task: Task
    representation: Representation
    head: nn.Module
    train: Inputs
    public: Inputs
    device: torch.device


class UserProgram:
    """The base program of a user. A method subclasses it and adds verbs.

    `fit` trains the whole model on private data; `represent` embeds public rows. Override `private_loss` to add a
    term to local training, and `setup`, `save`, `restore` for state of your own.
    """

    def __init__(self, participant: Participant, method: Method, protocol: Protocol, seed: int) -> None:
        self.participant, self.method, self.protocol = participant, method, protocol
        self.name, self.seed, self.device = participant.spec.name, seed, participant.device
        self.representation, self.head, self.task = participant.representation, participant.head, participant.task
        self.fits = 0
        self.fit_generator = torch_generator("fit", seed, self.name)
        self._order = torch.empty(0, dtype=torch.int64)
        whole = [*self.representation.parameters(), *self.head.parameters()]
        self.fit_optimizer = self._optimizer((whole, participant.spec.fit_rate))
        self.setup()

    def setup(self) -> None:
        """Prepare what a method needs beyond the base program."""

    # -- what a method may override or call

    @verb
    def fit(self) -> dict[str, Any]:
        """The local phase: `fit_steps` optimizer steps on private batches, whole model. Replies the mean loss."""
        self.set_training(True)
        total = torch.zeros((), device=self.device)
        steps = self.fit_steps()
        for step in range(steps):
            self.schedule(self.fit_optimizer, self.fits + step / steps, self.protocol.rounds + 1)
            x, targets = self.private_batch()
            loss = self.private_loss(x, targets)
            self.step(self.fit_optimizer, loss)
            total += loss.detach()
        self.fits += 1
        return {"loss": float(total) / max(1, steps)}

    @verb
    def represent(self, batch: Tensor) -> dict[str, Any]:
        """The embeddings of public rows: (B,) int64 -> unit rows (B, d), without a graph."""
        self.set_training(True)
        with torch.no_grad():
            return {"z": self.embed(batch)}

    def fit_steps(self) -> int:
        """Optimizer steps of one fit."""
        return self.protocol.steps

    def private_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of one private batch."""
        return self.task.loss(self.outputs(x), targets)

    def outputs(self, x: Tensor) -> Tensor:
        """(B, ...) -> the head's outputs, from the features or the embedding as the protocol says."""
        features = self.representation.backbone(x)
        if self.protocol.head == "embedding":
            features = self.representation.projection(features)
        return self.head(features)  # type: ignore[no-any-return]

    def embed(self, batch: Tensor, view: Tensor | int = 0) -> Tensor:
        """Public rows (B,) in one view -> unit rows (B, d), with a graph where gradients are on."""
        return self.representation(self.participant.public.rows(batch, view))  # type: ignore[no-any-return]

    def private_batch(self) -> tuple[Tensor, Tensor]:
        """The next private batch, in random order over the set, each item in one of its views at random."""
        data = self.participant.train
        size = min(self.protocol.fit_batch, len(data))
        while len(self._order) < size:
            order = torch.randperm(len(data), generator=self.fit_generator)
            self._order = torch.cat([self._order, order])
        rows, self._order = self._order[:size], self._order[size:]
        view = torch.randint(data.views, (size,), generator=self.fit_generator)
        return data.rows(rows, view), data.targets(rows)

    def alignment_optimizer(self, *extra: nn.Module, factor: float = 1.0) -> torch.optim.Optimizer:
        """An optimizer for the alignment phase: the representation model and what `extra` holds, never the head.

        Args:
            factor: on the suite's alignment rates; what a method is tuned with.
        """
        spec, representation = self.participant.spec, self.representation
        fresh = [*representation.projection.parameters(), *(p for module in extra for p in module.parameters())]
        return self._optimizer(
            (representation.backbone.parameters(), spec.align_rate * factor), (fresh, spec.projection_rate * factor)
        )

    def schedule(self, optimizer: torch.optim.Optimizer, done: float, phases: int) -> None:
        """Set the learning rates of the protocol's schedule after `done` of `phases` phases."""
        factor = 1.0
        if self.protocol.schedule == "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * min(1.0, done / phases)))
        elif self.protocol.schedule == "restarts":
            factor = 0.5 * (1 + math.cos(math.pi * (done % 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * factor

    def step(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        """One gradient step."""
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def save(self) -> dict[str, Any]:
        """State of a method's own, for the checkpoint; extend together with `restore`."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what `save` returned."""

    # -- what only the core calls

    def packed(self) -> dict[str, Any]:
        """Everything that training changes."""
        return {
            "representation": self.representation.state_dict(),
            "head": self.head.state_dict(),
            "fit_optimizer": self.fit_optimizer.state_dict(),
            "fit_generator": self.fit_generator.get_state(),
            "order": self._order,
            "fits": self.fits,
            "training": self.representation.training,
            "own": self.save(),
        }

    def unpacked(self, state: Mapping[str, Any]) -> None:
        """Put back what `packed` returned."""
        self.representation.load_state_dict(state["representation"])
        self.head.load_state_dict(state["head"])
        self.fit_optimizer.load_state_dict(state["fit_optimizer"])
        self.fit_generator.set_state(state["fit_generator"])
        self._order, self.fits = state["order"], state["fits"]
        self.set_training(state["training"])
        self.restore(state["own"])

    def set_training(self, mode: bool) -> None:
        """Put the whole model into training or evaluation mode."""
        self.representation.train(mode)
        self.head.train(mode)

    def _optimizer(self, *groups: tuple[Iterable[nn.Parameter], float]) -> torch.optim.Optimizer:
        trainable = [
            {"params": [parameter for parameter in parameters if parameter.requires_grad], "lr": rate, "rate": rate}
            for parameters, rate in groups
        ]
        return torch.optim.AdamW(trainable, weight_decay=self.protocol.weight_decay, fused=True)


class UserHost:
    """What an engine holds: calls a user program's verbs with decoded messages, and shields the global generator.

    Args:
        program: the method's user program.
        examiner: scores it; the program itself has no way to it.
    """

    def __init__(self, program: UserProgram, examiner: Examiner) -> None:
        self.program, self._examiner = program, examiner
        self._devices = [program.device] if program.device.type == "cuda" else []
        with torch.random.fork_rng(self._devices):
            torch.manual_seed(derive("global", program.seed, program.name))
            self._keep()

    def call(self, verb: str, message: bytes) -> bytes:
        """Run a verb; `evaluate` is the core's own and leaves every generator as it was."""
        arguments = messages.decode(message)
        if verb == "evaluate":
            function: Callable[..., Any] = functools.partial(self._examiner.score, self.program)
        else:
            function = getattr(self.program, verb, None)  # type: ignore[assignment]
            if not getattr(function, "is_verb", False):
                raise AttributeError(f"the user program {type(self.program).__qualname__} has no verb '{verb}'")
        with torch.random.fork_rng(self._devices):
            torch.random.set_rng_state(self._global)
            for device, state in zip(self._devices, self._on_device, strict=True):
                torch.cuda.set_rng_state(state, device)
            reply = function(**arguments)
            if verb != "evaluate":
                self._keep()
        return messages.encode(reply or {})

    def save(self) -> bytes:
        return messages.pack({"program": self.program.packed(), "global": self._global, "on device": self._on_device})

    def restore(self, state: bytes) -> None:
        unpacked = messages.unpack(state)
        self.program.unpacked(unpacked["program"])
        self._global, self._on_device = unpacked["global"], unpacked["on device"]

    def _keep(self) -> None:
        self._global = torch.random.get_rng_state()
        self._on_device = [torch.cuda.get_rng_state(device) for device in self._devices]
