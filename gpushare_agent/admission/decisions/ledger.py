"""The books as one container sees them: what is free for it on each card, which offered IDs nobody else holds. Pure.

What the pod's own init containers hold counts as free: the kubelet hands it on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gpushare_agent.admission.decisions import memory_share
from gpushare_agent.admission.decisions.identity import Served, initial_ids
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import CORES_PER_CARD, DeviceId, GpuUuid, split_device_id
from gpushare_agent.model.pods import ContainerKind
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.placement import CardState


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings that bear on placement."""

    names: ResourceNames
    share_policy: Literal["binpack", "spread"] = "binpack"
    share_mode: bool = True
    max_shares_of_card: int | None = None
    """Sharing containers that one card can serve: MPS has a bound on its clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """What is taken, as seen by one container: use by others on each card, and who holds each ID."""

    inventory: GpuInventory
    used_cores: Mapping[GpuUuid, int]
    used_blocks: Mapping[GpuUuid, int]
    holders: Mapping[ResourceKind, Mapping[DeviceId, frozenset[ContainerKey]]]
    allocations: Mapping[ContainerKey, Allocation]
    used_gpu_mem: Mapping[GpuUuid, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the kubelet offers in one GetPreferredAllocation. Its "available" is a claim to check."""

    kind: ResourceKind
    available: Sequence[str]
    must_include: Sequence[str]
    size: int


def card_states(
    served: Served | None, books: Books, policy: Policy, *, offered: Collection[DeviceId] | None = None
) -> list[CardState]:
    """Each card as `served` may use it: what the pod's own init containers hold counts as free for it.

    `offered`, where given, are the vcore IDs that the kubelet can hand out: a card has no more room than that.
    """
    per_card: dict[GpuUuid, int] | None = None
    if offered is not None:
        per_card = {}
        for device in offered:
            uuid = GpuUuid(device.partition("::")[0])
            per_card[uuid] = per_card.get(uuid, 0) + 1
    own_cores, own_blocks = _own_initial(served, books) if served is not None else ({}, {})
    full = full_of_shares(served, books, policy) if served is not None else frozenset()
    whole = _whole_of_others(served, books)
    states = []
    for card in books.inventory.cards:
        total = policy.names.units(card, ResourceKind.VMEMORY)
        free = CORES_PER_CARD - books.used_cores.get(card.uuid, 0) + own_cores.get(card.uuid, 0)
        if card.uuid in full:
            free = 0
        if per_card is not None:
            free = min(free, per_card.get(card.uuid, 0))
        left = total - books.used_blocks.get(card.uuid, 0) + own_blocks.get(card.uuid, 0)
        left -= memory_share.blocks_taken(books.used_gpu_mem.get(card.uuid, 0), policy.names)
        states.append(
            CardState(
                index=card.index,
                uuid=card.uuid,
                healthy=card.is_healthy,
                free_cores=max(0, free),
                free_blocks=0 if card.uuid in whole else max(0, min(total, left)),
                total_blocks=total,
            )
        )
    return states


def memory_states(served: Served, books: Books, policy: Policy) -> list[memory_share.MemoryState]:
    """Each card as `served` may use it: what the pod's own init containers hold counts as free for it."""
    use = memory_share.MemoryUse(
        blocks=books.used_blocks, gpu_mem=books.used_gpu_mem, whole=memory_share.whole_cards(books.allocations.values())
    )
    own: Counter[GpuUuid] = Counter()
    for device in initial_ids(served.pod.uid, ResourceKind.GPU_MEM, books.allocations):
        keys = books.holders[ResourceKind.GPU_MEM].get(DeviceId(device), frozenset())
        if keys != {served.key} and may_take_over(served, keys, books):
            own[GpuUuid(device.partition("::")[0])] += 1
    full = full_of_shares(served, books, policy)
    states = []
    for card in books.inventory.cards:
        total = policy.names.units(card, ResourceKind.GPU_MEM)
        free = memory_share.free_gpu_mem(card, use, policy.names) + own[card.uuid]
        states.append(
            memory_share.MemoryState(
                index=card.index,
                uuid=card.uuid,
                is_healthy=card.is_healthy,
                free_units=0 if card.uuid in full else min(total, free),
                total_units=total,
            )
        )
    return states


def free_ids(served: Served, kind: ResourceKind, available: Sequence[str], books: Books) -> list[DeviceId]:
    """The offered IDs that no other container holds by our books, whatever the kubelet says.

    The rest of the offer is taken: the kubelet forgot a holder, which is the fault that this check exists to catch.
    """
    holders = books.holders[kind]
    return [
        DeviceId(device)
        for device in available
        if (keys := holders.get(DeviceId(device))) is None or may_take_over(served, keys, books)
    ]


def must_cards(
    served: Served, offer: Offer, books: Books, kind: ResourceKind = ResourceKind.VCORE
) -> tuple[GpuUuid, ...]:
    """Cards that the container cannot avoid: of the IDs to include, and of what init containers leave to it. `kind` is the
    resource whose IDs bind the card."""
    ids: set[str] = set()
    if offer.kind is kind:
        ids.update(offer.must_include)
    held = books.allocations.get(served.key)
    if held is not None:
        ids |= held.ids(kind)
    if not ids and served.container.kind is not ContainerKind.INIT:
        holders = books.holders[kind]
        ids |= {
            device
            for device in initial_ids(served.pod.uid, kind, books.allocations)
            if may_take_over(served, holders.get(DeviceId(device), frozenset()), books)
        }
    known = books.inventory.by_uuid()
    found = {split[0] for device in ids if (split := split_device_id(device)) is not None and split[0] in known}
    return tuple(sorted(found, key=lambda uuid: known[uuid].index))


def full_of_shares(served: Served, books: Books, policy: Policy) -> frozenset[GpuUuid]:
    """Cards that have as many sharing containers as they can serve. Init containers are over before the others start."""
    if policy.max_shares_of_card is None or policy.names.wanted(served.container, ResourceKind.VCORE) >= CORES_PER_CARD:
        return frozenset()
    shares = Counter(
        card
        for key, held in books.allocations.items()
        if not held.is_whole and held.kind is not ContainerKind.INIT and key != served.key
        for card in held.cards[:1]
    )
    return frozenset(card for card, count in shares.items() if count >= policy.max_shares_of_card)


def _whole_of_others(served: Served | None, books: Books) -> frozenset[GpuUuid]:
    """Whole cards come with all their memory, whether it was asked for or not. Those of the pod's own init containers are
    handed on."""
    return memory_share.whole_cards(
        held
        for key, held in books.allocations.items()
        if served is None or not may_take_over(served, frozenset({key}), books)
    )


def _own_initial(served: Served, books: Books) -> tuple[dict[GpuUuid, int], dict[GpuUuid, int]]:
    """Cores and blocks by card that only the pod's init containers hold: the kubelet hands them on."""
    cores: dict[GpuUuid, int] = {}
    blocks: dict[GpuUuid, set[DeviceId]] = {}
    for key, held in books.allocations.items():
        if key.pod_uid != served.pod.uid or held.kind is not ContainerKind.INIT or key == served.key:
            continue
        for device in held.vmemory_ids if held.cards and not held.is_whole else ():
            if may_take_over(served, books.holders[ResourceKind.VMEMORY].get(device, frozenset()), books):
                blocks.setdefault(held.cards[0], set()).add(device)
    for core in initial_ids(served.pod.uid, ResourceKind.VCORE, books.allocations):
        keys = books.holders[ResourceKind.VCORE].get(DeviceId(core), frozenset())
        if keys != {served.key} and may_take_over(served, keys, books):
            card = GpuUuid(core.partition("::")[0])
            cores[card] = cores.get(card, 0) + 1
    return cores, {card: len(ids) for card, ids in blocks.items()}


def may_take_over(served: Served, keys: frozenset[ContainerKey], books: Books) -> bool:
    """All holders are the container itself or init containers of its pod, whose IDs the kubelet hands on."""
    return all(
        key == served.key
        or (
            key.pod_uid == served.pod.uid
            and (held := books.allocations.get(key)) is not None
            and held.kind is ContainerKind.INIT
        )
        for key in keys
    )
