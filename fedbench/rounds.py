"""One cell from start to result: build the users, run the rounds, score, keep a checkpoint after every round."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedbench import messages
from fedbench.cache import Cache
from fedbench.cell_result import described, failure, mean_bytes, spent_seconds
from fedbench.choice import NOT_APPLICABLE
from fedbench.errors import StorageError, UserError
from fedbench.federation import CellFailed, Federation, Meter
from fedbench.interfaces import Engine, Fault, Metric, Observer, UserSpec
from fedbench.method import Method, ServerProgram
from fedbench.plan import Cell
from fedbench.registry import Registry
from fedbench.seeds import derive
from fedbench.store import CellFolder
from fedbench.user import UserHost

Notify = Callable[[str, Mapping[str, Any]], None]


@dataclass
class Surroundings:
    """What a cell needs and what may not change its numbers."""

    registry: Registry
    cache: Cache
    device: torch.device
    provenance: Mapping[str, Any]
    notify: Notify = lambda event, details: None
    observers: list[Observer] = field(default_factory=list)
    reverse: bool = False

    def tell(self, event: str, *details: Mapping[str, Any]) -> None:
        """Call every observer's method of that name; one that raises is noted, and costs the cell nothing."""
        for observer in self.observers:
            try:
                getattr(observer, event)(*details)
            except Exception as error:
                text = f"the observer {type(observer).__name__} failed in {event}: {type(error).__name__}: {error}"
                self.notify("note", {"text": text})


def run_cell(cell: Cell, folder: CellFolder, around: Surroundings, *, replace: bool = False) -> dict[str, Any]:
    """Run or resume a cell, write its result file and return the result.

    A failure at run time is a result too: status `failed`, with its cause.

    Args:
        replace: set a finished result aside once the new one is there.

    Raises:
        StorageError: the result or the checkpoint cannot be kept.
    """
    run = CellRun(cell, folder, around)
    description = {"method": cell.method.name, "options": dict(cell.method.options), "seed": cell.seed, "key": cell.key}
    around.tell("cell_started", description)
    try:
        try:
            run.run()
        except Restart:
            run = CellRun(cell, folder, around)
            run.run()
        result = run.result("done", None)
    except NotApplicable as error:
        result = run.result(NOT_APPLICABLE, failure(str(error), kind=NOT_APPLICABLE))
    except StorageError:
        raise
    except CellFailed as error:
        fault = error.fault
        message = fault.message if fault.kind == "diverged" else f"{fault.verb}: {fault.message}"
        result = run.result("failed", failure(message, kind=fault.kind, user=fault.user, trace=fault.trace))
    except UserError as error:
        result = run.result("failed", failure(str(error), kind="error"))
    except Exception as error:
        result = run.result("failed", failure(f"{type(error).__name__}: {error}", trace=traceback.format_exc()))
    folder.write(result, replace=replace)
    if result["status"] != "failed":
        folder.checkpoint_path.unlink(missing_ok=True)
    around.tell("cell_finished", description, result)
    return result


class CellRun:
    """The state of one running cell."""

    def __init__(self, cell: Cell, folder: CellFolder, around: Surroundings) -> None:
        self.cell, self.folder, self.around = cell, folder, around
        self.protocol = cell.suite.protocol
        self.records: list[dict[str, Any]] = []
        self.metrics: dict[str, Metric] = {}
        self.scores: dict[str, dict[str, Any]] = {}
        self.validation: dict[str, float] = {}
        self.started = time.perf_counter()
        self.paper: int | None = None
        self.reference = False
        self.faults: list[Fault] = []
        self.touched: list[str] = []

    def run(self) -> None:
        """Build, resume where a checkpoint is, run what is left, score on test."""
        torch.set_num_threads(self.protocol.threads)
        torch.set_flush_denormal(True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            engine, server = self._build()
            try:
                done = self._resume(engine, server)
                for r in range(done, self.protocol.rounds):
                    self._round(r, lambda r=r: server.round(r))  # type: ignore[misc]
                    self._checkpoint(engine, server)
                self._round(self.protocol.rounds, server.finish)
                self.scores = self.federation.evaluate("test")
            finally:
                engine.stop()
        finally:
            torch.set_flush_denormal(False)  # whatever else this process computes wants IEEE arithmetic

    def _build(self) -> tuple[Engine, ServerProgram]:
        registry, suite, seed = self.around.registry, self.cell.suite, self.cell.seed
        world = registry.create("data", suite.data_name, suite.data_options)
        world.verify()
        method: Method = registry.create("method", self.cell.method.name, self.cell.resolved)
        if not isinstance(method, Method):
            raise TypeError(f"the method '{self.cell.method.name}' is a {type(method).__name__}, no fedbench.Method")
        self.reference = method.reference
        if loss := self.cell.parts.get("loss"):
            method.loss_factory = lambda: registry.create("loss", loss.name, loss.options)
        self.touched = list(method.touches(suite.users))
        if strangers := set(self.touched) - {user.name for user in suite.users}:
            raise ValueError(f"touches names users that the suite does not have: {', '.join(map(str, strangers))}")
        if not self.touched:
            raise NotApplicable(f"{NOT_APPLICABLE} (0 of {len(suite.users)} users)")
        sizes = {
            "validation": suite.validation,
            "test": suite.test,
            "public": suite.public_size,
            "train views": suite.train_views,
            "public views": suite.public_views,
        }
        built: dict[str, UserHost] = {}
        # Two processes that start together fill the cache from both ends instead of waiting for each other.
        for spec in reversed(suite.users) if self.around.reverse else suite.users:
            self.around.notify("preparing", {"user": spec.name})
            participant, examiner = registry.create("user", spec.kind).build(
                spec,
                world=world,
                registry=registry,
                protocol=self.protocol,
                sizes=sizes,
                seed=seed,
                cache=self.around.cache,
                device=self.around.device,
            )
            self.metrics[spec.name] = examiner.metric
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive("user program", seed, spec.name))
                built[spec.name] = UserHost(method.User(participant, method, self.protocol, seed), examiner)
        self.paper = _checked_size(method.paper_bytes(self.protocol, len(built)))
        hosts = {spec.name: built[spec.name] for spec in suite.users}
        engine: Engine = registry.create("engine", "local")
        engine.start(hosts)
        self.federation = Federation(engine, list(hosts), self.protocol, self._score)
        self.faults = self.federation.faults
        specs = {spec.name: spec for spec in suite.users}
        return engine, method.Server(method, self.protocol, self.federation, specs, suite.public_size, seed)

    def _score(self) -> None:
        self.validation = {
            user: float(reply["value"]) for user, reply in self.federation.evaluate("validation").items()
        }

    def _round(self, r: int, work: Callable[[], None]) -> None:
        self.federation.meter = meter = Meter(r + 1)
        self.validation = {}
        known = len(self.faults)
        started = time.perf_counter()
        work()
        for fault in self.faults[known:]:
            text = f"{fault.user} {fault.kind} in '{fault.verb}' and is left out from now on: {fault.message}"
            self.around.notify("note", {"text": text})
        if left := [user for user in self.federation.alive if user not in meter.fitted]:
            raise RuntimeError(f"the method's round never asked for 'fit' of {left[0]}: every user has its local phase")
        record = {
            "round": r,
            "validation": self.validation,
            "train_loss": meter.logged().get("fit loss", {}),
            "bytes_up": sum(meter.up.values()),
            "bytes_down": sum(meter.down.values()),
            "seconds": time.perf_counter() - started,
            "log": {name: values for name, values in meter.logged().items() if name != "fit loss"},
            "users": {
                user: [meter.up[user], meter.down[user], meter.tensor_up[user], meter.tensor_down[user]]
                for user in self.federation.users
            },
            "verbs": dict(meter.seconds),
        }
        self.records.append(record)
        self.around.notify("round", record)
        self.around.tell("round_finished", {"method": self.cell.method.label, "seed": self.cell.seed}, record)

    def _checkpoint(self, engine: Engine, server: ServerProgram) -> None:
        states = {name: torch.frombuffer(bytearray(state), dtype=torch.uint8) for name, state in engine.save().items()}
        whole = {
            "key": self.cell.key,
            "users": states,
            "server": server.packed(),
            "alive": list(self.federation.alive),
            "faults": [dataclasses.asdict(fault) for fault in self.faults],
            "records": self.records,
        }
        self.folder.keep(messages.seal(whole))

    def _resume(self, engine: Engine, server: ServerProgram) -> int:
        path = self.folder.checkpoint_path
        if not path.exists():
            return 0
        try:
            whole = messages.unseal(path.read_bytes())
            if whole["key"] != self.cell.key:
                raise ValueError("it belongs to another cell")
            engine.restore({name: state.numpy().tobytes() for name, state in whole["users"].items()})
            server.unpacked(whole["server"])
            self.federation.alive = list(whole["alive"])
            self.faults.extend(Fault(**fault) for fault in whole["faults"])
            self.records = list(whole["records"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            aside = _set_aside(path)
            self.around.notify("note", {"text": f"damaged checkpoint set aside as {aside.name}: {error}"})
            raise Restart from None
        self.around.notify("resumed", {"rounds": len(self.records)})
        return len(self.records)

    def result(self, status: str, error: Mapping[str, Any] | None) -> dict[str, Any]:
        """The result file's content."""
        exchanges = [record for record in self.records if record["round"] < self.protocol.rounds]
        return {
            **described(self.cell, self.around.provenance),
            "status": status,
            "error": dict(error) if error else None,
            "users": [self._user_row(spec, exchanges) for spec in self._built()],
            "touched": self.touched,
            "reference": self.reference,
            "faults": [dataclasses.asdict(fault) for fault in self.faults],
            "rounds": [
                {name: value for name, value in record.items() if name not in ("users", "verbs")}
                for record in self.records
            ],
            "bytes": {**mean_bytes(exchanges, [spec.name for spec in self._built()]), "paper": self.paper},
            "seconds": {**spent_seconds(self.records), "process": time.perf_counter() - self.started},
        }

    def _built(self) -> list[UserSpec]:
        return [spec for spec in self.cell.suite.users if spec.name in self.metrics]

    def _user_row(self, spec: UserSpec, exchanges: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        metric, score = self.metrics[spec.name], self.scores.get(spec.name, {})
        sizes = mean_bytes(exchanges, [spec.name])
        return {
            "name": spec.name,
            "task": spec.task,
            "metric": metric.label,
            "higher_is_better": metric.higher_is_better,
            "model": spec.model,
            "test": score.get("value"),
            "validation": self.validation.get(spec.name),
            "subsets": {subset: score[subset] for subset in ("seen", "unseen") if subset in score},
            "bytes_up": sizes["up"],
            "bytes_down": sizes["down"],
            "tensor_up": sizes["tensor_up"],
            "tensor_down": sizes["tensor_down"],
        }


def _checked_size(size: Any) -> int | None:
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**63):
        return size
    raise ValueError(f"paper_bytes is {size!r:.80}, expected a whole number of bytes below 2^63, or None")


def _set_aside(path: Path) -> Path:
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return path.rename(target)


class NotApplicable(Exception):
    """A method touches none of the suite's users: its cell would be local training under another name."""


class Restart(Exception):
    """A damaged checkpoint left the programs half restored: build the cell anew."""
