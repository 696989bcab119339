"""Reasons of the Events on the Node, shared by the GPU watch that raises them and the writer that sends them."""

from __future__ import annotations

from enum import StrEnum


class NodeEventReason(StrEnum):
    """Reasons that `kubectl get events` shows: stable, CamelCase."""

    GPU_UNHEALTHY = "CardUnhealthy"
    GPU_RECOVERED = "CardRecovered"
    GPU_CORDONED = "CardCordoned"
    GPU_UNCORDONED = "CardUncordoned"
    CONFIGURATION_REFUSED = "NodeConfigurationRefused"

    @property
    def type(self) -> str:
        is_warning = self in (NodeEventReason.GPU_UNHEALTHY, NodeEventReason.CONFIGURATION_REFUSED)
        return "Warning" if is_warning else "Normal"
