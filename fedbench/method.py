"""What a method is: its options, a user program and a server program (kind `method`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fedbench.interfaces import Protocol, UserSpec
from fedbench.ranges import Ranges
from fedbench.seeds import torch_generator

if TYPE_CHECKING:
    from fedbench.federation import Federation
    from fedbench.user import UserProgram


class PublicRows:
    """The public set as the server sees it: how many rows there are, and batches of row numbers."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        self.size = size
        self._generator = generator

    def draw(self, count: int, batch: int) -> list[Tensor]:
        """`count` index vectors (batch,), int64, without repetition inside a batch; passes over the set in order.

        A new permutation starts where the rest of the last one is shorter than a batch.
        """
        batches: list[Tensor] = []
        order = torch.empty(0, dtype=torch.int64)
        while len(batches) < count:
            if len(order) < batch:
                order = torch.randperm(self.size, generator=self._generator)
            batches.append(order[:batch].clone())
            order = order[batch:]
        return batches


class ServerProgram:
    """The server of a method, in direct style: `round` reads like the paper's algorithm box.

    A subclass writes `round(r)`, and asks users for verbs of its user program. `ask("fit")` must happen once in a
    round: the core scores the users right after it, and asks for one last `fit` after the last round.
    """

    def __init__(
        self,
        method: Any,
        protocol: Protocol,
        federation: Federation,
        specs: Mapping[str, UserSpec],
        public_size: int,
        seed: int,
    ) -> None:
        self.method, self.protocol, self.specs = method, protocol, dict(specs)
        self._federation = federation
        self._generator = torch_generator("server", seed)
        self.public = PublicRows(public_size, torch_generator("public batches", seed))

    @property
    def users(self) -> list[str]:
        """Names of the users that take part, in user order."""
        return list(self._federation.alive)

    def round(self, r: int) -> None:
        """One round, numbered from 0."""
        raise NotImplementedError

    def finish(self) -> None:
        """The last local phase, the same for every method."""
        self.ask("fit")

    def ask(
        self,
        verb: str,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        users: Sequence[str] | None = None,
        **common: Any,
    ) -> dict[str, dict[str, Any]]:
        """Ask users for a verb and return their replies, by name, in user order.

        Args:
            verb: a method of the user program marked `@verb`.
            each: what differs, by user; where given, its keys choose the users.
            users: whom to ask; default: the keys of `each`, else everyone.
            common: what every message holds.
        """
        chosen = users if users is not None else (list(each) if each is not None else self.users)
        messages = {user: {**common, **(each or {}).get(user, {})} for user in chosen}
        return self._federation.ask(verb, messages)

    def sample_others(self, user: str, count: int) -> list[str]:
        """`count` other users, drawn without repetition, in the order drawn."""
        others = [name for name in self.users if name != user]
        picked = torch.randperm(len(others), generator=self._generator)[: min(count, len(others))]
        return [others[index] for index in picked.tolist()]

    def groups(self, key: Callable[[UserSpec], Any]) -> list[list[str]]:
        """The living users in groups of equal `key(spec)`, in user order; also those of one user."""
        return [[spec.name for spec in group] for group in grouped([self.specs[user] for user in self.users], key)]

    def log(self, name: str, values: Mapping[str, float]) -> None:
        """Add one value a user to the round's record; a round's values are averaged."""
        self._federation.log(name, values)

    def save(self) -> dict[str, Any]:
        """What the server must keep between rounds beyond its generators; extend together with `restore`."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what `save` returned."""

    def packed(self) -> dict[str, Any]:
        """The whole server state, for the checkpoint."""
        return {
            "own": self.save(),
            "generator": self._generator.get_state(),
            "public": self.public._generator.get_state(),
        }

    def unpacked(self, state: Mapping[str, Any]) -> None:
        """Put back what `packed` returned."""
        self._generator.set_state(state["generator"])
        self.public._generator.set_state(state["public"])
        self.restore(state["own"])


def label_space(spec: UserSpec) -> str:
    """What users must share to exchange logits or labels: a suite's task has one list of classes for all its users."""
    return spec.task


def architecture(spec: UserSpec) -> str:
    """What users must share to exchange the weights of their representation models."""
    return json.dumps([spec.model, dict(spec.model_options)], sort_keys=True)


def grouped(specs: Sequence[UserSpec], key: Callable[[UserSpec], Any]) -> list[list[UserSpec]]:
    """Users in groups of equal key, in user order."""
    groups: dict[Any, list[UserSpec]] = {}
    for spec in specs:
        groups.setdefault(key(spec), []).append(spec)
    return list(groups.values())


def partnered(specs: Sequence[UserSpec], key: Callable[[UserSpec], Any]) -> list[str]:
    """Names of the users that share their key with at least one other, in user order."""
    inside = {spec.name for group in grouped(specs, key) if len(group) > 1 for spec in group}
    return [spec.name for spec in specs if spec.name in inside]


class Method:
    """A published method or a control: one file under `baselines/`.

    Options are the typed keyword-only arguments of the constructor. An option that is named after a kind of plugin
    (`loss`) takes a name of that kind; the plugin's own options are written `loss.tau`.
    """

    revision: ClassVar[int]
    tunable: ClassVar[Ranges] = {}
    """What `fedbench tune` may vary: ranges of options by name; empty where there is nothing to tune."""
    reference: ClassVar[bool] = False
    """Whether this is no federated method but shows what could be had; the board gives it no rank."""
    trains_heads: ClassVar[bool] = False
    """Whether verbs other than `fit` change users' heads, as distillation through them does; else they may not."""
    User: ClassVar[type[UserProgram]]
    Server: ClassVar[type[ServerProgram]]

    def paper_bytes(self, protocol: Protocol, users: int) -> int | None:
        """Bytes of one round, whole federation, both directions, in the paper's own message format."""
        return None

    def touches(self, users: Sequence[UserSpec]) -> list[str]:
        """Names of those users of a suite that train otherwise than with local training; default: all.

        A method that touches nobody is listed below the board and not run.
        """
        return [user.name for user in users]

    def create_loss(self) -> Any:
        """A fresh alignment loss as the cell names it; only for methods with an option `loss`."""
        if self.loss_factory is None:
            raise TypeError(f"{type(self).__name__} has no option 'loss'")
        return self.loss_factory()

    loss_factory: Callable[[], Any] | None = None
