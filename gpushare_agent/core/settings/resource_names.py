"""The resources that a node offers, from its settings. No state."""

from __future__ import annotations

from collections.abc import Collection

from gpushare_agent.core.model.resources import NvidiaNames, ResourceNames
from gpushare_agent.core.settings.settings import Settings


def resource_names(
    settings: Settings, mig_profiles: Collection[str] = (), *, shares_in_mig: bool = False
) -> ResourceNames:
    """The resources that the node offers, with MIG instances of these profiles. The isolation in use decides whether the
    instances are shared: agent/isolation/resource_names.py."""
    gpushare, nvidia = settings.gpushare, nvidia_names(settings)
    return ResourceNames(
        vcore=settings.resources.vcore,
        vmemory=settings.resources.vmemory,
        offers_vcore=settings.resources.enabled,
        gpu_mem=gpushare.resource if gpushare.enabled else "",
        memory_block_mib=settings.resources.memory_block_mib,
        gpu_mem_unit_mib=1024 if gpushare.unit == "GiB" else 1,
        gpu=nvidia.resources(mig_profiles) if settings.nvidia.enabled else (),
        nvidia=nvidia,
        shares_in_mig=shares_in_mig,
    )


def nvidia_names(settings: Settings) -> NvidiaNames:
    """Which GPU serves which resource of NVIDIA's."""
    nvidia = settings.nvidia
    return NvidiaNames(
        resource=nvidia.resource,
        gpus=nvidia.gpus,
        names=nvidia.name_pairs,
        mig_strategy=nvidia.mig_strategy,
        mig_names=nvidia.mig_name_pairs,
        replicas=nvidia.replica_counts,
        sharing=nvidia.sharing,
        is_renamed=nvidia.rename_replicas,
        refuses_several=nvidia.refuses_several_replicas,
        is_packed=nvidia.replica_policy == "packed",
    )
