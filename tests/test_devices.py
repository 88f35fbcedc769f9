"""Which device a cell computes on."""

from __future__ import annotations

import pytest
import torch

from fedbench.devices import kind_of, resolve
from fedbench.errors import UserError


def pretend(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A machine with that many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")


def test_cpu_is_always_there() -> None:
    assert resolve("cpu") == torch.device("cpu")
    assert kind_of(resolve("cpu")) == "cpu"


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0)
    assert resolve("auto") == torch.device("cpu")
    pretend(monkeypatch, 1)
    assert resolve("auto") == torch.device("cuda")


def test_the_kind_of_a_gpu_is_its_name_without_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 2)
    assert kind_of(resolve("cuda:0")) == kind_of(resolve("cuda:1")) == kind_of(resolve("cuda")) == "cuda Some GPU"


@pytest.mark.parametrize(
    "wish", ["gpu", "", "cpu:0", "cpu:", "cuda:", "cuda:x", "cuda:-1", "cuda:٣", "cuda:1.0", "CPU"]
)
@pytest.mark.parametrize("gpus", [0, 2])
def test_anything_else_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, wish: str, gpus: int) -> None:
    pretend(monkeypatch, gpus)
    with pytest.raises(UserError, match="there is no device") as caught:
        resolve(wish)
    assert "--device" in str(caught.value) and "auto, cpu, cuda" in str(caught.value)


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0)
    with pytest.raises(UserError, match="no CUDA device"):
        resolve("cuda:1")
    pretend(monkeypatch, 2)
    with pytest.raises(UserError, match=r"no device 'cuda:2' \(2 found\)"):
        resolve("cuda:2")
