"""Where results lie: one folder for each cell of a run."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedbench.cache import atomic_file
from fedbench.errors import InUse, StorageError, UserError
from fedbench.promotion import Promotion, promote, reference_results
from fedbench.results import Damaged, Result, dump, read, read_placed, safe, seal, slug

State = Literal["missing", "running", "done", "failed", "damaged"]

__all__ = ["CellFolder", "Damaged", "Promotion", "Result", "Store", "promote", "reference_results"]


@dataclass(frozen=True)
class CellFolder:
    """The folder of one cell: its result, its checkpoint while it runs, and its error when it failed."""

    path: Path
    suite: str
    scale: str
    method: str
    options: Mapping[str, Any]
    seed: int
    key: str

    @property
    def result_path(self) -> Path:
        """The result file."""
        return self.path / "result.json"

    @property
    def checkpoint_path(self) -> Path:
        """The checkpoint from which an interrupted cell resumes."""
        return self.path / "checkpoint.safetensors"

    @property
    def error_path(self) -> Path:
        """The error of a failed cell with its trace, for people."""
        return self.path / "error.txt"

    @property
    def state(self) -> State:
        """Where the cell stands, from its files alone; running means begun: there is a checkpoint but no result."""
        try:
            result = self.read()
        except Damaged:
            return "damaged"
        if result is not None:
            return "failed" if result["status"] == "failed" else "done"
        return "running" if self.checkpoint_path.exists() else "missing"

    def read(self) -> Result | None:
        """The result, None while there is none.

        Raises:
            Damaged: the file cannot be trusted, or is another cell's.
        """
        try:
            return read(self.result_path, self._identity())
        except FileNotFoundError:
            return None

    def write(self, result: Mapping[str, Any], *, replace: bool = False) -> Result:
        """Put the result in place, whole or not at all, with schema and digest, and return it as it reads back.

        A failed result is replaced, a damaged one is set aside, and with `replace` also a finished one.

        Raises:
            UserError: a finished result is already there.
            StorageError: the folder cannot be written.
            Damaged: the result lacks a field (the file is then set aside, so that nothing is lost).
        """
        sealed = seal(result)
        if (state := self.state) == "done" and not replace:
            raise UserError(
                "a finished result is already there", where=str(self.result_path), expected="set it aside first"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if sealed.get("status") == "failed":
                with atomic_file(self.error_path) as handle:
                    handle.write(_error_text(sealed).encode())
            else:
                self.error_path.unlink(missing_ok=True)
            with atomic_file(self.result_path) as handle:
                handle.write(dump(sealed))
                if state in ("done", "damaged"):  # only now, when the new one is on the disk
                    self.set_aside()
        except OSError as error:
            raise self._unwritable("result", error) from None
        try:
            return read(self.result_path, self._identity())
        except Damaged:
            self.set_aside()
            raise

    def set_aside(self) -> Path:
        """Rename the result so that the cell can run again; nothing is deleted. Returns the new place."""
        kind = "damaged" if self.state == "damaged" else "old"
        number = 1
        while (target := self.path / f"result.json.{kind}-{number}").exists():
            number += 1
        try:
            self.result_path.rename(target)
        except OSError as error:
            raise StorageError(f"it cannot be set aside: {error.strerror}", where=str(self.result_path)) from None
        return target

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the cell for this process; the lock ends with the process, however it dies.

        Raises:
            InUse: another process holds it.
            StorageError: the folder cannot be written.
        """
        place = self.path / ".lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = open(place, "a+")  # noqa: SIM115 - closed below, and not truncated before it is ours
        except OSError as error:
            raise self._unwritable("lock", error) from None
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                holder = handle.read(20).strip() or "unknown"
                raise InUse(
                    f"another process (pid {holder}) is running this cell",
                    where=str(self.path),
                    expected="wait for it, or choose another folder for the runs",
                ) from None
            with contextlib.suppress(OSError):  # on a full disk the lock still holds; only its holder's name is lost
                os.ftruncate(handle.fileno(), 0)
                os.pwrite(handle.fileno(), str(os.getpid()).encode(), 0)
            self._sweep()
            yield

    def keep(self, checkpoint: bytes) -> None:
        """Put the checkpoint in place, whole or not at all.

        Raises:
            StorageError: the folder cannot be written.
        """
        try:
            with atomic_file(self.checkpoint_path) as handle:
                handle.write(checkpoint)
        except OSError as error:
            raise self._unwritable("checkpoint", error) from None

    def _unwritable(self, what: str, error: OSError) -> StorageError:
        return StorageError(
            f"the {what} cannot be written: {error.strerror}",
            where=str(self.path),
            expected="make room and run the same command again: every finished round is kept",
        )

    def _sweep(self) -> None:
        """Remove what a killed process left half-written; only the holder of the lock writes here."""
        for name in (self.result_path.name, self.checkpoint_path.name, self.error_path.name):
            for left in self.path.glob(f".{name}.*"):
                left.unlink(missing_ok=True)

    def _identity(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("suite", "scale", "method", "options", "seed", "key")}


def is_locked(cell: Path) -> bool:
    """Whether a process runs the cell of this folder now."""
    try:
        with open(cell / ".lock") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@dataclass(frozen=True)
class Store:
    """The results of runs: `root/SUITE/SCALE/METHOD/seedK-KEY/`."""

    root: Path

    def cell(self, suite: str, scale: str, method: str, options: Mapping[str, Any], seed: int, key: str) -> CellFolder:
        """The folder of a cell; nothing is made on disk."""
        path = self.root / safe(suite) / safe(scale) / slug(method, options) / f"seed{seed}-{key[:12]}"
        return CellFolder(path, suite, scale, method, options, seed, key)

    def ensure_writable(self) -> None:
        """Make the root and check that results can be written, before anything is computed.

        Raises:
            UserError: they cannot.
        """
        expected = "a folder that this account can write"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with atomic_file(self.root / ".writable"):
                pass
            (self.root / ".writable").unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"results cannot be written there: {error.strerror}", where=str(self.root), expected=expected
            ) from None
        for depth in ("*", "*/*", "*/*/*", "*/*/*/seed*"):
            for folder in self.root.glob(depth):
                if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
                    raise UserError("results cannot be written there", where=str(folder), expected=expected)

    def results(self, suite: str, scale: str) -> list[Result | Damaged]:
        """Every result of a suite at a scale, done, failed or damaged, in the order of their paths."""
        board = self.root / safe(suite) / safe(scale)
        return [read_placed(path) for path in sorted(board.glob("*/seed*-*/result.json"))]

    def find(self, key: str) -> Result:
        """The finished result with this cell key, wherever it lies.

        Raises:
            UserError: there is none, or it failed.
            Damaged: it cannot be trusted.
        """
        for path in sorted(self.root.glob(f"*/*/*/seed*-{key[:12]}/result.json")):
            result = read_placed(path)
            if isinstance(result, Damaged):
                raise result
            if result["key"] == key and result["status"] != "failed":
                return result
        raise UserError(f"no finished result has the key {key[:12]}", where=str(self.root), expected="run it first")


def _error_text(result: Result) -> str:
    error = result["error"] or {}
    head = f"{error.get('kind', 'error')}: {error.get('message', '')}"
    user = f"user: {error['user']}\n" if error.get("user") else ""
    return f"{head}\n{user}\n{error.get('trace') or ''}\n"
