"""TKEStack's vcuda library: it replaces libcuda inside the container and reads its limits from /etc/vcuda/vcuda.config.

The edits mount the container's vDevice directory; the numbers are what vcuda.config holds. A container on whole GPUs gets
the untouched libraries, and its vcuda.config sets no limit.
Source: docs/reference/formats.md, the vDevice protocol and the driver directory.
"""

from __future__ import annotations

from gpushare_agent.agent.isolation.kept import Kept, NotKept
from gpushare_agent.agent.isolation.request import (
    ClaimUse,
    Follows,
    Isolation,
    IsolationRequest,
    invalid,
    mounted_driver,
    refused_mounts,
)
from gpushare_agent.core.model.allocations import ContainerEdits, ContainerMount, merged
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.names import LIBRARY_DIRECTORY, VDEVICE_DIRECTORY


def edit_vcuda(request: IsolationRequest) -> ContainerEdits | Refused:
    """The container's own vDevice directory; the driver directory, where one is configured, and the search path to it: by it
    the control library is found before a libcuda of the image or of NVIDIA's runtime."""
    own_paths = (VDEVICE_DIRECTORY, LIBRARY_DIRECTORY)
    # Whole GPUs are not limited, so any number of them goes, and a volume over the files lifts nothing.
    if not request.is_whole:
        if len(request.shares) > 1:
            return invalid(
                f"container {request.container.name} has shares of several GPUs, and the library of isolation vcuda limits"
                " one. Nothing was allocated. Ask for one GPU, or choose another isolation."
            )
        if (refused := refused_mounts(request.container, "vcuda", own_paths)) is not None:
            return refused
    vdevice = ContainerMount(host_path=str(request.vdevice_directory), container_path=VDEVICE_DIRECTORY)
    driver = request.config.whole_driver if request.is_whole else request.config.shared_driver
    if driver is None:
        return ContainerEdits(mounts=(vdevice,))
    return merged(ContainerEdits(mounts=(vdevice,)), mounted_driver(request.container, driver))


def _not_shared(use: ClaimUse) -> Refused | None:
    """Its limits are kept for all processes, of any containers and pods; under the open kernel modules from 515 on for those
    of one container."""
    # The library asks the driver for the GPU's processes and counts those that it knows of.
    if not use.is_shared or use.module is None or not use.module.lists_namespace_pids:
        return None
    return invalid(
        f"{use.who} share it, and the open kernel module {use.module.version} lists to a process those of its own"
        " container alone, so vcuda would give each all of the memory: make a claim, or a request of it, for each container,"
        f" or {use.remedy}"
    )


ISOLATION = Isolation(
    name="vcuda",
    edit=edit_vcuda,
    keeps=Kept(
        memory_by="vcuda",
        compute_by="vcuda",
        not_kept=(
            NotKept.ASYNC_ALLOCATIONS,
            NotKept.BYPASS,
            NotKept.COPIES,
            NotKept.EXTENDED_LAUNCHES,
            NotKept.GRAPHS,
            NotKept.MANAGED_MEMORY,
            NotKept.OTHER_APIS,
            NotKept.POOLS,
            NotKept.SMALL_LAUNCHES,
            NotKept.VIRTUAL_MEMORY,
        ),
    ),
    not_shared=_not_shared,
    mounts_vdevice=True,
    mounts_driver=True,
    follows_processes=True,
    reads_processes=True,
    # The library reads vcuda.config at each cuInit, cuDriverGetVersion, cuGetProcAddress and nvmlInit: a running process
    # that makes one of these calls follows, which cannot be known before.
    cores_follow=Follows.NEW_PROCESSES,
    memory_follows=Follows.NEW_PROCESSES,
    why_not_in_mig="its library limits compute by utilization, and NVML has none where MIG is on",
)
