"""The process in which `fedbench check` runs a plugin's checks: what it finds goes out as JSON lines.

`python -m fedbench.conformance.process` is started by the command, not by hand. A check that takes longer than it may
ends the process, from a thread of C that needs no lock of Python's: whatever hangs, the trace of where is left behind.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedbench.errors import UserError

Emit = Callable[[str, Mapping[str, Any]], None]


def work(request: Mapping[str, Any], emit: Emit) -> None:
    """Load what is to be checked and check it; the last event is `end`.

    Args:
        request: text, plugins (paths), timeout in seconds, known verdicts by subject and check, and subjects to leave
            out.
        emit: takes an event name and its details.
    """
    import torch

    from fedbench.conformance.subjects import subjects
    from fedbench.conformance.twin import twin

    torch.set_num_threads(1)

    def limit() -> None:
        faulthandler.dump_traceback_later(request["timeout"], exit=True, file=sys.stderr)

    limit()
    emit("loading", {"subject": request["text"]})
    found = subjects(request["text"], [Path(path) for path in request["plugins"]])
    if any(subject.kind in ("method", "data") for subject in found):
        twin()  # it starts while the first checks run
    for subject in found:
        if subject.label not in request["without"]:
            limit()
            emit("loading", {"subject": subject.label})
            _check(subject, request["known"].get(subject.label, {}), emit, limit)
    faulthandler.cancel_dump_traceback_later()
    emit("end", {})


def _check(subject: Any, known: Mapping[str, Any], emit: Emit, limit: Callable[[], None]) -> None:
    from fedbench.conformance import examine, place
    from fedbench.declared import source_file

    try:
        file = source_file(subject.target)
        emit("subject", {"subject": subject.label, "where": place(subject), "file": str(file or "")})
    except (Exception, SystemExit) as error:
        emit("unloadable", {"subject": subject.label, **_described(error)})
        return

    def begin(check: Any) -> None:
        limit()
        emit("begin", {"subject": subject.label, "check": check.name})

    for finding in examine(subject, known=known, begin=begin):
        emit("finding", dataclasses.asdict(finding))


def _described(error: BaseException) -> dict[str, str]:
    message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return {"message": " ".join(message.split()), "trace": traceback.format_exc()}


def main() -> None:
    """Serve one request from standard input."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a plugin prints must not get between the events
    faulthandler.enable(file=sys.stderr)
    request = json.loads(sys.stdin.readline())

    def emit(event: str, details: Mapping[str, Any]) -> None:
        try:
            channel.write(json.dumps({"event": event, **details}) + "\n")
            channel.flush()
        except BrokenPipeError:
            os._exit(0)  # nobody listens any more

    try:
        work(request, emit)
    except (Exception, SystemExit) as error:
        emit("refused", _described(error))
    os._exit(0)  # and with it whatever threads a plugin has left running


if __name__ == "__main__":
    main()
