"""What `fedbench run`, `validate`, `data show` and `clean` do, in the order in which they do it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedbench.errors import StorageError, UserError
from fedbench.suite_parts import SEEDS_BELOW

if TYPE_CHECKING:
    from fedbench.interfaces import World
    from fedbench.plan import Cell
    from fedbench.registry import Registry
    from fedbench.runner import Outcome
    from fedbench.specs import MethodSpec
    from fedbench.store import Store
    from fedbench.suite import Suite

RUNS = Path("runs")


def open_suite(
    suite: str, scale: str, overrides: Sequence[str], plugins: Sequence[Path], strict: bool
) -> tuple[Suite, Registry]:
    """Load a suite and the plugins that it and the command line name."""
    from fedbench.discovery import discover
    from fedbench.suite import load

    loaded = load(suite, scale=scale, overrides=overrides)
    return loaded, discover([*loaded.plugins, *plugins], strict=strict)


def validate_suite(suite: str, scale: str, overrides: Sequence[str], plugins: Sequence[Path], strict: bool) -> None:
    """Check a suite, names and options included, and say what it holds."""
    from fedbench.plan import check_method, validate
    from fedbench.suite import check_names

    loaded, registry = open_suite(suite, scale, overrides, plugins, strict)
    validate(loaded, registry)
    if not loaded.planned:  # what a planned scale names need not exist yet
        for index, spec in enumerate(loaded.methods):
            check_method(loaded, registry, spec, loaded.where(f"methods[{index}]"))
        world = registry.create("data", loaded.data_name, loaded.data_options, loaded.where("data"))
        try:
            world.verify()
        except UserError as error:  # a suite can be checked where its data is not installed
            click.echo(f"The users' data is not checked: {error}", err=True)
        else:
            check_users(loaded, registry, world, loaded.seeds[0], most=1)
    cells = len(loaded.methods) * len(loaded.seeds)
    click.echo(
        f"{loaded.name} at scale {loaded.scale} is valid: {len(loaded.users)} users, "
        f"{len(loaded.methods)} methods, {len(loaded.seeds)} seeds, {cells} cells"
    )
    if loaded.planned:
        checked = check_names(loaded, registry)
        missing = f" Missing plugins: {', '.join(checked.missing)}." if checked.missing else ""
        click.echo(f"It cannot run yet: {loaded.planned}{missing}")


def run_suite(
    suite: str,
    scale: str,
    *,
    methods: Sequence[str],
    losses: Sequence[str],
    seeds: str | None,
    plugins: Sequence[Path],
    jobs: int | None,
    device: str,
    results: Path | None,
    overwrite: str,
    overrides: Sequence[str],
    dry_run: bool,
    strict: bool,
) -> int:
    """Run what is missing and print the board; the exit code is 1 where something failed."""
    from fedbench import devices, plan, runner
    from fedbench.boards import planned_board, print_board, protocol_facts
    from fedbench.store import Store

    loaded, registry = open_suite(suite, scale, overrides, plugins, strict)
    if loaded.planned:
        from fedbench.suite import check_names

        missing = ", ".join(check_names(loaded, registry).missing)
        raise UserError(
            f"the scale '{scale}' cannot run yet: {loaded.planned}",
            where=loaded.where(f"scale.{scale}.planned"),
            expected=f"missing plugins: {missing}" if missing else None,
        )
    plan.validate(loaded, registry)
    specs = chosen_methods(loaded, registry, methods, losses)
    kind = devices.kind_of(devices.resolve(device))
    cells = plan.make_cells(loaded, registry, methods=specs, seeds=parse_seeds(seeds), device=kind)
    store = Store(results or RUNS)
    if dry_run:
        return show_plan(cells, store)
    outcome = run_cells(
        loaded,
        registry,
        cells,
        store,
        scale=scale,
        overrides=overrides,
        plugins=plugins,
        device=device,
        jobs=jobs,
        overwrite=overwrite,
    )
    shown = planned_board(loaded, store.results(loaded.name, loaded.scale), cells)
    print_board(shown, loaded, "table", source=f"your runs in {store.root}", facts=protocol_facts(loaded))
    if outcome.full:
        raise StorageError(outcome.full)
    failed = [cell for cell in cells if runner.folder_of(store, cell).state in ("failed", "damaged")]
    if failed and not outcome.failed and overwrite == "missing":
        click.echo("Failed cells are kept; --overwrite failed runs them again.", err=True)
    return 1 if outcome.failed or failed else 0


def run_cells(
    suite: Suite,
    registry: Registry,
    cells: Sequence[Cell],
    store: Store,
    *,
    scale: str,
    overrides: Sequence[str],
    plugins: Sequence[Path],
    device: str,
    jobs: int | None,
    overwrite: str = "missing",
) -> Outcome:
    """Run those of the cells that the overwrite rule says, after checking what they all need."""
    from fedbench import devices, runner
    from fedbench.progress import make_progress
    from fedbench.provenance import collect

    progress = make_progress()
    store.ensure_writable()
    pending = runner.choose(cells, store, overwrite, progress)
    if pending:
        preflight(suite, registry, pending[0].cell.seed)
    shared = {
        "suite": str(suite.path or suite.name),
        "scale": scale,
        "overrides": list(overrides),
        "plugins": [str(Path(path).resolve()) for path in [*suite.plugins, *plugins]],
        "device": device,
        "results": str(store.root.resolve()),  # a plugin may change the working folder
        "overwrite": overwrite,
        "provenance": {**collect(sys.argv), "device": devices.kind_of(devices.resolve(device))},
    }
    return runner.run(pending, shared, jobs or len(os.sched_getaffinity(0)), progress)


def chosen_methods(suite: Suite, registry: Registry, methods: Sequence[str], losses: Sequence[str]) -> list[MethodSpec]:
    """The rows to run: what the command line names plus `local`, else the suite's.

    Raises:
        UserError: an unknown method, loss or option.
    """
    from fedbench.plan import check_method
    from fedbench.specs import parse_loss, parse_method

    asked = [(spec, f"--method {text}") for text in methods if (spec := parse_method(text, where="--method"))]
    asked += [(spec, f"--loss {text}") for text in losses if (spec := parse_loss(text, where="--loss"))]
    if asked:
        local = next(spec for spec in suite.methods if spec.name == "local" and not spec.options)
        asked = [(local, "methods"), *asked]
    else:
        asked = [(spec, suite.where(f"methods[{index}]")) for index, spec in enumerate(suite.methods)]
    for spec, where in asked:
        check_method(suite, registry, spec, where)
    return list(dict.fromkeys(spec for spec, _ in asked))


def parse_seeds(text: str | None) -> list[int] | None:
    """`0,1,2` as numbers; None where none are given.

    Raises:
        UserError: not whole numbers of at least 0, or one twice.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    # isdecimal: int() takes signs, underscores and blanks besides; the length keeps it from numbers of megabytes.
    if not all(part.isdecimal() and len(part) < 20 and int(part) < SEEDS_BELOW for part in parts) or len(
        set(map(int, parts))
    ) != len(parts):
        expected = "different whole numbers below 2^32, as 0,1,2"
        raise UserError(f"these are no seeds: '{text}'", where="--seeds", expected=expected)
    return [int(part) for part in parts]


def preflight(suite: Suite, registry: Registry, seed: int) -> None:
    """Check data packages, weights and every user's data options before anything is computed.

    Raises:
        UserError: something is missing or altered; the message names the command that helps.
    """
    world = registry.create("data", suite.data_name, suite.data_options, suite.where("data"))
    world.verify()
    for name in dict.fromkeys(user.model for user in suite.users):
        registry.resolve("model", name).verify()
    check_users(suite, registry, world, seed)


def check_users(suite: Suite, registry: Registry, world: World, seed: int, most: int | None = None) -> None:
    """Build every user's model and begin its private data, of at most so many items, to see that options fit.

    Raises:
        UserError: an option is refused; its place is named.
    """
    from fedbench.registry import placed

    for index, user in enumerate(suite.users):
        at = f"user[{index}]"
        registry.create("model", user.model, user.model_options, f"{suite.where(f'{at}.model')}, {user.name}")
        size = user.train if most is None else min(user.train, most)
        try:
            world.train(user.task, size=size, seed=seed, user=user.name, views=suite.train_views, **dict(user.data))
        except UserError as error:
            raise placed(error, f"{suite.where(f'{at}.data')}, {user.name}") from None


def show_plan(cells: Sequence[Any], store: Any) -> int:
    """Print the cells, their keys and states."""
    from fedbench.runner import folder_of

    for cell in cells:
        click.echo(f"{folder_of(store, cell).state:<8} {cell.key[:12]} {cell.label}")
    suite = cells[0].suite
    click.echo(
        f"{len(cells)} cells, {len(suite.users)} users, {suite.protocol.rounds} rounds, "
        f"{suite.protocol.steps} local steps and {suite.protocol.iterations} alignment iterations a round"
    )
    return 0


def show_data(
    suite: str, scale: str, *, overrides: Sequence[str], plugins: Sequence[Path], seed: int, out: Path | None
) -> None:
    """Write the contact sheet of a suite's data."""
    from fedbench.contact_sheet import contact_sheet
    from fedbench.plan import validate

    loaded, registry = open_suite(suite, scale, overrides, plugins, False)
    if loaded.planned:
        raise UserError(f"the scale '{scale}' cannot be shown yet: {loaded.planned}")
    validate(loaded, registry)

    world = registry.create("data", loaded.data_name, loaded.data_options)
    world.verify()
    sections = []
    for user in loaded.users:
        train = world.train(
            user.task, size=user.train, seed=seed, user=user.name, views=loaded.train_views, **user.data
        )
        options = ", ".join(f"{name} {value}" for name, value in user.data.items())
        sections.append((f"{user.name}: {user.task}, {user.train} training items, {options}", train))
    for task in dict.fromkeys(user.task for user in loaded.users):
        sections.append((f"test set of {task}", world.test(task, size=loaded.test)))
    sections.append(
        (f"public set, {loaded.public_size} items", world.public(size=loaded.public_size, views=loaded.public_views))
    )
    path = out or Path(f"{loaded.name}-data.png")
    contact_sheet(sections, path, attribution=world.attribution)
    click.echo(f"wrote {path}")
    if world.attribution:
        click.echo(world.attribution)


def clean_up(*, results: Path | None, everything: bool, yes: bool) -> None:
    """Remove checkpoints of unfinished cells and files set aside; with `everything` also the cache."""
    from fedbench.cache import default_folder
    from fedbench.store import is_locked

    root = results or RUNS
    found: list[Path] = []
    running = 0
    for cell in sorted(root.glob("*/*/*/seed*-*")):
        if is_locked(cell):
            running += 1
            continue
        for pattern in ("checkpoint.safetensors*", "result.json.damaged-*", "result.json.old-*", ".*.*"):
            found += cell.glob(pattern)
    if running:
        click.echo(f"{running} cells are running and stay as they are")
    if everything:
        found += [path for ending in ("npy", "json", "lock") for path in default_folder().glob(f"*.{ending}")]
    size = sum(path.stat().st_size for path in found)
    left = []
    for path in found if yes else ():
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            left.append(f"{path} stays: {error.strerror}")
    verb = "removed" if yes else "would remove (say --yes to do it)"
    click.echo(f"{verb}: {len(found) - len(left)} files, {size / 1e6:.1f} MB")
    if left:
        raise UserError("; ".join(left), expected="remove it by hand")
