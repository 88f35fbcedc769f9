"""Put the reference boards into README.md, between `<!-- board SUITE SCALE -->` and `<!-- end board -->`.

Run: `python benchmarks/update_readme.py`, or with `--check` to fail where README.md is not up to date.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"(<!-- board (\S+) (\S+) -->\n).*?(<!-- end board -->)", re.DOTALL)


def board(suite: str, scale: str) -> str:
    """The reference board of a suite as Markdown, empty where there is none yet."""
    if not any((ROOT / "results" / suite / scale).glob("*/seed*.json")):
        return ""
    command = [
        *(sys.executable, "-m", "fedbench", "leaderboard", f"suites/{suite}.toml"),
        *("--scale", scale, "--reference", "--format", "markdown"),
    ]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> None:
    path = ROOT / "README.md"
    old = path.read_text()
    new = MARK.sub(lambda match: match[1] + board(match[2], match[3]) + match[4], old)
    if "--check" in sys.argv:
        sys.exit(0 if new == old else "README.md is not up to date: run python benchmarks/update_readme.py")
    path.write_text(new)


if __name__ == "__main__":
    main()
