"""libgpushare: preloaded into every process of the container, it finds its limits in a file that the agent alone writes.

| in the container | what |
|---|---|
| `/usr/local/gpushare/libgpushare.so`, `/etc/ld.so.preload` | the library; the same for all, read-only |
| `/etc/vcuda`, read-only | the container's directory with gpushare.config, which the agent changes while programs run |
| `/etc/vcuda/usage`, writable | what the container's processes share of their use |

The library finds its limits by a GPU's UUID, so shares of several GPUs, and whole ones beside them, are limited each by its
own. It reads no variable, so none of a spec's lifts a limit but NVIDIA_VISIBLE_DEVICES, and LD_PRELOAD with the driver's
library. Whole GPUs alone get nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpushare_agent.isolation.gpushare.format import CORES_OF_GPU, MOST_GPUS, USAGE_NAME, GpuLimits
from gpushare_agent.isolation.kept import Circumstances, Kept, NotKept
from gpushare_agent.isolation.request import (
    Follows,
    Isolation,
    IsolationRequest,
    preloaded_driver,
    refused_mounts,
    refused_nothing,
    refused_override,
)
from gpushare_agent.isolation.shares import ShareLimits, limits_by_gpu
from gpushare_agent.model.allocations import Allocation, ContainerEdits, ContainerMount
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import CORES_PER_GPU, GPUSHARE_DIRECTORY, PRELOAD_PATH, VDEVICE_DIRECTORY, GpuUuid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames

LIBRARY_NAME = "libgpushare.so"
LIBRARY_PATH = f"{GPUSHARE_DIRECTORY}/{LIBRARY_NAME}"


def edit_gpushare(request: IsolationRequest) -> ContainerEdits | Refused:
    if request.is_whole:
        return ContainerEdits()
    limited = [share for share in request.shares if not share.is_whole]
    # 0 would be a limit that lets nothing start, which is no share.
    if not limited or min(min(share.cores, share.memory_mib) for share in limited) < 1:
        return refused_nothing(request, "gpushare")
    if len(request.shares) > MOST_GPUS:
        return _refused_too_many(request)
    own_paths = (VDEVICE_DIRECTORY, PRELOAD_PATH, GPUSHARE_DIRECTORY)
    container = request.container
    refused = refused_override(container, "gpushare", preloaded_driver(container))
    refused = refused or refused_mounts(container, "gpushare", own_paths)
    if refused is not None:
        return refused
    directory, own = request.config.settings.libgpushare.directory, request.vdevice_directory
    return ContainerEdits(
        mounts=(
            ContainerMount(host_path=str(directory / LIBRARY_NAME), container_path=LIBRARY_PATH),
            ContainerMount(host_path=str(directory / "ld.so.preload"), container_path=PRELOAD_PATH),
            ContainerMount(host_path=str(own), container_path=VDEVICE_DIRECTORY),
            # In the read-only directory one file that can be written: its mount comes after the directory's.
            ContainerMount(
                host_path=str(own / USAGE_NAME), container_path=f"{VDEVICE_DIRECTORY}/{USAGE_NAME}", read_only=False
            ),
        )
    )


def _refused_too_many(request: IsolationRequest) -> Refused:
    return Refused(
        reason=RefusalReason.INVALID_REQUEST,
        detail=f"container {request.container.name} has shares on {len(request.shares)} GPUs, and isolation gpushare limits"
        f" at most {MOST_GPUS} of one container. Nothing was allocated. Ask for fewer, or for whole GPUs.",
    )


def live_limits(
    parts: Sequence[Allocation], pod: Pod | None, gpus: Mapping[GpuUuid, Gpu], names: ResourceNames
) -> tuple[GpuLimits, ...] | None:
    """The limits of each GPU of a container, `parts` as limits_by_gpu has them. None where one is not in the inventory, or
    its memory is not known."""
    shares = limits_by_gpu(parts, pod, gpus, names)
    limited = [share for share in shares.values() if share.is_limited] if shares else []
    if shares is None or not limited or min(min(share.memory_bytes, share.cores) for share in limited) < 1:
        return None
    return tuple(_limits(uuid, share) for uuid, share in shares.items())


def _limits(uuid: GpuUuid, share: ShareLimits) -> GpuLimits:
    if not share.is_limited:
        return GpuLimits(uuid=uuid)
    percent = CORES_OF_GPU // CORES_PER_GPU
    return GpuLimits(
        uuid=uuid,
        memory_bytes=share.memory_bytes,
        cores=min(share.cores, CORES_PER_GPU) * percent,
        # Not above the cores is no ceiling: the annotation was ignored, or the pod has none.
        ceiling=share.core_limit * percent if share.core_limit > share.cores else None,
    )


def _keeps(_: Circumstances) -> Kept:
    return Kept(
        memory_by="gpushare",
        compute_by="gpushare",
        not_kept=(NotKept.BYPASS, NotKept.COPIES, NotKept.MUSL, NotKept.OTHER_APIS),
        keeps_managed_memory=True,
    )


ISOLATION = Isolation(
    name="gpushare",
    edit=edit_gpushare,
    keeps=_keeps,
    mounts_vdevice=True,
    follows_processes=True,
    cores_follow=Follows.RUNNING_PROCESSES,
    memory_follows=Follows.RUNNING_PROCESSES,
    # The library would limit the memory of an instance, by its UUID. But a node that offers units of memory there offers
    # cores with them, and those nobody would keep.
    why_not_in_mig="its library can keep the memory of an instance, but needs utilisation to keep compute, and NVML has none"
    " where MIG is on",
)
