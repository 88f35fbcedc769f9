"""The built-in methods, one file each, registered through the same hooks as anyone's."""

from __future__ import annotations

from fedbench.hookspecs import Register, hookimpl


@hookimpl
def fedbench_methods(register: Register) -> None:
    register("centralised", "fedbench_baselines.centralised:Centralised")
    register("cofed", "fedbench_baselines.cofed:CoFED")
    register("fccl", "fedbench_baselines.fccl:FCCL")
    register("fccl+", "fedbench_baselines.fccl_plus:FCCLPlus")
    register("fedavg", "fedbench_baselines.fedavg:FedAvg")
    register("fedbone", "fedbench_baselines.fedbone:FedBone")
    register("feddf", "fedbench_baselines.feddf:FedDF")
    register("fedhca2", "fedbench_baselines.fedhca2:FedHCA2")
    register("fedhenn", "fedbench_baselines.fedhenn:FedHeNN")
    register("fedkd", "fedbench_baselines.fedkd:FedKD")
    register("fedlps", "fedbench_baselines.fedlps:FedLPS")
    register("fedmd", "fedbench_baselines.fedmd:FedMD")
    register("fedmuscle", "fedbench_baselines.fedmuscle:FedMuscle")
    register("fedproto", "fedbench_baselines.fedproto:FedProto")
    register("fedprox", "fedbench_baselines.fedprox:FedProx")
    register("fedtgp", "fedbench_baselines.fedtgp:FedTGP")
    register("festa", "fedbench_baselines.festa:FeSTA")
    register("fml", "fedbench_baselines.fml:FML")
    register("kt-pfl", "fedbench_baselines.kt_pfl:KTpFL")
    register("lg-fedavg", "fedbench_baselines.lg_fedavg:LGFedAvg")
    register("local", "fedbench_baselines.local:Local")
    register("local-long", "fedbench_baselines.local_long:LocalLong")
    register("sage", "fedbench_baselines.sage:SAGE")
    register("simclr", "fedbench_baselines.simclr:SimCLR")
