"""An engine that puts every user into a process of its own: what users share without a message is lost there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import traceback
import warnings
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from fedbench.conformance.cells import WatchingEngine
from fedbench.interfaces import Fault, UserHandle

_REPLY, _FAULT = b"reply", b"fault"


class ForkingEngine(WatchingEngine):
    """Forks one process a user when the cell starts; each then knows its own user's state and the messages it gets."""

    def __init__(self) -> None:
        super().__init__()
        self._processes: dict[str, tuple[int, Connection]] = {}

    def start(self, users: Mapping[str, UserHandle]) -> None:
        super().start(users)
        for name, user in users.items():
            ours, theirs = Pipe()
            with warnings.catch_warnings():  # of forking beside threads: a child only computes, and never returns
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
            if process == 0:
                for _, other in self._processes.values():
                    other.close()  # else a user would outlive the run that started it
                ours.close()
                _serve(user, theirs)
            theirs.close()
            self._processes[name] = (process, ours)

    def carry(self, user: str, verb: str, message: bytes) -> bytes | Fault:
        try:
            return self._asked(user, verb.encode(), message)
        except _Raised as error:
            return Fault(user, verb, "raised", *error.args)
        except (EOFError, OSError):
            return Fault(user, verb, "gone", "its process ended")

    def save(self) -> dict[str, bytes]:
        return {user: self._asked(user, b"+save", b"") for user in self.users}

    def restore(self, states: Mapping[str, bytes]) -> None:
        for user, state in states.items():
            self._asked(user, b"+restore", state)

    def weights(self) -> dict[tuple[str, str], str]:
        """None: they are elsewhere."""
        return {}

    def broken(self) -> list[str]:
        return []

    def close(self) -> None:
        for process, connection in self._processes.values():
            connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)
        self._processes.clear()

    def _asked(self, user: str, verb: bytes, message: bytes) -> bytes:
        connection = self._processes[user][1]
        connection.send_bytes(verb)
        connection.send_bytes(message)
        kind, answer = connection.recv_bytes(), connection.recv_bytes()
        if kind == _FAULT:
            raise _Raised(*json.loads(answer))
        return answer


class _Raised(Exception):
    """A user's process raised: message and trace."""


def _serve(user: UserHandle, connection: Connection) -> Any:
    """Answer until the other end closes; never returns."""
    try:
        while True:
            verb, message = connection.recv_bytes().decode(), connection.recv_bytes()
            kind, answer = _REPLY, b""
            try:
                if verb == "+save":
                    answer = user.save()
                elif verb == "+restore":
                    user.restore(message)
                else:
                    answer = user.call(verb, message)
            except Exception as error:
                kind = _FAULT
                answer = json.dumps([f"{type(error).__name__}: {error}", traceback.format_exc()]).encode()
            connection.send_bytes(kind)
            connection.send_bytes(answer)
    finally:
        os._exit(0)
