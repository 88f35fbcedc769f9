"""From a validated suite to cells with content keys: what is to run, and what each result depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbench.errors import UserError
from fedbench.interfaces import KINDS
from fedbench.options import check_options, read_options
from fedbench.registry import Registry, placed
from fedbench.specs import MethodSpec, parse_method
from fedbench.suite import Suite, check_names
from fedbench.toml_lines import show
from fedbench.version import PROTOCOL

_TRAIN_ARGUMENTS = frozenset({"self", "task", "size", "seed", "user", "views"})


@dataclass(frozen=True)
class Part:
    """A plugin chosen by a method's option (its loss), with resolved options."""

    kind: str
    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One (suite, scale, method + options, seed).

    Args:
        method: name and the options that the board shows: those that differ from what the suite and the defaults
            say, and every part.
        resolved: all options of the method.
        parts: plugins chosen by options, by option name.
        key: SHA-256 of everything that changes a number.
        protocol_key: the same without method, parts and seed: cells of one board share it.
        versions: version of every plugin used, by `kind:name`.
    """

    suite: Suite
    method: MethodSpec
    resolved: Mapping[str, Any]
    parts: Mapping[str, Part]
    seed: int
    key: str
    protocol_key: str
    versions: Mapping[str, str]

    @property
    def label(self) -> str:
        """How progress and errors name it."""
        return f"{self.method.label} seed {self.seed}"


def validate(suite: Suite, registry: Registry) -> None:
    """Check every plugin name and option of a suite.

    Raises:
        UserError: the first that is wrong, with file and line.
    """
    check_names(suite, registry)
    if suite.planned:
        return
    registry.check_options("data", suite.data_name, suite.data_options, suite.where("data"))
    world = registry.resolve("data", suite.data_name)
    known = {name: option for name, option in read_options(world.train).items() if name not in _TRAIN_ARGUMENTS}
    for label in suite.method_options:
        check_method(suite, registry, parse_method(label), suite.where(show(("method", label))))
    for index, user in enumerate(suite.users):
        where = suite.where(f"user[{index}].data")
        check_options(f"data '{suite.data_name}' for a user", known, user.data, where)
        if user.task not in world.tasks:
            raise UserError(
                f"the data '{suite.data_name}' has no task '{user.task}'",
                where=suite.where(f"user[{index}].task"),
                expected="it has: " + ", ".join(world.tasks),
            )


def make_cells(
    suite: Suite,
    registry: Registry,
    *,
    methods: Sequence[MethodSpec] | None = None,
    seeds: Sequence[int] | None = None,
    device: str = "cpu",
) -> list[Cell]:
    """The cells in the order in which they run: seed by seed, `local` and then the suite's first method first.

    Args:
        methods: default: the suite's.
        seeds: default: the suite's.
        device: kind of device, as the key records it.
    """
    chosen = list(methods if methods is not None else suite.methods)
    chosen.sort(key=lambda spec: spec.name != "local")
    world = protocol_identity(suite, registry, device)
    cells: dict[str, Cell] = {}
    for seed in seeds if seeds is not None else suite.seeds:
        for spec in chosen:
            cell = _make_cell(suite, registry, spec, seed, world)
            cells.setdefault(cell.key, cell)  # `fedmuscle` and `fedmuscle:loss=muscle` are one
    return list(cells.values())


def make_cell(suite: Suite, registry: Registry, spec: MethodSpec, seed: int, device: str) -> Cell:
    """One cell: its options resolved and its keys computed. Imports no plugin."""
    return _make_cell(suite, registry, spec, seed, protocol_identity(suite, registry, device))


def _make_cell(suite: Suite, registry: Registry, spec: MethodSpec, seed: int, world: Mapping[str, Any]) -> Cell:
    resolved, parts, shown = resolve_method(suite, registry, spec)
    chosen = [("method", spec.name), *((part.kind, part.name) for part in parts.values())]
    versions = _versions(registry, chosen)
    own = {
        "method": spec.name,
        "options": resolved,
        "parts": {name: dataclasses.asdict(part) for name, part in parts.items()},
        "versions": versions,
        "seed": seed,
    }
    return Cell(
        suite=suite,
        method=shown,
        resolved=resolved,
        parts=parts,
        seed=seed,
        key=digest({"protocol": world, "cell": own}),
        protocol_key=digest(world),
        versions={**world["versions"], **versions},
    )


def resolve_method(
    suite: Suite, registry: Registry, spec: MethodSpec
) -> tuple[dict[str, Any], dict[str, Part], MethodSpec]:
    """All options of a method, the plugins it names, and the spec as the board shows it."""
    usual = usual_options(suite, registry, spec)
    shown = _differing({name: value for name, value in spec.options.items() if "." not in name}, usual)
    resolved = {**usual, **shown}
    parts: dict[str, Part] = {}
    for name in sorted(resolved):
        if name not in KINDS or not isinstance(resolved[name], str):
            continue
        shown[name] = resolved[name]
        in_suite = suite.loss_options.get(resolved[name], {}) if name == "loss" else {}
        usual = {**registry.declared(name, resolved[name]).defaults, **in_suite}
        dotted = {key.partition(".")[2]: value for key, value in spec.options.items() if key.startswith(f"{name}.")}
        given = _differing(dotted, usual)
        shown.update({f"{name}.{key}": value for key, value in given.items()})
        parts[name] = Part(name, resolved[name], {**usual, **given})
    stray = [key for key in spec.options if "." in key and key.partition(".")[0] not in parts]
    if stray:
        raise UserError(f"the method '{spec.name}' has no option '{stray[0]}'", expected=f"it has: {sorted(resolved)}")
    return resolved, parts, MethodSpec(spec.name, shown)


def usual_options(suite: Suite, registry: Registry, spec: MethodSpec) -> dict[str, Any]:
    """What a row's options are where it gives none: the method's defaults, then the suite's `[method.NAME]`, then its
    tables of the rows that this one is among, `[method."NAME:loss=gramian"]`."""
    usual = dict(registry.declared("method", spec.name).defaults)
    for _, table in _tables(suite, registry, spec):
        usual.update(table)
    return usual


def _tables(suite: Suite, registry: Registry, spec: MethodSpec) -> list[tuple[str, Mapping[str, Any]]]:
    """The tables that hold for a row, with their labels: its method's, then those of the rows that it is among."""
    of_method = suite.method_options.get(spec.name, {})
    row = {**registry.declared("method", spec.name).defaults, **of_method, **spec.options}
    found = [(spec.name, of_method)] if of_method else []
    for label, table in suite.method_options.items():
        rows = parse_method(label)
        if rows.options and rows.name == spec.name and rows.options.items() <= row.items():
            found.append((label, table))
    return found


def _differing(given: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """What is not as usual anyway: 1 is 1.0, so that one number has one key and one name, but no bool."""
    return {
        name: value
        for name, value in given.items()
        if name not in usual or usual[name] != value or isinstance(usual[name], bool) != isinstance(value, bool)
    }


def check_method(suite: Suite, registry: Registry, spec: MethodSpec, where: str | None = None) -> None:
    """Raise `UserError` where a method does not exist or does not take its options, or its loss does not."""
    registry.entry("method", spec.name, where=where)
    given = {**usual_options(suite, registry, spec), **spec.options}
    plain = {name: value for name, value in given.items() if "." not in name}
    registry.check_options("method", spec.name, plain, where)
    for name, value in plain.items():
        if name in KINDS:
            registry.entry(name, str(value), where=where)
    try:
        parts = resolve_method(suite, registry, spec)[1]
    except UserError as error:
        raise placed(error, where) if where else error from None
    for name in registry.options("method", spec.name):
        if name in KINDS and name not in parts:
            raise UserError(
                f"the option '{name}' of method '{spec.name}' names no {name}",
                where=where,
                expected="its default must be written as a string in the constructor",
            )
    tables = [("method", label) for label, _ in _tables(suite, registry, spec)]
    for part in parts.values():
        own = [name.partition(".")[2] for name in spec.options if name.startswith(f"{part.kind}.")]
        _try(suite, registry, part, own, [(part.kind, part.name)], where)
    _try(suite, registry, Part("method", spec.name, plain), list(spec.options), tables, where)


def _try(
    suite: Suite,
    registry: Registry,
    part: Part,
    own: Sequence[str],
    tables: Sequence[tuple[str, str]],
    where: str | None,
) -> None:
    """Build a part once; what its constructor refuses is an error at the row, or at the key of a table that said it."""
    place = where or "options"
    try:
        registry.create(part.kind, part.name, part.options, place)
    except UserError as error:
        written = suite.method_options if part.kind == "method" else suite.loss_options
        keys = [(*table, key) for table in tables for key in written.get(table[1], {}) if key not in own]
        named = [key for key in keys if f"'{key[2]}'" in error.what or f" {key[2]} " in f" {error.what} "]
        blamed = suite.where(show(named[0])) if named else suite.where(show(keys[0][:2])) if keys and not own else place
        at = f"{blamed}{(error.where or place).removeprefix(place)}"
        raise UserError(error.what, where=at, expected=error.expected) from None


def protocol_identity(suite: Suite, registry: Registry, device: str) -> dict[str, Any]:
    """Everything that changes a number on the board and is common to all its cells."""
    used = {("data", suite.data_name), ("engine", "local")}
    weights = {}
    for user in suite.users:
        used |= {("user", user.kind), ("task", user.task), ("model", user.model)}
        if stated := registry.declared("model", user.model).weights:
            weights[user.model] = stated
    for name in registry.names("metric"):
        # Every built-in counts, since which one a task uses may not be readable; a stranger's only where it is used.
        if registry.entry("metric", name).source.door == "built-in" or _may_use(registry, suite, name):
            used.add(("metric", name))
    return {
        "protocol version": PROTOCOL,
        "suite": suite.identity(),
        "manifest": registry.declared("data", suite.data_name).manifest,
        "weights": weights,
        "versions": _versions(registry, sorted(used)),
        "device": device,
        "torch": importlib.metadata.version("torch"),
    }


def _may_use(registry: Registry, suite: Suite, metric: str) -> bool:
    stated = {registry.declared("task", user.task).metric for user in suite.users}
    return metric in stated or "" in stated


def digest(value: Any) -> str:
    """SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _versions(registry: Registry, used: Sequence[tuple[str, str]]) -> dict[str, str]:
    return {f"{kind}:{name}": registry.version(kind, name) for kind, name in used}
