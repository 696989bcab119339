"""Why no card can be given, in words for the pod's owner: what was asked, what is free, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.names import CORES_PER_CARD, GpuUuid
from gpushare_agent.placement.request import CardRequest, CardState, describe_blocks, describe_request

_WAIT = "Wait for pods on this node to end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """Writes refusals of one request. `healthy` is every healthy card, by index; `number_of_cards` counts all."""

    request: CardRequest
    healthy: Sequence[CardState]
    number_of_cards: int
    memory_block_mib: int

    def no_healthy_card(self) -> Refused:
        if self.number_of_cards == 0:
            state = "this node has no cards that the driver can name"
        else:
            state = f"none of the {self.number_of_cards} cards of this node is healthy"
        advice = "Look for the reason in the agent's log; the pod can run on another node."
        return self._refuse(RefusalReason.NO_HEALTHY_CARD, f"{state}. {advice}")

    def no_room_for_share(self) -> Refused:
        largest = self._largest(1)
        if self.request.blocks > sum(card.total_blocks for card in largest):
            return self._larger_than("the largest card of this node", largest)
        free_cores = sum(card.free_cores for card in self.healthy)
        free_blocks = sum(card.free_blocks for card in self.healthy)
        best = self._best_free()
        if free_cores < self.request.cores:
            reason, state = RefusalReason.NOT_ENOUGH_CORES, f"only {free_cores} cores are free on all cards together"
        elif free_blocks < self.request.blocks:
            reason = RefusalReason.NOT_ENOUGH_MEMORY
            state = f"only {self._blocks(free_blocks)} are free on all cards together"
        else:
            reason = RefusalReason.FRAGMENTED
            state = (
                f"{free_cores} cores and {self._blocks(free_blocks)} are free in all, but no card has enough of both"
            )
        have = f"the best is card {best.index} with {best.free_cores} cores and {self._blocks(best.free_blocks)} free"
        return self._refuse(reason, f"{state}; {have}. {_WAIT}, or ask for less.")

    def no_room_for_whole(self) -> Refused:
        wanted = self.request.whole_cards
        if wanted > len(self.healthy):
            state = f"{wanted} whole cards are more than the {len(self.healthy)} healthy cards of this node"
            advice = f"Ask for at most {len(self.healthy) * CORES_PER_CARD} cores, or use a larger node."
            return self._refuse(RefusalReason.NOT_ENOUGH_CORES, f"{state}. {advice}")
        largest = self._largest(wanted)
        if self.request.blocks > sum(card.total_blocks for card in largest):
            return self._larger_than(f"the {wanted} largest cards of this node together", largest)
        free = [card for card in self.healthy if card.is_free]
        if len(free) >= wanted:
            roomiest = sum(sorted((card.total_blocks for card in free), reverse=True)[:wanted])
            state = f"the {wanted} largest of {len(free)} free cards have {self._blocks(roomiest)} together"
            return self._refuse(RefusalReason.NOT_ENOUGH_MEMORY, f"{state}. {_WAIT}, or ask for less memory.")
        return self._too_few_free(wanted, free)

    def wrong_cards(self) -> Refused:
        """The must-include cards cannot be given."""
        named = ", ".join(self._state_of(uuid) for uuid in sorted(set(self.request.must_cards)))
        need = "one card" if not self.request.whole_cards else f"{self.request.whole_cards} wholly free cards"
        state = f"the kubelet insists on devices of {named}, which cannot be part of {need} with room for this"
        advice = "Delete the pod, so that it is admitted afresh; if that recurs, restart the kubelet."
        return self._refuse(RefusalReason.WRONG_CARDS, f"{state}. {advice}")

    def _too_few_free(self, wanted: int, free: Sequence[CardState]) -> Refused:
        cores = sum(card.free_cores for card in self.healthy)
        free_names = f"{len(free)} of {len(self.healthy)} cards {'is' if len(free) == 1 else 'are'} wholly free"
        if cores >= wanted * CORES_PER_CARD:
            state = f"{cores} cores are free in all, but only {free_names}: the others are in use"
            return self._refuse(RefusalReason.FRAGMENTED, f"{state}. {_WAIT}, or use a node with free cards.")
        state = f"{wanted} wholly free cards are needed, {free_names}"
        return self._refuse(RefusalReason.NOT_ENOUGH_CORES, f"{state}. {_WAIT}, or ask for fewer cards.")

    def _state_of(self, uuid: GpuUuid) -> str:
        card = next((card for card in self.healthy if card.uuid == uuid), None)
        if card is None:
            return f"{uuid} (not a healthy card of this node)"
        return f"card {card.index} ({card.free_cores} cores and {self._blocks(card.free_blocks)} free)"

    def _larger_than(self, what: str, largest: Sequence[CardState]) -> Refused:
        names = ", ".join(f"card {card.index}" for card in largest)
        total = sum(card.total_blocks for card in largest)
        state = f"this is more memory than {what} ({names}) has at all: {self._blocks(total)}"
        return self._refuse(
            RefusalReason.NOT_ENOUGH_MEMORY, f"{state}. Ask for at most that much, or use a node with larger cards."
        )

    def _largest(self, count: int) -> list[CardState]:
        ordered = sorted(self.healthy, key=lambda card: (-card.total_blocks, card.index))
        return sorted(ordered[:count], key=lambda card: card.index)

    def _best_free(self) -> CardState:
        """The card that lacks least of the request, cores and memory weighed by their parts of it."""
        wanted = self.request

        def lack(card: CardState) -> int:
            cores, blocks = max(0, wanted.cores - card.free_cores), max(0, wanted.blocks - card.free_blocks)
            return cores * wanted.blocks + blocks * wanted.cores

        return min(self.healthy, key=lambda card: (lack(card), -card.free_cores, -card.free_blocks, card.index))

    def _blocks(self, blocks: int) -> str:
        return describe_blocks(blocks, self.memory_block_mib)

    def _refuse(self, reason: RefusalReason, rest: str) -> Refused:
        asked = describe_request(self.request.cores, self.request.blocks, self.memory_block_mib)
        return Refused(reason=reason, detail=f"no card for {asked}: {rest}")
