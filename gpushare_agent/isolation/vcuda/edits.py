"""TKEStack's vcuda library: it replaces libcuda inside the container and reads its limits from /etc/vcuda/vcuda.config.

The edits mount the container's vDevice directory; the numbers are what vcuda.config holds. A container on whole GPUs gets
the untouched libraries, and its vcuda.config sets no limit.
Source: docs/reference/formats.md, the vDevice protocol and the driver directory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpushare_agent.isolation.request import Follows, Isolation, IsolationRequest, Preparation
from gpushare_agent.model.allocations import Allocation, ContainerEdits, ContainerMount
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.gpus import Gpu, KernelModule
from gpushare_agent.model.isolation import IsolationName
from gpushare_agent.model.names import (
    CORE_LIMIT_ANNOTATION,
    CORES_PER_GPU,
    ENV_LIBRARY_PATH,
    LIBRARY_DIRECTORY,
    MIB,
    GpuUuid,
)
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.model.units import cores_of_part

VDEVICE_DIRECTORY = "/etc/vcuda"
_NUMBER = re.compile(r"[+-]?[0-9]{1,9}")
_DRIVER = re.compile(r"(\d{1,6})\.(\d{1,6})")


def edit_vcuda(request: IsolationRequest) -> ContainerEdits | Refused:
    """The container's own vDevice directory; the driver directory, where one is configured, and the search path to it: by it
    the control library is found before a libcuda of the image or of NVIDIA's runtime."""
    if len(request.shares) > 1 and not request.is_whole:
        return Refused(
            reason=RefusalReason.INVALID_REQUEST,
            detail=f"container {request.container.name} has shares of several GPUs, and the library of isolation"
            f" {IsolationName.VCUDA} limits one. Nothing was allocated. Ask for one GPU, or choose another isolation.",
        )
    own = request.config.virtual_manager / request.pod_uid / request.container.name
    vdevice = ContainerMount(host_path=str(own), container_path=VDEVICE_DIRECTORY)
    driver = request.config.whole_driver if request.is_whole else request.config.shared_driver
    if driver is None:
        return ContainerEdits(mounts=(vdevice,))
    libraries = [f"{LIBRARY_DIRECTORY}/lib64"]
    if request.container.env.get("compat32", "").lower() == "true":
        libraries.append(f"{LIBRARY_DIRECTORY}/lib")
    # The link to the version in force, not its target: the kubelet keeps this answer for restarts.
    mount = ContainerMount(host_path=str(driver), container_path=LIBRARY_DIRECTORY)
    return ContainerEdits(env=((ENV_LIBRARY_PATH, ":".join(libraries)),), mounts=(vdevice, mount))


@dataclass(frozen=True, slots=True, kw_only=True)
class VDeviceShare:
    """The numbers of one vcuda.config. `core_limit` is 0 where the share is not elastic."""

    cores: int
    memory_bytes: int
    core_limit: int
    is_limited: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimit:
    """The effective elastic ceiling; `problem` where the annotation is ignored, with the reason."""

    percent: int = 0
    problem: str = ""


def core_limit(annotations: Mapping[str, str], cores: int) -> CoreLimit:
    """Reads the pod's vcuda-core-limit for a container of `cores`.

    The numbers that gpu-manager 1.1.5 reads are read alike (Go's Atoi: a sign, leading zeros), and what is above 100 is 100.
    What would end or starve the container's programs there is ignored here with the reason:
    docs/how-to/migrate-from-gpu-manager.md.
    """
    text = annotations.get(CORE_LIMIT_ANNOTATION)
    if text is None:
        return CoreLimit()
    limit = min(int(text), CORES_PER_GPU) if _NUMBER.fullmatch(text) else -1
    if limit < 0:
        return CoreLimit(problem=f"{CORE_LIMIT_ANNOTATION} is {text[:16]!r}, but must be a whole number from 0 to 100")
    if limit and limit < cores:
        return CoreLimit(
            problem=f"{CORE_LIMIT_ANNOTATION} is {limit}, below the {cores} cores that the container asks for: it is "
            "a ceiling and must be at least as high"
        )
    return CoreLimit(percent=limit)


def vdevice_share(
    allocation: Allocation, annotations: Mapping[str, str], gpus: Mapping[GpuUuid, Gpu], names: ResourceNames
) -> VDeviceShare:
    """The limits of a container. Whole GPUs are not limited: vcuda.config has `enable` 0 and their whole memory."""
    if allocation.is_whole:
        memory_mib = sum(gpus[uuid].memory_mib for uuid in allocation.gpus if uuid in gpus)
        return VDeviceShare(cores=allocation.cores, memory_bytes=memory_mib * MIB, core_limit=0, is_limited=False)
    if allocation.gpu_ids:
        return _replica_share(allocation, gpus)
    cores = share_cores(allocation, gpus, names)
    unit_mib = names.gpu_mem_unit_mib if allocation.gpu_mem_ids else names.memory_block_mib
    memory_mib = allocation.size.memory * unit_mib
    return VDeviceShare(
        cores=cores,
        memory_bytes=memory_mib * MIB,
        core_limit=core_limit(annotations, cores).percent,
        is_limited=True,
    )


def _replica_share(allocation: Allocation, gpus: Mapping[GpuUuid, Gpu]) -> VDeviceShare:
    """Of replicas of one GPU; of several GPUs the sum."""
    parts = [(gpus[uuid], part) for uuid, part in allocation.parts.items() if uuid in gpus]
    return VDeviceShare(
        cores=sum(cores_of_part(part) for _, part in parts),
        memory_bytes=sum(int(part * gpu.memory_mib) for gpu, part in parts) * MIB,
        core_limit=0,
        is_limited=allocation.is_limited,
    )


def share_cores(allocation: Allocation, gpus: Mapping[GpuUuid, Gpu], names: ResourceNames) -> int:
    """Percent of the GPU's compute. A request for memory alone, GPUShare's or a claim's, gets the same part of both."""
    if allocation.gpu_ids:
        return allocation.cores
    is_memory_alone = bool(allocation.gpu_mem_ids) or (allocation.claim is not None and not allocation.size.cores)
    gpu = gpus.get(allocation.gpus[0]) if is_memory_alone and allocation.gpus else None
    if gpu is None or gpu.memory_mib < 1:  # a GPU of which the driver reports the UUID alone
        return allocation.size.cores
    unit_mib = names.gpu_mem_unit_mib if allocation.gpu_mem_ids else names.memory_block_mib
    cores = CORES_PER_GPU * allocation.size.memory * unit_mib // gpu.memory_mib
    return min(CORES_PER_GPU, max(1, cores))


def reported_pids(host_pid: int, namespace_pids: Sequence[int], module: KernelModule | None) -> tuple[int, ...]:
    """The PIDs by which the driver in use reports a process to those of its container: pids.config holds these.

    | kernel module | process lists | utilisation samples | here |
    |---|---|---|---|
    | proprietary, not known, open before 515 | host | host | the host's PID |
    | open 515 to 569 | namespace | host | both |
    | open from 570 | namespace | namespace | the namespaces' |

    `namespace_pids` are those of the container's PID namespace and of those nested in it; none for a process in the host's,
    which has its host PID there too. With both kinds in one list another container's process is taken for one of this
    container where its host PID equals a PID of our namespace: its utilisation is then counted as ours, which holds us below
    our share, never above. Host PIDs that low are the kernel's own at first, so that is left so.
    """
    if module is None or not module.lists_namespace_pids or not namespace_pids:
        return (host_pid,)
    return tuple(namespace_pids) if module.samples_namespace_pids else (host_pid, *namespace_pids)


def driver_numbers(version: str) -> tuple[int, int]:
    """Major and minor of a driver version such as 580.159.04; (0, 0) where it has none (simulated GPUs)."""
    match = _DRIVER.match(version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


ISOLATION = Isolation(
    name=IsolationName.VCUDA,
    edit=edit_vcuda,
    preparations=(Preparation.VDEVICE,),
    # The library reads vcuda.config at each cuInit, cuDriverGetVersion, cuGetProcAddress and nvmlInit: a running process
    # that makes one of these calls follows, which cannot be known before.
    cores_follow=Follows.NEW_PROCESSES,
    memory_follows=Follows.NEW_PROCESSES,
    why_not_in_mig="its library limits compute by utilisation, and NVML has none where MIG is on",
)
