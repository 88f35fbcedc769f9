"""How long the commands take that compute nothing: wall time of a fresh process, from start to exit.

    python benchmarks/startup.py [--times 10]

The target is 0.3 s for each. Bytecode is cached, as it is from a user's second command on. The board is drawn from
made-up results of the suite `smoke`, one for each of its cells.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedbench.discovery import discover
from fedbench.plan import make_cells
from fedbench.provenance import collect
from fedbench.results import dump, seal
from fedbench.store import Store
from fedbench.suite import load

TARGET = 0.3
COMMANDS = {
    "fedbench --help": ["--help"],
    "fedbench list": ["list"],
    "fedbench plugins": ["plugins"],
    "fedbench leaderboard smoke": ["leaderboard", "smoke"],
}


def main() -> None:
    """Time every command and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="processes for each command")
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as folder:
        make_up(Path(folder) / "runs")
        print(f"{'command':<28} {'min s':>7} {'median s':>9}  target {TARGET} s")
        for name, arguments in COMMANDS.items():
            wall_time(arguments, Path(folder))  # fills the cache of bytecode
            spent = [wall_time(arguments, Path(folder)) for _ in range(times)]
            verdict = "" if statistics.median(spent) < TARGET else "  over target"
            print(f"{name:<28} {min(spent):7.3f} {statistics.median(spent):9.3f}{verdict}")


def wall_time(arguments: list[str], folder: Path) -> float:
    """Seconds of one process that runs `fedbench ARGUMENTS` in a folder."""
    command = [sys.executable, "-c", "from fedbench.cli import main; main()", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def make_up(root: Path) -> None:
    """Fill a store with a result for each cell of the suite, as a run leaves them."""
    suite = load("smoke")
    provenance = collect(["fedbench", "run", "smoke"])
    for cell in make_cells(suite, discover()):
        digest = hashlib.sha256(cell.key.encode()).digest()
        users = [
            {
                "name": user.name,
                "task": user.task,
                "metric": "score",
                "higher_is_better": True,
                "test": 20.0 + digest[index] / 16,
                "validation": 20.0,
            }
            for index, user in enumerate(suite.users)
        ]
        method, options = cell.method.name, dict(cell.method.options)
        result = {
            "suite": suite.name,
            "scale": suite.scale,
            "method": method,
            "options": options,
            "resolved": dict(cell.resolved),
            "seed": cell.seed,
            "key": cell.key,
            "protocol_key": cell.protocol_key,
            "versions": dict(cell.versions),
            "status": "done",
            "error": None,
            "users": users,
            "rounds": [],
            "bytes": {"up": 1e6, "down": 1e6, "tensor_up": 1e6, "tensor_down": 1e6, "paper": None},
            "seconds": {"total": 10.0},
            "provenance": provenance,
        }
        path = Store(root).cell(suite.name, suite.scale, method, options, cell.seed, cell.key).path
        path.mkdir(parents=True)
        (path / "result.json").write_bytes(dump(seal(result)))


if __name__ == "__main__":
    main()
