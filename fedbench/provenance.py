"""Where a result comes from: versions, kind of machine, source state and command, never who or which host."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from fedbench.version import PROTOCOL, __version__

PACKAGES = ("torch", "torchvision", "timm", "numpy", "scipy", "safetensors")
_REQUIRED: Mapping[str, type] = {
    "fedbench": str,
    "protocol": int,
    "python": str,
    "packages": dict,
    "machine": dict,
    "command": list,
    "time": str,
}


def collect(command: Sequence[str]) -> dict[str, Any]:
    """The provenance of a run started now by `command` (argv): plain values, no host, user or absolute path."""
    return {
        "fedbench": __version__,
        "protocol": PROTOCOL,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "machine": _machine(),
        "git": _checkout(Path(__file__).resolve().parent.parent),
        "command": strip_paths(command),
        "time": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
    }


def fault(provenance: Any) -> str | None:
    """What a result's provenance lacks, None where it lacks nothing."""
    for name, kind in _REQUIRED.items():
        if name not in provenance:
            return f"the field provenance.{name} is missing"
        if not isinstance(provenance[name], kind) or isinstance(provenance[name], bool):
            return f"provenance.{name} is {provenance[name]!r:.40}, expected {kind.__name__}"
    try:
        datetime.fromisoformat(provenance["time"])
    except ValueError:
        return f"provenance.time is {provenance['time']!r:.40}, expected an ISO 8601 time"
    return None


def strip_paths(command: Sequence[str]) -> list[str]:
    """The command with every path that leads outside the working folder cut to its last part, and no addresses."""
    return [Path(part).name if index == 0 else _strip(part) for index, part in enumerate(command)]


def _strip(argument: str) -> str:
    if "://" in argument:
        argument = re.sub(r"([A-Za-z][\w+.-]*://)\S*", r"\1", argument)
        return argument
    name, equals, value = argument.rpartition("=")
    if re.match(r"[/~]|\.\.(/|$)|[A-Za-z]:[\\/]", value):
        return name + equals + _last(value)
    return re.sub(r"(?<![\w./~-])(?:~[\w.-]*|\.\.)?/[^,;\"'\])]*", lambda found: _last(found[0]), argument)


def _last(path: str) -> str:
    return re.split(r"[\\/]", path.rstrip("/\\"))[-1] if path.strip("/\\~.") else ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        memory: float | None = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (OSError, ValueError):
        memory = None
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _lines_after("model name", Path("/proc/cpuinfo")) or platform.processor() or None,
        "vectors": _vectors(),
        "cores": cores,
        "memory_gb": memory,
        "gpus": [
            model
            for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
            if (model := _lines_after("Model", file))
        ],
    }


def _vectors() -> str | None:
    """The widest vector instructions, which decide how sums are rounded, and so what a cell computes."""
    flags = (_lines_after("flags", Path("/proc/cpuinfo")) or "").split()
    return next((kind for kind in ("amx_tile", "avx512f", "avx2") if kind in flags), None)


def _lines_after(label: str, file: Path) -> str | None:
    """The value of the first `label : value` line of a file under /proc."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return None
    found = re.search(rf"^{label}\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else None


def _checkout(folder: Path) -> dict[str, Any] | None:
    """Commit and state of the checkout that this fedbench runs from, None where it is an installed copy."""
    # A copy installed below somebody else's repository must not report that repository's commit.
    if _git(folder, "ls-files", "--error-unmatch", "fedbench/version.py") is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain")
    return None if commit is None else {"commit": commit, "dirty": changes is None or bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, env=environment
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
