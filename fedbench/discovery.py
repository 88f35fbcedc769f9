"""How plugins are found: built-ins, installed packages and single files, all by the same registration."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from fedbench import hookspecs
from fedbench.errors import UserError, unknown
from fedbench.registry import Entry, Failure, Registry, Source, apart

BUILT_INS = ("fedbench_plugins", "fedbench_baselines")
GROUP = "fedbench"

_HOOKS = {
    "fedbench_users": "user",
    "fedbench_tasks": "task",
    "fedbench_models": "model",
    "fedbench_losses": "loss",
    "fedbench_data": "data",
    "fedbench_metrics": "metric",
    "fedbench_methods": "method",
    "fedbench_engines": "engine",
}


def discover(files: Sequence[Path] = (), *, strict: bool = False) -> Registry:
    """Load every plugin and return the registry.

    A built-in or installed plugin that fails is kept as a `Failure` and the rest goes on; a file was asked for by
    name, so its failure is an error.

    Args:
        files: single-file plugins, loaded last, in this order.
        strict: make every failure an error.

    Raises:
        UserError: a file is missing, raises at import, misspells a hook or registers a taken name.
    """
    registry = Registry()
    if os.environ.get("FEDBENCH_NO_BUILTINS") != "1":
        for name in BUILT_INS:
            source = Source(name, "built-in")
            _take(registry, source, lambda name=name: importlib.import_module(name), fatal=strict)  # type: ignore[misc]
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
        version = point.dist.version if point.dist else ""
        source = Source(point.dist.name if point.dist else point.name, "package", version)
        _take(registry, source, point.load, fatal=strict)
    for path in dict.fromkeys(map(_resolved, files)):
        source = Source(path.stem, "file", path=_short(path))
        _take(registry, source, lambda path=path: load_file(path), fatal=True)  # type: ignore[misc]
    return registry


@functools.cache
def default_registry() -> Registry:
    """Built-ins and installed packages, loaded once a process."""
    return discover()


def load(kind: str, name: str, **options: Any) -> Any:
    """A plugin object by name: `fedbench.load("loss", "muscle", tau=0.2, tau_prev=0.15)`.

    Raises:
        UserError: unknown kind, name or option, or an option of the wrong type.
    """
    return default_registry().create(kind, name, options)


def load_file(path: Path) -> ModuleType:
    """Import a single-file plugin under a name of its own, made from its stem and content."""
    if not path.is_file():
        raise UserError("there is no such plugin file", where=_short(path), expected="a Python file")
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    except OSError as error:
        raise UserError(f"the plugin file cannot be read: {error.strerror}", where=_short(path)) from None
    name = f"fedbench_external_{''.join(c if c.isalnum() else '_' for c in path.stem)}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError("this is not a Python file", where=_short(path), expected="a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _take(registry: Registry, source: Source, load_plugin: Callable[[], Any], *, fatal: bool) -> None:
    try:
        with apart():
            _register(registry, source, load_plugin())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin that exits at import is as broken as one that raises
        if fatal:
            if isinstance(error, UserError):
                raise
            raise UserError(_cause(error), where=str(source), expected="the plugin failed to load") from error
        registry.failures.append(Failure(source, _cause(error), traceback.format_exc()))


def _register(registry: Registry, source: Source, plugin: Any) -> None:
    manager = pluggy.PluginManager("fedbench")
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name=source.name)
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        known = [name for name in dir(hookspecs) if name.startswith("fedbench_")]
        raise unknown("hook", str(error).split("'")[1], known, where=str(source)) from None
    # Everything or nothing: a plugin that fails half-way leaves no half behind.
    trial = Registry(entries=dict(registry.entries))
    observers: dict[str, Any] = {}
    for hook, kind in _HOOKS.items():
        getattr(manager.hook, hook)(
            register=lambda name, target, kind=kind: trial.add(Entry(kind, name, target, source))
        )
    manager.hook.fedbench_observers(register=lambda name, target: observers.update({name: target}))
    if len(trial.entries) == len(registry.entries) and not observers and source.door == "file":
        raise UserError("this plugin registers nothing", where=str(source), expected="functions marked @hookimpl")
    registry.entries = trial.entries
    registry.observers += observers.values()
    registry.observer_names += [(source, name) for name in observers]
    registry.sources.append(source)


def _cause(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} (line {error.lineno} of {Path(error.filename).name})"
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if "importlib" not in frame.filename), None)
    place = f" (line {last.lineno} of {Path(last.filename).name})" if last else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def _resolved(file: Path) -> Path:
    try:
        return Path(file).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, a loop of links
        raise UserError(f"this is no path of a file: {error}", where=str(file), expected="a Python file") from None


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
