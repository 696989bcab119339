"""What one node still has, in short: enough to say of most nodes at once whether a pod fits, and why not. Pure.

A cluster has thousands of nodes and the scheduler waits for every answer. So the exact planning (pod_plan.py) is asked only
where the summary cannot decide: never for a pod with one container that asks, which is nearly every pod.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gpushare_agent.admission.decisions import memory_share
from gpushare_agent.extender.pod_plan import GpuRoom
from gpushare_agent.model.names import CORES_PER_GPU
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames

MAX_SCORE = 10
"""MaxExtenderPriority of kube-scheduler."""
_TIGHT_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class Wish:
    """What one container asks for. Positional, for it is a part of keys of caches."""

    kind: ContainerKind
    cores: int
    blocks: int
    units: int


Signature = tuple[Wish, ...]
"""Of a pod: pods of one signature fit the same nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoom:
    """Of the healthy GPUs only. `free` has (cores, blocks, units) for each; `whole_blocks` the blocks of the wholly free
    GPUs, most first; `all_blocks` and `all_units` those of every healthy GPU were it empty."""

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
        Wish(container.kind, *wanted)
        for container in pod.containers
        if any(wanted := tuple(names.wanted(container, kind) for kind in ResourceKind))
    )


def room_of(rooms: Sequence[GpuRoom], names: ResourceNames) -> NodeRoom:
    free, whole, all_blocks, all_units = [], [], [], []
    used_cores = used_mib = memory_mib = 0
    for room in rooms:
        if not room.is_healthy:
            continue
        total = room.memory_mib // names.memory_block_mib
        left = 0 if room.is_whole else max(0, total - room.blocks - memory_share.blocks_taken(room.units, names))
        cores = max(0, CORES_PER_GPU - room.cores)
        free.append((cores, min(left, total), _free_units(room, names)))
        if cores == CORES_PER_GPU and left >= total:
            whole.append(total)
        all_blocks.append(total)
        all_units.append(room.memory_mib // names.gpu_mem_unit_mib)
        used_cores += CORES_PER_GPU - cores
        used_mib += (total - left) * names.memory_block_mib
        memory_mib += room.memory_mib
    return NodeRoom(
        free=tuple(free),
        whole_blocks=tuple(sorted(whole, reverse=True)),
        all_blocks=tuple(sorted(all_blocks, reverse=True)),
        all_units=tuple(sorted(all_units, reverse=True)),
        used_cores=used_cores,
        used_memory_mib=used_mib,
        memory_mib=memory_mib,
    )


def _free_units(room: GpuRoom, names: ResourceNames) -> int:
    if room.is_whole:
        return 0
    left_mib = room.memory_mib - room.blocks * names.memory_block_mib
    return max(0, left_mib // names.gpu_mem_unit_mib - room.units)


def lacks_at_all(room: NodeRoom, wish: Wish) -> bool:
    """Not even an empty node of this kind could serve it: to evict others does not help."""
    if wish.cores >= CORES_PER_GPU:
        count = wish.cores // CORES_PER_GPU
        return len(room.all_blocks) < count or sum(room.all_blocks[:count]) < wish.blocks
    if wish.units:
        return not room.all_units or room.all_units[0] < wish.units
    return not room.all_blocks or room.all_blocks[0] < wish.blocks


def has_room(room: NodeRoom, wish: Wish) -> bool:
    """Exact for a container that is alone in its pod; for one of several it is only necessary."""
    if wish.cores >= CORES_PER_GPU:
        count = wish.cores // CORES_PER_GPU
        return len(room.whole_blocks) >= count and sum(room.whole_blocks[:count]) >= wish.blocks
    wanted_cores, wanted_blocks, wanted_units = wish.cores, wish.blocks, wish.units
    for cores, blocks, units in room.free:  # a loop and no generator: thousands of nodes are asked in one answer
        if cores >= wanted_cores and blocks >= wanted_blocks and units >= wanted_units:
            return True
    return False


def may_fit_together(room: NodeRoom, wishes: Signature) -> bool:
    """False where the containers cannot all have room whatever goes where: their sum is more than what is free. Init
    containers hand on what they hold, so only the others are added up."""
    asked = _together(wishes)
    free = [sum(gpu[n] for gpu in room.free) for n in range(3)]
    return all(wanted <= left for wanted, left in zip(asked, free, strict=True))


def together_text(room: NodeRoom, wishes: Signature) -> str:
    cores, blocks, units = _together(wishes)
    left = [sum(gpu[n] for gpu in room.free) for n in range(3)]
    asked = f"{cores} cores and {blocks} memory blocks" + (f" and {units} units of memory" if units else "")
    return f"the pod's containers ask for {asked} together, the node has {left[0]} cores and {left[1]} blocks free"


def _together(wishes: Signature) -> tuple[int, int, int]:
    lasting = [wish for wish in wishes if wish.kind is not ContainerKind.INIT]
    return (
        sum(wish.cores for wish in lasting),
        sum(wish.blocks for wish in lasting if wish.cores < CORES_PER_GPU),
        sum(wish.units for wish in lasting),
    )


def lack_text(room: NodeRoom, wish: Wish, names: ResourceNames) -> str:
    """Why it has not, in a sentence that is the same for nodes in the same state."""
    if not room.free:
        return "the node has no healthy GPU"
    if wish.cores >= CORES_PER_GPU:
        count = wish.cores // CORES_PER_GPU
        if len(room.free) < count:
            return f"{count} whole GPUs wanted, the node has {len(room.free)} healthy ones"
        if len(room.whole_blocks) < count:
            return f"{count} wholly free GPUs wanted, {len(room.whole_blocks)} of {len(room.free)} are"
        return f"the largest {count} free GPUs have less than {wish.blocks} memory blocks together"
    if wish.units:
        best = max(units for _, _, units in room.free)
        return f"{wish.units} {names.gpu_mem} wanted on one GPU, the best has {best} free"
    cores, blocks = max(gpu[0] for gpu in room.free), max(gpu[1] for gpu in room.free)
    asked = f"{wish.cores} cores and {wish.blocks} memory blocks wanted on one GPU"
    if cores < wish.cores:
        return f"{asked}, no GPU has more than {cores} cores free"
    if blocks < wish.blocks:
        return f"{asked}, no GPU has more than {blocks} blocks free"
    return f"{asked}, no GPU has both free: at most {cores} cores, and {blocks} blocks on another"


def score(room: NodeRoom, wishes: Signature, node_policy: Literal["binpack", "spread"]) -> int:
    """0..10, of a node where the pod fits. The part is the same for every node; what differs is what the node has left.

    binpack: full nodes first, and for a share nodes where a used GPU takes it, so that no free GPU is broken up; for
    whole GPUs nodes whose free GPUs are used up by it. spread: the other way round.
    """
    capacity = CORES_PER_GPU * len(room.free) or 1
    fullness = (room.used_cores / capacity + room.used_memory_mib / (room.memory_mib or 1)) / 2
    if node_policy == "spread":
        return round(MAX_SCORE * (1 - fullness))
    tight = sum(_tightness(room, wish) for wish in wishes) / len(wishes)
    return round(MAX_SCORE * ((1 - _TIGHT_WEIGHT) * fullness + _TIGHT_WEIGHT * tight))


def _tightness(room: NodeRoom, wish: Wish) -> float:
    """1 where nothing is broken up by it, 0 where it takes a part of a node's only free GPUs."""
    if wish.cores >= CORES_PER_GPU:
        count = wish.cores // CORES_PER_GPU
        return count / max(count, len(room.whole_blocks))
    left = [
        cores - wish.cores
        for cores, blocks, units in room.free
        if wish.cores <= cores < CORES_PER_GPU and blocks >= wish.blocks and units >= wish.units
    ]
    return 1 - min(left) / (2 * CORES_PER_GPU) if left else 0.0
