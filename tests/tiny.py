"""The tiny suite as the core sees it: its cells, users and results, for the tests of the core."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedbench import messages
from fedbench.cache import Cache
from fedbench.discovery import discover
from fedbench.examiner import Examiner
from fedbench.interfaces import Observer
from fedbench.method import Method
from fedbench.plan import Cell, make_cell
from fedbench.registry import Registry
from fedbench.rounds import Surroundings, run_cell
from fedbench.runner import folder_of
from fedbench.specs import parse_method
from fedbench.store import Store
from fedbench.suite import Suite, load
from fedbench.user import Participant, UserHost, UserProgram

sys.path.append(str(Path(__file__).parent))
from made_up import provenance

WriteSuite = Callable[..., Path]
CPU = torch.device("cpu")
torch.set_num_threads(1)  # as every cell does; more only wait for each other on nets this small


def participant(suite: Suite, registry: Registry, name: str = "user1", seed: int = 0) -> tuple[Participant, Examiner]:
    """One user of a suite and who scores it, as a cell builds them."""
    spec = next(user for user in suite.users if user.name == name)
    sizes = {
        "validation": suite.validation,
        "test": suite.test,
        "public": suite.public_size,
        "train views": suite.train_views,
        "public views": suite.public_views,
    }
    built: tuple[Participant, Examiner] = registry.create("user", spec.kind).build(
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
    return host(path, method, name=name, seed=seed, loss=loss, **options).program


def host(
    path: Path, method: str = "local", *, name: str = "user1", seed: int = 0, loss: str = "muscle", **options: Any
) -> UserHost:
    """A user of a built-in method as an engine holds it."""
    registry, suite = discover(), load(str(path))
    made: Method = registry.create("method", method, options)
    made.loss_factory = lambda: registry.create("loss", loss)
    person, examiner = participant(suite, registry, name, seed)
    return UserHost(made.User(person, made, suite.protocol, seed), examiner)


def score(host: UserHost, split: str) -> dict[str, Any]:
    """A user's score, as the core asks for it."""
    return messages.decode(host.call("evaluate", messages.encode({"split": split})))


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
