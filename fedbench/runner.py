"""Runs the cells that are missing: in this process for one job, else in worker processes, one cell each at a time."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbench.choice import NOT_APPLICABLE
from fedbench.errors import UserError
from fedbench.plan import Cell
from fedbench.progress import Progress
from fedbench.store import CellFolder, Damaged, Store

OVERWRITE = {
    "missing": "run cells that have no result",
    "failed": "run cells that have no result or a failed one",
    "always": "run every cell; old results are set aside",
    "never": "run nothing, only show what is there",
}


@dataclass
class Job:
    """One cell to run."""

    cell: Cell
    folder: CellFolder


@dataclass
class Outcome:
    """What became of a run: results of all planned cells that have one, and how many failed to get one."""

    ran: int = 0
    failed: list[str] = field(default_factory=list)


def choose(cells: Sequence[Cell], store: Store, overwrite: str, progress: Progress) -> list[Job]:
    """The cells that the overwrite rule says to run; damaged results are set aside and run again."""
    jobs = []
    for cell in cells:
        folder = folder_of(store, cell)
        if overwrite == "never":
            continue
        try:
            result = folder.read()
        except Damaged as error:
            aside = folder.set_aside()
            progress.note(f"{error}; set aside as {aside.name}, {cell.label} runs again")
            result = None
        if result is not None and overwrite == "always":
            folder.set_aside()
            result = None
        if result is None or (overwrite == "failed" and result["status"] == "failed"):
            jobs.append(Job(cell, folder))
    return jobs


def folder_of(store: Store, cell: Cell) -> CellFolder:
    """Where a cell's result goes."""
    suite, method = cell.suite, cell.method
    return store.cell(suite.name, suite.scale, method.name, dict(method.options), cell.seed, cell.key)


def run(jobs: Sequence[Job], request: Mapping[str, Any], count: int, progress: Progress) -> Outcome:
    """Run the jobs, `count` at a time, and report to `progress`.

    Args:
        request: what every worker request shares: suite, scale, overrides, plugins, device, results, provenance.

    Raises:
        KeyboardInterrupt: after the workers are stopped; every finished round is kept.
    """
    outcome = Outcome()
    progress.begin([job.cell for job in jobs], count)
    try:
        if count == 1:
            _run_here(jobs, request, progress, outcome)
        else:
            _run_workers(jobs, request, min(count, len(jobs)), progress, outcome)
    finally:
        progress.end()
    return outcome


def _request(job: Job, shared: Mapping[str, Any]) -> dict[str, Any]:
    return {**shared, "method": job.cell.method.label, "seed": job.cell.seed, "key": job.cell.key}


def _run_here(jobs: Sequence[Job], shared: Mapping[str, Any], progress: Progress, outcome: Outcome) -> None:
    from fedbench.worker import execute

    for job in jobs:
        progress.started(job.cell)

        def emit(event: str, details: Mapping[str, Any], job: Job = job) -> None:
            _take(job, {"event": event, **details}, progress, outcome)

        try:
            execute(_request(job, shared), emit)
        except UserError as error:
            _take(job, {"event": "refused", "message": str(error)}, progress, outcome)
        except Exception as error:  # as in a worker process: one broken cell stops no other
            message = f"{type(error).__name__}: {error}"
            event = {"event": "broken", "message": message, "trace": traceback.format_exc()}
            _take(job, event, progress, outcome)


class Worker:
    """A worker process; its events arrive in a queue shared by all workers."""

    def __init__(self, events: queue.Queue[tuple[Worker, dict[str, Any]]], *, reverse: bool = False) -> None:
        self.job: Job | None = None
        self.reverse = reverse
        self._events = events
        # Ctrl-C is for the runner, which then stops its workers: a worker inherits that the signal is blocked.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fedbench.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, job: Job, request: Mapping[str, Any]) -> None:
        """Hand the worker a job; one that has died by now says so through its events."""
        self.job = job
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def stop(self) -> None:
        """End the process at once; the checkpoint of its last round stays."""
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # a killed process may leave half a line
                self._events.put((self, json.loads(line)))
        self._events.put((self, {"event": "died", "code": self._process.wait()}))


def _run_workers(
    jobs: Sequence[Job], shared: Mapping[str, Any], count: int, progress: Progress, outcome: Outcome
) -> None:
    waiting = list(jobs)
    events: queue.Queue[tuple[Worker, dict[str, Any]]] = queue.Queue()
    workers: list[Worker] = []

    def give(worker: Worker) -> None:
        if waiting:
            job = waiting.pop(0)
            progress.started(job.cell)
            worker.send(job, {**_request(job, shared), "reverse": worker.reverse})
        else:
            worker.job = None

    try:
        for number in range(count):
            workers.append(Worker(events, reverse=number % 2 == 1))
            give(workers[-1])
        while any(worker.job for worker in workers):
            worker, event = events.get()
            if worker.job is None:
                continue
            job = worker.job
            if event["event"] == "died":
                code = event["code"]
                reason = f"signal {-code} (out of memory?)" if code < 0 else f"exit code {code}"
                event = {"event": "broken", "message": f"the worker process died: {reason}", "trace": ""}
                workers.remove(worker)
                if waiting:
                    worker = Worker(events)
                    workers.append(worker)
            if _take(job, event, progress, outcome):
                give(worker)
    finally:
        for worker in workers:
            worker.stop()


def _take(job: Job, event: Mapping[str, Any], progress: Progress, outcome: Outcome) -> bool:
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
        outcome.ran += 1
        error = event["error"]
        if event["status"] == NOT_APPLICABLE:
            progress.note(f"{job.cell.label}: {error['message']}")
            error = None
        if error:
            outcome.failed.append(job.cell.label)
        user = f"{error['user']}: " if error and error.get("user") else ""
        progress.finished(job.cell, event["seconds"], f"{user}{error['message']}" if error else None)
        return True
    elif kind in ("refused", "broken"):
        outcome.ran += 1
        outcome.failed.append(job.cell.label)
        if trace := event.get("trace"):
            Path(job.folder.path).mkdir(parents=True, exist_ok=True)
            (Path(job.folder.path) / "error.txt").write_text(trace)
        progress.finished(job.cell, 0.0, event["message"])
        return True
    return False
