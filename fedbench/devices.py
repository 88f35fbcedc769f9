"""Which device a cell computes on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fedbench.errors import UserError

if TYPE_CHECKING:
    import torch


def resolve(wish: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:i` as a device.

    Raises:
        UserError: it is none of these, or this machine does not have it.
    """
    import torch

    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name, _, number = wish.partition(":")
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", wish):
        raise UserError(
            f"there is no device '{wish}'", where="--device", expected="auto, cpu, cuda or cuda:0, cuda:1, …"
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("this machine has no CUDA device", where="--device", expected="use --device cpu")
    if number and int(number) >= torch.cuda.device_count():
        raise UserError(f"there is no device '{wish}'", where="--device", expected=f"{torch.cuda.device_count()} found")
    return torch.device(wish)


def kind_of(device: torch.device) -> str:
    """What a cell key records: `cpu`, or the name of the GPU, without its number."""
    import torch

    return "cpu" if device.type == "cpu" else f"cuda {torch.cuda.get_device_name(device)}"
