"""Local training: every user alone with its private data. The reference of every Δ%.

Paper: the row "Local Training" of FedMuscle (ICLR 2026, arXiv 2602.01626).
Equations: min over θ^n of the task loss on D^n, E local steps a round.
Deviations: none. It gets the same R + 1 local phases as every other method.
Users: all.
"""

from __future__ import annotations

from typing import ClassVar

from fedbench.method import Method, ServerProgram
from fedbench.user import UserProgram


class LocalServer(ServerProgram):
    """Asks everyone to train, and exchanges nothing."""

    def round(self, r: int) -> None:
        self.ask("fit")


class Local(Method):
    """Local training, the reference of Δ%."""

    revision: ClassVar[int] = 1
    User = UserProgram
    Server = LocalServer
