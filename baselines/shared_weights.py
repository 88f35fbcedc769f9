"""Weights as what crosses: users of one architecture share the bodies of their models, and some of them their heads.

The body is what lies before the head and is trained: the backbone without its frozen layers, which are equal anyway,
and the projection where the protocol puts heads on it (elsewhere no loss of a local phase reaches it). A head has
the classes of its label space, so it is shared within equal label space and architecture only.

Whoever shares a part starts from the initial weights of the first user of its group: weights that start apart have no
meaningful mean. Optimizer moments stay with the user. Who has nobody to share with is asked for `fit` alone, so it
trains locally, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fedbench.interfaces import UserSpec
from fedbench.method import Method, ServerProgram, architecture, label_space, partnered
from fedbench.user import UserProgram, verb
from fedbench_baselines.averaging import load_trainable, trainable, weighted_mean

BODY, HEAD = "body", "head"
"""The parts of a model that users may share."""

Key = Callable[[UserSpec], Any]
State = Mapping[str, Tensor]


def architecture_and_labels(spec: UserSpec) -> str:
    """What users must share to exchange whole models, heads included."""
    return json.dumps([architecture(spec), label_space(spec)])


def of_part(state: State, part: str) -> dict[str, Tensor]:
    """Those of a message's weights that belong to the body or to the head."""
    return {name: value for name, value in state.items() if name.startswith("head.") == (part == HEAD)}


class SharingMethod(Method):
    """A method whose users exchange weights where their architectures are equal."""

    def sharing(self) -> dict[str, Key]:
        """The parts that are shared, and what users must have in common to share each."""
        return {BODY: architecture, HEAD: architecture_and_labels}

    def touches(self, users: Sequence[UserSpec]) -> list[str]:
        sharing = {name for key in self.sharing().values() for name in partnered(users, key)}
        return [user.name for user in users if user.name in sharing]


class SharingUser(UserProgram):
    """Sends the weights of a part of its model, and goes on from those that it gets."""

    method: SharingMethod

    def modules(self, part: str) -> dict[str, nn.Module]:
        """What a part consists of, by the prefix under which its weights cross."""
        if part == HEAD:
            return {"head.": self.head}
        body: dict[str, nn.Module] = {"backbone.": self.representation.backbone}
        if self.protocol.head == "embedding":
            body["projection."] = self.representation.projection
        return body

    def parameters(self, parts: Sequence[str]) -> dict[str, nn.Parameter]:
        """The trained parameters of some parts, by the name under which they cross."""
        return {
            f"{prefix}{name}": parameter
            for part in parts
            for prefix, module in self.modules(part).items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    def weights(self, parts: Sequence[str]) -> dict[str, Tensor]:
        """The weights of some parts; they change as training goes on."""
        modules = [pair for part in parts for pair in self.modules(part).items()]
        return {name: value for prefix, module in modules for name, value in trainable(module, prefix).items()}

    def load(self, weights: State) -> None:
        """Go on from these weights, which are those of one part or of several."""
        for part in (BODY, HEAD):
            if of_part(weights, part):
                for prefix, module in self.modules(part).items():
                    load_trainable(module, weights, prefix)

    @verb
    def upload(self, parts: list[str]) -> dict[str, Any]:
        """The weights of some parts."""
        return dict(self.weights(parts))

    @verb
    def download(self, **weights: Tensor) -> dict[str, Any]:
        """Go on from these weights."""
        self.load(weights)
        return {}


class UpdatingUser(SharingUser):
    """Sends how its weights changed since the last exchange, and adds what it gets to what they were then."""

    def setup(self) -> None:
        self.start = self.snapshot()

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of all weights that may cross."""
        return {name: value.clone() for name, value in self.weights([BODY, HEAD]).items()}

    @verb
    def download(self, **weights: Tensor) -> dict[str, Any]:
        """Go on from these weights."""
        self.load(weights)
        self.start = self.snapshot()
        return {}

    @verb
    def upload_update(self, parts: list[str]) -> dict[str, Any]:
        """What some parts' weights are minus what they were."""
        return {name: value - self.start[name] for name, value in self.weights(parts).items()}

    @verb
    def add_update(self, **update: Tensor) -> dict[str, Any]:
        """Go on from what the weights were plus this; parts that it leaves out stay as trained."""
        self.load({name: self.start[name] + value.to(self.device) for name, value in update.items()})
        self.start = self.snapshot()
        return {}

    def save(self) -> dict[str, Any]:
        return {"start": self.start}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.start = {name: value.to(self.device) for name, value in state["start"].items()}


class SharingServer(ServerProgram):
    """Knows who shares which part with whom."""

    method: SharingMethod

    def sharers(self, part: str) -> list[list[str]]:
        """The living users that share a part, in groups of two or more."""
        return [group for group in self.groups(self.method.sharing()[part]) if len(group) > 1]

    def parts(self) -> dict[str, list[str]]:
        """The parts that each living user shares with others; users that share none are left out."""
        found: dict[str, list[str]] = {user: [] for user in self.users}
        for part in self.method.sharing():
            for group in self.sharers(part):
                for user in group:
                    found[user].append(part)
        return {user: parts for user, parts in found.items() if parts}

    def start_equally(self) -> None:
        """Give all that share a part the initial weights of the first user of their group."""
        messages: dict[str, dict[str, Tensor]] = {}
        for part in self.method.sharing():
            for group in self.sharers(part):
                weights = self.initial(group, part)
                for user in group:
                    messages.setdefault(user, {}).update(weights)
        self.ask("download", each={user: messages[user] for user in self.users if user in messages})

    def initial(self, group: Sequence[str], part: str) -> dict[str, Tensor]:
        """The weights of the first of a group that answers."""
        for user in group:
            if sent := self.ask("upload", users=[user], parts=[part]):
                return sent[user]
        return {}

    def shared(self, sent: Mapping[str, State]) -> Iterator[tuple[list[str], list[dict[str, Tensor]]]]:
        """For each part and group: those that sent weights of it, where they are two or more, and these weights."""
        for part, key in self.method.sharing().items():
            for group in self.groups(key):
                states = {user: of_part(sent[user], part) for user in group if user in sent}
                senders = [user for user, state in states.items() if state]
                if len(senders) > 1:
                    yield senders, [states[user] for user in senders]

    def means(self, sent: Mapping[str, State]) -> dict[str, dict[str, Tensor]]:
        """For each sender the means over its groups, weighted by private items."""
        found: dict[str, dict[str, Tensor]] = {}
        for users, states in self.shared(sent):
            mean = weighted_mean(states, [self.specs[user].train for user in users])
            for user in users:
                found.setdefault(user, {}).update(mean)
        return {user: found[user] for user in self.users if user in found}
