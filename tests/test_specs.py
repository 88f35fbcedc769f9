"""Method specs: reading, the canonical label, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbench.errors import UserError
from fedbench.specs import MethodSpec, Value, parse_loss, parse_method


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("local", "local", {}),
        (" fedmuscle:loss=muscle ", "fedmuscle", {"loss": "muscle"}),
        ("fedmuscle:tau=0.1,loss=gramian", "fedmuscle", {"loss": "gramian", "tau": 0.1}),
        ("fedmuscle: loss = muscle , loss.tau = 1e-2", "fedmuscle", {"loss": "muscle", "loss.tau": 0.01}),
        ("x:a=true,b=False,c=-3,d=3.,e=v1.2", "x", {"a": True, "b": False, "c": -3, "d": 3.0, "e": "v1.2"}),
        ("x:a=b=c", "x", {"a": "b=c"}),
        ('x:a="1, 2=3",b="true"', "x", {"a": "1, 2=3", "b": "true"}),
    ],
)
def test_reads_names_and_typed_options(text: str, name: str, options: Mapping[str, Value]) -> None:
    spec = parse_method(text)
    assert spec.name == name
    assert spec.options == options
    assert {key: type(value) for key, value in spec.options.items()} == {k: type(v) for k, v in options.items()}


def test_label_is_the_same_in_whatever_order_options_come() -> None:
    first, second = parse_method("fedmuscle:tau=0.10,loss=muscle"), parse_method("fedmuscle:loss=muscle,tau=1e-1")
    assert first.label == second.label == "fedmuscle:loss=muscle,tau=0.1"
    assert first == second and hash(first) == hash(second) and len({first, second}) == 1


def test_options_that_python_calls_equal_stay_different() -> None:
    assert len({parse_method(f"x:a={value}") for value in ("1", "1.0", "true", '"1"')}) == 4


def test_specs_sort_by_label_and_do_not_follow_the_callers_dict() -> None:
    options: dict[str, Value] = {"b": 1}
    spec = MethodSpec("x", options)
    options["b"] = 2
    assert spec.label == "x:b=1"
    assert sorted([spec, MethodSpec("local")]) == [MethodSpec("local"), spec]


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}(\.[a-z]{1,3})?", fullmatch=True)
values = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.from_regex(r"[-0-9.e]*"),
)


@given(st.dictionaries(names, values, max_size=4))
def test_a_label_is_read_back_as_the_same_spec(options: dict[str, Value]) -> None:
    spec = MethodSpec("name-1", options)
    back = parse_method(spec.label)
    assert back.label == spec.label
    assert dict(back.options) == dict(spec.options)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "fedmuscle:", ":a=1", "a b", "../x", "x:a", "x:a=", "x:=1", "x:a=1,,b=2", "x:a=1,", "x:a-b=1"),
        *("x:.a=1", 'x:a="b', 'x:a="b"c', 'x:a=b"c"', "x:a=1e999", "x:a=" + "9" * 5000),
    ],
)
def test_refuses_malformed_specs(text: str) -> None:
    with pytest.raises(UserError):
        parse_method(text)


def test_errors_quote_the_spec_and_say_the_form() -> None:
    with pytest.raises(UserError, match=r"suite\.toml:3: 'x:a=1,oops' is malformed at 'oops' \(NAME or NAME:option"):
        parse_method("x:a=1,oops", where="suite.toml:3")
    with pytest.raises(UserError, match="'x:a=1,a=2' gives the option 'a' twice"):
        parse_method("x:a=1,a=2")


def test_a_loss_stands_for_fedmuscle_with_it() -> None:
    assert parse_loss("cosine") == parse_method("fedmuscle:loss=cosine")
    assert parse_loss("muscle:tau=0.1") == parse_method("fedmuscle:loss=muscle,loss.tau=0.1")
    with pytest.raises(UserError, match="not a method"):
        parse_loss("my loss")
