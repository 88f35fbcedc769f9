"""The tiny suite as the core sees it: its cells, users and results, for the tests of the core."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedbench.cache import Cache
from fedbench.discovery import discover
from fedbench.interfaces import Observer
from fedbench.method import Method
from fedbench.plan import Cell, make_cell
from fedbench.registry import Registry
from fedbench.rounds import Surroundings, run_cell
from fedbench.runner import folder_of
from fedbench.specs import parse_method
from fedbench.store import Store
from fedbench.suite import Suite, load
from fedbench.user import Participant, UserProgram

sys.path.append(str(Path(__file__).parent))
from made_up import provenance

WriteSuite = Callable[..., Path]
CPU = torch.device("cpu")
torch.set_num_threads(1)  # as every cell does; more only wait for each other on nets this small


def participant(suite: Suite, registry: Registry, name: str = "user1", seed: int = 0) -> Participant:
    """One user of a suite, as a cell builds it."""
    spec = next(user for user in suite.users if user.name == name)
    sizes = {
        "validation": suite.validation,
        "test": suite.test,
        "public": suite.public_size,
        "train views": suite.train_views,
        "public views": suite.public_views,
    }
    built: Participant = registry.create("user", spec.kind).build(
        spec,
        world=registry.create("data", suite.data_name, suite.data_options),
        registry=registry,
        protocol=suite.protocol,
        sizes=sizes,
        seed=seed,
        cache=Cache(),
        device=CPU,
    )
    return built


def program(
    path: Path, method: str = "local", *, name: str = "user1", seed: int = 0, loss: str = "muscle", **options: Any
) -> UserProgram:
    """A user program of a built-in method, without a cell around it."""
    registry, suite = discover(), load(str(path))
    made: Method = registry.create("method", method, options)
    made.loss_factory = lambda: registry.create("loss", loss)
    return made.User(participant(suite, registry, name, seed), made, suite.protocol, seed)


def cell_of(
    path: Path, method: str = "local", *, seed: int = 0, plugins: Sequence[Path] = (), overrides: Sequence[str] = ()
) -> tuple[Cell, Registry]:
    """One cell of a suite file, and the registry that it needs."""
    suite, registry = load(str(path), overrides=overrides), discover(plugins)
    return make_cell(suite, registry, parse_method(method), seed, "cpu"), registry


def run(
    cell: Cell,
    registry: Registry,
    runs: Path,
    *,
    notify: Callable[[str, Mapping[str, Any]], None] = lambda event, details: None,
    observers: Sequence[Observer] = (),
) -> dict[str, Any]:
    """Run a cell in this process; its result as the store reads it back."""
    around = Surroundings(registry, Cache(), CPU, provenance(), notify, list(observers))
    folder = folder_of(Store(runs), cell)
    with folder.lock():
        run_cell(cell, folder, around)
    result = folder.read()
    assert result is not None
    return result


def numbers(result: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs of one cell must have in common, to the last bit: everything but times."""
    assert result["status"] == "done", result["error"]
    rounds = [{name: value for name, value in record.items() if name != "seconds"} for record in result["rounds"]]
    return {"users": result["users"], "rounds": rounds, "bytes": result["bytes"], "key": result["key"]}
