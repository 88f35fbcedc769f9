"""Checking a suite against plugins: names, options, and what a planned scale may still lack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedbench.errors import UserError, unknown
from fedbench.suite import Suite, check_names, load

BASE = Path(__file__).parent / "suites" / "base.toml"
KNOWN: dict[str, dict[str, set[str]]] = {
    "user": {"single": set()},
    "task": {"mlc": set(), "ic10": set()},
    "model": {"small-convnet": set(), "small-resnet": {"width"}},
    "data": {"shapes": {"pixels"}},
    "method": {"local": set(), "local-long": set(), "fedmuscle": {"loss", "shuffle"}},
    "loss": {"muscle": {"tau"}, "pairwise": {"tau", "width"}},
}


class FakeRegistry:
    def __init__(self) -> None:
        self.checked: list[tuple[str, str, dict[str, Any], str]] = []

    def names(self, kind: str) -> Iterable[str]:
        return KNOWN[kind]

    def check_options(self, kind: str, name: str, options: Mapping[str, Any], where: str) -> None:
        self.checked.append((kind, name, dict(options), where))
        for option in options:
            if option not in KNOWN[kind][name]:
                raise unknown(f"option of {kind} '{name}'", option, KNOWN[kind][name], where=where)


class FailingRegistry(FakeRegistry):
    """Like the real one, it can say why a name is unknown."""

    def check_options(self, kind: str, name: str, options: Mapping[str, Any], where: str) -> None:
        if name not in KNOWN[kind]:
            raise UserError(f"unknown {kind} '{name}'", where=where, expected="my_plugin.py failed to load")


def suite(*overrides: str, scale: str = "mini") -> Suite:
    return load(str(BASE), scale=scale, overrides=overrides)


def test_accepts_what_is_known_and_checks_all_options() -> None:
    registry = FakeRegistry()
    checked = check_names(suite(), registry)
    assert checked == suite()
    assert checked.missing == ()
    options = {(kind, name, str(options)) for kind, name, options, _ in registry.checked}
    assert ("data", "shapes", "{'pixels': 32}") in options
    assert ("model", "small-resnet", "{'width': 8}") in options
    assert ("method", "fedmuscle", "{'shuffle': False, 'loss': 'muscle'}") in options
    assert ("loss", "muscle", "{'tau': 0.2}") in options


def test_options_of_a_loss_reach_the_loss() -> None:
    registry = FakeRegistry()
    methods = 'methods=["local", "local-long", "fedmuscle:loss=pairwise,loss.tau=0.1", "fedmuscle:loss.tau=0.3"]'
    check_names(suite(methods, "loss.pairwise.width=2"), registry)
    assert ("loss", "pairwise", {"width": 2, "tau": 0.1}, f"--set {methods}") in registry.checked
    check_names(suite(methods, "method.fedmuscle.loss=muscle"), registry)
    assert ("loss", "muscle", {"tau": 0.3}, f"--set {methods}") in registry.checked


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("user.user1.kind=singel", "--set user.user1.kind=singel: unknown user 'singel' (did you mean 'single'?)"),
        ("user.user1.task=mcl", "unknown task 'mcl' (did you mean 'mlc'?)"),
        ("user.user2.model.name=smal-resnet", "unknown model 'smal-resnet' (did you mean 'small-resnet'?)"),
        ("user.user2.model.wide=2", "--set user.user2.model.wide=2: unknown option of model 'small-resnet' 'wide'"),
        ("data.name=shape", "--set data.name=shape: unknown data 'shape' (did you mean 'shapes'?)"),
        ("data.pixel=2", "base.toml:17: unknown option of data 'shapes' 'pixel'"),
        ('methods=["local", "local-long", "fedmusle"]', "unknown method 'fedmusle' (did you mean 'fedmuscle'?)"),
        ('methods=["local", "local-long", "fedmuscle:los=a"]', "unknown option of method 'fedmuscle' 'los'"),
        ('methods=["local", "local-long", "fedmuscle:loss=muscel"]', "unknown loss 'muscel' (did you mean 'muscle'?)"),
        ('methods=["local", "local-long", "fedmuscle:loss=muscle,loss.ta=1"]', "unknown option of loss 'muscle' 'ta'"),
        ("method.fedmuscl.a=1", "unknown method 'fedmuscl' (did you mean 'fedmuscle'?)"),
        ("method.local.loss=muscel", "unknown option of method 'local' 'loss'"),
        ("loss.muscel.tau=1", "--set loss.muscel.tau=1: unknown loss 'muscel' (did you mean 'muscle'?)"),
        ("loss.muscle.ta=1", "unknown option of loss 'muscle' 'ta'"),
    ],
)
def test_refuses(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_names(suite(override), FakeRegistry() if "option" in message else FailingSoftly())
    assert message in str(caught.value)


class FailingSoftly(FakeRegistry):
    def check_options(self, kind: str, name: str, options: Mapping[str, Any], where: str) -> None:
        """Says nothing, so that the check's own error shows."""


def test_says_where_in_the_file_a_name_stands(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(BASE.read_text().replace('task = "ic10"', 'task = "ic11"', 1))
    with pytest.raises(UserError, match=r"s\.toml:41: unknown task 'ic11' \(did you mean 'ic10'\?\)"):
        check_names(load(str(path)), FailingSoftly())


def test_the_registry_may_say_why_a_name_is_unknown() -> None:
    with pytest.raises(UserError, match=r"unknown task 'mine' \(my_plugin\.py failed to load\)"):
        check_names(suite("user.user1.task=mine"), FailingRegistry())


def test_a_planned_scale_collects_what_is_missing() -> None:
    checked = check_names(suite(scale="paper"), FakeRegistry())
    assert checked.planned == "needs the published data"
    assert checked.missing == ("model 'vit'", "task 'tc'")


def test_a_planned_scale_still_has_its_known_options_checked() -> None:
    with pytest.raises(UserError, match="unknown option of data 'shapes' 'pixel'"):
        check_names(suite("data.pixel=1", scale="paper"), FakeRegistry())
