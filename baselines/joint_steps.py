"""Joint local phases: users of one architecture take every step together, on the sum of their losses.

Each user computes the gradient of its own task loss on its own private batch. The server sums the gradients of what is
shared, and everybody takes the same optimizer step on the sum, with the same moments and rate: all copies of a shared
part stay equal to the last bit, as if there were one. What is not shared takes its own step at the same time.

A phase has `steps` steps, as everyone's: a step's gradients go up in `joint_step`, their sums come down with the next
one, and those of the last step with `fit`, after which users are scored. Users that share nothing are asked for `fit`
alone, which trains locally, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbench.user import verb
from fedbench_baselines.averaging import total
from fedbench_baselines.shared_weights import BODY, HEAD, SharingServer, SharingUser, State


class JointUser(SharingUser):
    """Takes steps whose gradient is in part that of others."""

    def setup(self) -> None:
        rate = self.participant.spec.fit_rate
        # Apart, since a shared part has one rate for all; what no loss reaches needs no optimizer.
        self.fit_optimizer = self._optimizer(*((self.parameters([part]).values(), rate) for part in (BODY, HEAD)))
        self.joined: list[str] = []
        self._pending = False
        self._taken = 0
        self._total = torch.zeros((), device=self.device)

    @verb
    def join(self, **rates: float) -> dict[str, Any]:
        """Share these parts from now on, each at one learning rate."""
        self.joined = list(rates)
        for group, part in zip(self.fit_optimizer.param_groups, (BODY, HEAD), strict=True):
            group["rate"] = rates.get(part, group["rate"])
        return {}

    @verb
    def joint_step(self, **sums: Tensor) -> dict[str, Any]:
        """Take the step of the last batch on these sums; replies the gradients of shared parts on the next batch."""
        self.set_training(True)
        self.take(sums)
        loss = self.private_loss(*self.private_batch())
        self.fit_optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._total += loss.detach()
        self._pending = True
        shared = self.parameters(self.joined)
        return {name: parameter.grad for name, parameter in shared.items() if parameter.grad is not None}

    @verb
    def fit(self, **sums: Tensor) -> dict[str, Any]:
        """The end of a joint phase, with its last step; a local phase where none is under way."""
        if not self._pending:
            return super().fit()
        self.take(sums)
        loss = float(self._total) / self._taken
        self._taken, self._total = 0, torch.zeros((), device=self.device)
        self.fits += 1
        return {"loss": loss}

    def take(self, sums: State) -> None:
        """The step whose gradients are there, on sums where there are any: who was left alone has none."""
        if not self._pending:
            return
        for name, parameter in self.parameters(self.joined).items():
            if name in sums:
                parameter.grad = sums[name].to(self.device)
        done = self.fits + self._taken / self.protocol.steps
        self.schedule(self.fit_optimizer, done, self.protocol.rounds + 1)
        self.fit_optimizer.step()
        self._taken += 1
        self._pending = False

    def save(self) -> dict[str, Any]:
        return {"joined": self.joined}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.joined = list(state["joined"])


class JointServer(SharingServer):
    """Sums gradients, step by step."""

    def join(self, parts: Sequence[str]) -> None:
        """Tell everyone which of these parts it shares in every step, and the lowest rate of its group."""
        rates: dict[str, dict[str, float]] = {}
        for part in parts:
            for group in self.sharers(part):
                lowest = min(self.specs[user].fit_rate for user in group)
                for user in group:
                    rates.setdefault(user, {})[part] = lowest
        self.ask("join", each=rates)

    def joint_phase(self) -> None:
        """One local phase, joint for those that share a part."""
        sums: dict[str, dict[str, Tensor]] = {user: {} for user in self.parts()}
        for _ in range(self.protocol.steps):
            sums = self.sums(self.ask("joint_step", each=sums))
        self.ask("fit", each={user: sums.get(user, {}) for user in self.users})

    def sums(self, gradients: Mapping[str, State]) -> dict[str, dict[str, Tensor]]:
        """For each sender the sums over its groups."""
        found: dict[str, dict[str, Tensor]] = {user: {} for user in gradients}
        for users, states in self.shared(gradients):
            summed = total(states)
            for user in users:
                found[user].update(summed)
        return found
