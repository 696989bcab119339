"""What vcuda.config says of a container: from what it holds, the pod's vcuda-core-limit, and the driver. Pure.

Source: docs/formats.md, the vDevice protocol.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import CORE_LIMIT_ANNOTATION, CORES_PER_GPU, GpuUuid
from gpushare_agent.model.resources import ResourceNames

MIB = 1024 * 1024
_DRIVER = re.compile(r"(\d{1,6})\.(\d{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class VDeviceShare:
    """The numbers of one vcuda.config. `core_limit` is 0 where the share is not elastic."""

    cores: int
    memory_bytes: int
    core_limit: int
    is_limited: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimit:
    """The elastic ceiling that counts, and, where the annotation cannot count, why."""

    percent: int = 0
    complaint: str = ""


def core_limit(annotations: Mapping[str, str], cores: int) -> CoreLimit:
    """Reads the pod's vcuda-core-limit for a container of `cores`. A tenant's text: checked, else ignored with a reason."""
    text = annotations.get(CORE_LIMIT_ANNOTATION)
    if text is None:
        return CoreLimit()
    shown = text[:16]
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and int(text) <= CORES_PER_GPU):
        return CoreLimit(complaint=f"{CORE_LIMIT_ANNOTATION} is {shown!r}, but must be a whole number from 0 to 100")
    limit = int(text)
    if limit and limit < cores:
        return CoreLimit(
            complaint=f"{CORE_LIMIT_ANNOTATION} is {limit}, below the {cores} cores that the container asks for: it is "
            "a ceiling and must be at least as high"
        )
    return CoreLimit(percent=limit)


def vdevice_share(
    held: Allocation, annotations: Mapping[str, str], gpus: Mapping[GpuUuid, Gpu], names: ResourceNames
) -> VDeviceShare:
    """The limits of a container. Whole GPUs are not limited: the library is told so, and shows their whole memory."""
    if held.is_whole:
        memory_mib = sum(gpus[uuid].memory_mib for uuid in held.gpus if uuid in gpus)
        return VDeviceShare(cores=held.cores, memory_bytes=memory_mib * MIB, core_limit=0, is_limited=False)
    cores = share_cores(held, gpus, names)
    memory_mib = held.memory_blocks * names.memory_block_mib + len(held.gpu_mem_ids) * names.gpu_mem_unit_mib
    return VDeviceShare(
        cores=cores,
        memory_bytes=memory_mib * MIB,
        core_limit=core_limit(annotations, cores).percent,
        is_limited=True,
    )


def share_cores(held: Allocation, gpus: Mapping[GpuUuid, Gpu], names: ResourceNames) -> int:
    """Percent of the GPU's compute. Who holds memory alone gets as much of it as of the memory (GPUShare's rule)."""
    gpu = gpus.get(held.gpus[0]) if held.gpu_mem_ids and held.gpus else None
    if gpu is None:
        return held.cores
    cores = CORES_PER_GPU * len(held.gpu_mem_ids) * names.gpu_mem_unit_mib // gpu.memory_mib
    return min(CORES_PER_GPU, max(1, cores))


def driver_numbers(version: str) -> tuple[int, int]:
    """Major and minor of a driver version such as 580.159.04; (0, 0) where it says none (simulated GPUs)."""
    match = _DRIVER.match(version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
