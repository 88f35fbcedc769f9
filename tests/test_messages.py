"""What crosses between server and users."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedbench.messages import decode, encode, pack, tensor_bytes, unpack


def test_a_message_comes_back_equal_and_apart() -> None:
    z = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    message: dict[str, Any] = {"z": z, "n": 3, "x": 0.1, "s": "é", "b": True, "none": None, "list": [1, 2.5, "a"]}
    back = decode(encode(message))
    assert torch.equal(back.pop("z"), z)
    assert back == {key: value for key, value in message.items() if key != "z"}
    encoded = encode({"z": z})
    decode(encoded)["z"].zero_()
    assert torch.equal(decode(encoded)["z"], z)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_every_type_of_tensor_survives(dtype: torch.dtype) -> None:
    value = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    back = decode(encode({"value": value}))["value"]
    assert back.dtype == dtype and torch.equal(back, value)


def test_views_empty_and_shared_tensors_survive() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    message = {"t": base.t(), "same": base, "again": base, "row": base[1], "empty": torch.empty(0, 4)}
    back = decode(encode(message))
    for key, value in message.items():
        assert torch.equal(back[key], value), key


def test_tensor_bytes_count_the_tensors_alone() -> None:
    message = {"z": torch.zeros(32, 16), "i": torch.zeros(4, dtype=torch.int64), "loss": 1.0}
    assert tensor_bytes(message) == 32 * 16 * 4 + 4 * 8
    assert len(encode(message)) > tensor_bytes(message)


@pytest.mark.parametrize("value", [{"a": 1}, object(), [torch.zeros(1)], b"bytes"])
def test_a_message_is_flat(value: object) -> None:
    with pytest.raises(TypeError, match="'bad'"):
        encode({"bad": value})


def test_a_nested_state_survives_with_its_key_types() -> None:
    state = {"optimizer": {0: {"step": torch.tensor(3.0), "betas": (0.9, 0.99)}, "groups": [{"lr": 1e-3}]}, "n": None}
    back = unpack(pack(state))
    assert torch.equal(back["optimizer"][0].pop("step"), torch.tensor(3.0))
    assert back["optimizer"] == {0: {"betas": (0.9, 0.99)}, "groups": [{"lr": 1e-3}]}


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_damaged_bytes_are_refused(cut: int) -> None:
    data = pack({"z": torch.zeros(8), "n": 1})
    with pytest.raises(ValueError, match="damaged"):
        unpack(data[:cut])
