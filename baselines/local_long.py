"""A control: local training with as many extra local steps as other methods have alignment steps.

Paper: none; ours. A gain that this row shares is a gain of more optimizer steps, not of collaboration.
Equations: those of local training, with T extra steps a round (R·T in all); the last phase is like everyone's.
Users: all.
"""

from __future__ import annotations

from typing import ClassVar

from fedbench.method import Method
from fedbench.user import UserProgram
from fedbench_baselines.local import LocalServer


class LongUser(UserProgram):
    """Trains T steps longer in every round."""

    def fit_steps(self) -> int:
        last = self.fits >= self.protocol.rounds
        return self.protocol.steps + (0 if last else self.protocol.iterations)


class LocalLong(Method):
    """Control: local training with R·T extra local steps."""

    revision: ClassVar[int] = 1
    User = LongUser
    Server = LocalServer
