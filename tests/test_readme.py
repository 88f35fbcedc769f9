"""README names what there is: every method, every command, and an example of a plugin that works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedbench.cli import cli
from fedbench.conformance import assert_conforms
from fedbench.discovery import discover

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text below a heading, up to the next."""
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def quoted(text: str) -> set[str]:
    """The names in backticks in the first column of a table, without options."""
    rows = [re.split(r"(?<!\\)\|", line)[1] for line in text.splitlines() if line.startswith("| `")]
    return {name.partition(":")[0] for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_method_is_in_the_field() -> None:
    methods = {name for kind, name in discover().entries if kind == "method"}
    known = quoted(section("The field"))
    losses = {name for kind, name in discover().entries if kind == "loss"} | {"loss=muscle"}
    assert methods <= known
    assert known - methods <= losses


def test_every_command_is_in_the_table() -> None:
    assert {name.split()[1] for name in quoted(section("Commands"))} == set(cli.commands)


EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(("kind", "name"), [("loss", "cosine"), ("method", "my-local")])
def test_the_examples_of_plugins_conform(kind: str, name: str, tmp_path: Path) -> None:
    (text,) = (example for example in EXAMPLES if f'register("{name}"' in example)
    path = tmp_path / "example.py"
    path.write_text(text)
    assert_conforms(kind, name, plugins=[path])
