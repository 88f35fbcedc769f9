"""User errors say what, where and what was expected, and survive the way between processes."""

from __future__ import annotations

import copy
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from fedbench.errors import UserError, nearest, unknown


class SuiteError(UserError):
    """A kind of user error."""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UserError("no such key"), "no such key"),
        (UserError("no such key", where="a.toml"), "a.toml: no such key"),
        (UserError("no such key", expected="a name"), "no such key (a name)"),
        (UserError("no such key", where="a.toml", expected="a name"), "a.toml: no such key (a name)"),
    ],
)
def test_message(error: UserError, text: str) -> None:
    assert str(error) == text


def test_parts_are_kept() -> None:
    error = UserError("what", where="where", expected="expected")
    assert (error.what, error.where, error.expected) == ("what", "where", "expected")
    assert error.args == ("what",)


@pytest.mark.parametrize("kind", [UserError, SuiteError])
def test_copies_keep_kind_and_parts(kind: type[UserError]) -> None:
    error = copy.copy(kind("what", where="where", expected="expected"))
    assert type(error) is kind
    assert str(error) == "where: what (expected)"


def fail() -> None:
    raise UserError("what", where="where", expected="expected")


def test_errors_reach_the_parent_process_whole() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        error = pool.submit(fail).exception(timeout=60)
    assert isinstance(error, UserError)
    assert str(error) == "where: what (expected)"


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("fedmuscel", ["fedmuscle", "fedavg"], "fedmuscle"),
        ("FEDMUSCLE", ["FedMuscle"], "FedMuscle"),
        ("coverge", iter(["style", "coverage"]), "coverage"),
        ("xyz", ["fedmuscle"], None),
        ("", ["fedmuscle"], None),
        ("fedmuscle", [], None),
    ],
)
def test_nearest(name: str, known: list[str], expected: str | None) -> None:
    assert nearest(name, known) == expected


def test_unknown_suggests_the_nearest_name() -> None:
    error = unknown("loss", "mucle", ["infonce", "muscle"], where="suite.toml")
    assert isinstance(error, UserError)
    assert str(error) == "suite.toml: unknown loss 'mucle' (did you mean 'muscle'?)"


def test_unknown_lists_all_names_where_none_is_near() -> None:
    assert str(unknown("loss", "zzz", ["muscle", "infonce"])) == "unknown loss 'zzz' (known: infonce, muscle)"
    assert str(unknown("loss", "zzz", [])) == "unknown loss 'zzz' (known: none)"
