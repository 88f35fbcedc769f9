"""Runs the cells that are missing, in worker processes that fork for each cell."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedbench.cell_result import failed, failure
from fedbench.choice import NOT_APPLICABLE
from fedbench.errors import UserError
from fedbench.plan import Cell
from fedbench.progress import Progress
from fedbench.store import CellFolder, Damaged, Store
from fedbench.worker import settles

OVERWRITE = {
    "missing": "run cells that have no result",
    "failed": "run cells that have no result or a failed one",
    "always": "run every cell; an old result is set aside when the new one is there",
    "never": "run nothing, only show what is there",
}


@dataclass
class Job:
    """One cell to run."""

    cell: Cell
    folder: CellFolder


@dataclass
class Outcome:
    """What became of a run: how many cells ended, and which failed to get a result."""

    ran: int = 0
    failed: list[str] = field(default_factory=list)
    full: str | None = None


def choose(cells: Sequence[Cell], store: Store, overwrite: str, progress: Progress) -> list[Job]:
    """The cells that the overwrite rule says to run; damaged results are set aside and run again."""
    jobs = []
    for cell in cells if overwrite != "never" else ():
        folder = folder_of(store, cell)
        try:
            result = folder.read()
        except Damaged as error:
            aside = folder.set_aside()
            progress.note(f"{error}; set aside as {aside.name}, {cell.label} runs again")
            result = None
        if result is None or not settles(result["status"], overwrite):
            jobs.append(Job(cell, folder))
    return jobs


def folder_of(store: Store, cell: Cell) -> CellFolder:
    """Where a cell's result goes."""
    suite, method = cell.suite, cell.method
    return store.cell(suite.name, suite.scale, method.name, dict(method.options), cell.seed, cell.key)


def run(jobs: Sequence[Job], request: Mapping[str, Any], count: int, progress: Progress) -> Outcome:
    """Run the jobs, `count` at a time, and report to `progress`.

    Args:
        request: what every worker request shares: suite, scale, overrides, plugins, device, results, provenance,
            overwrite.

    Raises:
        KeyboardInterrupt: after the workers are stopped; every finished round is kept.
    """
    outcome = Outcome()
    progress.begin([job.cell for job in jobs], count)
    try:
        _run(jobs, request, min(count, len(jobs)), progress, outcome)
    finally:
        progress.end()
    return outcome


class Worker:
    """A worker process; its events arrive in a queue shared by all workers."""

    def __init__(self, events: queue.Queue[tuple[Worker, dict[str, Any]]], *, reverse: bool = False) -> None:
        self.job: Job | None = None
        self.told = False
        self.reverse = reverse
        self._events = events
        # A session of its own: Ctrl-C is for the runner, which then stops its workers and their forks together.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fedbench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def send(self, job: Job, request: Mapping[str, Any]) -> None:
        """Hand the worker a job; one that has died by now says so through its events."""
        self.job, self.told = job, False
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def stop(self) -> None:
        """End the process and its fork at once; the checkpoint of the last round stays."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listener.join(timeout=10)  # until the fork is gone too, and with it its lock

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # a killed process may leave half a line
                self._events.put((self, json.loads(line)))
        self._events.put((self, {"event": "died", "code": self._process.wait()}))


def _run(jobs: Sequence[Job], shared: Mapping[str, Any], count: int, progress: Progress, outcome: Outcome) -> None:
    waiting = list(jobs)
    events: queue.Queue[tuple[Worker, dict[str, Any]]] = queue.Queue()
    workers: list[Worker] = []

    def give(worker: Worker) -> None:
        if waiting and outcome.full is None:
            job = waiting.pop(0)
            progress.started(job.cell)
            own = {"method": job.cell.method.label, "seed": job.cell.seed, "key": job.cell.key}
            worker.send(job, {**shared, **own, "reverse": worker.reverse})
        else:
            worker.job = None

    try:
        for number in range(count):
            workers.append(Worker(events, reverse=number % 2 == 1))
            give(workers[-1])
        while any(worker.job for worker in workers):
            worker, event = events.get()
            job = worker.job
            if job is None:
                continue
            if event["event"] not in ("over", "died"):
                worker.told |= _take(job, event, shared, progress, outcome)
                continue
            if not worker.told:
                _take(job, _ending(event), shared, progress, outcome)
            if event["event"] == "died":
                workers.remove(worker)
                if not waiting:
                    continue
                worker = Worker(events, reverse=worker.reverse)
                workers.append(worker)
            give(worker)
    finally:
        for worker in workers:
            worker.stop()


def _take(job: Job, event: Mapping[str, Any], shared: Mapping[str, Any], progress: Progress, outcome: Outcome) -> bool:
    """Tell progress about one event; True where the cell has ended."""
    kind = event["event"]
    if kind == "preparing":
        progress.preparing(job.cell, event["user"])
    elif kind == "resumed":
        progress.resumed(job.cell, event["rounds"])
    elif kind == "note":
        progress.note(f"{job.cell.label}: {event['text']}")
    elif kind == "round":
        progress.round(job.cell, event)
    elif kind == "finished":
        error = event["error"]
        if event["status"] == NOT_APPLICABLE:
            progress.note(f"{job.cell.label}: {error['message']}")
            error = None
        user = f"{error['user']}: " if error and error.get("user") else ""
        _ended(job, event["seconds"], f"{user}{error['message']}" if error else None, progress, outcome)
        return True
    elif kind == "elsewhere":
        progress.skipped(job.cell, event["message"])
        return True
    elif kind in ("refused", "broken", "storage"):
        message = event["message"]
        if kind == "storage":
            outcome.full = message
        elif kind == "broken":
            error = failure(message, trace=event.get("trace", ""))
            try:
                with job.folder.lock():
                    job.folder.write(failed(job.cell, shared["provenance"], error), replace=True)
            except UserError as unkept:
                message += f"; and this cannot be kept: {unkept}"
        _ended(job, 0.0, message, progress, outcome)
        return True
    return False


def _ended(job: Job, seconds: float, cause: str | None, progress: Progress, outcome: Outcome) -> None:
    outcome.ran += 1
    if cause:
        outcome.failed.append(job.cell.label)
    progress.finished(job.cell, seconds, cause)


def _ending(event: Mapping[str, Any]) -> dict[str, Any]:
    """The last event of a cell that gave none: what it did itself is its failure, what was done to it is not."""
    code = event["code"]
    if event["event"] == "died":
        return {"event": "refused", "message": f"the worker process died: {_exit(code)}"}
    if -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        return {"event": "refused", "message": f"its process was stopped: {_exit(code)}; the same command resumes it"}
    return {"event": "broken", "message": f"its process ended before it had a result: {_exit(code)}"}


def _exit(code: int) -> str:
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"signal {-code}{hint}" if code < 0 else f"exit code {code}"
