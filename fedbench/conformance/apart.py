"""Checks plugins in a process of their own, which is started anew where one hangs or dies. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbench.conformance import Finding, conforms, shown
from fedbench.errors import UserError

GRACE = 60.0
"""Seconds beyond the limit, for a slow start: the process ends itself before."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass
class Report:
    """What came of one plugin.

    Args:
        label: kind and name.
        where: `file:line` of its class.
        file: its file.
        unloadable: why it cannot be loaded; "" where it can.
    """

    label: str
    where: str = ""
    file: str = ""
    findings: list[Finding] = field(default_factory=list)
    unloadable: str = ""
    trace: str = ""

    @property
    def code(self) -> int:
        """0 where it conforms, 1 where it does not, 2 where it cannot be loaded."""
        return 2 if self.unloadable else 0 if conforms(self.findings) else 1


class Examination:
    """The checks of all plugins that a name or a file means.

    Args:
        timeout: seconds that one check may take.
        listen: told what is being done.
    """

    def __init__(
        self, text: str, plugins: Sequence[Path], *, timeout: float, listen: Callable[[str], None] = lambda doing: None
    ) -> None:
        self.text, self.plugins, self.timeout = text, plugins, timeout
        self.reports: dict[str, Report] = {}
        self._listen = listen
        self._doing: dict[str, Any] = {}

    def run(self) -> list[Report]:
        """The reports, in the order in which the plugins were checked.

        Raises:
            UserError: there is nothing to check: no such name, or a file that cannot be loaded. `trace` says where.
        """
        while True:
            self._doing = {}
            process = _Process(self._request())
            try:
                while (event := process.next(self.timeout + GRACE)) is not None:
                    if self._take(event):
                        return list(self.reports.values())
            finally:
                process.stop()
            self._blame(process)

    def _request(self) -> dict[str, Any]:
        reports = self.reports.values()
        return {
            "text": self.text,
            "plugins": [str(Path(path).resolve()) for path in self.plugins],
            "timeout": self.timeout,
            "known": {report.label: {one.check: one.verdict for one in report.findings} for report in reports},
            "without": [report.label for report in reports if report.unloadable],
        }

    def _take(self, event: Mapping[str, Any]) -> bool:
        """Write down one event; True where it is the last."""
        kind, label = event["event"], event.get("subject", "")
        if kind == "refused":
            raise Unloadable(event["message"], event["trace"])
        if kind in ("loading", "begin"):
            self._doing = dict(event)
            self._listen(f"{label}: {event['check']}" if kind == "begin" else f"loading {label}")
        elif kind == "subject":
            report = self.reports.setdefault(label, Report(label))
            report.where, report.file = event["where"], event["file"]
        elif kind == "unloadable":
            self.reports[label] = Report(label, unloadable=event["message"], trace=event["trace"])
        elif kind == "finding":
            finding = Finding(**{name: value for name, value in event.items() if name != "event"})
            self.reports[label].findings.append(finding)
        return bool(kind == "end")

    def _blame(self, process: _Process) -> None:
        """The process ended in the middle: what it was doing failed."""
        cause, trace = process.cause(self.timeout), process.said()
        slow = cause.startswith("it did not end")
        advice = "make it end, or give it more time with --timeout" if slow else "raise an exception instead of this"
        label = self._doing.get("subject", "")
        if self._doing.get("event") == "begin":
            report, check = self.reports[label], self._doing["check"]
            report.findings.append(Finding(label, check, "failed", _place(trace, report), cause, advice, trace))
        elif label and label != self.text:
            self.reports[label] = Report(label, unloadable=cause, trace=trace)
        else:
            raise Unloadable(f"{self.text}: it cannot be loaded: {cause}", trace)


class Unloadable(UserError):
    """Nothing could be checked; carries the trace of why."""

    def __init__(self, what: str, trace: str) -> None:
        super().__init__(what)
        self.trace = trace


class _Process:
    """A process that checks, its events, and what it and the plugin print."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fedbench-check-", ignore_cleanup_errors=True)
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._text = ""
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fedbench.conformance.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            text=True,
            # A session and a folder of its own, so that whatever a plugin starts or leaves behind goes with it.
            start_new_session=True,
            env={**os.environ, "TMPDIR": self._folder.name, "CUDA_VISIBLE_DEVICES": ""},
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next event; None where the process has ended, or has said nothing for so long that it was ended."""
        self._began = time.monotonic()
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return None

    def stop(self) -> None:
        """End the process and all that it started; what they printed is kept."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if not self._printed.closed:
            self._printed.seek(0)
            self._text = self._printed.read().decode(errors="replace")
            self._printed.close()
            self._folder.cleanup()

    def said(self) -> str:
        """The end of what was printed: it holds the trace of a crash, or of what hung."""
        return self._text[-20_000:]

    def cause(self, timeout: float) -> str:
        """Why it ended, in words."""
        if "Timeout (" in self._text or time.monotonic() - self._began >= timeout + GRACE:
            return f"it did not end within {timeout:g} s"
        code = self._process.returncode
        if code < 0:
            return f"the process died: {signal.Signals(-code).name}"
        return f"the process died: exit code {code}"

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # a killed process may leave half a line
                self._events.put(json.loads(line))
        self._process.wait()
        self._events.put(None)


def _place(trace: str, report: Report) -> str:
    """The innermost line of the plugin in a trace of `faulthandler`, which begins there; else its class."""
    for file, line in _FRAME.findall(trace):
        if file == report.file:
            return f"{shown(Path(file))}:{line}"
    return report.where
