"""Options of plugins: typed arguments of a constructor, checked before anything runs."""

from __future__ import annotations

from typing import Any, Literal, Optional

import pytest

from fedbench.errors import UserError
from fedbench.options import check_options, read_options


class Plugin:
    """A plugin.

    Args:
        rate: how fast.
        kind: which one.
    """

    def __init__(
        self,
        *,
        rate: float = 0.1,
        count: int = 1,
        flag: bool = False,
        kind: Literal["one", "two"] = "one",
        limit: int | None = None,
        old: Optional[float] = None,  # noqa: UP045 - the older spelling must work too
        names: list[str] = [],  # noqa: B006
        free: Any = None,
    ) -> None: ...


class Demanding:
    """Has an option without a default."""

    def __init__(self, *, needed: int, more: str = "x") -> None: ...


def check(given: dict[str, Any], factory: Any = Plugin) -> None:
    check_options("loss 'mine'", read_options(factory), given, "suite.toml:3")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rate", 0.5),
        ("rate", 2),
        ("count", 2),
        ("flag", True),
        ("kind", "two"),
        ("limit", None),
        ("limit", 3),
        ("old", 3),
        ("old", None),
        ("names", ["a"]),
        ("free", object()),
        ("free", True),
    ],
)
def test_what_fits_is_taken(name: str, value: Any) -> None:
    check({name: value})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("rate", True, "expected float"),
        ("rate", "0.5", "expected float"),
        ("rate", None, "expected float"),
        ("count", True, "expected int"),
        ("count", 1.0, "expected int"),
        ("count", 1.5, "expected int"),
        ("flag", 1, "expected bool"),
        ("flag", "true", "expected bool"),
        ("kind", "three", "expected 'one' or 'two'"),
        ("kind", 1, "expected 'one' or 'two'"),
        ("limit", 1.5, "expected int or nothing"),
        ("limit", False, "expected int or nothing"),
        ("old", True, "expected float or nothing"),
        ("names", "a", "list"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(name: str, value: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        check({name: value})
    message = str(caught.value)
    assert expected in message
    for part in ("suite.toml:3", f"'{name}'", "loss 'mine'", repr(value)):
        assert part in message


def test_an_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown option of loss 'mine' 'raet'.*did you mean 'rate'"):
        check({"raet": 1.0})


def test_a_needed_option_must_be_given() -> None:
    check({"needed": 1}, Demanding)
    with pytest.raises(UserError, match=r"'needed' of loss 'mine' must be given \(int\)"):
        check({"more": "y"}, Demanding)


def test_options_carry_their_default_and_doc_line() -> None:
    options = read_options(Plugin)
    assert (options["rate"].default, options["rate"].doc) == (0.1, "how fast.")
    assert options["kind"].doc == "which one."
    assert options["count"].doc == ""


def test_a_class_without_a_constructor_has_none() -> None:
    class Bare:
        """Nothing to choose."""

    import torch

    class Module(torch.nn.Module):
        """Only torch's constructor, which takes anything."""

    assert read_options(Bare) == {} == read_options(Module)
    with pytest.raises(UserError, match="known: none"):
        check({"x": 1}, Bare)


def test_an_annotation_that_cannot_be_resolved_takes_anything() -> None:
    class Odd:
        def __init__(self, *, x: Missing = 1) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    check({"x": "text"}, Odd)


def test_a_factory_has_options_too() -> None:
    def make(*, width: int = 8, **rest: Any) -> object:
        """Make it."""
        return object()

    assert list(read_options(make)) == ["width"]
