"""How long a whole run takes: seconds to the first provisional Δ% and to the board, and peak memory.

Run: `python benchmarks/run_time.py [SUITE] [fedbench run options]`, e.g. with `--jobs 2`. It runs the suite into a
temporary folder unless `--results` names one, so nothing of yours is reused but the cache of renders and frozen
features: run it twice for warm caches. Before round 2 nobody has been aligned, so the first provisional Δ% that counts
is that of round 2. Targets for Setup1 at `--jobs 2` on 2 cores: provisional Δ% within 3 minutes, board within 30, peak
memory below 6 GB.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path


def children(parent: int) -> list[int]:
    """A process and everything it started."""
    found = [parent]
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in task.read_text().split():
            found += children(int(child))
    return found


def memory(parent: int) -> float:
    """Proportional set size of a process tree in GB: shared pages, such as mapped caches, count once."""
    total = 0
    for process in children(parent):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1e6


def main() -> None:
    arguments = sys.argv[1:] or ["suites/setup1.toml", "--jobs", "2"]
    with contextlib.ExitStack() as stack:
        if "--results" not in arguments:
            arguments += ["--results", stack.enter_context(tempfile.TemporaryDirectory())]
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "fedbench", "run", *arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        peak = 0.0

        def watch() -> None:
            nonlocal peak
            while process.poll() is None:
                try:
                    peak = max(peak, memory(process.pid))
                except OSError:
                    continue
                time.sleep(2)

        threading.Thread(target=watch, daemon=True).start()
        first = None
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if first is None and "provisional" in line and ": round 1/" not in line:
                first = time.monotonic() - started
        code = process.wait()
        total = time.monotonic() - started
    print(f"first provisional Δ%: {first:.0f} s" if first else "no provisional Δ% was shown")
    print(f"board: {total / 60:.1f} min, exit code {code}")
    print(f"peak memory of all processes: {peak:.2f} GB")


if __name__ == "__main__":
    main()
