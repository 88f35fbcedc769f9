"""The built-in methods, one file each, registered through the same hooks as anyone's."""

from __future__ import annotations

from fedbench.hookspecs import Register, hookimpl


@hookimpl
def fedbench_methods(register: Register) -> None:
    register("fedmuscle", "fedbench_baselines.fedmuscle:FedMuscle")
    register("local", "fedbench_baselines.local:Local")
    register("local-long", "fedbench_baselines.local_long:LocalLong")
    register("simclr", "fedbench_baselines.simclr:SimCLR")
