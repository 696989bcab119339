"""Tells of every change of a card's health: in the log, as a metric, and as an Event on the Node.

Subscribed to the inventory; decides nothing. State owned: what was told last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import structlog

from gpushare_agent.gpus.inventory import GpuInventoryState
from gpushare_agent.model.gpus import Card, GpuInventory
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.node_events import NodeEventReason

log = structlog.get_logger(__name__)


class TellsNode(Protocol):
    def note(self, reason: NodeEventReason, uuid: str, message: str) -> None: ...


class CountsHealth(Protocol):
    def card_health_changed(self, uuid: str, healthy: bool) -> None: ...


class CountsNothing:
    def card_health_changed(self, uuid: str, healthy: bool) -> None: ...


class CardNews:
    """Subscribes itself to `inventory`. A card that is well when it is first seen is no news."""

    def __init__(self, inventory: GpuInventoryState, events: TellsNode, metrics: CountsHealth | None = None) -> None:
        self._inventory = inventory
        self._events = events
        self._metrics = metrics or CountsNothing()
        self._cards: Mapping[GpuUuid, Card] = {}
        self._cordoned: Mapping[GpuUuid, str] = inventory.cordoned
        inventory.subscribe(self._changed)

    def _changed(self, inventory: GpuInventory) -> None:
        cards, was_cordoned = self._cards, self._cordoned
        self._cards, self._cordoned = inventory.by_uuid(), self._inventory.cordoned
        for card in sorted(inventory.cards, key=lambda card: card.index):
            was_healthy = card.uuid not in cards or cards[card.uuid].is_healthy
            self._tell_cordon(card, was_cordoned.get(card.uuid), self._cordoned.get(card.uuid))
            if was_healthy and not card.is_healthy:
                self._tell_unhealthy(card)
            elif card.is_healthy and not was_healthy:
                self._tell_healthy(card, was_cordoned=card.uuid in was_cordoned)

    def _tell_cordon(self, card: Card, before: str | None, now: str | None) -> None:
        if before == now:
            return
        if now is not None:
            log.warning("card_cordoned", index=card.index, uuid=card.uuid, reason=now)
            because = f": {now}" if now else ""
            self._note(NodeEventReason.CARD_CORDONED, card, f"taken out of service by an operator{because}")
        else:
            log.warning("card_uncordoned", index=card.index, uuid=card.uuid, reason=before)
            still = "" if card.is_healthy else f", and Unhealthy still: {card.unhealthy_reason}"
            self._note(NodeEventReason.CARD_UNCORDONED, card, f"put back in service by an operator{still}")

    def _tell_unhealthy(self, card: Card) -> None:
        self._metrics.card_health_changed(card.uuid, healthy=False)
        if card.uuid in self._cordoned:
            return  # that is the cordon's news
        log.error("card_unhealthy", index=card.index, uuid=card.uuid, reason=card.unhealthy_reason)
        self._note(NodeEventReason.CARD_UNHEALTHY, card, card.unhealthy_reason)

    def _tell_healthy(self, card: Card, *, was_cordoned: bool) -> None:
        self._metrics.card_health_changed(card.uuid, healthy=True)
        if was_cordoned:
            return
        log.info("card_recovered", index=card.index, uuid=card.uuid)
        self._note(NodeEventReason.CARD_RECOVERED, card, "well again, and offered to pods")

    def _note(self, reason: NodeEventReason, card: Card, text: str) -> None:
        self._events.note(reason, card.uuid, f"GPU {card.index} ({card.uuid}): {text}")
