"""Small convolutional nets trained from scratch on raw pixels: the phones beside the workstations.

The first convolution strides by 4, since maps of half the image's side cost more than all other layers together
on one core; group norm, since private and public images have different statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.errors import UserError
from fedbench.modules import Model, scaled_pixels

if TYPE_CHECKING:
    import numpy as np

    from fedbench.cache import Cache
    from fedbench.interfaces import Samples

GROUPS = 8


class _FromPixels(Model):
    """What both nets share: pixels in, mean over the last map out."""

    net: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, 3) pixels in 0..255, uint8 or float, sides of 16 or more -> (B, features)."""
        images = scaled_pixels(x).contiguous(memory_format=torch.channels_last)
        features: Tensor = self.net(images).mean((2, 3))
        return features

    def prepare(self, samples: Samples, cache: Cache) -> np.ndarray:
        """The pixels as they are: uint8 (N, V, H, W, 3)."""
        return samples.inputs["image"]


class SmallConvNet(_FromPixels):
    """A plain convolutional net from scratch: four strided stages, group norm, ReLU.

    Args:
        width: channels of the first stage, a multiple of 8; every stage doubles them, so there are 8 * width features.
        depth: convolutions of each stage after the first.
    """

    revision: ClassVar[int] = 1

    def __init__(self, *, width: int = 32, depth: int = 1) -> None:
        super().__init__()
        _check(type(self).__name__, width, depth)
        layers: list[nn.Module] = [_convolution(3, width, size=7, stride=4)]
        for channels in (width, 2 * width, 4 * width):
            layers.append(_convolution(channels, 2 * channels, size=3, stride=2))
            layers += [_convolution(2 * channels, 2 * channels, size=3, stride=1) for _ in range(depth - 1)]
        self.net = nn.Sequential(*layers)
        self.features = 8 * width


class SmallResNet(_FromPixels):
    """A residual net from scratch: a strided stem and two stages of residual blocks, group norm, ReLU.

    Args:
        width: channels of the stem, a multiple of 8; both stages double them, so there are 4 * width features.
        depth: residual blocks of each stage.
    """

    revision: ClassVar[int] = 1

    def __init__(self, *, width: int = 24, depth: int = 1) -> None:
        super().__init__()
        _check(type(self).__name__, width, depth)
        layers: list[nn.Module] = [_convolution(3, width, size=7, stride=4)]
        for channels in (width, 2 * width):
            layers.append(_Residual(channels, 2 * channels))
            layers += [_Residual(2 * channels, 2 * channels) for _ in range(depth - 1)]
        self.net = nn.Sequential(*layers)
        self.features = 4 * width


class _Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut; where channels grow, the map's sides halve."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.halve = out != channels
        self.first = _convolution(channels, out, size=3, stride=2 if self.halve else 1)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(GROUPS, out)
        self.shortcut = nn.Conv2d(channels, out, 1, bias=False) if self.halve else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.second(self.first(x)))
        if self.halve:
            x = F.avg_pool2d(x, 2, ceil_mode=True)
        return F.relu(y + self.shortcut(x))


def _convolution(channels: int, out: int, *, size: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.GroupNorm(GROUPS, out), nn.ReLU())


def _check(name: str, width: int, depth: int) -> None:
    if width < GROUPS or width % GROUPS:
        raise UserError(f"width = {width}", where=name, expected=f"a positive multiple of {GROUPS}")
    if depth < 1:
        raise UserError(f"depth = {depth}", where=name, expected="1 or more")
