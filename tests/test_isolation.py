"""A cell and its process: what one does to the other, to the disk and to a second run, reaches no other cell."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from command_line import Done, fedbench, working_in
from conftest import tiny_suite

QUICK = ("--jobs", 1, "--seeds", 0, "--set", "rounds=1", "--device", "cpu")
SUITE = tiny_suite().replace('task = "ic100"', 'task = "mlc"').replace('task = "ic10"', 'task = "mlc"')


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    """A working folder that holds the tiny suite only."""
    (tmp_path / "tiny.toml").write_text(SUITE)
    with working_in(tmp_path):
        yield tmp_path


def results_of(folder: Path, method: str) -> list[Path]:
    return sorted((folder / "runs" / "tiny" / "mini").glob(f"{method}/seed*/result.json"))


def errors(done: Done) -> str:
    assert "Traceback" not in done.err
    return done.err


UNRULY = """
import os, resource, sys
import fedbench, torch

class Server(fedbench.ServerProgram):
    def round(self, r):
        self.ask("fit")
        BODY

class Unruly(fedbench.Method):
    \'\'\'Does to its process what no method should.\'\'\'
    User = fedbench.UserProgram
    Server = Server

@fedbench.hookimpl
def fedbench_methods(register):
    register("a-unruly", Unruly)
"""


def unruly(folder: Path, body: str) -> tuple[object, ...]:
    """A command that runs the unruly method, then `simclr`, in one worker."""
    (folder / "unruly.py").write_text(UNRULY.replace("BODY", body))
    return ("run", "tiny.toml", "--plugin", "unruly.py", "--method", "a-unruly", "--method", "simclr", *QUICK)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("sys.exit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt('mine')", "KeyboardInterrupt: mine"),
        ("os._exit(0)", "its process ended before it had a result: exit code 0"),
        ("os.abort()", "its process ended before it had a result: signal 6"),
    ],
)
def test_a_cell_that_leaves_its_process_fails_alone(empty: Path, body: str, cause: str) -> None:
    done = fedbench(*unruly(empty, body))
    assert done.code == 1 and f"a-unruly seed 0: FAILED: {cause}" in errors(done)
    assert "simclr seed 0: done" in done.err and cause in done.out
    (path,) = results_of(empty, "a-unruly")
    result = json.loads(path.read_bytes())
    assert result["status"] == "failed" and result["error"]["message"] == cause
    assert (path.parent / "error.txt").is_file()
    assert "failed" in fedbench("leaderboard", "tiny.toml").out


def test_what_a_cell_does_to_its_process_reaches_no_other(empty: Path) -> None:
    assert fedbench("run", "tiny.toml", "--method", "simclr", *QUICK).code == 0
    (path,) = results_of(empty, "simclr")
    sound = json.loads(path.read_bytes())
    shutil.rmtree("runs")
    assert fedbench(*unruly(empty, "torch.set_default_dtype(torch.float64); torch.set_num_threads(2)")).code == 0
    assert json.loads(path.read_bytes())["users"] == sound["users"]


def test_a_full_disk_is_named_and_no_failure_of_the_method(empty: Path) -> None:
    done = fedbench(*unruly(empty, "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"))
    assert done.code == 2
    assert "the checkpoint cannot be written: File too large" in errors(done).splitlines()[-1]
    assert "make room" in errors(done) and "simclr seed 0: started" not in done.err
    assert results_of(empty, "local") and not results_of(empty, "a-unruly")


def test_always_starts_from_the_beginning_and_keeps_the_old_result_until_then(empty: Path) -> None:
    assert fedbench("run", "tiny.toml", "--method", "local", *QUICK).code == 0
    (path,) = results_of(empty, "local")
    sound = json.loads(path.read_bytes())
    (path.parent / "checkpoint.safetensors").write_bytes(b"left over")
    refused = fedbench("run", "tiny.toml", "--method", "local", *QUICK, "--overwrite", "always", "--plugin", "no.py")
    assert refused.code == 2 and json.loads(path.read_bytes()) == sound
    done = fedbench("run", "tiny.toml", "--method", "local", *QUICK, "--overwrite", "always")
    assert done.code == 0 and "checkpoint" not in done.err and "resumed" not in done.err
    assert json.loads(path.read_bytes())["users"] == sound["users"]
    left = sorted(file.name for file in path.parent.iterdir())
    assert left == [".lock", "result.json", "result.json.old-1"]


def test_a_result_of_another_run_is_taken_as_it_is(empty: Path) -> None:
    """Both runs plan the cell; the one that comes second to its lock finds it finished."""
    (empty / "late.py").write_text(LATE)
    assert fedbench("run", "tiny.toml", "--method", "local", *QUICK, "--results", "theirs").code == 0
    done = fedbench("run", "tiny.toml", "--method", "local", *QUICK, "--plugin", "late.py")
    assert done.code == 0 and "another run has finished it in the meantime" in done.err
    (path,) = results_of(empty, "local")
    assert not (path.parent / "checkpoint.safetensors").exists()


LATE = """
import pathlib, shutil, sys
import fedbench

class Late(fedbench.Observer):
    pass

@fedbench.hookimpl
def fedbench_observers(register):
    if "fedbench.worker" in sys.argv[0] + " ".join(sys.orig_argv):  # another run finishes while this one starts
        shutil.copytree("theirs", "runs", dirs_exist_ok=True)
    register("late", Late)
"""
