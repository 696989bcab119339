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
    ISOLATION_PROBE_FAILED = "IsolationProbeFailed"

    @property
    def type(self) -> str:
        return "Warning" if self in _WARNINGS else "Normal"


_WARNINGS = (
    NodeEventReason.GPU_UNHEALTHY,
    NodeEventReason.CONFIGURATION_REFUSED,
    NodeEventReason.ISOLATION_PROBE_FAILED,
)
