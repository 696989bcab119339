"""Places and checks a container that asks for GPUShare's resource: memory of one GPU, and nothing else. Pure.

A GPU's memory is one account: what vcuda's blocks, gpu-mem units and whole GPUs have taken is taken for all of them.
A gpu-mem ID binds the GPU, as a vcore ID does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.gpus import Gpu, GpuInventory
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.placement.place import explain_share


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """By GPU: vmemory blocks charged, gpu-mem units held, and the GPUs that are somebody's as a whole."""

    blocks: Mapping[GpuUuid, int]
    gpu_mem: Mapping[GpuUuid, int]
    whole: frozenset[GpuUuid]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryState:
    """A GPU as a memory share may use it, in units."""

    index: int
    uuid: GpuUuid
    is_healthy: bool
    free_units: int
    total_units: int


def whole_gpus(allocations: Iterable[Allocation]) -> frozenset[GpuUuid]:
    """The GPUs that containers hold as a whole."""
    return frozenset(gpu for held in allocations if held.is_whole for gpu in held.gpus)


def free_gpu_mem(gpu: Gpu, use: MemoryUse, names: ResourceNames) -> int:
    """gpu-mem units that the GPU can still give."""
    if gpu.uuid in use.whole:
        return 0
    blocks_mib = use.blocks.get(gpu.uuid, 0) * names.memory_block_mib
    left = (gpu.memory_mib - blocks_mib) // names.gpu_mem_unit_mib - use.gpu_mem.get(gpu.uuid, 0)
    return max(0, left)


def blocks_taken(gpu_mem_units: int, names: ResourceNames) -> int:
    """vmemory blocks that gpu-mem units take from a GPU; a block taken in part is taken."""
    return -(-gpu_mem_units * names.gpu_mem_unit_mib // names.memory_block_mib)


def validate(
    container: ContainerSpec, names: ResourceNames, inventory: GpuInventory, *, share_mode: bool
) -> Refused | None:
    """What is wrong with the wish whatever is free now, None where nothing is."""
    wanted = names.wanted(container, ResourceKind.GPU_MEM)
    asked = describe(wanted, names)
    others = [name for name in (names.vcore, names.vmemory) if container.requests.get(name)]
    if others:
        return _no(
            RefusalReason.INVALID_REQUEST,
            f"{asked} and {' and '.join(others)} cannot be asked for by one container: the first is memory alone, the "
            "others a share of compute and memory. Ask for one or the other.",
        )
    if not share_mode:
        return _no(
            RefusalReason.SHARING_DISABLED,
            f"{asked} is a share of a GPU, and sharing is switched off on this node. Use a node that shares its GPUs.",
        )
    largest = max((names.units(gpu, ResourceKind.GPU_MEM) for gpu in inventory.gpus), default=0)
    if wanted > largest:
        return _no(
            RefusalReason.NOT_ENOUGH_MEMORY,
            f"{asked} is more than any GPU of this node has: the largest has {describe(largest, names)}. A share never "
            "spans GPUs. Ask for less, or use a node with larger GPUs.",
        )
    return None


def effective_request(pod: Pod, container: ContainerSpec, names: ResourceNames) -> int:
    """Units that must be free where the container is placed: an init container's IDs go on to the containers after it, which
    may need more on the same GPU."""
    wanted = names.wanted(container, ResourceKind.GPU_MEM)
    if container.kind is not ContainerKind.INIT:
        return wanted
    pool = need = wanted
    for successor in pod.containers[pod.containers.index(container) + 1 :]:
        units = names.wanted(successor, ResourceKind.GPU_MEM)
        if not units or not pool:
            continue
        need += max(0, units - pool)
        pool = max(pool, units) if successor.kind is ContainerKind.INIT else max(0, pool - units)
    return need


def place_memory(
    units: int,
    states: list[MemoryState],
    names: ResourceNames,
    *,
    share_policy: Literal["binpack", "spread"],
    hint: tuple[int, ...],
    must_gpus: tuple[GpuUuid, ...],
) -> tuple[GpuUuid, str] | Refused:
    """The GPU, and why. The hint is any tenant's word: it counts where that GPU has room."""
    healthy = [state for state in states if state.is_healthy]
    if not healthy:
        return _no(
            RefusalReason.NO_HEALTHY_GPU,
            f"none of the {len(states)} GPUs of this node is healthy. See `gpushare-agent check` there.",
        )
    fitting = [state for state in healthy if state.free_units >= units]
    if must_gpus:
        named = [state for state in fitting if (state.uuid,) == must_gpus]
        if named:
            return named[0].uuid, "the kubelet's IDs name it"
        return _no(
            RefusalReason.WRONG_GPUS,
            f"{describe(units, names)} must come from {', '.join(must_gpus)}, where an init container of the pod is, and "
            "there is not enough room on that GPU. Give init containers as much as the main container, or nothing.",
        )
    if not fitting:
        best = max(healthy, key=lambda state: (state.free_units, -state.index))
        return _no(
            RefusalReason.NOT_ENOUGH_MEMORY,
            f"{describe(units, names)} fit no GPU: GPU {best.index} has most left, {describe(best.free_units, names)} of "
            f"{best.total_units}. Ask for less, or wait until a pod on this node ends.",
        )
    hinted = [state for state in fitting if hint == (state.index,)]
    if hinted:
        return hinted[0].uuid, "the scheduler chose it"
    sign = 1 if share_policy == "binpack" else -1
    chosen = min(fitting, key=lambda state: (sign * state.free_units, state.index))
    return chosen.uuid, explain_share(len(fitting), [(state.free_units,) for state in fitting], share_policy)


def describe(units: int, names: ResourceNames) -> str:
    """`6 aliyun.com/gpu-mem (6144 MiB)`."""
    return f"{units} {names.gpu_mem} ({units * names.gpu_mem_unit_mib} MiB)"


def _no(reason: RefusalReason, detail: str) -> Refused:
    return Refused(reason=reason, detail=detail)
