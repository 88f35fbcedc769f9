"""Another process with other hash seeds, which is asked for the evidence of a plugin's runs.

What holds in one process only, such as the order of a set or a number made from `hash` or `id`, differs there.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedbench.conformance import Failed, Subject
from fedbench.conformance.cells import Evidence, difference


class Twin:
    """A process that computes evidence; it lives as long as this one."""

    def __init__(self) -> None:
        other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        # Without a GPU, since autograd's threads for it do not survive the forks that are made over there.
        environment = {**os.environ, "PYTHONHASHSEED": other_seed, "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fedbench.conformance.twin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, subject: Subject, evidence: Callable[[Subject], Evidence]) -> Evidence:
        """What a function of a module finds of a plugin over there.

        Raises:
            Failed: it raised there, or the process died.
        """
        request = {
            "kind": subject.kind,
            "name": subject.name,
            "options": dict(subject.options),
            "plugins": [str(path) for path in subject.plugins],
            "module": evidence.__module__,
            "function": evidence.__name__,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise Failed(f"in another process it died: exit code {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise Failed(f"in another process only: {reply['error']}", trace=reply["trace"])
        return [(name, value) for name, value in reply["evidence"]]

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def twin() -> Twin:
    """The twin of this process, started when it is first wanted."""
    found = _started(os.getpid())
    if not found.alive:
        _started.cache_clear()
        found = _started(os.getpid())
    return found


def differs_elsewhere(subject: Subject, here: Evidence, evidence: Callable[[Subject], Evidence]) -> str | None:
    """The first thing in which another process finds something else, in words; `evidence` is a module's function.

    Raises:
        Failed: it raised there, or the process died.
    """
    return difference(here, twin().ask(subject, evidence))


@functools.cache
def _started(process: int) -> Twin:
    found = Twin()
    atexit.register(found.stop)
    return found


def main() -> None:
    """Answer requests from standard input until it closes."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a plugin prints must not get between the replies
    import torch

    from fedbench.discovery import discover

    torch.set_num_threads(1)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        try:
            files = tuple(Path(path) for path in request["plugins"])
            subject = Subject(request["kind"], request["name"], request["options"], discover(files), files)
            function = getattr(importlib.import_module(request["module"]), request["function"])
            reply = {"evidence": function(subject)}
        except (Exception, SystemExit) as error:
            import traceback

            reply = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        channel.write(json.dumps(reply) + "\n")
        channel.flush()


if __name__ == "__main__":
    main()
