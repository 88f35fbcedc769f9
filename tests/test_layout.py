"""The rooms of the house: what a file may hold and import, checked on the syntax trees of all of them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fedbench.discovery import discover

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"fedbench": "fedbench", "fedbench_plugins": "plugins", "fedbench_baselines": "baselines"}
LONGEST = 320

ROOMS: tuple[tuple[str, ...], ...] = (
    ("version", "errors", "seeds", "toml_lines"),
    # what a plugin is, how one is read and found
    ("hookspecs", "interfaces", "modules", "options", "ranges", "declared", "cache", "specs"),
    ("registry", "discovery"),
    # TOML -> validated suite -> cells with keys
    ("suite_source", "suite_table", "suite_names", "suite_parts", "suite_set", "suite", "plan"),
    # what a result is and where it lies
    ("provenance", "results", "promotion", "store"),
    # results -> Δ% and boards; before the engine, which it must never need
    ("delta", "choice", "leaderboard", "curves", "report", "terminal"),
    # one cell
    ("messages", "inputs", "devices", "examiner", "user", "method", "federation", "cell_result", "rounds", "worker"),
    # what a plugin must do
    (
        "conformance",
        "conformance.apart",
        "conformance.carriers",
        "conformance.cells",
        "conformance.data",
        "conformance.forks",
        "conformance.generators",
        "conformance.heldout",
        "conformance.losses",
        "conformance.methods",
        "conformance.metrics",
        "conformance.models",
        "conformance.process",
        "conformance.rows",
        "conformance.runs",
        "conformance.subjects",
        "conformance.tasks",
        "conformance.twin",
    ),
    # what people see
    ("progress", "runner", "boards", "listing", "contact_sheet", "check_command", "commands", "tuning"),
    ("cli", "__main__"),
)
"""The files of the core: one imports only from its own room and from rooms before it."""

FOR_PLUGINS = {*ROOMS[0], *ROOMS[1], "registry", "messages", "inputs", "examiner", "user", "method", "federation"}
"""What plugins and methods may import of the core: contracts and the user runtime, nothing that plans or shows.

The registry is among it, since a kind of user makes a user's parts from their names.
"""

NAMED = {
    # Δ% is defined against local training, so the core has to know which method that is.
    "local": {"boards", "choice", "commands", "plan", "progress", "rounds", "suite_parts", "tuning"},
    # What `--loss NAME` is short for.
    "fedmuscle": {"specs"},
    # The kind of a user whose table names none.
    "single": {"interfaces"},
}
"""Names of built-ins that a file of the core may hold, each for a reason."""


def files(package: str) -> list[Path]:
    return sorted((ROOT / PACKAGES[package]).rglob("*.py"))


EVERY = [path for package in PACKAGES for path in files(package)]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, *, top_only: bool = False) -> set[str]:
    """Full names of what a file imports when it runs, `fedbench.cache` or `fedbench_plugins.losses.info_nce`."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    nodes = tree(path).body if top_only else ast.walk(tree(path))
    found: set[str] = set()
    for node in nodes:
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and node.module, f"{path}: a relative import"
            whole = node.module in PACKAGES
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if whole else {node.module}
    return found


def room(path: Path) -> str:
    """A file of the core as `ROOMS` names it: `seeds`, `conformance.cells`, `conformance` for a folder's own file."""
    inside = path.relative_to(ROOT / "fedbench").with_suffix("")
    parts = inside.parts[:-1] if inside.name == "__init__" and len(inside.parts) > 1 else inside.parts
    return ".".join(parts)


def of_core(names: set[str]) -> set[str]:
    """Files of the core among imported names; `from fedbench import hookimpl` is the public face, no file."""
    known = {room(path) for path in files("fedbench")} - {"__init__"}
    return {name.removeprefix("fedbench.") for name in names if name.startswith("fedbench.")} & known


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call by the dotted name of what is called."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_no_file_is_long() -> None:
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in EVERY}
    assert not {name: lines for name, lines in long.items() if lines > LONGEST}


def test_every_file_of_the_core_has_a_room() -> None:
    placed = [name for room in ROOMS for name in room]
    assert len(placed) == len(set(placed))
    assert {room(path) for path in files("fedbench")} - {"__init__"} == set(placed)


def test_data_flows_one_way() -> None:
    room_of = {name: number for number, room in enumerate(ROOMS) for name in room}
    backwards = [
        f"{room(path)} imports {name}"
        for path in files("fedbench")
        if room(path) != "__init__"
        for name in of_core(imports(path))
        if room_of[name] > room_of[room(path)]
    ]
    assert not backwards


def test_no_two_files_of_the_core_need_each_other() -> None:
    needs = {room(path): of_core(imports(path, top_only=True)) for path in files("fedbench")}
    while free := {name for name, needed in needs.items() if not needed & needs.keys()}:
        for name in free:
            del needs[name]
    assert not needs, "imported in a circle"


def test_the_core_imports_no_plugin() -> None:
    found = {
        (room(path), name)
        for path in files("fedbench")
        for name in imports(path)
        if name.startswith(("fedbench_plugins", "fedbench_baselines"))
    }
    assert not found


def test_plugins_import_contracts_only() -> None:
    for package in ("fedbench_plugins", "fedbench_baselines"):
        for path in files(package):
            extra = of_core(imports(path)) - FOR_PLUGINS
            assert not extra, f"{path.relative_to(ROOT)} imports {extra}"


def test_plugins_of_one_kind_know_no_other() -> None:
    for path in files("fedbench_baselines"):
        foreign = [name for name in imports(path) if name.startswith("fedbench_plugins")]
        # A method may be made with a particular loss; everything else comes to it by name.
        assert all(name.startswith("fedbench_plugins.losses.") for name in foreign), f"{path.name} imports {foreign}"
    for path in files("fedbench_plugins"):
        inside = path.relative_to(ROOT / "plugins")
        own = f"fedbench_plugins.{inside.parts[0]}."
        foreign = [name for name in imports(path) if name.startswith("fedbench_") and not f"{name}.".startswith(own)]
        assert not foreign, f"{inside} imports {foreign}"


@pytest.mark.parametrize("path", files("fedbench"), ids=room)
def test_the_core_names_no_plugin(path: Path) -> None:
    names = {name for kind, name in discover().entries}
    docstrings = {id(node.value) for node in ast.walk(tree(path)) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            head = node.value.partition(":")[0]  # `fedmuscle` and `fedmuscle:loss=muscle`
            if head in names:
                assert room(path) in NAMED.get(head, ()), f"line {node.lineno} names {head}"


def test_what_may_be_named_is_named() -> None:
    for name, stems in NAMED.items():
        for stem in stems:
            assert f'"{name}"' in (ROOT / "fedbench" / f"{stem}.py").read_text(), f"{stem} no longer names {name}"


def test_nothing_is_unpickled_or_evaluated() -> None:
    pickling = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    for path in EVERY:
        assert not {name.split(".")[0] for name in imports(path)} & pickling, path
        for name, call in calls(path):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            place = f"{path.relative_to(ROOT)}:{call.lineno}"
            assert name not in ("eval", "exec", "torch.save"), place
            if name == "torch.load":
                assert given.get("weights_only") == "True", place
            if name in ("np.load", "numpy.load"):
                assert given.get("allow_pickle") == "False", place


def test_nothing_draws_from_the_global_generators() -> None:
    for path in EVERY:
        assert "random" not in imports(path), path
        for name, call in calls(path):
            place = f"{path.relative_to(ROOT)}:{call.lineno}"
            if name.startswith(("np.random.", "numpy.random.")):
                assert name.rpartition(".")[2] in ("Generator", "PCG64", "SeedSequence"), place
            if name in ("torch.randperm", "torch.randn", "torch.rand", "torch.randint", "torch.multinomial"):
                assert "generator" in {keyword.arg for keyword in call.keywords}, place


def test_the_folders_are_imported_under_their_own_names_only() -> None:
    assert not {"plugins", "baselines", "suites"} & set(sys.modules)
