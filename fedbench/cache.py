"""Arrays on disk that are costly to make: built once, shared by processes, rebuilt when damaged."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.errors import StorageError

if TYPE_CHECKING:
    import numpy as np


def default_folder() -> Path:
    """`$FEDBENCH_CACHE`, else the user's cache folder + `fedbench`."""
    if chosen := os.environ.get("FEDBENCH_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedbench"


class Cache:
    """A folder of read-only, memory-mapped arrays, each named after the hash of its key.

    Args:
        folder: where; made when missing. Default `default_folder()`.

    Raises:
        StorageError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()
        self._checked: set[str] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable("made", error) from None

    def array(self, key: str, build: Callable[[], np.ndarray]) -> np.ndarray:
        """The array of `key`, memory-mapped read-only; `build()` makes it when it is missing or damaged.

        Two processes that ask at once build it once: the second waits for the first.
        """
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        found = self._load(name)
        if found is not None:
            return found
        with self._locked(name):
            found = self._load(name)
            if found is None:
                self._store(name, key, build())
                found = self._load(name)
        if found is None:
            raise StorageError("the cache does not keep what is written to it", where=str(self.folder / name))
        return found

    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.folder.glob("*.npy"))

    def _load(self, name: str) -> np.ndarray | None:
        import numpy as np

        path = self.folder / f"{name}.npy"
        try:
            stated = json.loads((self.folder / f"{name}.json").read_text())
            if name not in self._checked:
                if stated["sha256"] != _file_hash(path):
                    return None
                self._checked.add(name)
            array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            return None
        return array

    def _store(self, name: str, key: str, array: np.ndarray) -> None:
        import numpy as np

        path = self.folder / f"{name}.npy"
        try:
            with atomic_file(path) as handle:
                np.save(handle, np.asarray(array, order="C"), allow_pickle=False)
            stated = {"key": key, "sha256": _file_hash(path)}
            with atomic_file(self.folder / f"{name}.json") as handle:
                handle.write(json.dumps(stated).encode())
        except OSError as error:
            raise self._unusable("written", error) from None
        self._checked.add(name)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        try:
            handle = open(self.folder / f"{name}.lock", "w")  # noqa: SIM115 - closed below
        except OSError as error:
            raise self._unusable("written", error) from None
        with handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _unusable(self, verb: str, error: OSError) -> StorageError:
        return StorageError(
            f"the cache folder cannot be {verb}: {error}",
            where=str(self.folder),
            expected="set FEDBENCH_CACHE to a folder with room that you may write",
        )


@contextmanager
def atomic_file(path: Path) -> Iterator[tempfile._TemporaryFileWrapper[bytes]]:
    """A binary file that appears at `path` whole or not at all, even if the process or the machine dies."""
    handle = tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False)  # noqa: SIM115 - closed below
    try:
        yield handle
        handle.flush()
        os.fsync(handle.fileno())
        os.fchmod(handle.fileno(), 0o666 & ~_umask())  # a temporary file is private, a result is not
        handle.close()
        os.replace(handle.name, path)
    except BaseException:
        handle.close()
        Path(handle.name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current


def _file_hash(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
