"""A plugin package for fedbench: one loss, one method, one observer."""

from __future__ import annotations

from typing import Any

from fedbench import hookimpl


@hookimpl
def fedbench_losses(register: Any) -> None:
    register("squared", "fedbench_sample.squared:Squared")


@hookimpl
def fedbench_methods(register: Any) -> None:
    register("centroid", "fedbench_sample.centroid:Centroid")


@hookimpl
def fedbench_observers(register: Any) -> None:
    register("diary", "fedbench_sample.diary:Diary")
