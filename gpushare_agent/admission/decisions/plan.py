"""Plans a container's devices when the kubelet asks for a preference, and checks what it then allocates. Pure.

The first GetPreferredAllocation of a container places the whole container, cores and memory; the calls that follow carry
the plan out. A device ID says which card it is on: for vcore it binds the card. For vmemory the IDs are counters, and the
memory is charged to the card that the container's vcore IDs name.

Planning never fails a GetPreferredAllocation: a refusal is kept and becomes the error of the Allocate that follows, where
the kubelet shows it to the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpushare_agent.admission.decisions import memory_share
from gpushare_agent.admission.decisions.identity import Served
from gpushare_agent.admission.decisions.ledger import (
    Books,
    Offer,
    Policy,
    card_states,
    free_ids,
    full_of_shares,
    memory_states,
    must_cards,
)
from gpushare_agent.admission.decisions.reuse import reach
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import CORES_PER_CARD, DeviceId, GpuUuid, split_device_id
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.placement import CardRequest, CardState, Placed, place, validate_request

_ABOUT_ROOM = frozenset(
    {
        RefusalReason.NO_HEALTHY_CARD,
        RefusalReason.NOT_ENOUGH_CORES,
        RefusalReason.NOT_ENOUGH_MEMORY,
        RefusalReason.FRAGMENTED,
    }
)
_CARDS_NAMED = 3
_REASON_CHARS = 160
"""Of a driver's words: the kubelet shows the text in the pod's status."""


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
    if policy.names.wanted(served.container, ResourceKind.GPU_MEM):
        return _plan_memory(served, offer, free, books, policy, hint)
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
        cores=reached.cores, blocks=reached.blocks, hint=hint, must_cards=must_cards(served, offer, books)
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
        return _named(served, _with_absent_cards(served, placed, books, policy), policy.names)
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
    if policy.names.wanted(served.container, ResourceKind.GPU_MEM):
        return _check_memory(served, _named_cards(ids, books.inventory), ids, books, policy)
    held = books.allocations.get(served.key)
    if kind is ResourceKind.VCORE:
        cards = _named_cards(ids, books.inventory)
    elif held is not None and held.vcore_ids:
        cards = held.cards
    else:
        cards = planned
    return _check_cards(served, cards, books, policy, has_ids=kind is ResourceKind.VCORE, ids=ids) or cards


def _with_absent_cards(served: Served, refused: Refused, books: Books, policy: Policy) -> Refused:
    """Adds which cards were not counted, and why: the reader looks for room where there is none for another reason."""
    if refused.reason not in _ABOUT_ROOM:
        return refused
    told = ""
    full = full_of_shares(served, books, policy)
    if full:
        told += (
            f" {len(full)} cards count as full, for they have {policy.max_shares_of_card} sharing containers, the most "
            "that one serves (setting mps.max_clients)."
        )
    unhealthy = [card for card in books.inventory.cards if not card.is_healthy]
    if unhealthy:
        named = "; ".join(
            f"card {card.index}: {card.unhealthy_reason[:_REASON_CHARS].rstrip('.') or 'no reason given'}"
            for card in sorted(unhealthy, key=lambda card: card.index)[:_CARDS_NAMED]
        )
        more = f"; and {len(unhealthy) - _CARDS_NAMED} more" if len(unhealthy) > _CARDS_NAMED else ""
        told += f" Out of service, and not counted: {named}{more}."
    return replace(refused, detail=refused.detail + told) if told else refused


def _plan_memory(
    served: Served, offer: Offer, free: Sequence[DeviceId], books: Books, policy: Policy, hint: tuple[int, ...]
) -> Plan | Refused:
    names = policy.names
    refused = memory_share.validate(served.container, names, books.inventory, share_mode=policy.share_mode)
    if refused is not None:
        return _named(served, refused, names)
    placed = memory_share.place_memory(
        memory_share.reach(served.pod, served.container, names),
        memory_states(served, books, policy),
        names,
        share_policy=policy.share_policy,
        hint=hint,
        must_cards=must_cards(served, offer, books, ResourceKind.GPU_MEM),
    )
    if isinstance(placed, Refused):
        return _named(served, _with_absent_cards(served, placed, books, policy), names)
    card, why = placed
    ids = _choose(offer, free, (card,))
    if len(ids) < offer.size:
        return _too_few(served, offer, len(ids))
    return Plan(cards=(card,), ids=ids, placed=Placed(cards=(card,), policy="memory", explanation=why))


def _check_memory(
    served: Served, cards: tuple[GpuUuid, ...], ids: Sequence[str], books: Books, policy: Policy
) -> tuple[GpuUuid, ...] | Refused:
    names = policy.names
    refused = memory_share.validate(served.container, names, books.inventory, share_mode=policy.share_mode)
    if refused is not None:
        return _named(served, refused, names)
    if len(cards) != 1:
        return Refused(
            reason=RefusalReason.WRONG_CARDS,
            detail=f"{_who(served)} asks for memory of one card, but the allocated IDs are on {len(cards)}: {_spread(ids)}. "
            "The kubelet did not follow the preferred allocation (a reused init container's devices or the topology "
            "manager can cause this). Give init containers the same amount as the main container, or none.",
        )
    state = next(state for state in memory_states(served, books, policy) if state.uuid == cards[0])
    if not state.is_healthy:
        return _unhealthy(served, state)
    if state.free_units < len(ids):
        return Refused(
            reason=RefusalReason.NOT_ENOUGH_MEMORY,
            detail=f"{_who(served)} asks for {memory_share.describe(len(ids), names)}; card {state.index} has "
            f"{memory_share.describe(state.free_units, names)} free. Ask for less, or wait until a pod on this node ends.",
        )
    return cards


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
        card = cards.get(split[0]) if split is not None else None
        if split is None or card is None or split[1] >= policy.names.units(card, kind):
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


def _unhealthy(served: Served, state: CardState | memory_share.MemoryState) -> Refused:
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
    wanted = {kind: names.wanted(served.container, kind) for kind in names.kinds}
    asked = ", ".join(
        f"{count} {names.name(kind)}" for kind, count in wanted.items() if count or kind is not ResourceKind.GPU_MEM
    )
    return Refused(reason=refused.reason, detail=f"{_who(served)} (asks for {asked}): {refused.detail}")


def _who(served: Served) -> str:
    return f"pod {served.pod.namespace}/{served.pod.name}, container {served.container.name}"
