"""`fedbench tune`: the same number of trials for every method, scored on validation of a seed that no board uses."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedbench import delta
from fedbench.errors import UserError

if TYPE_CHECKING:
    from fedbench.plan import Cell
    from fedbench.ranges import Ranges
    from fedbench.registry import Registry
    from fedbench.specs import MethodSpec
    from fedbench.suite import Suite

TRIALS = Path("runs") / "tuning"
SEED = 100


@dataclass(frozen=True)
class Trial:
    """One trial: what was drawn, and Δ% on validation against local training of the same seed, None where it failed."""

    cell: Cell
    drawn: Mapping[str, Any]
    delta: float | None
    users: Mapping[str, float | None]
    cause: str = ""


def tune(
    suite: str,
    scale: str,
    *,
    method: str,
    trials: int,
    seed: int,
    plugins: Sequence[Path],
    jobs: int | None,
    device: str,
    results: Path | None,
    overrides: Sequence[str],
) -> int:
    """Run the trials that are missing, print them best first, and the lines that record the best one in the suite.

    The first trial is the method as the suite has it, the others are random draws from the ranges it declares. Only
    validation is read; the exit code is 1 where a trial failed.

    Raises:
        UserError: the method declares nothing to tune, or the seed is one of the board's.
    """
    from fedbench import plan
    from fedbench.commands import open_suite, run_cells
    from fedbench.devices import kind_of, resolve
    from fedbench.specs import parse_method
    from fedbench.store import Store

    loaded, registry = open_suite(suite, scale, overrides, plugins, False)
    if loaded.planned:
        raise UserError(f"the scale '{scale}' cannot run yet: {loaded.planned}", where=loaded.where("scale"))
    if seed in loaded.seeds:
        raise UserError(
            f"seed {seed} is one of the board's", where="--seed", expected="a seed that the suite does not use"
        )
    plan.validate(loaded, registry)
    base = parse_method(method, where="--method")
    specs = draw_specs(loaded, registry, base, trials)
    kind = kind_of(resolve(device))
    local = next(spec for spec in loaded.methods if spec.name == "local" and not spec.options)
    cells = plan.make_cells(loaded, registry, methods=[local, *specs.values()], seeds=[seed], device=kind)
    store = Store(results or TRIALS)
    run_cells(
        loaded, registry, cells, store, scale=scale, overrides=overrides, plugins=plugins, device=device, jobs=jobs
    )
    found = read_trials(cells, store)
    tunable = registry.resolve("method", base.name).tunable
    for line in report(loaded, base, tunable, found, trials, seed):
        click.echo(line)
    return 1 if any(trial.delta is None for trial in found) else 0


def draw_specs(suite: Suite, registry: Registry, base: MethodSpec, trials: int) -> dict[int, MethodSpec]:
    """The specs of the trials by number, 0 being the method as it is; draws depend on suite, method and number alone.

    Raises:
        UserError: unknown method or option, or nothing to tune.
    """
    from dataclasses import replace

    from fedbench.plan import check_method
    from fedbench.seeds import numpy_generator

    check_method(suite, registry, base, "--method")
    ranges: Ranges = getattr(registry.resolve("method", base.name), "tunable", {})
    free = {name: ranges[name] for name in sorted(ranges) if name not in base.options}
    if not free:
        raise UserError(f"the method '{base.name}' declares nothing to tune", where="--method")
    specs = {0: base}
    for number in range(1, trials):
        draws = numpy_generator("tune", suite.name, base.label, number)
        drawn = {name: found.draw(draws) for name, found in free.items()}
        specs[number] = replace(base, options={**base.options, **drawn})
        check_method(suite, registry, specs[number], f"tunable of {base.name}")
    return specs


def read_trials(cells: Sequence[Cell], store: Any) -> list[Trial]:
    """What became of the trials, best first, failed ones last."""
    from fedbench.runner import folder_of

    results = {cell.key: folder_of(store, cell).read() for cell in cells}
    local = results[cells[0].key]
    trials = []
    for cell in cells[1:]:
        result = results[cell.key]
        if local is None or local["status"] != "done":
            trials.append(Trial(cell, cell.method.options, None, {}, "local training has no result"))
        elif result is None or result["status"] != "done":
            cause = result["error"]["message"] if result else "not run"
            trials.append(Trial(cell, cell.method.options, None, {}, cause))
        else:
            gain = delta.of_seed(result["users"], local["users"], score="validation")
            trials.append(Trial(cell, cell.method.options, gain.mean, gain.users, "; ".join(gain.notes)))
    return sorted(trials, key=lambda trial: (trial.delta is None, -(trial.delta or 0.0), trial.cell.method.label))


def report(
    suite: Suite, base: MethodSpec, tunable: Collection[str], trials: Sequence[Trial], count: int, seed: int
) -> list[str]:
    """The trials as lines, and how the best is recorded in the suite file."""
    lines = [f"{suite.name} · {suite.scale} · {base.label}: {count} trials on validation of seed {seed}"]
    for trial in trials:
        users = " ".join("–" if value is None else f"{value:+.1f}" for value in trial.users.values())
        gain = f"failed: {trial.cause}" if trial.delta is None else f"Δ {trial.delta:+.2f} %   {users}"
        lines.append(f"  {trial.cell.method.label:<44} {gain}")
    best = trials[0]
    if best.delta is None:
        return lines
    chosen = {name: value for name, value in best.drawn.items() if name in tunable and name not in base.options}
    command = f"fedbench tune suites/{suite.name}.toml --method {base.label} --trials {count} --seed {seed}"
    note = f"tuned: best of {count} trials, validation Δ {best.delta:+.2f} % on seed {seed}: {command}"
    lines += ["", "To record it in the suite:"]
    if chosen:
        lines += [
            f"[method.{key_of(base.label)}]",
            *(f"{name} = {json.dumps(value)}" for name, value in chosen.items()),
        ]
    lines += [
        "[tuning]",
        f"{key_of(base.label)} = {json.dumps(note, ensure_ascii=False)}",
    ]
    return lines


def key_of(label: str) -> str:
    """A label as a key of TOML, quoted where it must be."""
    return label if re.fullmatch(r"[A-Za-z0-9_-]+", label) else json.dumps(label)
