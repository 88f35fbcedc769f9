"""A data set as a model reads it: prepared once, then picked by row and view."""

from __future__ import annotations

import torch
from torch import Tensor

from fedbench.cache import Cache
from fedbench.interfaces import Samples
from fedbench.modules import Model


class Inputs:
    """Prepared rows of one `Samples`, in memory, and its targets.

    Args:
        samples: the items.
        model: whose `prepare` turns them into what its trainable part reads.
        cache: where frozen features are kept.
        device: where picked rows go.
    """

    def __init__(self, samples: Samples, model: Model, cache: Cache, device: torch.device) -> None:
        import numpy as np

        self.samples = samples
        self.device = device
        # A copy in memory: pages of a memory map would be read again and again by random access.
        self._data = torch.from_numpy(np.array(model.prepare(samples, cache)))
        self._targets = None if samples.targets is None else torch.from_numpy(np.array(samples.targets))
        self.views = int(self._data.shape[1])

    def __len__(self) -> int:
        return len(self.samples)

    def rows(self, index: Tensor, view: Tensor | int) -> Tensor:
        """Rows `index` (B,) in view(s) `view`, (B, ...) float32 on the device."""
        return self._data[index, view].to(self.device, torch.float32)

    def targets(self, index: Tensor) -> Tensor:
        """The targets of rows `index`, on the device."""
        if self._targets is None:
            raise ValueError("these samples have no targets")
        return self._targets[index].to(self.device)
