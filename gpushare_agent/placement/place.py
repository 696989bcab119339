"""The one entrance of placement: finds the policy for a request and applies it."""

from __future__ import annotations

from collections.abc import Sequence

from gpushare_agent.model.errors import Refused
from gpushare_agent.model.names import MEMORY_BLOCK_MIB
from gpushare_agent.model.topology import Topology
from gpushare_agent.placement.fragment import choose_fragment
from gpushare_agent.placement.link import FreeCard, LinkSet, choose_linked
from gpushare_agent.placement.refusals import Refusals
from gpushare_agent.placement.request import CardRequest, CardState, Placed, validate_request
from gpushare_agent.placement.share import SharePolicy, choose_share, has_room


def place(
    request: CardRequest,
    cards: Sequence[CardState],
    topology: Topology,
    *,
    share_policy: SharePolicy,
    share_mode: bool = True,
    memory_block_mib: int = MEMORY_BLOCK_MIB,
) -> Placed | Refused:
    """Chooses the card of a share or the whole cards of a container, or says why there are none.

    `memory_block_mib` is used for the texts only.
    """
    invalid = validate_request(request.cores, request.blocks, share_mode=share_mode, memory_block_mib=memory_block_mib)
    if invalid is not None:
        return invalid
    healthy = sorted((card for card in cards if card.healthy), key=lambda card: card.index)
    refusals = Refusals(request=request, healthy=healthy, number_of_cards=len(cards), memory_block_mib=memory_block_mib)
    if not healthy:
        return refusals.no_healthy_card()
    if request.whole_cards:
        return _place_whole(request, healthy, topology, refusals)
    return _place_share(request, healthy, share_policy, refusals)


def _place_share(
    request: CardRequest, healthy: Sequence[CardState], share_policy: SharePolicy, refusals: Refusals
) -> Placed | Refused:
    fitting = [card for card in healthy if has_room(card, request)]
    if request.must_cards:
        named = [card for card in fitting if {card.uuid} == set(request.must_cards)]
        return _placed(named, "must-include", "the kubelet's IDs name it") if named else refusals.wrong_cards()
    if not fitting:
        return refusals.no_room_for_share()
    hinted = _hinted(request, fitting, 1)
    if hinted:
        return _placed(hinted, "hint", "the scheduler chose it")
    chosen = choose_share(fitting, share_policy)
    return _placed([chosen], "share", explain_share(len(fitting), [_free(card) for card in fitting], share_policy))


def explain_share(count: int, free: Sequence[tuple[int, ...]], share_policy: SharePolicy) -> str:
    """Why this one of the cards with room; `free` is what each has left."""
    if count == 1:
        return "the only card with room"
    if len(set(free)) == 1:
        return f"the first of {count} cards with the same room"
    which = "fullest" if share_policy == "binpack" else "emptiest"
    return f"the {which} of {count} cards with room"


def _free(card: CardState) -> tuple[int, int]:
    return card.free_cores, card.free_blocks


def _place_whole(
    request: CardRequest, healthy: Sequence[CardState], topology: Topology, refusals: Refusals
) -> Placed | Refused:
    free = [card for card in healthy if card.is_free]
    must = frozenset(card.index for card in free if card.uuid in request.must_cards)
    if len(must) != len(set(request.must_cards)):
        return refusals.wrong_cards()
    hinted = _hinted(request, free, request.whole_cards)
    if hinted and must <= {card.index for card in hinted} and _have_memory(hinted, request):
        return _placed(hinted, "hint", "the scheduler chose this")
    if request.whole_cards == 1 and not must:
        return _place_fragment(request, free, topology, refusals)
    found = choose_linked(
        topology.links,
        [FreeCard(index=card.index, blocks=card.total_blocks) for card in free],
        request.whole_cards,
        blocks=request.blocks,
        must=must,
    )
    if found is None:
        return refusals.wrong_cards() if must else refusals.no_room_for_whole()
    policy = "must-include" if must else "link"
    return _placed([card for card in free if card.index in found.cards], policy, _explain_link(found, len(free), must))


def _place_fragment(
    request: CardRequest, free: Sequence[CardState], topology: Topology, refusals: Refusals
) -> Placed | Refused:
    fitting = [card for card in free if _have_memory([card], request)]
    if not fitting:
        return refusals.no_room_for_whole()
    index = choose_fragment(topology.root, {card.index for card in free}, {card.index for card in fitting})
    why = f"of {len(fitting)} free cards, the one in the branch that is broken up most"
    return _placed([card for card in free if card.index == index], "fragment", why)


def _hinted(request: CardRequest, usable: Sequence[CardState], count: int) -> list[CardState]:
    """The cards that the hint names, empty where it is not `count` different usable ones: a hint may say anything."""
    if len(request.hint) != count:
        return []
    named = [card for card in usable if card.index in request.hint]
    return named if len(named) == count else []


def _have_memory(cards: Sequence[CardState], request: CardRequest) -> bool:
    return sum(card.total_blocks for card in cards) >= request.blocks


def _explain_link(found: LinkSet, free: int, must: frozenset[int]) -> str:
    among = f"all sets with {sorted(must)}, which the kubelet's IDs name" if must else "all sets"
    how = f"the least of {among}" if found.is_exact else f"the best of {found.steps} sets tried"
    return f"of {free} free cards, at a total link cost of {found.cost}, {how}"


def _placed(cards: Sequence[CardState], policy: str, why: str) -> Placed:
    names = ", ".join(str(card.index) for card in cards)
    return Placed(
        cards=tuple(card.uuid for card in cards),
        policy=policy,
        explanation=f"{'card' if len(cards) == 1 else 'cards'} {names}: {why}",
    )
