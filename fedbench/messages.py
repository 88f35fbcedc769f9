"""What crosses between server and users: flat messages of tensors and plain values, as safetensors bytes.

The same codec keeps checkpoints, whose values may nest. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

Message = Mapping[str, Any]

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_json = json.JSONEncoder(separators=(",", ":")).encode  # made once: every exchange needs it several times
_PLAIN = (bool, int, float, str, type(None))


def encode(message: Message) -> bytes:
    """A flat message as bytes.

    Raises:
        TypeError: a value is neither a tensor, a plain value nor a list of plain values; the key is named.
    """
    for key, value in message.items():
        if not isinstance(key, str):
            raise TypeError(f"the message key {key!r} is not a string")
        if isinstance(value, (Tensor, *_PLAIN)):
            continue
        if isinstance(value, list | tuple) and all(isinstance(item, _PLAIN) for item in value):
            continue
        raise TypeError(f"the message value '{key}' is a {type(value).__name__}: send tensors and plain values")
    return pack(message)


def decode(data: bytes) -> dict[str, Any]:
    """The message of `encode`; the tensors are fresh copies."""
    message = unpack(data)
    if not isinstance(message, dict):
        raise ValueError("this is not a message")
    return message


def tensor_bytes(message: Message) -> int:
    """Bytes of the tensors alone, which is what papers report."""
    return sum(value.numel() * value.element_size() for value in message.values() if isinstance(value, Tensor))


def pack(value: Any) -> bytes:
    """Nested dicts, lists and tuples of tensors and plain values, as bytes."""
    tensors: dict[str, Tensor] = {}
    skeleton = _fold(value, tensors)
    return _write(tensors, {"fedbench": _json(skeleton)})


def unpack(data: bytes) -> Any:
    """What `pack` was given.

    Raises:
        ValueError: the bytes are damaged or no message.
    """
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        skeleton = json.loads(header["__metadata__"]["fedbench"])
        tensors = load_tensors(data)
        return _unfold(skeleton, tensors)
    except (struct.error, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError, SafetensorError) as error:
        raise ValueError(f"damaged message: {error}") from None


def seal(value: Any) -> bytes:
    """`pack` with a checksum, for what must not be read back damaged in a single bit."""
    content = pack(value)
    stored = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return pack({"sha256": hashlib.sha256(content).hexdigest(), "content": stored})


def unseal(data: bytes) -> Any:
    """What `seal` was given.

    Raises:
        ValueError: the bytes are damaged or were not made by `seal`.
    """
    stored = unpack(data)
    if not isinstance(stored, dict) or not isinstance(stored.get("content"), Tensor):
        raise ValueError("damaged message: it has no checksum")
    content = stored["content"].numpy().tobytes()
    if hashlib.sha256(content).hexdigest() != stored.get("sha256"):
        raise ValueError("damaged message: its content does not match its checksum")
    return unpack(content)


def _fold(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.detach().cpu().contiguous()
        return {"t": name}
    if isinstance(value, Mapping):
        return {"d": [[_fold(key, tensors), _fold(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"l" if isinstance(value, list) else "u": [_fold(item, tensors) for item in value]}
    if isinstance(value, _PLAIN):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be stored: use tensors and plain values")


def _write(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The safetensors format, written here: its library takes four times as long for checks that `_fold` made."""
    header: dict[str, Any] = {"__metadata__": metadata}
    data, end = [], 0
    for name, tensor in tensors.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + len(raw)],
        }
        data.append(raw)
        end += len(raw)
    text = _json(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data)


def _unfold(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "t":
        return tensors[content]
    if kind == "d":
        return {_unfold(key, tensors): _unfold(item, tensors) for key, item in content}
    items = [_unfold(item, tensors) for item in content]
    return items if kind == "l" else tuple(items)
