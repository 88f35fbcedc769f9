"""The shapes world keeps the promises of every world, and its captions and labels say what the pictures show."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from fedbench.errors import UserError
from fedbench.interfaces import Samples
from fedbench_plugins.data.shape_painter import DISTANCES, PALETTE, Scenes, paint
from fedbench_plugins.data.shapes import COLOURS, SHAPES, ShapesWorld

TASKS = ("mlc", "ic100", "ic10")
world = ShapesWorld()


def train(task: str, size: int = 120, seed: int = 0, user: str = "user1", views: int = 1, **options: object) -> Samples:
    return world.train(task, size=size, seed=seed, user=user, views=views, **options)  # type: ignore[arg-type]


def concepts(samples: Samples) -> set[int]:
    assert samples.pairs is not None
    return set((samples.pairs // 2).tolist())


def same(first: Samples, second: Samples) -> bool:
    return (
        first.key == second.key
        and all(np.array_equal(first.inputs[name], second.inputs[name]) for name in first.inputs)
        and np.array_equal(first.scenes, second.scenes)
        and (first.targets is None or np.array_equal(first.targets, second.targets))  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("task", TASKS)
def test_shapes_types_and_ranges(task: str) -> None:
    samples = train(task, size=70, views=3)
    image, targets = samples.inputs["image"], samples.targets
    assert image.shape == (70, 3, 32, 32, 3)
    assert image.dtype == np.uint8
    assert targets is not None
    assert samples.scenes.dtype == np.int64
    if task == "mlc":
        assert targets.shape == (70, 10)
        assert targets.dtype == np.uint8
        assert set(targets.sum(axis=1).tolist()) == {1, 2, 3}
        assert samples.pairs is None
    else:
        assert targets.shape == (70,)
        assert targets.dtype == np.int64
        assert targets.min() >= 0
        assert targets.max() < len(samples.classes)
        assert samples.pairs is not None
        assert samples.pairs.dtype == np.int64
        concept = samples.pairs // 2
        assert np.array_equal(targets, concept if task == "ic100" else concept // 10)
    assert len(samples.classes) == (100 if task == "ic100" else 10)
    assert len(set(samples.classes)) == len(samples.classes)


def test_no_scene_is_in_two_sets() -> None:
    sets = [world.public(size=600, views=1)]
    for task in TASKS:
        sets += [world.test(task, size=600), train(task), train(task, user="user2"), train(task, seed=1)]
        sets += [train(task, style="filled"), train(task, coverage=0.3)]
        sets += [world.validation(task, size=120, seed=seed, user="user1") for seed in (0, 1)]
        sets += [world.validation(task, size=120, seed=0, user="user2")]
    numbers = np.concatenate([samples.scenes for samples in sets])
    assert len(np.unique(numbers)) == len(numbers)
    assert numbers.min() >= 0
    pictures = {row.tobytes() for samples in sets for row in samples.inputs["image"][:, 0]}
    assert len(pictures) == len(numbers)
    assert len({samples.key for samples in sets}) == len(sets)


@pytest.mark.parametrize("task", TASKS)
def test_equal_calls_give_equal_sets(task: str) -> None:
    fresh = ShapesWorld()
    assert same(train(task, views=2), fresh.train(task, size=120, seed=0, user="user1", views=2))
    assert same(world.test(task, size=50), fresh.test(task, size=50))
    validation = [w.validation(task, size=50, seed=3, user="user1") for w in (world, fresh)]
    assert same(*validation)
    assert same(world.public(size=50, views=2), fresh.public(size=50, views=2))


def test_a_seed_and_a_user_redraw_training_and_validation() -> None:
    base = train("ic100").inputs["image"]
    assert not np.array_equal(base, train("ic100", seed=1).inputs["image"])
    assert not np.array_equal(base, train("ic100", user="user2").inputs["image"])
    drawn = [world.validation("ic10", size=40, seed=s, user=u) for s, u in ((0, "a"), (1, "a"), (0, "b"))]
    assert len({samples.inputs["image"].tobytes() for samples in drawn}) == 3
    assert len({np.asarray(samples.targets).tobytes() for samples in drawn}) == 3


@pytest.mark.parametrize("size", [1, 37, 499, 500, 501])
def test_a_set_is_the_beginning_of_a_larger_one(size: int) -> None:
    small, large = world.public(size=size, views=2), world.public(size=560, views=2)
    assert np.array_equal(small.scenes, large.scenes[:size])
    assert np.array_equal(small.inputs["image"], large.inputs["image"][:size])
    assert small.inputs["text"].tolist() == large.inputs["text"][:size].tolist()
    assert small.key != large.key


def test_views_differ_but_do_not_depend_on_how_many_there_are() -> None:
    one, two, four = (world.public(size=30, views=views).inputs["image"] for views in (1, 2, 4))
    assert np.array_equal(one[:, 0], four[:, 0])
    assert np.array_equal(two, four[:, :2])
    assert len({row.tobytes() for row in four.reshape(-1, 32 * 32 * 3)}) == 120


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", ["test", "validation"])
def test_all_concepts_in_both_styles_are_scored(task: str, split: str) -> None:
    samples = world.test(task, size=400) if split == "test" else world.validation(task, size=400, seed=0, user="user1")
    assert samples.inputs["image"].shape[1] == 1
    if task == "mlc":
        assert np.asarray(samples.targets).any(axis=0).all()
    else:
        assert set(np.asarray(samples.pairs).tolist()) == set(range(200))


@pytest.mark.parametrize("task", ["ic10", "ic100"])
@pytest.mark.parametrize(("style", "codes"), [("filled", {0}), ("outlined", {1}), ("both", {0, 1})])
def test_style_is_respected(task: str, style: str, codes: set[int]) -> None:
    assert set((np.asarray(train(task, style=style).pairs) % 2).tolist()) == codes


def test_outlined_pictures_leave_most_of_the_background() -> None:
    def painted(outlined: bool) -> float:
        scenes = Scenes(np.zeros((20, 3), int), np.zeros((20, 3), int), np.ones(20, int), np.full(20, outlined))
        pictures = paint(scenes, size=20, pixels=32, random=np.random.default_rng(0)).astype(int)
        return float(((pictures[..., 0] - pictures[..., 1]) > 110).mean())

    assert 0.02 < painted(True) < 0.5 * painted(False)


@pytest.mark.parametrize("coverage", [0.01, 0.1, 0.33, 0.5, 1.0, 1])
@pytest.mark.parametrize("task", TASKS)
def test_coverage_limits_concepts_and_keeps_classes(task: str, coverage: float) -> None:
    samples = train(task, size=600, coverage=coverage, user="user7")
    targets = np.asarray(samples.targets)
    if task == "mlc":
        assert targets.any(axis=0).all()
    elif task == "ic10":
        assert len(concepts(samples)) == max(10, round(100 * coverage))
        assert set(targets.tolist()) == set(range(10))
    else:
        assert len(concepts(samples)) == len(set(targets.tolist())) == max(1, round(100 * coverage))


def test_coverage_grows_by_adding_concepts_and_differs_between_users() -> None:
    few, more = (concepts(train("ic10", size=500, coverage=coverage)) for coverage in (0.2, 0.4))
    assert few < more
    assert concepts(train("ic10", size=500, coverage=0.2, user="user2")) != few
    assert concepts(train("ic10", size=500, coverage=0.2, seed=1)) != few


def test_multi_label_scenes_show_only_covered_concepts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()

    def spy(scenes: Scenes, *, size: int, pixels: int, random: np.random.Generator) -> np.ndarray:
        used = np.arange(3) < scenes.counts[:, None]
        seen.update((scenes.shapes * 10 + scenes.colours)[used].tolist())
        return paint(scenes, size=size, pixels=pixels, random=random)

    monkeypatch.setattr("fedbench_plugins.data.shapes.paint", spy)
    train("mlc", size=500, coverage=0.25)
    assert len(seen) == 25


@pytest.mark.parametrize("task", ["mlc", "ic10"])
def test_ten_items_hold_all_ten_shapes(task: str) -> None:
    targets = np.asarray(train(task, size=10, coverage=0.33).targets)
    assert targets.any(axis=0).all() if task == "mlc" else sorted(targets) == list(range(10))


def test_captions_follow_the_grammar() -> None:
    captions = world.public(size=400, views=1).inputs["text"]
    thing = f"an? ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
    assert all(re.fullmatch(f"{thing}( beside {thing}( and {thing})?)?", caption) for caption in captions)
    assert not any(re.search(r"\ban [^aeiou]|\ba [aeiou]", caption) for caption in captions)
    assert {len(re.findall(thing, caption)) for caption in captions} == {1, 2, 3}


def test_captions_name_the_colours_that_the_pictures_show() -> None:
    samples = world.public(size=300, views=1)
    names = [name for name in COLOURS if name not in ("brown", "pink")]  # those two are as dull as a background
    hues = np.array([PALETTE[name][0] for name in names])
    wrong = 0
    for picture, caption in zip(samples.inputs["image"][:, 0] / 255.0, samples.inputs["text"], strict=True):
        high, low = picture.max(axis=-1), picture.min(axis=-1)
        vivid = (high - low > 0.6 * high) & (high > 0.4)
        spread = np.where(vivid, high - low, 1)
        r, g, b = np.moveaxis(picture, -1, 0)
        hue = np.select([high == r, high == g], [(g - b) / spread % 6, (b - r) / spread + 2], (r - g) / spread + 4) / 6
        apart = np.abs(hue[vivid][:, None] - hues)
        near = np.minimum(apart, 1 - apart)
        counts = np.bincount(near.argmin(axis=1)[near.min(axis=1) < 0.03], minlength=len(names))
        for name, count in zip(names, counts, strict=True):
            wrong += (name in caption) != (count >= 12) and not (name == "orange" and "brown" in caption)
    assert wrong / (300 * len(names)) < 0.02


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_an_inside_within_its_disc(shape: str) -> None:
    ticks = np.linspace(-1.5, 1.5, 61, dtype=np.float32)
    u, v = np.meshgrid(ticks, ticks)
    inside = DISTANCES[shape](u, v) < 0
    assert inside.any()
    assert np.hypot(u, v)[inside].max() < 1.12


def test_shapes_cannot_be_mistaken_for_each_other() -> None:
    ticks = np.linspace(-1.2, 1.2, 41, dtype=np.float32)
    u, v = np.meshgrid(ticks, ticks)
    masks = [distance(u, v) < 0 for distance in DISTANCES.values()]
    for i, first in enumerate(masks):
        for second in masks[:i]:
            assert (first & second).sum() < 0.85 * (first | second).sum()


def test_pixels_set_the_size() -> None:
    samples = ShapesWorld(pixels=48).test("ic10", size=3)
    assert samples.inputs["image"].shape == (3, 1, 48, 48, 3)
    assert samples.key != world.test("ic10", size=3).key


def test_a_thousand_items_are_quick() -> None:
    started = time.process_time()
    world.public(size=1000, views=1)
    assert time.process_time() - started < 1.5  # 0.2 s on an idle core


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "outline"}, "did you mean 'outlined'"),
        ({"style": 3}, "unknown style '3'"),
        ({"coverage": 0}, "coverage is 0"),
        ({"coverage": 1.01}, "at most 1"),
        ({"coverage": float("nan")}, "coverage is nan"),
        ({"coverage": True}, "coverage is True"),
        ({"coverage": "half"}, "coverage is 'half'"),
        ({"covrage": 0.5}, "did you mean 'coverage'"),
        ({"size": 0}, "size is 0"),
        ({"views": 0}, "views is 0"),
        ({"task": "ic11"}, "did you mean 'ic10"),
    ],
)
def test_bad_options_are_user_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        train(**{"task": "ic10", **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("pixels", [0, 15, 257, 32.0, "32", True])
def test_bad_pixels_are_user_errors(pixels: object) -> None:
    with pytest.raises(UserError, match="from 16 to 256"):
        ShapesWorld(pixels=pixels)  # type: ignore[arg-type]


def test_other_splits_check_their_arguments() -> None:
    with pytest.raises(UserError, match="unknown task"):
        world.test("ss", size=3)
    with pytest.raises(UserError, match="size is -1"):
        world.validation("mlc", size=-1, seed=0, user="user1")
    with pytest.raises(UserError, match="views is 0"):
        world.public(size=3, views=0)


def test_there_is_nothing_to_verify_or_attribute() -> None:
    world.verify()
    assert (world.revision, world.manifest, world.attribution) == (1, "", "")
    assert set(world.tasks) == set(TASKS)
