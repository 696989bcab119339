"""libgpushare: preloaded into every process of the container, it finds its limits in a file that the agent alone writes.

| in the container | what |
|---|---|
| `/usr/local/gpushare/libgpushare.so`, the two `PRELOAD_PATHS` | the library; the same for all, read-only |
| `/etc/vcuda`, read-only | the container's directory with gpushare.config, which the agent changes while programs run |
| `/etc/vcuda/usage`, writable | what the container's processes share of their use |

The library finds its limits by a GPU's UUID, so shares of several GPUs, and whole ones next to them, each have their own
limits. It reads no variable, so of a spec's variables only NVIDIA_VISIBLE_DEVICES, and LD_PRELOAD with the driver's library,
lift a limit. Containers with whole GPUs only get nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpushare_agent.agent.isolation.gpushare.format import CORES_OF_GPU, MOST_GPUS, USAGE_NAME, UUID_BYTES, GpuLimits
from gpushare_agent.agent.isolation.kept import Kept, NotKept
from gpushare_agent.agent.isolation.request import (
    Follows,
    Isolation,
    IsolationRequest,
    invalid,
    refused_mounts,
    refused_share,
)
from gpushare_agent.core.model.allocations import Allocation, ContainerEdits, ContainerMount
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import (
    CORES_PER_GPU,
    ENV_PRELOAD,
    ENV_VISIBLE_DEVICES,
    GPUSHARE_DIRECTORY,
    MAX_ANNOTATION_CHARS,
    PRELOAD_PATHS,
    VDEVICE_DIRECTORY,
    GpuUuid,
)
from gpushare_agent.core.model.pods import ContainerSpec, Pod
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.model.shares import ShareLimits, limits_by_gpu

LIBRARY_NAME = "libgpushare.so"
LIBRARY_PATH = f"{GPUSHARE_DIRECTORY}/{LIBRARY_NAME}"


_NO_GPUS = ("void", "none")
"""Values of NVIDIA_VISIBLE_DEVICES that make NVIDIA's runtime add no GPU: a spec may have them if GPUs come by CDI."""


def edit_gpushare(request: IsolationRequest) -> ContainerEdits | Refused:
    if request.is_whole:
        return ContainerEdits()
    if refused := _unlimited(request) or _overridden(request.container):
        return refused
    own_paths = (VDEVICE_DIRECTORY, *PRELOAD_PATHS, GPUSHARE_DIRECTORY)
    if refused := refused_mounts(request.container, "gpushare", own_paths):
        return refused
    directory, own = request.config.settings.libgpushare.directory, request.vdevice_directory
    return ContainerEdits(
        mounts=(
            ContainerMount(host_path=str(directory / LIBRARY_NAME), container_path=LIBRARY_PATH),
            *(
                ContainerMount(host_path=str(directory / "ld.so.preload"), container_path=path)
                for path in PRELOAD_PATHS
            ),
            ContainerMount(host_path=str(own), container_path=VDEVICE_DIRECTORY),
            # One writable file in the read-only directory: its mount comes after the directory's.
            ContainerMount(
                host_path=str(own / USAGE_NAME), container_path=f"{VDEVICE_DIRECTORY}/{USAGE_NAME}", read_only=False
            ),
        )
    )


def _unlimited(request: IsolationRequest) -> Refused | None:
    name, shares = request.container.name, request.shares
    # 0 would be a limit that lets nothing start, which is no share.
    if min((min(share.cores, share.memory_mib) for share in shares if not share.is_whole), default=0) < 1:
        gpus = ", ".join(f"{gpu.index} with {gpu.memory_mib} MiB" for gpu in request.gpus) or "none"
        return invalid(
            f"container {name} asks for {request.cores} cores and {request.memory_mib} MiB (GPUs: {gpus}), which makes a"
            " limit of 0 under isolation gpushare. Nothing was allocated. Ask for cores and at least one memory block, or"
            " for whole GPUs."
        )
    if len(shares) > MOST_GPUS:
        return invalid(
            f"container {name} has shares on {len(shares)} GPUs, and isolation gpushare limits at most {MOST_GPUS} of one"
            " container. Nothing was allocated. Ask for fewer, or for whole GPUs."
        )
    if any(len(share.gpu.uuid) >= UUID_BYTES for share in shares):
        return refused_share(
            request, "gpushare", "drivers before 470 name MIG instances in another way. Update the driver"
        )
    return None


def _overridden(container: ContainerSpec) -> Refused | None:
    """Refuses a spec whose own variable would win over the limits. The kubelet puts the spec's variables after a device
    plugin's, so of one name the spec's counts."""
    value = container.env.get(ENV_PRELOAD, "")
    # The loader takes the libraries of LD_PRELOAD before those of /etc/ld.so.preload. Ours leads to itself what is linked
    # to such a driver, as an image's own variable may name one, but not what a constructor calls before. Other libraries,
    # such as allocators, lift no limit. A value that is too long to read may name anything.
    is_cut = len(value) >= MAX_ANNOTATION_CHARS
    has_driver = any(path.rpartition("/")[2].startswith("libcuda.so") for path in value.replace(":", " ").split())
    names = [f"{ENV_PRELOAD} ({'libcuda.so' if has_driver else 'too long to be read'})"] if has_driver or is_cut else []
    if container.env.get(ENV_VISIBLE_DEVICES, _NO_GPUS[0]) not in _NO_GPUS:  # by which NVIDIA's runtime would add GPUs
        names.append(ENV_VISIBLE_DEVICES)
    if not names:
        return None
    return invalid(
        f"container {container.name} sets {', '.join(names)} in its spec, which would win over the limit of its share"
        " under isolation gpushare. Nothing was allocated. Remove the variable: the agent sets what the library and"
        " NVIDIA's runtime read."
    )


def live_limits(
    parts: Sequence[Allocation], pod: Pod | None, gpus: Mapping[GpuUuid, Gpu], names: ResourceNames
) -> tuple[GpuLimits, ...] | None:
    """The limits of each GPU of a container, `parts` as limits_by_gpu has them. None if one is not in the inventory, or
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
        # A value not above the cores is no ceiling: the annotation was ignored, or the pod has none.
        ceiling=share.core_limit * percent if share.core_limit > share.cores else None,
    )


ISOLATION = Isolation(
    name="gpushare",
    edit=edit_gpushare,
    keeps=Kept(
        memory_by="gpushare",
        compute_by="gpushare",
        not_kept=(NotKept.BYPASS, NotKept.COPIES, NotKept.MUSL, NotKept.OTHER_APIS),
        keeps_managed_memory=True,
    ),
    mounts_vdevice=True,
    follows_processes=True,
    cores_follow=Follows.RUNNING_PROCESSES,
    memory_follows=Follows.RUNNING_PROCESSES,
)
