"""Plans a container's devices when the kubelet asks for a preference, and checks what it then allocates. Pure.

The first GetPreferredAllocation of a container places the whole container, cores and memory; the calls that follow carry
the plan out. A device ID says which card it is on: for vcore it binds the card. For vmemory the IDs are counters, and the
memory is charged to the card that the container's vcore IDs name.

Planning never fails a GetPreferredAllocation: a refusal is kept and becomes the error of the Allocate that follows, where
the kubelet shows it to the user.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gpushare_agent.decisions.identity import Served, initial_ids
from gpushare_agent.decisions.placement import CardRequest, CardState, Placed, place, validate_request
from gpushare_agent.decisions.reuse import reach
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.gpus import Card, GpuInventory
from gpushare_agent.model.names import CORES_PER_CARD, DeviceId, GpuUuid, split_device_id
from gpushare_agent.model.pods import ContainerKind
from gpushare_agent.model.resources import ResourceKind, ResourceNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings that bear on placement."""

    names: ResourceNames
    share_policy: Literal["binpack", "spread"] = "binpack"
    share_mode: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """What is taken, as seen by one container: use by others on each card, and who holds each ID."""

    inventory: GpuInventory
    used_cores: Mapping[GpuUuid, int]
    used_blocks: Mapping[GpuUuid, int]
    holders: Mapping[ResourceKind, Mapping[DeviceId, frozenset[ContainerKey]]]
    allocations: Mapping[ContainerKey, Allocation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the kubelet offers in one GetPreferredAllocation. Its "available" is a claim to check."""

    kind: ResourceKind
    available: Sequence[str]
    must_include: Sequence[str]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where the container goes, and the IDs to prefer for the resource that was asked about."""

    cards: tuple[GpuUuid, ...]
    ids: tuple[DeviceId, ...]
    placed: Placed


def plan(
    served: Served, offer: Offer, free: Sequence[DeviceId], books: Books, policy: Policy, hint: tuple[int, ...]
) -> Plan | Refused:
    """Place the container and choose the IDs of the offered resource from `free` (see `free_ids`)."""
    cores = policy.names.wanted(served.container, ResourceKind.VCORE)
    blocks = policy.names.wanted(served.container, ResourceKind.VMEMORY)
    refused = validate_request(
        cores, blocks, share_mode=policy.share_mode, memory_block_mib=policy.names.memory_block_mib
    )
    if refused is not None:
        return _named(served, refused, policy.names)
    reached = reach(served.pod, served.container, policy.names)
    if isinstance(reached, Refused):
        return reached
    states = card_states(served, books, policy, offered=free if offer.kind is ResourceKind.VCORE else None)
    request = CardRequest(
        cores=reached.cores, blocks=reached.blocks, hint=hint, must_cards=_must_cards(served, offer, books)
    )
    placed = place(
        request,
        states,
        books.inventory.topology,
        share_policy=policy.share_policy,
        share_mode=policy.share_mode,
        memory_block_mib=policy.names.memory_block_mib,
    )
    if isinstance(placed, Refused):
        return _named(served, placed, policy.names)
    ids = _choose(offer, free, placed.cards)
    if len(ids) < offer.size:
        return _too_few(served, offer, len(ids))
    return Plan(cards=placed.cards, ids=ids, placed=placed)


def check(
    served: Served, kind: ResourceKind, ids: Sequence[str], books: Books, policy: Policy, planned: tuple[GpuUuid, ...]
) -> tuple[GpuUuid, ...] | Refused:
    """The cards to which the allocated IDs bind the container, or why they cannot be accepted.

    `planned` are the cards of the plan, needed where vmemory comes first and its IDs say nothing of the card.
    """
    refused = _check_ids(served, kind, ids, books, policy)
    if refused is not None:
        return refused
    held = books.allocations.get(served.key)
    if kind is ResourceKind.VCORE:
        cards = _named_cards(ids, books.inventory)
    elif held is not None and held.vcore_ids:
        cards = held.cards
    else:
        cards = planned
    return _check_cards(served, cards, books, policy, has_ids=kind is ResourceKind.VCORE, ids=ids) or cards


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
    states = []
    for card in books.inventory.cards:
        total = blocks_of(card, policy.names)
        free = CORES_PER_CARD - books.used_cores.get(card.uuid, 0) + own_cores.get(card.uuid, 0)
        if per_card is not None:
            free = min(free, per_card.get(card.uuid, 0))
        left = total - books.used_blocks.get(card.uuid, 0) + own_blocks.get(card.uuid, 0)
        states.append(
            CardState(
                index=card.index,
                uuid=card.uuid,
                healthy=card.is_healthy,
                free_cores=max(0, free),
                free_blocks=max(0, min(total, left)),
                total_blocks=total,
            )
        )
    return states


def blocks_of(card: Card, names: ResourceNames) -> int:
    """Whole memory blocks of a card."""
    return card.memory_mib // names.memory_block_mib


def free_ids(served: Served, kind: ResourceKind, available: Sequence[str], books: Books) -> list[DeviceId]:
    """The offered IDs that no other container holds by our books, whatever the kubelet says.

    The rest of the offer is taken: the kubelet forgot a holder, which is the fault that this check exists to catch.
    """
    holders = books.holders[kind]
    return [
        DeviceId(device)
        for device in available
        if (keys := holders.get(DeviceId(device))) is None or _may_take_over(served, keys, books)
    ]


def _may_take_over(served: Served, keys: frozenset[ContainerKey], books: Books) -> bool:
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


def _own_initial(served: Served, books: Books) -> tuple[dict[GpuUuid, int], dict[GpuUuid, int]]:
    """Cores and blocks by card that only the pod's init containers hold: the kubelet hands them on."""
    cores: dict[GpuUuid, int] = {}
    blocks: dict[GpuUuid, set[DeviceId]] = {}
    for key, held in books.allocations.items():
        if key.pod_uid != served.pod.uid or held.kind is not ContainerKind.INIT or key == served.key:
            continue
        for device in held.vmemory_ids if held.cards and not held.is_whole else ():
            if _may_take_over(served, books.holders[ResourceKind.VMEMORY].get(device, frozenset()), books):
                blocks.setdefault(held.cards[0], set()).add(device)
    for core in initial_ids(served.pod.uid, ResourceKind.VCORE, books.allocations):
        keys = books.holders[ResourceKind.VCORE].get(DeviceId(core), frozenset())
        if keys != {served.key} and _may_take_over(served, keys, books):
            card = GpuUuid(core.partition("::")[0])
            cores[card] = cores.get(card, 0) + 1
    return cores, {card: len(ids) for card, ids in blocks.items()}


def _must_cards(served: Served, offer: Offer, books: Books) -> tuple[GpuUuid, ...]:
    """Cards that the container cannot avoid: of the IDs to include, and of what init containers leave to it."""
    ids: set[str] = set()
    if offer.kind is ResourceKind.VCORE:
        ids.update(offer.must_include)
    held = books.allocations.get(served.key)
    if held is not None:
        ids |= held.vcore_ids
    if not ids and served.container.kind is not ContainerKind.INIT:
        holders = books.holders[ResourceKind.VCORE]
        ids |= {
            device
            for device in initial_ids(served.pod.uid, ResourceKind.VCORE, books.allocations)
            if _may_take_over(served, holders.get(DeviceId(device), frozenset()), books)
        }
    known = books.inventory.by_uuid()
    found = {split[0] for device in ids if (split := split_device_id(device)) is not None and split[0] in known}
    return tuple(sorted(found, key=lambda uuid: known[uuid].index))


def _choose(offer: Offer, free: Sequence[DeviceId], cards: tuple[GpuUuid, ...]) -> tuple[DeviceId, ...]:
    """The IDs to prefer: those to include first, then the lowest free ones of the cards; for vmemory any will do."""
    chosen = dict.fromkeys(DeviceId(device) for device in offer.must_include)
    for card in cards:
        prefix = f"{card}::"
        _fill(chosen, offer.size, [device for device in free if device.startswith(prefix)])
    if offer.kind is ResourceKind.VMEMORY and len(chosen) < offer.size:
        _fill(chosen, offer.size, free)
    return tuple(chosen)


def _fill(chosen: dict[DeviceId, None], size: int, ids: Sequence[DeviceId]) -> None:
    for device in sorted(ids, key=lambda d: (_number(d), d)):
        if len(chosen) >= size:
            return
        chosen[device] = None


def _number(device: str) -> int:
    number = device.rpartition("::")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) <= 6 else 0


def _too_few(served: Served, offer: Offer, found: int) -> Refused:
    name = f"{served.pod.namespace}/{served.pod.name} container {served.container.name}"
    return Refused(
        reason=RefusalReason.DEVICE_IN_USE,
        detail=f"{name} asks for {offer.size} {offer.kind} units, but only {found} of the {len(offer.available)} IDs "
        "that the kubelet offers are really free: containers that still run hold the others. Create the pod again once "
        "they have ended; if it persists, restart the kubelet of this node.",
    )


def _check_ids(served: Served, kind: ResourceKind, ids: Sequence[str], books: Books, policy: Policy) -> Refused | None:
    wanted = policy.names.wanted(served.container, kind)
    if len(set(ids)) != len(ids) or len(ids) != wanted:
        return Refused(
            reason=RefusalReason.INVALID_REQUEST,
            detail=f"{_who(served)} asks for {wanted} {policy.names.name(kind)}, but {len(ids)} device IDs were "
            f"allocated ({len(set(ids))} distinct). Delete the pod and create it again.",
        )
    cards = books.inventory.by_uuid()
    for device in ids:
        split = split_device_id(device)
        limit = CORES_PER_CARD
        card = cards.get(split[0]) if split is not None else None
        if card is not None and kind is ResourceKind.VMEMORY:
            limit = blocks_of(card, policy.names)
        if split is None or card is None or split[1] >= limit:
            return Refused(
                reason=RefusalReason.UNKNOWN_DEVICE,
                detail=f"{_who(served)}: device ID {device[:80]!r} of {policy.names.name(kind)} names no card of this "
                "node. The cards may have changed since the kubelet heard of them; it is told again now. Create the "
                "pod again.",
            )
    free = free_ids(served, kind, ids, books)
    if len(free) < len(ids):
        taken = sorted(set(ids) - set(free))
        return Refused(
            reason=RefusalReason.DEVICE_IN_USE,
            detail=f"{_who(served)}: the kubelet allocated {len(taken)} device ID(s) that another container still "
            f"holds (first: {taken[0]}). Nothing was given twice. Create the pod again.",
        )
    return None


def _check_cards(
    served: Served,
    cards: tuple[GpuUuid, ...],
    books: Books,
    policy: Policy,
    *,
    has_ids: bool,
    ids: Sequence[str],
) -> Refused | None:
    cores = policy.names.wanted(served.container, ResourceKind.VCORE)
    blocks = policy.names.wanted(served.container, ResourceKind.VMEMORY)
    refused = validate_request(
        cores, blocks, share_mode=policy.share_mode, memory_block_mib=policy.names.memory_block_mib
    )
    if refused is not None:
        return _named(served, refused, policy.names)
    wanted_cards = 1 if cores < CORES_PER_CARD else cores // CORES_PER_CARD
    if has_ids and len(cards) != wanted_cards:
        return Refused(
            reason=RefusalReason.WRONG_CARDS,
            detail=f"{_who(served)} asks for {cores} cores, which must come from {wanted_cards} card(s), but the "
            f"allocated IDs are on {len(cards)}: {_spread(ids)}. The kubelet did not follow the preferred allocation "
            "(a reused init container's devices or the topology manager can cause this). Give init containers the same "
            "number of cores as the main container, or none.",
        )
    states = {state.uuid: state for state in card_states(served, books, policy)}
    if not cards or not all(card in states for card in cards):
        return Refused(
            reason=RefusalReason.NOT_READY,
            detail=f"{_who(served)}: the cards changed during its admission. Create the pod again.",
        )
    if cores >= CORES_PER_CARD:
        return _check_whole(served, [states[c] for c in cards], blocks)
    return _check_share(served, states[cards[0]], cores, blocks, policy)


def _check_share(served: Served, state: CardState, cores: int, blocks: int, policy: Policy) -> Refused | None:
    if not state.healthy:
        return _unhealthy(served, state)
    if state.free_cores < cores or state.free_blocks < blocks:
        block = policy.names.memory_block_mib
        return Refused(
            reason=RefusalReason.NOT_ENOUGH_MEMORY if state.free_cores >= cores else RefusalReason.NOT_ENOUGH_CORES,
            detail=f"{_who(served)} asks for {cores} cores and {blocks} memory blocks ({blocks * block} MiB); card "
            f"{state.index} has {state.free_cores} cores and {state.free_blocks} blocks "
            f"({state.free_blocks * block} MiB) free. Ask for less, or wait until a pod on this node ends.",
        )
    return None


def _check_whole(served: Served, states: list[CardState], blocks: int) -> Refused | None:
    for state in states:
        if not state.healthy:
            return _unhealthy(served, state)
        if state.free_cores < CORES_PER_CARD or state.free_blocks < state.total_blocks:
            return Refused(
                reason=RefusalReason.NOT_ENOUGH_CORES,
                detail=f"{_who(served)} asks for whole cards, but card {state.index} is in use: {state.free_cores} of "
                f"{CORES_PER_CARD} cores and {state.free_blocks} of {state.total_blocks} memory blocks are free. "
                "Wait until its shares end, or use a node with a free card.",
            )
    total = sum(state.total_blocks for state in states)
    if blocks > total:
        return Refused(
            reason=RefusalReason.NOT_ENOUGH_MEMORY,
            detail=f"{_who(served)} asks for {blocks} memory blocks, but its {len(states)} card(s) have {total}. "
            "Whole cards come with all their memory: leave the memory request out.",
        )
    return None


def _unhealthy(served: Served, state: CardState) -> Refused:
    return Refused(
        reason=RefusalReason.NO_HEALTHY_CARD,
        detail=f"{_who(served)}: card {state.index} ({state.uuid}) became unhealthy during the admission. Create the "
        "pod again: it will be placed elsewhere.",
    )


def _named_cards(ids: Sequence[str], inventory: GpuInventory) -> tuple[GpuUuid, ...]:
    known = inventory.by_uuid()
    found = {GpuUuid(device.partition("::")[0]) for device in ids}
    return tuple(sorted(found, key=lambda uuid: known[uuid].index))


def _spread(ids: Sequence[str]) -> str:
    counts: dict[str, int] = {}
    for device in ids:
        uuid = device.partition("::")[0]
        counts[uuid] = counts.get(uuid, 0) + 1
    return ", ".join(f"{n} on {uuid}" for uuid, n in sorted(counts.items()))


def _named(served: Served, refused: Refused, names: ResourceNames) -> Refused:
    """Placement knows numbers; the user knows the pod and the resources by name."""
    asked = ", ".join(f"{names.wanted(served.container, kind)} {names.name(kind)}" for kind in ResourceKind)
    return Refused(reason=refused.reason, detail=f"{_who(served)} (asks for {asked}): {refused.detail}")


def _who(served: Served) -> str:
    return f"pod {served.pod.namespace}/{served.pod.name}, container {served.container.name}"
