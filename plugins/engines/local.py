"""The in-process engine: the default, with the codec on, so that nothing aliases and bytes are exact."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import ClassVar

from fedbench.interfaces import Engine, Fault, UserHandle


class LocalEngine(Engine):
    """All users live in the process of the cell and answer one after another, in user order."""

    revision: ClassVar[int] = 1

    def __init__(self) -> None:
        self._users: dict[str, UserHandle] = {}

    def start(self, users: Mapping[str, UserHandle]) -> None:
        self._users = dict(users)

    def ask(
        self, verb: str, messages: Mapping[str, bytes], *, timeout: float | None = None
    ) -> dict[str, bytes | Fault]:
        # A verb in this process cannot be interrupted, so the timeout is left to engines with a carrier.
        return {user: self._call(user, verb, messages[user]) for user in self._users if user in messages}

    def save(self) -> dict[str, bytes]:
        return {name: user.save() for name, user in self._users.items()}

    def restore(self, states: Mapping[str, bytes]) -> None:
        for name, state in states.items():
            self._users[name].restore(state)

    def _call(self, user: str, verb: str, message: bytes) -> bytes | Fault:
        try:
            return self._users[user].call(verb, message)
        except Exception as error:
            return Fault(user, verb, "raised", f"{type(error).__name__}: {error}", traceback.format_exc())
