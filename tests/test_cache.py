"""The cache builds once, shares between processes, repairs what is damaged and never shows half a file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fedbench.cache import Cache, atomic_file, default_folder
from fedbench.errors import UserError


class Builder:
    """Counts how often it built."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.calls = array, 0

    def __call__(self) -> np.ndarray:
        self.calls += 1
        return self.array


@pytest.fixture
def builder() -> Builder:
    return Builder(np.arange(12, dtype=np.float32).reshape(3, 4))


def only(folder: Path, ending: str) -> Path:
    (path,) = folder.glob(f"*{ending}")
    return path


def test_builds_once_and_keeps_it_for_the_next_process(tmp_path: Path, builder: Builder) -> None:
    cache = Cache(tmp_path)
    first, second = cache.array("key", builder), cache.array("key", builder)
    later = Cache(tmp_path).array("key", builder)
    assert builder.calls == 1
    for array in (first, second, later):
        assert array.dtype == np.float32
        assert np.array_equal(array, builder.array)
    assert cache.size() == only(tmp_path, ".npy").stat().st_size > builder.array.nbytes


def test_other_keys_are_other_arrays(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.array("a", lambda: np.zeros(3)).tolist() == [0, 0, 0]
    assert cache.array("b", lambda: np.ones(2)).tolist() == [1, 1]
    assert cache.array("a", lambda: np.ones(2)).tolist() == [0, 0, 0]


def test_arrays_are_memory_mapped_and_read_only(tmp_path: Path, builder: Builder) -> None:
    array = Cache(tmp_path).array("key", builder)
    assert isinstance(array, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 5


@pytest.mark.parametrize(
    "array",
    [
        np.float64(3.5),
        np.zeros((0, 4), np.uint8),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(20)[::-3],
        np.array(["a red disc", "ü"]),
        np.ones(3, np.float16),
    ],
    ids=["scalar", "empty", "fortran", "strided", "text", "half"],
)
def test_shapes_and_types_survive(tmp_path: Path, array: np.ndarray) -> None:
    for cache in (Cache(tmp_path), Cache(tmp_path)):
        found = cache.array("key", lambda: array)
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
        assert np.array_equal(found, array)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("ending", [".npy", ".json"])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.unlink(), id="missing"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-4]), id="cut"),
        pytest.param(lambda path: path.write_bytes(b"\xff\xfe not this"), id="overwritten"),
        pytest.param(lambda path: path.write_bytes(b'["sha256"]'), id="other"),
        pytest.param(flip, id="flipped"),
    ],
)
def test_damaged_files_are_rebuilt(tmp_path: Path, builder: Builder, ending: str, damage: object) -> None:
    Cache(tmp_path).array("key", builder)
    damage(only(tmp_path, ending))  # type: ignore[operator]
    for _ in range(2):
        assert np.array_equal(Cache(tmp_path).array("key", builder), builder.array)
    assert builder.calls == 2


def test_a_file_that_goes_bad_while_in_use_is_rebuilt(tmp_path: Path, builder: Builder) -> None:
    cache = Cache(tmp_path)
    for content in (b"", b"\x93NUMPY", b"nonsense"):
        cache.array("key", builder)
        path = only(tmp_path, ".npy")
        path.unlink()
        path.write_bytes(content)
        assert np.array_equal(cache.array("key", builder), builder.array)
    assert builder.calls == 4


def test_a_wrong_hash_is_rebuilt(tmp_path: Path, builder: Builder) -> None:
    Cache(tmp_path).array("key", builder)
    only(tmp_path, ".json").write_text('{"key": "key", "sha256": "00"}')
    Cache(tmp_path).array("key", builder)
    assert builder.calls == 2


def test_pickles_are_never_written_or_read(tmp_path: Path, builder: Builder) -> None:
    cache = Cache(tmp_path)
    with pytest.raises(ValueError, match="allow_pickle"):
        cache.array("objects", lambda: np.array([{}], dtype=object))
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path: Path, builder: Builder) -> None:
    def fail() -> np.ndarray:
        raise FileNotFoundError("the data is not there")

    cache = Cache(tmp_path)
    with pytest.raises(FileNotFoundError, match="the data is not there"):
        cache.array("key", fail)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
    assert np.array_equal(cache.array("key", builder), builder.array)


_ASK = """
import sys, time
from pathlib import Path
import numpy as np
from fedbench.cache import Cache

folder, log, go = map(Path, sys.argv[1:])

def build():
    with open(log, "a") as handle:
        handle.write("built\\n")
    time.sleep(0.5)
    return np.arange(1000)

log.with_name(f"ready{sys.argv[0]}{__import__('os').getpid()}").touch()
while not go.exists():
    time.sleep(0.005)
assert Cache(folder).array("key", build).sum() == 499500
"""


def test_processes_that_ask_at_once_build_once(tmp_path: Path) -> None:
    folder, log, go = tmp_path / "cache", tmp_path / "log", tmp_path / "go"
    asking = [subprocess.Popen([sys.executable, "-c", _ASK, str(folder), str(log), str(go)]) for _ in range(2)]
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("ready*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        go.touch()
        assert [process.wait(timeout=60) for process in asking] == [0, 0]
    finally:
        for process in asking:
            process.kill()
    assert log.read_text() == "built\n"


def test_threads_that_ask_at_once_build_once(tmp_path: Path, builder: Builder) -> None:
    def slow() -> np.ndarray:
        time.sleep(0.1)
        return builder()

    cache = Cache(tmp_path)
    threads = [threading.Thread(target=cache.array, args=("key", slow)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builder.calls == 1


def test_folders_that_cannot_be_made_are_user_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="cannot be made") as caught:
            Cache(folder)
        assert str(folder) in str(caught.value)
        assert "FEDBENCH_CACHE" in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folders_are_user_errors(tmp_path: Path, builder: Builder) -> None:
    Cache(tmp_path).array("old", builder)
    tmp_path.chmod(0o500)
    try:
        cache = Cache(tmp_path)
        assert np.array_equal(cache.array("old", builder), builder.array)
        with pytest.raises(UserError, match="cannot be written"):
            cache.array("new", builder)
    finally:
        tmp_path.chmod(0o700)


def test_folders_that_vanish_are_user_errors(tmp_path: Path, builder: Builder) -> None:
    cache = Cache(tmp_path / "cache")
    (tmp_path / "cache").rmdir()
    with pytest.raises(UserError, match="cannot be written"):
        cache.array("key", builder)


def test_full_disks_are_user_errors(tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedbench.cache.os.fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        Cache(tmp_path).array("key", builder)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_default_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("FEDBENCH_CACHE", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine"
    assert Cache().folder == tmp_path / "mine"
    assert (tmp_path / "mine").is_dir()
    monkeypatch.delenv("FEDBENCH_CACHE")
    assert default_folder() == tmp_path / "xdg" / "fedbench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "fedbench"


def test_atomic_file_replaces_whole(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(b"old")
    with atomic_file(path) as handle:
        handle.write(b"new and longer")
        handle.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new and longer"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_atomic_file_leaves_nothing_behind_on_error(tmp_path: Path, error: BaseException) -> None:
    old = tmp_path / "old"
    old.write_bytes(b"old")
    for path in (old, tmp_path / "new"):
        with pytest.raises(type(error)), atomic_file(path) as handle:
            handle.write(b"half")
            raise error
    assert list(tmp_path.iterdir()) == [old]
    assert old.read_bytes() == b"old"


def test_atomic_file_survives_an_error_at_the_last_step(tmp_path: Path) -> None:
    folder = tmp_path / "taken"
    folder.mkdir()
    with pytest.raises(OSError), atomic_file(folder) as handle:
        handle.write(b"a file cannot replace a folder")
    assert list(tmp_path.iterdir()) == [folder]
