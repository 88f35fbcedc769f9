"""A process that runs cells for `fedbench run`: requests come in and events go out as JSON lines, never pickled.

`python -m fedbench.worker` is started by the runner, not by hand. It ends when its parent is gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedbench.errors import UserError

Emit = Callable[[str, Mapping[str, Any]], None]


def execute(request: Mapping[str, Any], emit: Emit) -> None:
    """Run one cell as the runner asks for it, and emit its events; the last one is `finished`.

    Args:
        request: suite, scale, overrides, plugins (paths), method (label), seed, key, device, results, provenance.
        emit: takes an event name and its details.
    """
    import torch

    from fedbench.cache import Cache
    from fedbench.devices import kind_of, resolve
    from fedbench.discovery import discover
    from fedbench.plan import make_cell
    from fedbench.rounds import Surroundings, run_cell
    from fedbench.specs import parse_method
    from fedbench.store import Store
    from fedbench.suite import load

    suite = load(request["suite"], scale=request["scale"], overrides=request["overrides"])
    registry = discover([Path(path) for path in request["plugins"]])
    device: torch.device = resolve(request["device"])
    cell = make_cell(suite, registry, parse_method(request["method"]), request["seed"], kind_of(device))
    if cell.key != request["key"]:
        raise UserError(
            "the suite or a plugin changed while it was running", where=cell.label, expected="start the run again"
        )
    store = Store(Path(request["results"]))
    folder = store.cell(suite.name, suite.scale, cell.method.name, dict(cell.method.options), cell.seed, cell.key)
    around = Surroundings(
        registry=registry,
        cache=Cache(),
        device=device,
        provenance=request["provenance"],
        notify=emit,
        reverse=bool(request.get("reverse")),
        observers=[_observer(target) for target in registry.observers],
    )
    with folder.lock():
        result = run_cell(cell, folder, around)
    emit("finished", {"status": result["status"], "error": result["error"], "seconds": result["seconds"]["total"]})


def _observer(target: Any) -> Any:
    import importlib

    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        target = getattr(importlib.import_module(module), attribute)
    return target() if isinstance(target, type) else target


def main() -> None:
    """Serve requests from standard input until it closes."""
    # Ctrl-C goes to the whole process group: the runner decides what happens, and a round is never cut here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not get between the events
    lock = threading.Lock()

    def emit(event: str, details: Mapping[str, Any]) -> None:
        with lock:
            try:
                channel.write(json.dumps({"event": event, **details}) + "\n")
            except BrokenPipeError:
                os._exit(0)  # the runner is gone, which is no failure of the cell

    requests: list[str] = []
    ready = threading.Semaphore(0)

    def listen() -> None:
        for line in sys.stdin:
            requests.append(line)
            ready.release()
        os._exit(0)  # the runner is gone: the checkpoint of the last round stays

    threading.Thread(target=listen, daemon=True).start()
    while True:
        ready.acquire()
        try:
            execute(json.loads(requests.pop(0)), emit)
        except UserError as error:
            emit("refused", {"message": str(error)})
        except Exception as error:
            import traceback

            emit("broken", {"message": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})


if __name__ == "__main__":
    main()
