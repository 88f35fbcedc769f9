"""What a plugin's source declares, read from its syntax tree: nothing is imported.

The planner and the leaderboard need a plugin's revision, data manifest, weights hash, option defaults and summary
without paying for torch or for a stranger's import.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LITERALS = ("revision", "manifest", "weights", "metric")


@dataclass(frozen=True)
class Declared:
    """What is written in a class body: None or empty where it says nothing literal."""

    summary: str = ""
    revision: int | None = None
    manifest: str = ""
    weights: str = ""
    metric: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)


def source_file(target: Any) -> Path | None:
    """The file that defines a `"module:attribute"` target or an object; only parent packages are imported."""
    module = target.partition(":")[0] if isinstance(target, str) else getattr(target, "__module__", "")
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        found = None
    if found is not None and found.origin and Path(found.origin).is_file():
        return Path(found.origin)
    import sys

    origin = getattr(sys.modules.get(module), "__file__", None)
    return Path(origin) if origin else None


def declared(target: Any) -> Declared:
    """Read the class of a target; an unreadable or dynamic one declares nothing."""
    path = source_file(target)
    attribute = target.partition(":")[2] if isinstance(target, str) else getattr(target, "__name__", "")
    if path is None or not attribute:
        return Declared()
    return _read(path, attribute)


def file_hash(target: Any) -> str:
    """SHA-256 of the file that defines the target, "" where there is none."""
    path = source_file(target)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path else ""


def imported_modules(target: Any) -> set[str]:
    """The modules that the target's file imports at its top, by full name."""
    path = source_file(target)
    return {target.partition(":")[0] for target in _source(path)[1].values()} if path else set()


@functools.cache
def _source(path: Path) -> tuple[dict[str, ast.ClassDef], dict[str, str]]:
    """The classes of a file, and what it imports from elsewhere as `"module:attribute"`, by name."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return {}, {}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    imported = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }
    return classes, imported


@functools.cache
def _read(path: Path, attribute: str) -> Declared:
    classes, imported = _source(path)
    found: dict[str, Any] = {}
    summary = ""
    name: str | None = attribute
    seen: set[str] = set()
    while name in classes and name not in seen:
        seen.add(name)
        node = classes[name]
        if not summary:
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
        for literal, value in _body_literals(node).items():
            found.setdefault(literal, value)
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        name = next((base for base in bases if base in classes), None)
        elsewhere = next((imported[base] for base in bases if base in imported), None)
        if name is None and elsewhere is not None:
            # Not the revision: it says of one file's own numbers that they have not changed.
            inherited = declared(elsewhere)
            for literal in ("defaults", "weights", "metric", "manifest"):
                found.setdefault(literal, getattr(inherited, literal))
    return Declared(summary=summary, **found)


def _body_literals(node: ast.ClassDef) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            name, value = item.target.id, item.value
        elif isinstance(item, ast.Assign) and len(item.targets) == 1 and isinstance(item.targets[0], ast.Name):
            name, value = item.targets[0].id, item.value
        elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
            found["defaults"] = _defaults(item.args)
            continue
        else:
            continue
        if name in _LITERALS and isinstance(value, ast.Constant):
            found[name] = value.value
    return found


def _defaults(arguments: ast.arguments) -> dict[str, Any]:
    pairs = list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    plain = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs += list(zip(plain, arguments.defaults, strict=True))
    values: dict[str, Any] = {}
    for argument, default in pairs:
        if default is None:
            continue
        try:
            values[argument.arg] = ast.literal_eval(default)
        except ValueError:
            continue
    return values
