"""The hooks a plugin may implement: each receives `register(name, target)`, called once per thing it adds.

A target is an object or, better, a lazy `"module:attribute"` string, so that listing imports nothing heavy.
Registering the same name twice for one kind is an error that names both sources.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pluggy

hookspec = pluggy.HookspecMarker("fedbench")
hookimpl = pluggy.HookimplMarker("fedbench")

Register = Callable[[str, Any], None]


@hookspec
def fedbench_users(register: Register) -> None:
    """Add kinds of user: how a user of the suite is built from its table."""


@hookspec
def fedbench_tasks(register: Register) -> None:
    """Add tasks: subclasses of `fedbench.Task`."""


@hookspec
def fedbench_models(register: Register) -> None:
    """Add models: subclasses of `fedbench.Model`."""


@hookspec
def fedbench_losses(register: Register) -> None:
    """Add alignment losses: subclasses of `fedbench.AlignmentLoss`."""


@hookspec
def fedbench_data(register: Register) -> None:
    """Add sources of data: subclasses of `fedbench.World`."""


@hookspec
def fedbench_metrics(register: Register) -> None:
    """Add metrics: subclasses of `fedbench.Metric`."""


@hookspec
def fedbench_methods(register: Register) -> None:
    """Add methods: subclasses of `fedbench.Method`."""


@hookspec
def fedbench_engines(register: Register) -> None:
    """Add engines: subclasses of `fedbench.Engine`."""


@hookspec
def fedbench_observers(register: Register) -> None:
    """Add run observers: subclasses of `fedbench.Observer`, told about every cell and round."""
