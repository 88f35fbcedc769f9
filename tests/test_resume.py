"""Runs that are killed, for real and in every way: the same command goes on, to the same bits."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedbench.discovery import discover
from fedbench.plan import Cell, make_cells
from fedbench.progress import Progress
from fedbench.runner import Job, Outcome, folder_of
from fedbench.runner import run as run_jobs
from fedbench.specs import parse_method
from fedbench.store import Store
from fedbench.suite import load

sys.path.append(str(Path(__file__).parent))
from command_line import fedbench
from conftest import tiny_suite
from made_up import provenance
from tiny import numbers, run

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads processes from /proc")

PAUSE = "FEDBENCH_TEST_PAUSE"
SLOW = f"""
import os, time, fedbench

class Slow(fedbench.AlignmentLoss):
    '''Waits at every call as long as the environment says, so that there is time to kill it.'''
    def forward(self, anchor, others):
        time.sleep(float(os.environ.get("{PAUSE}", "0")))
        return (1 - (anchor * others).sum(-1)).mean()

@fedbench.hookimpl
def fedbench_losses(register):
    register("slow", Slow)
"""
METHODS = ("fedmuscle:loss=slow", "fedmuscle:loss=slow,shuffle=true")


class Runs:
    """A suite whose cells can be slowed down, its command, and where its results go."""

    def __init__(self, suite: Path, plugin: Path, folder: Path) -> None:
        self.suite, self.plugin, self.store = suite, plugin, Store(folder)
        self.started: list[subprocess.Popen[str]] = []

    def command(self, jobs: int) -> list[str]:
        wanted = [word for method in METHODS for word in ("--method", method)]
        place = ["--results", str(self.store.root), "--device", "cpu", "--jobs", str(jobs)]
        return ["run", str(self.suite), "--plugin", str(self.plugin), *wanted, "--seeds", "0", *place]

    def start(self, jobs: int, pause: float = 0.0) -> subprocess.Popen[str]:
        """Start the command as a shell does: in a process group of its own."""
        process = subprocess.Popen(
            [sys.executable, "-m", "fedbench", *self.command(jobs)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, PAUSE: str(pause)},
        )
        self.started.append(process)
        return process

    @cached_property
    def cells(self) -> list[Cell]:
        """`local`, which `run` adds, and the slow ones."""
        specs = [parse_method(method) for method in ("local", *METHODS)]
        return make_cells(load(str(self.suite)), discover([self.plugin]), methods=specs, seeds=[0])

    def states(self) -> list[str]:
        return [folder_of(self.store, cell).state for cell in self.cells]

    def slow_cell_began(self) -> bool:
        """There is a checkpoint of one of the slow cells."""
        return "running" in self.states()[1:]

    def numbers(self) -> list[dict[str, Any]]:
        results = [folder_of(self.store, cell).read() for cell in self.cells]
        return [numbers(result) for result in results if result is not None]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The suite and the plugin that all tests here share."""
    folder = tmp_path_factory.mktemp("slow")
    suite, plugin = folder / "tiny.toml", folder / "slow.py"
    suite.write_text(tiny_suite().replace("rounds = 2", "rounds = 4"))
    plugin.write_text(SLOW)
    return suite, plugin


@pytest.fixture
def runs(place: tuple[Path, Path], tmp_path: Path) -> Iterator[Runs]:
    made = Runs(*place, tmp_path / "runs")
    yield made
    for process in made.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def undisturbed(place: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The numbers of every cell, run straight."""
    made = Runs(*place, tmp_path_factory.mktemp("straight"))
    return [numbers(run(cell, discover([made.plugin]), made.store.root)) for cell in made.cells]


def wait_until(true: Callable[[], Any], process: subprocess.Popen[str] | None = None, seconds: float = 60) -> Any:
    """What `true` returns as soon as it is something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := true():
            return found
        assert process is None or process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def children(parent: int) -> list[int]:
    """Living processes that a process started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := status(int(entry.name))) and stat[1] == str(parent):
            found.append(int(entry.name))
    return found


def status(process: int) -> list[str] | None:
    """State, parent, … of a living process; None where there is none."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


def finish(runs: Runs, jobs: int = 1) -> str:
    """Give the same command again, in this process; what it said."""
    done = fedbench(*runs.command(jobs))
    assert done.code == 0, done.err
    assert runs.states() == ["done"] * 3
    for cell in runs.cells:
        left = sorted(path.name for path in folder_of(runs.store, cell).path.iterdir())
        assert left == [".lock", "result.json"]
    return done.err


def test_kill_9(runs: Runs, undisturbed: list[dict[str, Any]]) -> None:
    process = runs.start(jobs=1, pause=0.1)
    wait_until(runs.slow_cell_began, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert runs.states() == ["done", "running", "missing"]
    assert re.search(r"fedmuscle:loss=slow seed 0: resumed after round [1-4]", finish(runs))
    assert runs.numbers() == undisturbed


def test_kill_9_of_the_parent_alone_leaves_no_orphan(runs: Runs, undisturbed: list[dict[str, Any]]) -> None:
    process = runs.start(jobs=2, pause=0.1)
    wait_until(runs.slow_cell_began, process)
    workers = children(process.pid)
    assert len(workers) == 2
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(status(worker) for worker in workers), seconds=10)
    before = runs.states()
    assert "running" in before and "failed" not in before
    finish(runs)
    assert runs.numbers() == undisturbed


def check_interrupted(process: subprocess.Popen[str], runs: Runs) -> None:
    """Send what Ctrl-C in a terminal sends, and check what it leaves."""
    workers = children(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "Stopped. Every finished round is kept: the same command goes on from there."
    assert "Traceback" not in said and "FAILED" not in said
    assert not any(status(worker) for worker in workers)
    assert "running" in runs.states() and "failed" not in runs.states()


def test_ctrl_c_stops_the_workers_and_says_how_to_go_on(runs: Runs, undisturbed: list[dict[str, Any]]) -> None:
    process = runs.start(jobs=2, pause=0.1)
    wait_until(runs.slow_cell_began, process)
    check_interrupted(process, runs)
    assert "resumed after round" in finish(runs)
    assert runs.numbers() == undisturbed


def test_a_cell_has_one_runner_at_a_time_and_the_same_command_goes_on(
    runs: Runs, undisturbed: list[dict[str, Any]]
) -> None:
    process = runs.start(jobs=1, pause=1.5)
    wait_until(runs.slow_cell_began, process)
    second = fedbench(*runs.command(1))
    assert second.code == 0, second.err
    assert re.search(r"slow seed 0: left out: .*another process \(pid \d+\) is running this cell", second.err)
    assert "slow,shuffle=true seed 0: done" in second.err
    check_interrupted(process, runs)
    again = runs.start(jobs=1)
    _, said = again.communicate(timeout=60)
    assert again.returncode == 0 and "resumed after round" in said
    assert runs.numbers() == undisturbed


def test_a_worker_that_nobody_listens_to_records_no_failure(runs: Runs) -> None:
    cell = runs.cells[0]
    request = {
        "suite": str(runs.suite),
        "scale": "mini",
        "overrides": [],
        "plugins": [str(runs.plugin)],
        "device": "cpu",
        "results": str(runs.store.root),
        "provenance": provenance(),
        "method": cell.method.label,
        "seed": cell.seed,
        "key": cell.key,
    }
    reader, writer = os.pipe()
    os.close(reader)
    worker = subprocess.Popen(
        [sys.executable, "-m", "fedbench.worker"], stdin=subprocess.PIPE, stdout=writer, text=True
    )
    os.close(writer)
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(request) + "\n")
    worker.stdin.flush()
    assert worker.wait(timeout=60) == 0
    worker.stdin.close()
    assert folder_of(runs.store, cell).read() is None


def test_an_idle_worker_ends_with_its_runner() -> None:
    worker = subprocess.Popen([sys.executable, "-m", "fedbench.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.close()
    assert worker.wait(timeout=20) == 0
    assert worker.stdout.read() == b""
    worker.stdout.close()


@pytest.mark.parametrize(
    ("last_words", "cause"),
    [
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "signal 9"),
        ('printf \'{"event": "rou\'; kill -9 $$', "signal 9"),  # in the middle of a line
        ("printf 'not JSON\\n'; exit 3", "exit code 3"),
    ],
)
def test_a_worker_that_cannot_live_is_waited_for_by_nobody(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_words: str, cause: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{last_words}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    console = Console(file=io.StringIO(), soft_wrap=True)
    jobs = [Job(cell, folder_of(runs.store, cell)) for cell in runs.cells]
    outcomes: list[Outcome] = []
    waiting = threading.Thread(target=lambda: outcomes.append(run_jobs(jobs, {}, 2, Progress(console))), daemon=True)
    waiting.start()
    waiting.join(60)
    (outcome,) = outcomes
    assert outcome.ran == 3 and sorted(outcome.failed) == sorted(cell.label for cell in runs.cells)
    assert str(console.file.getvalue()).count(f"FAILED: the worker process died: {cause}") == 3  # type: ignore[attr-defined]


def test_a_killed_worker_fails_its_cell_alone(runs: Runs, undisturbed: list[dict[str, Any]]) -> None:
    process = runs.start(jobs=2, pause=0.05)
    wait_until(runs.slow_cell_began, process)
    begun = next(folder for cell in runs.cells[1:] if (folder := folder_of(runs.store, cell)).state == "running")
    fork = int((begun.path / ".lock").read_text())
    assert any(fork in children(worker) for worker in children(process.pid))
    os.kill(fork, signal.SIGKILL)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 1
    (failed,) = [line for line in said.splitlines() if "FAILED" in line]
    assert "its process was stopped: signal 9 (out of memory?)" in failed
    assert "Traceback" not in said and "(3/3)" in said
    assert sorted(runs.states()) == ["done", "done", "running"] and begun.state == "running"
    assert "not run" in out  # the board names what is missing
    assert "resumed after round" in finish(runs)
    assert runs.numbers() == undisturbed
