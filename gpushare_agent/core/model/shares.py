"""The limits of a running share under any isolation, from its allocation and the pod's annotations. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from msgspec import Struct

from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import CORE_LIMIT_ANNOTATION, CORES_PER_GPU, MIB, GpuUuid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.resources import Measure, ResourceNames, cores_of_part

_NUMBER = re.compile(r"[+-]?[0-9]{1,9}")


class ShareLimits(Struct, frozen=True, kw_only=True):
    """`core_limit` is 0 where the share is not elastic."""

    cores: int
    memory_bytes: int
    core_limit: int
    is_limited: bool


class CoreLimit(Struct, frozen=True, kw_only=True):
    """The effective elastic ceiling; `problem` where the annotation is ignored, with the reason."""

    percent: int = 0
    problem: str = ""


def core_limit(annotations: Mapping[str, str], cores: int) -> CoreLimit:
    """Reads the pod's vcuda-core-limit for a container of `cores`.

    It reads the same numbers as gpu-manager 1.1.5 (Go's Atoi: a sign, leading zeros); a number above 100 counts as 100. A
    value that would end or starve the container's programs there is ignored here with the reason:
    docs/how-to/migrate-from-gpu-manager.md.
    """
    text = annotations.get(CORE_LIMIT_ANNOTATION)
    if text is None:
        return CoreLimit()
    # At most nine digits are converted: the text is a tenant's.
    limit = min(int(text), CORES_PER_GPU) if _NUMBER.fullmatch(text) else -1
    if limit < 0:
        return CoreLimit(problem=f"{CORE_LIMIT_ANNOTATION} is {text[:16]!r}, but must be a whole number from 0 to 100")
    # gpu-manager would set it, and its library would then throttle the container below its share.
    if limit and limit < cores:
        return CoreLimit(
            problem=f"{CORE_LIMIT_ANNOTATION} is {limit}, below the {cores} cores that the container asks for: it is "
            "a ceiling and must be at least as high"
        )
    return CoreLimit(percent=limit)


def share_limits(
    allocation: Allocation, pod: Pod | None, gpus: Mapping[GpuUuid, Gpu], names: ResourceNames
) -> ShareLimits:
    """The limits of a container, the elastic one as its claim or its pod's annotation says. Whole GPUs are not limited:
    vcuda.config has `enable` 0 and their whole memory."""
    if allocation.is_whole:
        # A GPU that the driver no longer reports has no memory to add.
        memory_mib = sum(gpus[uuid].memory_mib for uuid in allocation.gpus if uuid in gpus)
        return ShareLimits(cores=allocation.cores, memory_bytes=memory_mib * MIB, core_limit=0, is_limited=False)
    if allocation.unit_ids:
        return _replica_share(allocation, gpus)
    cores = share_cores(allocation, gpus, names)
    memory_mib = allocation.size.memory * names.unit_mib(allocation.memory_kind)
    if allocation.claim is not None:
        # A resize may have brought the cores above it.
        ceiling = allocation.claim.core_limit if allocation.claim.core_limit >= cores else 0
    else:
        ceiling = core_limit(pod.annotations, cores).percent if pod is not None else 0
    return ShareLimits(
        cores=cores,
        memory_bytes=memory_mib * MIB,
        core_limit=ceiling,
        is_limited=True,
    )


def on_gpu(allocation: Allocation, cores: int, memory_bytes: int, gpu: Gpu) -> tuple[int, int]:
    """Cores and bytes of the limits on one of its GPUs: of replicas on several GPUs each has its part."""
    if allocation.is_whole:
        return CORES_PER_GPU, gpu.memory_mib * MIB
    part = allocation.parts.get(gpu.uuid)
    # The limits are the sum over all GPUs, which no single one has. Memory is rounded down, as the isolation does it: all
    # replicas together must fit the GPU.
    return (cores, memory_bytes) if part is None else (cores_of_part(part), int(part * gpu.memory_mib) * MIB)


def _replica_share(allocation: Allocation, gpus: Mapping[GpuUuid, Gpu]) -> ShareLimits:
    """The share of replicas of one GPU; the sum over several GPUs."""
    parts = replica_limits(allocation, gpus).values()
    return ShareLimits(
        cores=sum(part.cores for part in parts),
        memory_bytes=sum(part.memory_bytes for part in parts),
        core_limit=0,
        is_limited=allocation.is_limited,
    )


def replica_limits(allocation: Allocation, gpus: Mapping[GpuUuid, Gpu]) -> dict[GpuUuid, ShareLimits]:
    """A container with all replicas of a GPU has it whole."""
    return {
        uuid: ShareLimits(
            cores=cores_of_part(part),
            # Rounded down: the replicas of a GPU together must not have more than it has.
            memory_bytes=int(part * gpus[uuid].memory_mib) * MIB,
            core_limit=0,
            is_limited=allocation.is_limited and part < 1,
        )
        for uuid, part in allocation.parts.items()
        if uuid in gpus
    }


def limits_by_gpu(
    parts: Sequence[Allocation], pod: Pod | None, gpus: Mapping[GpuUuid, Gpu], names: ResourceNames
) -> dict[GpuUuid, ShareLimits] | None:
    """The limits of all that a container has, in order of the GPUs' index; `parts` are several where it uses several results
    of a claim. None where a GPU is not in the inventory."""
    if any(uuid not in gpus for part in parts for uuid in part.gpus):
        return None
    found: dict[GpuUuid, ShareLimits] = {}
    for part in parts:
        if part.unit_ids:
            own = replica_limits(part, gpus)
        else:
            own = {uuid: share_limits(part, pod, gpus, names) for uuid in part.gpus}
        for uuid, limits in own.items():
            found[uuid] = _together(found[uuid], limits, gpus[uuid]) if uuid in found else limits
    return {uuid: found[uuid] for uuid in sorted(found, key=lambda uuid: gpus[uuid].index)}


def _together(one: ShareLimits, other: ShareLimits, gpu: Gpu) -> ShareLimits:
    """Two results of a claim on one GPU are one share of it, because a program cannot distinguish them."""
    return ShareLimits(
        cores=min(CORES_PER_GPU, one.cores + other.cores),
        memory_bytes=min(gpu.memory_mib * MIB, one.memory_bytes + other.memory_bytes),
        core_limit=max(one.core_limit, other.core_limit),
        is_limited=one.is_limited and other.is_limited,
    )


def share_cores(allocation: Allocation, gpus: Mapping[GpuUuid, Gpu], names: ResourceNames) -> int:
    """Percent of the GPU's compute. A request for memory alone, GPUShare's or a claim's, gets the same part of both."""
    if allocation.unit_ids:
        return allocation.cores
    is_memory_alone = allocation.claim is not None and not allocation.size.cores
    is_memory_alone = is_memory_alone or allocation.memory_kind.measure is Measure.UNITS
    gpu = gpus.get(allocation.gpus[0]) if is_memory_alone and allocation.gpus else None
    if gpu is None or gpu.memory_mib < 1:  # the driver reports the UUID alone
        return allocation.size.cores
    memory_mib = allocation.size.memory * names.unit_mib(allocation.memory_kind)
    return cores_of_part(Fraction(memory_mib, gpu.memory_mib))
