"""An engine that remembers every message, for the tests that count and compare what crosses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedbench import messages
from fedbench.interfaces import Fault
from fedbench.registry import Entry, Registry
from fedbench_plugins.engines.local import LocalEngine


@dataclass
class Exchange:
    """One verb: what each user was sent and replied, decoded, and the encoded bytes of both."""

    verb: str
    sent: dict[str, dict[str, Any]]
    replies: dict[str, dict[str, Any]]
    down: dict[str, int] = field(default_factory=dict)
    up: dict[str, int] = field(default_factory=dict)


def spied(registry: Registry) -> list[Exchange]:
    """Put a remembering engine in the place of the local one; its memory."""
    memory: list[Exchange] = []

    class SpyEngine(LocalEngine):
        def ask(
            self, verb: str, outgoing: Mapping[str, bytes], *, timeout: float | None = None
        ) -> dict[str, bytes | Fault]:
            replies = super().ask(verb, outgoing, timeout=timeout)
            good = {user: reply for user, reply in replies.items() if isinstance(reply, bytes)}
            memory.append(
                Exchange(
                    verb,
                    {user: messages.decode(sent) for user, sent in outgoing.items()},
                    {user: messages.decode(reply) for user, reply in good.items()},
                    {user: len(sent) for user, sent in outgoing.items()},
                    {user: len(reply) for user, reply in good.items()},
                )
            )
            return replies

    entry = registry.entries["engine", "local"]
    registry.entries["engine", "local"] = Entry("engine", "local", SpyEngine, entry.source)
    return memory


def verbs(memory: list[Exchange]) -> list[str]:
    """What was asked, in order."""
    return [exchange.verb for exchange in memory]
