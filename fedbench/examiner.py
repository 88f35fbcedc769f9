"""Scores a user's model on validation and test data. User programs don't hold these: a method can't touch them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedbench.inputs import Inputs
from fedbench.interfaces import Metric

if TYPE_CHECKING:
    from fedbench.user import UserProgram


@dataclass
class Examiner:
    """What a user is scored with; built beside its participant by a plugin of kind `user`.

    Args:
        metric: scores × targets -> value.
        validation: drawn like the test set, anew for each seed.
        test: the same for every seed.
        known: the (concept, style) pairs of the private data, where the task has one concept an item.
    """

    metric: Metric
    validation: Inputs
    test: Inputs
    known: np.ndarray[Any, Any] | None = None

    @torch.inference_mode()
    def score(self, program: UserProgram, split: str) -> dict[str, Any]:
        """The metric on `validation` or `test`; on test also apart for pairs seen and unseen in private data."""
        data = {"validation": self.validation, "test": self.test}[split]
        was_training = program.representation.training
        program.set_training(False)
        size = program.protocol.eval_batch
        outputs = [
            program.outputs(data.rows(torch.arange(start, min(start + size, len(data))), 0)).float().cpu()
            for start in range(0, len(data), size)
        ]
        # A method's verb must find the same mode whether or not the core has just scored or resumed.
        program.set_training(was_training)
        scores = program.task.scores(torch.cat(outputs))
        targets, pairs = data.samples.targets, data.samples.pairs
        reply: dict[str, Any] = {"value": self.metric(scores, targets)}  # type: ignore[arg-type]
        if split == "test" and pairs is not None and self.known is not None and targets is not None:
            seen = np.isin(pairs, self.known)
            for name, chosen in (("seen", seen), ("unseen", ~seen)):
                if chosen.any():
                    reply[name] = self.metric(scores[chosen], targets[chosen])
        return reply
