"""libgpushare: preloaded into every process of the container, it finds its limits in a file that the agent alone writes.

| in the container | what |
|---|---|
| `/usr/local/gpushare/libgpushare.so`, `/etc/ld.so.preload` | the library; the same for all, read-only |
| `/etc/vcuda`, read-only | the container's directory with gpushare.config, which the agent changes while programs run |
| `/etc/vcuda/usage`, writable | what the container's processes share of their use |

The library reads no variable, so none of a spec's lifts a limit but NVIDIA_VISIBLE_DEVICES. Whole GPUs get nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpushare_agent.isolation.gpushare.format import CORES_OF_GPU, USAGE_NAME, GpuLimits
from gpushare_agent.isolation.kept import Circumstances, Kept, NotKept
from gpushare_agent.isolation.request import (
    Follows,
    Isolation,
    IsolationRequest,
    refused_nothing,
    refused_override,
    refused_several,
)
from gpushare_agent.isolation.shares import limit_annotations, share_limits
from gpushare_agent.model.allocations import Allocation, ContainerEdits, ContainerMount
from gpushare_agent.model.errors import Refused
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import CORES_PER_GPU, GpuUuid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames

LIBRARY_NAME = "libgpushare.so"
LIBRARY_PATH = f"/usr/local/gpushare/{LIBRARY_NAME}"
PRELOAD_PATH = "/etc/ld.so.preload"
DIRECTORY = "/etc/vcuda"
"""In the container; native/gpushare/region.c has it."""


def edit_gpushare(request: IsolationRequest) -> ContainerEdits | Refused:
    if request.is_whole:
        return ContainerEdits()
    if (refused := refused_several(request, "gpushare")) is not None:
        return refused
    if not request.shares or min(request.cores, request.memory_mib) < 1:
        return refused_nothing(request, "gpushare")
    if (refused := refused_override(request.container, "gpushare")) is not None:
        return refused
    directory = request.config.settings.libgpushare.directory
    own = directory / "containers" / request.pod_uid / request.container.name
    return ContainerEdits(
        mounts=(
            ContainerMount(host_path=str(directory / LIBRARY_NAME), container_path=LIBRARY_PATH),
            ContainerMount(host_path=str(directory / "ld.so.preload"), container_path=PRELOAD_PATH),
            ContainerMount(host_path=str(own), container_path=DIRECTORY),
            # In the read-only directory one file that can be written: its mount comes after the directory's.
            ContainerMount(
                host_path=str(own / USAGE_NAME), container_path=f"{DIRECTORY}/{USAGE_NAME}", read_only=False
            ),
        )
    )


def live_limits(
    allocation: Allocation, pod: Pod | None, gpus: Mapping[GpuUuid, Gpu], names: ResourceNames
) -> GpuLimits | None:
    """Of the container's only GPU. None where that is not in the inventory, or its memory is not known."""
    gpu = gpus.get(allocation.gpus[0]) if allocation.gpus else None
    if gpu is None:
        return None
    share = share_limits(allocation, limit_annotations(allocation, pod), gpus, names)
    if min(share.memory_bytes, share.cores) < 1:
        return None
    percent = CORES_OF_GPU // CORES_PER_GPU
    return GpuLimits(
        uuid=gpu.uuid,
        memory_bytes=share.memory_bytes,
        cores=min(share.cores, CORES_PER_GPU) * percent,
        ceiling=share.core_limit * percent if share.core_limit > share.cores else None,
    )


def _keeps(_: Circumstances) -> Kept:
    return Kept(memory_by="gpushare", compute_by="gpushare", not_kept=(NotKept.BYPASS, NotKept.MUSL))


ISOLATION = Isolation(
    name="gpushare",
    edit=edit_gpushare,
    keeps=_keeps,
    cores_follow=Follows.RUNNING_PROCESSES,
    memory_follows=Follows.RUNNING_PROCESSES,
    why_not_in_mig="its library limits compute by utilisation, and NVML has none where MIG is on",
)
