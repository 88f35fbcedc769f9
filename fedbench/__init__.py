"""fedbench: the benchmark suite for federated multi-task learning.

`import fedbench` pulls in neither torch nor transformers; what needs them is reached lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedbench.errors import UserError
from fedbench.hookspecs import hookimpl
from fedbench.interfaces import Engine, Fault, Metric, Observer, Protocol, Samples, Task, UserSpec, World
from fedbench.version import __version__

if TYPE_CHECKING:
    from fedbench.discovery import load
    from fedbench.method import Method, ServerProgram
    from fedbench.modules import AlignmentLoss, Model
    from fedbench.user import UserProgram, verb

_LAZY = {
    "AlignmentLoss": "fedbench.modules",
    "Method": "fedbench.method",
    "Model": "fedbench.modules",
    "ServerProgram": "fedbench.method",
    "UserProgram": "fedbench.user",
    "load": "fedbench.discovery",
    "verb": "fedbench.user",
}

__all__ = [
    "AlignmentLoss",
    "Engine",
    "Fault",
    "Method",
    "Metric",
    "Model",
    "Observer",
    "Protocol",
    "Samples",
    "ServerProgram",
    "Task",
    "UserError",
    "UserProgram",
    "UserSpec",
    "World",
    "__version__",
    "hookimpl",
    "load",
    "verb",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fedbench' has no attribute '{name}'")
