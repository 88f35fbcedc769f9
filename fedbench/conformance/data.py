"""What a world must do: sets of the promised sizes and types, labels in range, and splits that share nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from fedbench.conformance import Check, Failed, Skipped, Subject
from fedbench.conformance.cells import Evidence, difference
from fedbench.conformance.generators import elsewhere, watched
from fedbench.conformance.twin import differs_elsewhere
from fedbench.interfaces import Samples

SIZES = {"train": 24, "validation": 20, "test": 30, "public": 28}
VIEWS = {"train": 2, "validation": 1, "test": 1, "public": 2}
USERS, SEEDS = ("user1", "user2"), (0, 1)

Sets = dict[tuple[str, ...], Samples]
"""By split, task, user and seed; a split names only what it depends on."""


def drawn(subject: Subject) -> Sets:
    """Every split of every task, made once for all checks."""
    if "sets" not in subject.kept:
        world = subject.create()
        world.verify()
        subject.kept["sets"] = dict(_draw(world))
    found: Sets = subject.kept["sets"]
    return found


def sizes_and_types(subject: Subject) -> str:
    """As many items as asked for, and arrays of the promised types."""
    tasks = subject.create().tasks
    if not tasks:
        raise Failed("it has no tasks", at=subject.target)
    for name, samples in drawn(subject).items():
        if wrong := _wrong_type(name[0], samples):
            raise Failed(f"{_words(name)}: {wrong}", at=getattr(subject.target, name[0]))
    return f"tasks: {', '.join(tasks)}"


def labels(subject: Subject) -> None:
    """Class numbers in range, and the same classes in every split of a task."""
    classes: dict[str, tuple[str, ...]] = {}
    for name, samples in drawn(subject).items():
        at = getattr(subject.target, name[0])
        if samples.targets is None:
            continue
        if classes.setdefault(name[1], samples.classes) != samples.classes:
            raise Failed(f"{_words(name)} has other classes than another split of its task", at=at)
        count = len(samples.classes)
        if len(set(samples.classes)) != count:
            raise Failed(f"{_words(name)}: a class is named twice", at=at)
        least, most = int(samples.targets.min()), int(samples.targets.max())
        limit = 1 if samples.targets.ndim == 2 else count - 1
        if least < 0 or most > limit:
            raise Failed(f"{_words(name)}: targets from {least} to {most}, expected 0 to {limit}", at=at)
        if samples.targets.ndim == 2 and samples.targets.shape[1] != count:
            raise Failed(f"{_words(name)}: {samples.targets.shape[1]} columns for {count} classes", at=at)


def disjoint_splits(subject: Subject) -> None:
    """No scene is in two splits, of whatever task, user and seed."""
    owner: dict[int, tuple[str, ...]] = {}
    for name, samples in drawn(subject).items():
        for scene in samples.scenes.tolist():
            other = owner.setdefault(scene, name)
            if other[0] != name[0]:
                raise Failed(f"scene {scene} is in {_words(other)} and in {_words(name)}")


def same_again(subject: Subject) -> None:
    """A second world makes the same sets under the same keys, whatever the global generators hold."""
    first = evidence_of(drawn(subject))
    with elsewhere(), watched() as touched:
        second = evidence(subject)
    if differs := difference(first, second):
        raise Failed(f"made a second time it differs: {differs}", at=getattr(subject.target, differs.split()[0]))
    if touched:
        raise Failed(f"it drew from the global generator of {' and '.join(touched)}")


def another_process(subject: Subject) -> None:
    """Another process makes the same sets."""
    if differs := differs_elsewhere(subject, evidence_of(drawn(subject)), evidence):
        raise Failed(f"another process makes something else: {differs}", at=getattr(subject.target, differs.split()[0]))


def seeds(subject: Subject) -> None:
    """A seed redraws private and validation sets, and users have sets of their own; other sets, other keys."""
    sets = drawn(subject)
    for split in ("train", "validation"):
        for task in subject.create().tasks:
            for one, two in (((USERS[0], "0"), (USERS[0], "1")), ((USERS[0], "0"), (USERS[1], "0"))):
                first, second = sets[split, task, *one], sets[split, task, *two]
                pair = f"{_words((split, task, *one))} and {_words((split, task, *two))}"
                if _content(first) == _content(second):
                    raise Failed(f"{pair} are equal", at=getattr(subject.target, split))
    keys: dict[str, tuple[str, ...]] = {}
    for name, samples in sets.items():
        other = keys.setdefault(samples.key, name)
        if other != name and _content(sets[other]) != _content(samples):
            raise Failed(f"{_words(other)} and {_words(name)} differ but have the key '{samples.key}'")


def fixed_sets(subject: Subject) -> None:
    """Test and public sets are the same whatever was made before them."""
    world, sets = subject.create(), drawn(subject)
    task = world.tasks[-1]
    world.train(task, size=5, seed=7, user="another", views=1)
    for name, samples in (
        (("test", task), world.test(task, size=SIZES["test"])),
        (("public",), world.public(size=SIZES["public"], views=VIEWS["public"])),
    ):
        if _content(samples) != _content(sets[name]):
            raise Failed(f"{_words(name)} depends on what was made before", at=getattr(subject.target, name[0]))


def attribution(subject: Subject) -> str:
    """Data made from files names their hash, and their authors."""
    target = subject.target
    if not target.manifest:
        raise Skipped("it is made from no files (manifest)")
    if len(target.manifest) != 64:
        raise Failed(f"manifest is '{target.manifest}', no SHA-256 in hexadecimal", at=target)
    if not target.attribution:
        raise Failed("it has a manifest but names no authors and licences (attribution)", at=target)
    return str(target.attribution)


def evidence(subject: Subject) -> Evidence:
    """What another process must find, too."""
    return evidence_of(dict(_draw(subject.create())))


def evidence_of(sets: Sets) -> Evidence:
    """A digest of every set and its key."""
    return [(_words(name), f"{samples.key} {_content(samples)}") for name, samples in sets.items()]


def _draw(world: Any) -> Iterator[tuple[tuple[str, ...], Samples]]:
    for task in world.tasks:
        for user, seed in ((USERS[0], 0), (USERS[0], 1), (USERS[1], 0)):
            name = task, user, str(seed)
            given = {"seed": seed, "user": user}
            yield ("train", *name), world.train(task, size=SIZES["train"], views=VIEWS["train"], **given)
            yield ("validation", *name), world.validation(task, size=SIZES["validation"], **given)
        yield ("test", task), world.test(task, size=SIZES["test"])
    yield ("public",), world.public(size=SIZES["public"], views=VIEWS["public"])


def _wrong_type(split: str, samples: Samples) -> str | None:
    """What is not as `Samples` says, in words."""
    size, views, targets = SIZES[split], VIEWS[split], samples.targets
    if len(samples) != size:
        return f"{len(samples)} items, {size} were asked for"
    if not samples.inputs:
        return "it has no inputs"
    for modality, array in samples.inputs.items():
        if len(array) != size:
            return f"{len(array)} inputs '{modality}' for {size} items"
        if modality == "image" and (array.dtype != np.uint8 or array.ndim != 5 or array.shape[-1] != 3):
            return f"pictures are {array.dtype} {array.shape}, expected uint8 (N, V, H, W, 3)"
        if modality == "image" and array.shape[1] != views:
            return f"{array.shape[1]} views, {views} were asked for"
        if modality == "text" and (array.ndim != 1 or array.dtype.kind not in "UOT"):
            return f"texts are {array.dtype} {array.shape}, expected str (N,)"
    if samples.scenes.dtype != np.int64 or samples.scenes.ndim != 1:
        return f"scenes are {samples.scenes.dtype} {samples.scenes.shape}, expected int64 (N,)"
    if samples.pairs is not None and (samples.pairs.dtype != np.int64 or samples.pairs.shape != (size,)):
        return f"pairs are {samples.pairs.dtype} {samples.pairs.shape}, expected int64 (N,)"
    if split == "public":
        return None if targets is None and not samples.classes else "the public set has targets or classes"
    if targets is None or not samples.classes:
        return "it has no targets or no classes"
    if (targets.dtype, targets.ndim) not in ((np.dtype(np.int64), 1), (np.dtype(np.uint8), 2)):
        return f"targets are {targets.dtype} {targets.shape}, expected int64 (N,) or uint8 (N, C)"
    return None if len(targets) == size else f"{len(targets)} targets for {size} items"


def _content(samples: Samples) -> str:
    """A digest of the arrays."""
    found = hashlib.blake2b(digest_size=16)
    arrays = {**samples.inputs, "targets": samples.targets, "scenes": samples.scenes, "pairs": samples.pairs}
    for name, array in arrays.items():
        found.update(name.encode())
        if array is not None:
            plain = array.astype(str) if array.dtype.kind in "OT" else array
            found.update(f"{plain.dtype} {plain.shape}".encode() + np.ascontiguousarray(plain).tobytes())
    return found.hexdigest()


def _words(name: tuple[str, ...]) -> str:
    """`train of ic10 of user1, seed 0`."""
    split, *rest = name
    return " of ".join([split, *rest[:2]]) + (f", seed {rest[2]}" if len(rest) == 3 else "")


_FIRST = ("sizes and types",)

CHECKS = (
    Check(
        "sizes and types", sizes_and_types, "return what fedbench.Samples says, as many items and views as asked for"
    ),
    Check("labels", labels, "number classes from 0 in the order of `classes`, the same in all splits", _FIRST),
    Check(
        "splits", disjoint_splits, "draw every split from scenes of its own, and number scenes across splits", _FIRST
    ),
    Check(
        "same twice",
        same_again,
        "draw from seeds.numpy_generator(...), named after split, task, user and seed",
        _FIRST,
    ),
    Check("another process", another_process, "use no hash(), no id() and no order of a set", ("same twice",)),
    Check(
        "seeds", seeds, "let user and seed into the generator's name and into the key of train and validation", _FIRST
    ),
    Check("fixed sets", fixed_sets, "make test and public sets from nothing but their own names", ("same twice",)),
    Check("attribution", attribution, "say in manifest and attribution what the data are made from", _FIRST),
)
