"""The cards as last read from the driver, and what became of those that vanished. Changed only by services/gpu_watch.py.

A card that the driver no longer shows stays, Unhealthy with the reason: its device IDs are known to the kubelet and may
be held by containers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpushare_agent.model.gpus import GpuInventory, Health
from gpushare_agent.model.topology_tree import build_topology


class GpuInventoryState:
    """Holds one inventory; `subscribe` is told after each change."""

    def __init__(self) -> None:
        self._inventory = GpuInventory(cards=(), topology=build_topology((), ()))
        self._on_change: list[Callable[[GpuInventory], None]] = []

    @property
    def current(self) -> GpuInventory:
        return self._inventory

    def subscribe(self, callback: Callable[[GpuInventory], None]) -> None:
        self._on_change.append(callback)

    def read(self, found: GpuInventory) -> bool:
        """Take over what the driver shows now; True where anything changed."""
        known = found.by_uuid()
        vanished = [card for card in self._inventory.cards if card.uuid not in known]
        if vanished:
            # Without the missing cards the rows of the topology would no longer be the cards' indexes.
            shown = {card.uuid: card for card in found.cards}
            cards = tuple(
                replace(shown[card.uuid], index=card.index)
                if card.uuid in shown
                else replace(
                    card, health=Health.UNHEALTHY, unhealthy_reason="the driver does not show this card any more"
                )
                for card in self._inventory.cards
            )
            found = replace(found, cards=cards, topology=self._inventory.topology)
        return self._set(found)

    def lost(self, reason: str) -> bool:
        """The driver cannot be read at all: every card is Unhealthy until it can."""
        cards = tuple(replace(card, health=Health.UNHEALTHY, unhealthy_reason=reason) for card in self._inventory.cards)
        return self._set(replace(self._inventory, cards=cards))

    def _set(self, inventory: GpuInventory) -> bool:
        if inventory == self._inventory:
            return False
        self._inventory = inventory
        for callback in self._on_change:
            callback(inventory)
        return True
