"""Reasons of the Events on the Node, shared by the GPU watch that raises them and the writer that sends them."""

from __future__ import annotations

from enum import StrEnum


class NodeEventReason(StrEnum):
    """Reasons that `kubectl get events` shows: stable, CamelCase."""

    CARD_UNHEALTHY = "CardUnhealthy"
    CARD_RECOVERED = "CardRecovered"
    CARD_CORDONED = "CardCordoned"
    CARD_UNCORDONED = "CardUncordoned"

    @property
    def type(self) -> str:
        return "Warning" if self is NodeEventReason.CARD_UNHEALTHY else "Normal"
