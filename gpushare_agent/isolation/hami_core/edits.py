"""HAMi-core: its library is preloaded into every process of the container and enforces the limits.

Source: docs/reference/formats.md, section 7; the units, the rounding and the library's own path were read in HAMi-core's sources.
Whole GPUs get neither library nor limits. The files on the host are made by isolation/hami_core/files.py.

| variable | meaning to the library |
|---|---|
| `CUDA_DEVICE_MEMORY_LIMIT_<i>` | `<MiB>m` for the i-th GPU that the container sees; 0 or no number: no limit |
| `CUDA_DEVICE_SM_LIMIT` | percent of every GPU; 0, 100 and more, or no number: no limit. With `_<i>`: of one GPU, and wins |
| `CUDA_DEVICE_MEMORY_SHARED_CACHE` | the file that its processes share their usage in; without it they end |
| `GPU_CORE_UTILIZATION_POLICY` | `disable`: cores are not limited; `force`: they are, whatever the cache file says |
| `CUDA_REDIRECT` | the library in which dlsym finds the driver's functions in the place of itself: that may be libcuda, without limits |
| `LIBCUDA_LOG_LEVEL` | 1: errors alone. The library's own default, 2, prints some lines to standard error of every process |

The kubelet appends the variables of the pod's spec to the agent's, so of one name the spec's counts
(`GenerateRunContainerOptions` in pkg/kubelet/kubelet_pods.go). A spec that sets one that lifts a limit is refused; so is
NVIDIA_VISIBLE_DEVICES, by which NVIDIA's runtime would add GPUs that the limits are not about. A claim's CDI spec replaces
variables of the pod's, whatever they come from, but only those that it has: there all of them are set.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Mapping

from gpushare_agent.isolation.kept import NOTHING_KEPT, Circumstances, Kept, NotKept, without_compute
from gpushare_agent.isolation.request import (
    ClaimUse,
    Follows,
    Isolation,
    IsolationRequest,
    refused_mounts,
    refused_nothing,
    refused_override,
)
from gpushare_agent.isolation.shares import share_limits
from gpushare_agent.model.allocations import Allocation, ContainerEdits, ContainerMount
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.gpus import Gpu, KernelModule
from gpushare_agent.model.names import (
    CORES_PER_GPU,
    ENV_HAMI_CORE_CACHE,
    ENV_HAMI_CORE_CORES,
    ENV_HAMI_CORE_DISABLE,
    ENV_HAMI_CORE_LIBRARY,
    ENV_HAMI_CORE_MEMORY,
    ENV_HAMI_CORE_POLICY,
    HAMI_CORE_DIRECTORY,
    MIB,
    PRELOAD_PATH,
    GpuUuid,
)
from gpushare_agent.model.pods import ContainerSpec
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.settings.sections import HamiCoreSettings

LIBRARY_PATH = f"{HAMI_CORE_DIRECTORY}/libvgpu.so"
"""In the container. The library opens itself under this path: it cannot be elsewhere."""
CACHE_DIRECTORY = f"{HAMI_CORE_DIRECTORY}/cache"
"""In the container: the directory of the file that its processes share."""

ENV_LOG_LEVEL = "LIBCUDA_LOG_LEVEL"
_DISABLED = "disable"
_TRUE = ("1", "t", "T", "TRUE", "true", "True")
"""What HAMi's device plugin takes for true (Go's ParseBool)."""


def edit_hami_core(request: IsolationRequest) -> ContainerEdits | Refused:
    """Environment and mounts from the container's own share; refused where a limit would be 0, which the library takes for
    no limit, or the pod's spec would lift it."""
    if request.is_whole:
        return ContainerEdits()
    config = request.config.settings.hami_core
    # HAMi's variable in the spec: the operator decides whether it counts.
    if opts_out(request.container, config):
        return ContainerEdits()
    limits = [
        0 if share.is_whole else _memory_limit_mib(share.memory_mib, share.gpu, config) for share in request.shares
    ]
    pairs = [(limit, s.cores) for limit, s in zip(limits, request.shares, strict=True) if not s.is_whole]
    # 0 is no limit to the library.
    if not pairs or min(map(min, pairs)) < 1:
        return refused_nothing(request, "hami-core", ", whose library takes 0 for no limit")
    refused = _overridden(request.container, len(limits), config)
    refused = refused or refused_mounts(request.container, "hami-core", (HAMI_CORE_DIRECTORY, PRELOAD_PATH))
    if refused is not None:
        return refused
    name = request.container.name
    cache, directory = f"{CACHE_DIRECTORY}/{name}.cache", config.directory / "containers" / request.pod_uid / name
    # A claim's CDI spec replaces a variable of the pod's only where it has that variable itself.
    is_policy_set = request.is_claim or config.core_policy != "default"
    switches: list[tuple[str, str]] = [(ENV_HAMI_CORE_POLICY, config.core_policy)] if is_policy_set else []
    switches += [(ENV_HAMI_CORE_LIBRARY, "")] if request.is_claim else []
    return ContainerEdits(
        env=(
            *((f"{ENV_HAMI_CORE_MEMORY}_{ordinal}", f"{mib}m") for ordinal, mib in enumerate(limits) if mib),
            (ENV_HAMI_CORE_CACHE, cache),
            *_core_limits(request, config),
            (ENV_LOG_LEVEL, "1"),
            *switches,
        ),
        mounts=(
            ContainerMount(host_path=str(config.directory / "libvgpu.so"), container_path=LIBRARY_PATH),
            ContainerMount(host_path=str(config.directory / "ld.so.preload"), container_path=PRELOAD_PATH),
            # The file and not its directory: in a directory the tenant could make trees that the agent, which has no
            # capability, may not remove.
            ContainerMount(host_path=str(directory / f"{name}.cache"), container_path=cache, read_only=False),
        ),
    )


def _core_limits(request: IsolationRequest, config: HamiCoreSettings) -> list[tuple[str, str]]:
    """One for the only GPU, as HAMi's own plugin sets it; of several GPUs one each. A claim's has both forms: one GPU's own,
    if the spec had it, would win."""
    percents = [
        CORES_PER_GPU if share.is_whole else _percent(share.cores, request.core_limit, config)
        for share in request.shares
    ]
    common = [(ENV_HAMI_CORE_CORES, str(percents[0]))] if len(percents) == 1 else []
    if common and not request.is_claim:
        return common
    return [*common, *((f"{ENV_HAMI_CORE_CORES}_{ordinal}", str(percent)) for ordinal, percent in enumerate(percents))]


def opts_out(container: ContainerSpec, config: HamiCoreSettings) -> bool:
    """The container goes without the library and its limits, where the node lets it: HAMi's variable in the spec."""
    return config.allow_opt_out and container.env.get(ENV_HAMI_CORE_DISABLE, "") in _TRUE


def lifts_cores(container: ContainerSpec | None, config: HamiCoreSettings) -> bool:
    """Compute is not limited: for all of the node, or for a container that says so where it may. None: any container."""
    asks = container is not None and container.env.get(ENV_HAMI_CORE_POLICY, "").lower() == _DISABLED
    return config.core_policy == _DISABLED or (asks and config.allow_opt_out)


def _overridden(container: ContainerSpec, gpus: int, config: HamiCoreSettings) -> Refused | None:
    limits = [ENV_HAMI_CORE_CACHE, ENV_HAMI_CORE_CORES, ENV_HAMI_CORE_LIBRARY]
    limits += [f"{name}_{gpu}" for name in (ENV_HAMI_CORE_MEMORY, ENV_HAMI_CORE_CORES) for gpu in range(gpus)]
    found = [name for name in limits if name in container.env]
    if container.env.get(ENV_HAMI_CORE_POLICY, "").lower() == _DISABLED and not lifts_cores(container, config):
        found.append(f"{ENV_HAMI_CORE_POLICY}={_DISABLED}")
    return refused_override(container, "hami-core", found)


def live_limits(
    allocation: Allocation,
    annotations: Mapping[str, str],
    gpus: Mapping[GpuUuid, Gpu],
    names: ResourceNames,
    config: HamiCoreSettings,
) -> tuple[int, int] | None:
    """Bytes and percent that the shared region of a running share is to have, of the container's only GPU. None where one
    would be 0, which is no limit: the GPU is not in the inventory, the driver does not report its memory, or the kubelet has
    not allocated both resources yet."""
    gpu = gpus.get(allocation.gpus[0]) if allocation.gpus else None
    if gpu is None:
        return None
    share = share_limits(allocation, annotations, gpus, names)
    memory_mib = _memory_limit_mib(share.memory_bytes // MIB, gpu, config)
    percent = _percent(share.cores, share.core_limit, config)
    return (memory_mib * MIB, percent) if memory_mib >= 1 and percent >= 1 else None


def _memory_limit_mib(memory_mib: int, gpu: Gpu, config: HamiCoreSettings) -> int:
    # Oversubscribed or not, a program must not be told of more memory than the GPU has.
    return min(int(memory_mib * config.memory_scaling), gpu.memory_mib)


def _percent(cores: int, core_limit: int, config: HamiCoreSettings) -> int:
    """The share times the scaling, or the elastic ceiling where that is higher: the library has no other elasticity."""
    return min(CORES_PER_GPU, max(int(cores * config.core_scaling), core_limit))


def hides_compute(module: KernelModule) -> bool:
    """The library learns its processes' PIDs from the driver's process lists, and finds no utilisation sample with them."""
    return module.lists_namespace_pids and not module.samples_namespace_pids


def _keeps(found: Circumstances) -> Kept:
    if not found.has_library:
        return NOTHING_KEPT
    limited = Kept(
        memory_by="hami-core",
        compute_by="hami-core",
        not_kept=(
            NotKept.ARRAYS,
            NotKept.BYPASS,
            NotKept.COOPERATIVE_LAUNCHES,
            NotKept.COPIES,
            NotKept.GRAPHS,
            NotKept.MUSL,
            NotKept.OTHER_APIS,
            NotKept.POOLS,
            NotKept.SMALL_LAUNCHES,
        ),
        keeps_managed_memory=True,
    )
    if not found.has_core_limit:
        return without_compute(limited)
    if found.module is not None and hides_compute(found.module):
        return without_compute(limited, NotKept.OPEN_MODULES)
    return limited


def _not_shared(use: ClaimUse) -> Refused | None:
    """Its limits are kept for the processes of one PID namespace: a container."""
    if not use.is_shared:
        return None
    return Refused(
        reason=RefusalReason.INVALID_REQUEST,
        detail=f"{use.who} share it, and HAMi-core knows processes by the numbers that they have in their own container:"
        " those of several would be taken for each other, and hang. Make a claim, or a request of it, for each container, or"
        f" {use.remedy}",
    )


ISOLATION = Isolation(
    name="hami-core",
    edit=edit_hami_core,
    keeps=_keeps,
    not_shared=_not_shared,
    cores_follow=Follows.NEW_PROCESSES,  # the library copies this limit once, when it starts its watcher
    memory_follows=Follows.RUNNING_PROCESSES,
    # Read in its source: it takes CUDA_VISIBLE_DEVICES for numbers, and measures compute by the physical GPU's samples.
    why_not_in_mig="its library limits compute by utilisation, and NVML has none where MIG is on",
)
