"""A built-in whose code changed says so: its `revision`, or the core's PROTOCOL, is part of every cell's key.

`revisions.json` records, for every built-in plugin and for the core, the number and a digest of the code that it
stands for: the syntax trees, without docstrings, comments and line numbers, of the module of its class and of all
built-in modules that this one imports. When a digest changes:

- its numbers may change: raise `revision` (PROTOCOL for the core) and run `python tests/test_revisions.py --update`;
- they cannot change (a message, a rename): `python tests/test_revisions.py --waive KIND:NAME "why they cannot"`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedbench.discovery import discover
from fedbench.registry import Registry
from fedbench.version import PROTOCOL

RECORD = Path(__file__).with_name("revisions.json")
BUILT_IN = ("fedbench_plugins", "fedbench_baselines")
CORE = "core"
CORE_MODULES = tuple(
    f"fedbench.{name}"
    for name in (
        "cell_result",
        "examiner",
        "federation",
        "inputs",
        "messages",
        "method",
        "modules",
        "plan",
        "rounds",
        "seeds",
        "user",
    )
)
"""Those parts of the core that compute, draw or choose what ends up in a number."""


@cache
def tree(module: str) -> ast.Module:
    """The syntax tree of a module's file, docstrings left out."""
    path = file_of(module)
    assert path is not None, module
    return stripped(path.read_text(encoding="utf-8"))


@cache
def file_of(module: str) -> Path | None:
    """The file of a module, found without importing it; None for a package or what is no module."""
    package, *rest = module.split(".")
    found = importlib.util.find_spec(package)
    assert found is not None and found.origin is not None, package
    path = Path(found.origin).parent.joinpath(*rest).with_suffix(".py")
    return path if rest and path.is_file() else None


def stripped(source: str) -> ast.Module:
    """A syntax tree without docstrings, also those below assignments."""
    parsed = ast.parse(source)
    for node in ast.walk(parsed):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [item for item in body if not is_text(item)] or [ast.Pass()]  # type: ignore[attr-defined]
    return parsed


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def imported(module: str) -> set[str]:
    """The built-in modules that a module imports, anywhere in its file; not its packages, which only register."""
    names: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.startswith(BUILT_IN) and file_of(name)}


def closure(module: str) -> list[str]:
    """A module and every built-in module that it needs, sorted."""
    found, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imported(name)
    return sorted(found)


def digest(modules: tuple[str, ...] | list[str]) -> str:
    """SHA-256 over the stripped trees of some modules."""
    text = "\n".join(f"{name}: {written(tree(name))}" for name in modules)
    return hashlib.sha256(text.encode()).hexdigest()


def written(node: Any) -> str:
    """A syntax tree as text that is the same for every version of Python: newer ones have more empty fields."""
    if isinstance(node, list):
        return "[" + ",".join(map(written, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
    return f"{type(node).__name__}(" + ",".join(f"{name}={written(value)}" for name, value in sorted(fields)) + ")"


def current() -> dict[str, dict[str, Any]]:
    """What the record should say now."""
    registry = discover()
    found: dict[str, dict[str, Any]] = {CORE: {"revision": PROTOCOL, "digest": digest(CORE_MODULES)}}
    for (kind, name), entry in sorted(registry.entries.items()):
        if entry.source.door == "built-in":
            modules = closure(entry.target.partition(":")[0])
            revision = registry.declared(kind, name).revision
            found[f"{kind}:{name}"] = {"revision": revision, "digest": digest(modules)}
    return found


def complaints(recorded: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> list[str]:
    """One line for everything that is not as recorded; what it takes to put it right is in the line."""
    lines = []
    for name in sorted({*recorded, *now}):
        number = "PROTOCOL in fedbench/version.py" if name == CORE else "its revision"
        if name not in recorded:
            lines.append(f"{name} is new: record it")
        elif name not in now:
            lines.append(f"{name} is gone: drop it from the record")
        elif now[name]["revision"] < recorded[name]["revision"]:
            lines.append(f"{name} went back from revision {recorded[name]['revision']}: numbers only rise")
        elif now[name]["revision"] != recorded[name]["revision"]:
            lines.append(f"{name} has a new revision: record it")
        elif now[name]["digest"] != recorded[name]["digest"]:
            lines.append(f"the code of {name} changed: raise {number} and record it, or waive it")
    return lines


HOW = (
    "record: python tests/test_revisions.py --update\n"
    'waive:  python tests/test_revisions.py --waive KIND:NAME "why no number can change"'
)


def test_no_code_changed_without_its_revision() -> None:
    found = complaints(json.loads(RECORD.read_text()), current())
    assert not found, "\n".join([*found, HOW])


def test_every_built_in_is_recorded_with_a_revision() -> None:
    recorded = json.loads(RECORD.read_text())
    registry: Registry = discover()
    assert set(recorded) == {CORE} | {f"{kind}:{name}" for kind, name in registry.entries}
    for name, entry in recorded.items():
        assert isinstance(entry["revision"], int) and entry["revision"] >= 1, name
        assert set(entry) <= {"revision", "digest", "waiver"} and entry.get("waiver", "reason"), name


def test_a_plugins_digest_covers_what_it_imports() -> None:
    loss = closure("fedbench_plugins.losses.muscle")
    assert {"fedbench_plugins.losses.muscle", "fedbench_plugins.losses.contraction"} <= set(loss)
    assert "fedbench_plugins.data.shape_painter" in closure("fedbench_plugins.data.shapes")
    assert {"fedbench_plugins.data.emoji.draws", "fedbench_plugins.data.emoji.layout"} <= set(
        closure("fedbench_plugins.data.emoji.world")
    )


def test_only_code_counts() -> None:
    before = '"""Doc."""\nX = 1\n"""About X."""\n\ndef f(a):\n    """Doc."""\n    return a  # why\n'
    same = "X = 1\n\n\n\ndef f(a):\n    return (a)\n"
    assert written(stripped(before)) == written(stripped(same))
    assert written(stripped(before)) != written(stripped(same.replace("X = 1", "X = 2")))
    assert written(stripped("class A:\n    '''Doc.'''\n")) == written(stripped("class A:\n    pass\n"))


@pytest.mark.parametrize(
    ("revision", "digest", "said"),
    [
        (2, "aa", []),
        (2, "bb", ["the code of loss:x changed: raise its revision and record it, or waive it"]),
        (3, "bb", ["loss:x has a new revision: record it"]),
        (1, "aa", ["loss:x went back from revision 2: numbers only rise"]),
    ],
)
def test_what_is_said(revision: int, digest: str, said: list[str]) -> None:
    recorded = {"loss:x": {"revision": 2, "digest": "aa"}}
    assert complaints(recorded, {"loss:x": {"revision": revision, "digest": digest}}) == said


def update(waived: str | None, reason: str, *, all_of_it: bool) -> int:
    """Write the record; refuse what changed without a bump, unless it is waived or everything is taken as it is."""
    recorded: dict[str, dict[str, Any]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    now, left = current(), []
    for name, entry in now.items():
        old = recorded.get(name)
        if old is None or entry["revision"] > old["revision"] or entry["digest"] == old["digest"] or all_of_it:
            kept = old is not None and old["digest"] == entry["digest"] and old["revision"] == entry["revision"]
            recorded[name] = old if kept and old else entry
        elif name == waived:
            recorded[name] = {**entry, "waiver": reason}
        else:
            left.append(name)
    recorded = {name: recorded[name] for name in sorted(now)}
    RECORD.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
    for name in left:
        print(f"not recorded, its code changed and its revision did not: {name}")
    return 1 if left else 0


def main() -> int:
    """Update the record from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="record what is new or has a raised revision")
    parser.add_argument(
        "--waive", nargs=2, metavar=("KIND:NAME", "REASON"), help="record a change that changes no number"
    )
    parser.add_argument("--everything", action="store_true", help="before a first release: take all code as it is")
    given = parser.parse_args()
    if not (given.update or given.waive or given.everything):
        parser.error("say --update, --waive or --everything")
    waived, reason = given.waive or (None, "")
    if waived is not None and (waived not in current() or not reason.strip()):
        parser.error(f"'{waived}' is no built-in, or there is no reason")
    return update(waived, reason, all_of_it=given.everything)


if __name__ == "__main__":
    raise SystemExit(main())
