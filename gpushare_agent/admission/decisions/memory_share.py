"""Places and checks a container that asks for GPUShare's resource: memory of one card, and nothing else. Pure.

A card's memory is one account: what vcuda's blocks, gpu-mem units and whole cards have taken is taken for all of them.
A gpu-mem ID binds the card, as a vcore ID does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.gpus import Card, GpuInventory
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.placement.place import explain_share


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """By card: vmemory blocks charged, gpu-mem units held, and the cards that are somebody's as a whole."""

    blocks: Mapping[GpuUuid, int]
    gpu_mem: Mapping[GpuUuid, int]
    whole: frozenset[GpuUuid]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryState:
    """A card as a memory share may use it, in units."""

    index: int
    uuid: GpuUuid
    is_healthy: bool
    free_units: int
    total_units: int


def whole_cards(allocations: Iterable[Allocation]) -> frozenset[GpuUuid]:
    """The cards that containers hold as a whole."""
    return frozenset(card for held in allocations if held.is_whole for card in held.cards)


def free_gpu_mem(card: Card, use: MemoryUse, names: ResourceNames) -> int:
    """gpu-mem units that the card can still give."""
    if card.uuid in use.whole:
        return 0
    blocks_mib = use.blocks.get(card.uuid, 0) * names.memory_block_mib
    left = (card.memory_mib - blocks_mib) // names.gpu_mem_unit_mib - use.gpu_mem.get(card.uuid, 0)
    return max(0, left)


def blocks_taken(gpu_mem_units: int, names: ResourceNames) -> int:
    """vmemory blocks that gpu-mem units take from a card; a block taken in part is taken."""
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
            f"{asked} is a share of a card, and sharing is switched off on this node. Use a node that shares its cards.",
        )
    largest = max((names.units(card, ResourceKind.GPU_MEM) for card in inventory.cards), default=0)
    if wanted > largest:
        return _no(
            RefusalReason.NOT_ENOUGH_MEMORY,
            f"{asked} is more than any card of this node has: the largest has {describe(largest, names)}. A share never "
            "spans cards. Ask for less, or use a node with larger cards.",
        )
    return None


def reach(pod: Pod, container: ContainerSpec, names: ResourceNames) -> int:
    """Units that must be free where the container is placed: an init container's IDs go on to the containers after it, which
    may need more on the same card."""
    wanted = names.wanted(container, ResourceKind.GPU_MEM)
    if container.kind is not ContainerKind.INIT:
        return wanted
    pool = need = wanted
    for heir in pod.containers[pod.containers.index(container) + 1 :]:
        units = names.wanted(heir, ResourceKind.GPU_MEM)
        if not units or not pool:
            continue
        need += max(0, units - pool)
        pool = max(pool, units) if heir.kind is ContainerKind.INIT else max(0, pool - units)
    return need


def place_memory(
    units: int,
    states: list[MemoryState],
    names: ResourceNames,
    *,
    share_policy: Literal["binpack", "spread"],
    hint: tuple[int, ...],
    must_cards: tuple[GpuUuid, ...],
) -> tuple[GpuUuid, str] | Refused:
    """The card, and why. The hint is any tenant's word: it counts where that card has room."""
    healthy = [state for state in states if state.is_healthy]
    if not healthy:
        return _no(
            RefusalReason.NO_HEALTHY_CARD,
            f"none of the {len(states)} cards of this node is healthy. See `gpushare-agent check` there.",
        )
    fitting = [state for state in healthy if state.free_units >= units]
    if must_cards:
        named = [state for state in fitting if (state.uuid,) == must_cards]
        if named:
            return named[0].uuid, "the kubelet's IDs name it"
        return _no(
            RefusalReason.WRONG_CARDS,
            f"{describe(units, names)} must come from {', '.join(must_cards)}, where an init container of the pod is, and "
            "there is not enough room on that card. Give init containers as much as the main container, or nothing.",
        )
    if not fitting:
        best = max(healthy, key=lambda state: (state.free_units, -state.index))
        return _no(
            RefusalReason.NOT_ENOUGH_MEMORY,
            f"{describe(units, names)} fit no card: card {best.index} has most left, {describe(best.free_units, names)} of "
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
