"""The exchange of one cell: encodes, meters and times every message, and decides what a fault means."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from fedbench import messages
from fedbench.interfaces import Engine, Fault, Protocol

CORE_VERBS = frozenset({"evaluate"})
"""What only the core may ask for: a method never sees a score."""


class CellFailed(Exception):
    """A cell cannot go on: carries the fault that ended it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"{fault.user} {fault.kind} in '{fault.verb}': {fault.message}")
        self.fault = fault


class Meter:
    """What one round, counted from 1, exchanged and how long it took."""

    def __init__(self, round: int = 1) -> None:
        self.round = round
        self.up: dict[str, int] = defaultdict(int)
        self.down: dict[str, int] = defaultdict(int)
        self.tensor_up: dict[str, int] = defaultdict(int)
        self.tensor_down: dict[str, int] = defaultdict(int)
        self.seconds: dict[str, float] = defaultdict(float)
        self.fitted: set[str] = set()
        self._values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def log(self, name: str, values: Mapping[str, float]) -> None:
        """Add one value a user under a name."""
        for user, value in values.items():
            self._values[name][user].append(float(value))

    def logged(self) -> dict[str, dict[str, float]]:
        """Means over the round, by name and user."""
        return {
            name: {user: sum(items) / len(items) for user, items in users.items()}
            for name, users in self._values.items()
        }


class Federation:
    """The users of a cell behind an engine.

    Args:
        engine: carries bytes; already started.
        users: names, in user order.
        protocol: says what a fault means (`on_failure`, `quorum`).
        after_fit: called after every `fit`, to score.
    """

    def __init__(self, engine: Engine, users: list[str], protocol: Protocol, after_fit: Callable[[], None]) -> None:
        self.engine, self.protocol = engine, protocol
        self.users, self.alive = list(users), list(users)
        self.faults: list[Fault] = []
        self.meter = Meter()
        self._after_fit = after_fit

    def ask(self, verb: str, outgoing: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Send each user its message, return the replies in user order.

        Raises:
            CellFailed: a user failed and the protocol says stop, or fewer users than the quorum are left.
            ValueError: the verb is the core's own, a user is unknown, or it is the second `fit` of a round.
        """
        if verb in CORE_VERBS:
            raise ValueError(f"'{verb}' belongs to the core: a method may not ask for it")
        strangers = [user for user in outgoing if user not in self.alive]
        if strangers:
            raise ValueError(f"no such users: {', '.join(strangers)}")
        if verb == "fit":
            if again := [user for user in outgoing if user in self.meter.fitted]:
                raise ValueError(f"'fit' was asked of {again[0]} twice in a round: every method has R + 1 local phases")
            self.meter.fitted.update(outgoing)
        replies = self._exchange(verb, outgoing, metered=True)
        if verb == "fit":
            losses = {user: reply["loss"] for user, reply in replies.items() if "loss" in reply}
            self._check_finite("fit", "loss", losses)
            replies = {user: reply for user, reply in replies.items() if user in self.alive}
            self.meter.log("fit loss", {user: losses[user] for user in replies if user in losses})
            self._after_fit()
        return replies

    def evaluate(self, split: str) -> dict[str, dict[str, Any]]:
        """Scores of every living user; neither metered nor visible to a method.

        Raises:
            CellFailed: as `ask`; a score that is no finite number is a failure too.
        """
        replies = self._exchange("evaluate", {user: {"split": split} for user in self.alive}, metered=False)
        self._check_finite("evaluate", f"{split} score", {user: reply["value"] for user, reply in replies.items()})
        return {user: reply for user, reply in replies.items() if user in self.alive}

    def log(self, name: str, values: Mapping[str, float]) -> None:
        """Add values to the round's record."""
        self.meter.log(name, values)

    def _exchange(
        self, verb: str, outgoing: Mapping[str, Mapping[str, Any]], *, metered: bool
    ) -> dict[str, dict[str, Any]]:
        started = time.perf_counter()
        encoded = {user: messages.encode(outgoing[user]) for user in self.alive if user in outgoing}
        raw = self.engine.ask(verb, encoded)
        replies: dict[str, dict[str, Any]] = {}
        for user in list(encoded):
            answer = raw.get(user, Fault(user, verb, "gone", "no reply"))
            if isinstance(answer, Fault):
                self._lost(answer)
                continue
            try:
                replies[user] = messages.decode(answer)
            except ValueError as error:
                self._lost(Fault(user, verb, "raised", f"its reply cannot be read: {error}"))
                continue
            if metered:
                self.meter.down[user] += len(encoded[user])
                self.meter.tensor_down[user] += messages.tensor_bytes(outgoing[user])
                self.meter.up[user] += len(answer)
                self.meter.tensor_up[user] += messages.tensor_bytes(replies[user])
        self.meter.seconds[verb] += time.perf_counter() - started
        return replies

    def _check_finite(self, verb: str, what: str, values: Mapping[str, float]) -> None:
        for user, value in values.items():
            if not math.isfinite(value):
                self._lost(Fault(user, verb, "diverged", f"the {what} is {value:g} in round {self.meter.round}"))

    def _lost(self, fault: Fault) -> None:
        self.faults.append(fault)
        self.alive.remove(fault.user)
        if self.protocol.on_failure == "stop" or len(self.alive) < self.protocol.quorum:
            raise CellFailed(fault)
