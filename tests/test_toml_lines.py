"""Positions of TOML keys: every key that `tomllib` sees is found, on the right line."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbench.toml_lines import Key, key_lines, show

AWKWARD = '''\
# [comment]
title = "a [table] # no comment"   # = comment
path = 'C:\\[x]\\'
text = """
[not.a.table]
key = 1 \\""" # a quote, escaped, and two more
""" # closing
quoted = """a"""""
raw = \'\'\'
[[nor.this]]
it''s = 1\'\'\'\'
list = [  # comment with ]
    "one]", 'two[',   # more
    [1, 2,
     3],
    { a = 1, b.c = "}" },
    """
    three""",
    4
]
inline = { x = 1, "y z" = [ { q = 2 } ], w.v = "," }
"quoted key.with dot" = 1
'literal "key"' = 1979-05-27 07:32:00
a . "b" . c = +1e-3
empty = []
none = {}

[ table . "sub.table" ]
k = true#comment
[[user]]
name = "first"
  [user.data]
  style = "x"
  [[user.things]]
  n = 1
  [[user.things]]
  n = 2
[[user]]

[[user.things]]
n = 3
[scale.paper.protocol]
rounds = 1
[[scale.paper.user]]
last = 0xff'''


def paths(value: Any, at: Key = ()) -> Iterator[Key]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, inner in items:
        yield (*at, part)
        yield from paths(inner, (*at, part))


def line_of(fragment: str, text: str = AWKWARD) -> int:
    [line] = [number for number, line in enumerate(text.split("\n"), 1) if fragment in line]
    return line


def test_finds_every_key_of_awkward_toml_and_no_other() -> None:
    assert set(key_lines(AWKWARD)) == set(paths(tomllib.loads(AWKWARD)))


@pytest.mark.parametrize(
    ("key", "fragment"),
    [
        (("title",), "title ="),
        (("text",), 'text = """'),
        (("quoted",), "quoted = "),
        (("raw",), "raw ="),
        (("list",), "list = ["),
        (("list", 1), "two["),
        (("list", 2, 2), "3],"),
        (("list", 3, "b", "c"), "b.c"),
        (("list", 5), "    4"),
        (("inline", "y z", 0, "q"), "q = 2"),
        (("quoted key.with dot",), "with dot"),
        (('literal "key"',), "literal"),
        (("a", "b", "c"), "a . "),
        (("table", "sub.table", "k"), "k = true"),
        (("user", 0, "data", "style"), "style ="),
        (("user", 0, "things", 1, "n"), "  n = 2"),
        (("user", 1, "things", 0, "n"), "n = 3"),
        (("scale", "paper"), "[scale.paper.protocol]"),
        (("scale", "paper", "user", 0, "last"), "last ="),
    ],
)
def test_knows_the_line_of_a_key(key: Key, fragment: str) -> None:
    assert key_lines(AWKWARD)[key] == line_of(fragment)


def test_counts_windows_lines_once() -> None:
    text = AWKWARD.replace("\n", "\r\n")
    assert key_lines(text) == key_lines(AWKWARD)


def test_is_quick_on_long_strings_and_lists() -> None:
    text = 'a = """' + 'x"" ' * 200_000 + '"""\nb = [' + "1, " * 50_000 + "]\n"
    lines = key_lines(text)
    assert lines[("b",)] == 2 and lines[("b", 49_999)] == 2


@pytest.mark.parametrize("text", ["= 1", "a 1", "a = [1", "[a", "a = {b = 1"])
def test_refuses_what_is_not_toml(text: str) -> None:
    with pytest.raises(ValueError):
        key_lines(text)


@given(st.text(alphabet="ab.=[]{}\"'\\#,1 \n", max_size=40))
def test_agrees_with_tomllib_on_whatever_that_accepts(text: str) -> None:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    assert set(key_lines(text)) == set(paths(tables))


def strings() -> st.SearchStrategy[str]:
    plain = st.text(alphabet="ab]},#=' \t", max_size=6)
    return st.one_of(
        st.integers().map(str),
        plain.map(lambda text: f'"{text}"'),
        plain.map(lambda text: '"""\n' + text + '\n""b"""'),
        st.text(alphabet='ab"[]#', max_size=6).map(lambda text: f"'{text}'"),
        st.text(alphabet='ab"[]#\n', max_size=6).map(lambda text: f"'''{text}'''"),
    )


def arrays(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    breaks = st.sampled_from(["", "\n", " # ] comment\n"])
    array = st.lists(values, max_size=3).flatmap(
        lambda items: breaks.map(lambda gap: "[" + "".join(f"{gap} {item} {gap}," for item in items) + gap + "]")
    )
    table = st.lists(values, max_size=2).map(
        lambda items: "{" + ", ".join(f"k{number} . x = {item}" for number, item in enumerate(items)) + "}"
    )
    return st.one_of(array, table)


@given(st.lists(st.recursive(strings(), arrays, max_leaves=8), max_size=4))
def test_agrees_with_tomllib_on_generated_documents(values: list[str]) -> None:
    text = "".join(f"[[t]]\nkey = {value} # end\n[t.sub]\n'q'={value}\n" for value in values)
    assert set(key_lines(text)) == set(paths(tomllib.loads(text)))


def test_shows_keys_as_people_write_them() -> None:
    assert show(("user", 2, "model")) == "user[2].model"
    assert show(("reference", "rows", "Local Training")) == 'reference.rows."Local Training"'
