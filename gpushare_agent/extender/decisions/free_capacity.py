"""The free capacity of one node in short: whether a pod fits, why not, and the node's score. Pure.

A cluster has thousands of nodes and the scheduler waits for every answer, so the exact planning (pod_plan.py) runs only
where the summary cannot decide: never for a pod of which one container asks for GPUs, which is nearly every pod.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpushare_agent.model.names import CORES_PER_GPU
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.placement import GpuAccount
from gpushare_agent.placement.request import SharePolicy

MAX_SCORE = 10
"""MaxExtenderPriority of kube-scheduler."""
_TIGHT_WEIGHT = 0.5
_KINDS = (ResourceKind.VCORE, ResourceKind.VMEMORY, ResourceKind.GPU_MEM)


@dataclass(frozen=True, slots=True)
class ContainerRequest:
    """What one container asks for. Positional, for it is a part of keys of caches."""

    kind: ContainerKind
    cores: int
    blocks: int
    units: int


Signature = tuple[ContainerRequest, ...]
"""Of a pod: pods of one signature fit the same nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCapacity:
    """Free and used on one node, of its healthy GPUs and of MIG instances that take shares. `free` has (cores, blocks,
    units) of each; `whole_blocks` the blocks of the wholly free GPUs, most first; `all_blocks` and `all_units` those of
    every GPU were it empty, most first."""

    free: tuple[tuple[int, int, int], ...]
    whole_blocks: tuple[int, ...]
    all_blocks: tuple[int, ...]
    all_units: tuple[int, ...]
    used_cores: int
    used_memory_mib: int
    memory_mib: int


def signature_of(pod: Pod, names: ResourceNames) -> Signature:
    """The containers that ask for something of ours, in the kubelet's order; empty where none does."""
    return tuple(
        ContainerRequest(container.kind, *wanted)
        for container in pod.containers
        if any(wanted := tuple(names.wanted(container, kind) for kind in _KINDS))
    )


def capacity_of(gpus: Sequence[GpuAccount]) -> NodeCapacity:
    free, whole, all_blocks, all_units = [], [], [], []
    used_cores = used_mib = memory_mib = 0
    for gpu in gpus:
        if not gpu.is_healthy or not gpu.takes_shares:
            continue
        total, cores, blocks = gpu.total_blocks, gpu.free_cores, gpu.free_blocks
        free.append((cores, blocks, gpu.free_units))
        if cores == CORES_PER_GPU and blocks == total and not gpu.is_instance:
            whole.append(total)
        all_blocks.append(total)
        all_units.append(gpu.total_units)
        used_cores += CORES_PER_GPU - cores
        used_mib += (total - blocks) * gpu.block_mib
        memory_mib += gpu.memory_mib
    return NodeCapacity(
        free=tuple(free),
        whole_blocks=tuple(sorted(whole, reverse=True)),
        all_blocks=tuple(sorted(all_blocks, reverse=True)),
        all_units=tuple(sorted(all_units, reverse=True)),
        used_cores=used_cores,
        used_memory_mib=used_mib,
        memory_mib=memory_mib,
    )


def exceeds_node(node: NodeCapacity, request: ContainerRequest) -> bool:
    """Not even an empty node of this kind can serve it: to evict others does not help."""
    if request.cores >= CORES_PER_GPU:
        count = request.cores // CORES_PER_GPU
        return len(node.all_blocks) < count or sum(node.all_blocks[:count]) < request.blocks
    if request.units:
        return not node.all_units or node.all_units[0] < request.units
    return not node.all_blocks or node.all_blocks[0] < request.blocks


def fits(node: NodeCapacity, request: ContainerRequest) -> bool:
    """Exact for a container that is alone in its pod; for one of several it is only necessary."""
    if request.cores >= CORES_PER_GPU:
        count = request.cores // CORES_PER_GPU
        return len(node.whole_blocks) >= count and sum(node.whole_blocks[:count]) >= request.blocks
    wanted_cores, wanted_blocks, wanted_units = request.cores, request.blocks, request.units
    for cores, blocks, units in node.free:  # a loop and no generator: thousands of nodes are asked in one answer
        if cores >= wanted_cores and blocks >= wanted_blocks and units >= wanted_units:
            return True
    return False


def may_fit_together(node: NodeCapacity, requests: Signature) -> bool:
    """False where the containers ask for more in sum than is free, so that they cannot all fit whatever goes where. Init
    containers hand on what they have, so only the others are added up."""
    asked = _together(requests)
    free = [sum(gpu[n] for gpu in node.free) for n in range(3)]
    return all(wanted <= left for wanted, left in zip(asked, free, strict=True))


def together_text(node: NodeCapacity, requests: Signature) -> str:
    cores, blocks, units = _together(requests)
    left = [sum(gpu[n] for gpu in node.free) for n in range(3)]
    asked = f"{cores} cores and {blocks} memory blocks" + (f" and {units} units of memory" if units else "")
    return f"the pod's containers ask for {asked} together, the node has {left[0]} cores and {left[1]} blocks free"


def _together(requests: Signature) -> tuple[int, int, int]:
    lasting = [request for request in requests if request.kind is not ContainerKind.INIT]
    return (
        sum(request.cores for request in lasting),
        sum(request.blocks for request in lasting if request.cores < CORES_PER_GPU),
        sum(request.units for request in lasting),
    )


def lack_text(node: NodeCapacity, request: ContainerRequest, names: ResourceNames) -> str:
    """Why it does not fit, in a sentence that is the same for nodes in the same state."""
    if not node.free:
        return "the node has no healthy GPU"
    if request.cores >= CORES_PER_GPU:
        count = request.cores // CORES_PER_GPU
        if len(node.free) < count:
            return f"{_gpus(count, 'whole')} wanted, the node has {_gpus(len(node.free), 'healthy')}"
        if len(node.whole_blocks) < count:
            free = len(node.whole_blocks)
            return f"{_gpus(count, 'wholly free')} wanted, {free} of {len(node.free)} {'is' if free == 1 else 'are'}"
        if count == 1:
            return f"no free GPU has {request.blocks} memory blocks"
        return f"the largest {count} free GPUs have less than {request.blocks} memory blocks together"
    if request.units:
        best = max(units for _, _, units in node.free)
        return f"{request.units} {names.gpu_mem} wanted on one GPU, the best has {best} free"
    cores, blocks = max(gpu[0] for gpu in node.free), max(gpu[1] for gpu in node.free)
    asked = f"{request.cores} cores and {request.blocks} memory blocks wanted on one GPU"
    if cores < request.cores:
        return f"{asked}, no GPU has more than {cores} cores free"
    if blocks < request.blocks:
        return f"{asked}, no GPU has more than {blocks} blocks free"
    return f"{asked}, no GPU has both free: at most {cores} cores, and {blocks} blocks on another"


def gpu_text(gpu: GpuAccount, request: ContainerRequest) -> str:
    """What one GPU lacks for a container of one GPU or more, by itself; empty where it lacks nothing."""
    if not gpu.is_healthy:
        return "out of service"
    cores, blocks = gpu.free_cores, gpu.free_blocks
    if request.cores >= CORES_PER_GPU and gpu.is_instance:
        return "a MIG instance is no whole GPU"
    if request.cores < CORES_PER_GPU and not gpu.takes_shares:
        return "a MIG instance that cannot be shared here"
    if request.cores >= CORES_PER_GPU:
        return "" if cores == CORES_PER_GPU and blocks == gpu.total_blocks else "not wholly free"
    lacks = []
    if cores < request.cores:
        lacks.append(f"{request.cores - cores} GPU cores")
    if blocks < request.blocks:
        lacks.append(f"{(request.blocks - blocks) * gpu.block_mib / 1024:g} GiB")
    if gpu.free_units < request.units:
        lacks.append(f"{(request.units - gpu.free_units) * gpu.unit_mib / 1024:g} GiB")
    return f"lacks {' and '.join(lacks)}" if lacks else ""


def score(node: NodeCapacity, requests: Signature, node_policy: SharePolicy) -> int:
    """0..10, of a node where the pod fits. The part is the same for every node; what differs is what the node has left.

    binpack: full nodes first, and for a share nodes where a used GPU takes it, so that no free GPU is broken up; for
    whole GPUs nodes whose free GPUs are exactly used up. spread: the other way round.
    """
    capacity = CORES_PER_GPU * len(node.free) or 1
    fullness = (node.used_cores / capacity + node.used_memory_mib / (node.memory_mib or 1)) / 2
    if node_policy == "spread":
        return round(MAX_SCORE * (1 - fullness))
    tight = sum(_tightness(node, request) for request in requests) / len(requests)
    return round(MAX_SCORE * ((1 - _TIGHT_WEIGHT) * fullness + _TIGHT_WEIGHT * tight))


def _tightness(node: NodeCapacity, request: ContainerRequest) -> float:
    """1 where nothing is broken up by it, 0 where it takes a part of a node's only free GPUs."""
    if request.cores >= CORES_PER_GPU:
        count = request.cores // CORES_PER_GPU
        return count / max(count, len(node.whole_blocks))
    left = [
        cores - request.cores
        for cores, blocks, units in node.free
        if request.cores <= cores < CORES_PER_GPU and blocks >= request.blocks and units >= request.units
    ]
    return 1 - min(left) / (2 * CORES_PER_GPU) if left else 0.0


def _gpus(count: int, kind: str) -> str:
    return f"{count} {kind} GPU{'' if count == 1 else 's'}"
