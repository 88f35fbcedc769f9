"""A process that runs cells for `fedbench run`, each in a fork of its own: none sees what another did to its process.

`python -m fedbench.worker` is started by the runner, not by hand. Requests come in and events go out as JSON lines,
never pickled. It ends when its parent is gone, and its cell with it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from fedbench.errors import InUse, StorageError, UserError

Emit = Callable[[str, Mapping[str, Any]], None]


def execute(request: Mapping[str, Any], emit: Emit) -> None:
    """Run one cell as the runner asks for it, and emit its events; the last one is `finished`.

    Args:
        request: suite, scale, overrides, plugins (paths), method (label), seed, key, device, results, provenance,
            overwrite.
        emit: takes an event name and its details.

    Raises:
        UserError: the cell cannot run here and now, which says nothing about the method.
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
    overwrite = request.get("overwrite", "missing")
    with folder.lock():
        result = folder.read()
        if result is not None and settles(result["status"], overwrite):  # another run was faster
            folder.checkpoint_path.unlink(missing_ok=True)
            emit("note", {"text": "another run has finished it in the meantime"})
        else:
            if overwrite == "always":
                folder.checkpoint_path.unlink(missing_ok=True)
            result = run_cell(cell, folder, around, replace=overwrite == "always")
    emit("finished", {"status": result["status"], "error": result["error"], "seconds": result["seconds"]["total"]})


def settles(status: str, overwrite: str) -> bool:
    """Whether a result of this status need not be made again under this overwrite rule."""
    return overwrite != "always" and not (overwrite == "failed" and status == "failed")


def _observer(target: Any) -> Any:
    import importlib

    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        target = getattr(importlib.import_module(module), attribute)
    return target() if isinstance(target, type) else target


def main() -> None:
    """Serve requests from standard input until it closes; after each cell say `over` with its exit status."""
    channel = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not get between the events
    import torch  # noqa: F401 - once for all cells: a fork has it for nothing

    for line in sys.stdin:
        life, held = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(held)
            _serve(json.loads(line), channel, life)
        os.close(life)
        status = _wait(child)
        os.close(held)
        _send(channel, {"event": "over", "code": os.waitstatus_to_exitcode(status)})


def _wait(child: int) -> int:
    """Wait for the cell, or end it where the runner is gone: the checkpoint of its last round stays."""
    with selectors.DefaultSelector() as selector:
        ended = os.pidfd_open(child)
        selector.register(ended, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)  # the runner sends nothing before `over`, so this is its end
        ready = [key.fd for key, _ in selector.select()]
        os.close(ended)
    if ended not in ready:
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _serve(request: Mapping[str, Any], channel: int, life: int) -> NoReturn:
    """Run a cell in this fork and leave, without what an interpreter does at its end."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a plugin that asks for input must not read the runner's requests
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    lock = threading.Lock()

    def emit(event: str, details: Mapping[str, Any]) -> None:
        with lock:
            _send(channel, {"event": event, **details})

    try:
        execute(request, emit)
    except InUse as error:
        emit("elsewhere", {"message": str(error)})
    except StorageError as error:
        emit("storage", {"message": str(error)})
    except UserError as error:
        emit("refused", {"message": str(error)})
    except BaseException as error:  # also a plugin's `sys.exit`: one broken cell stops no other
        emit("broken", {"message": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _end_with(life: int) -> None:
    """End this fork together with the process that forked it."""
    os.read(life, 1)
    os._exit(0)


def _send(channel: int, event: Mapping[str, Any]) -> None:
    data = (json.dumps(event) + "\n").encode()
    try:
        while data:
            data = data[os.write(channel, data) :]
    except BrokenPipeError:
        os._exit(0)  # the runner is gone, which is no failure of the cell


if __name__ == "__main__":
    main()
