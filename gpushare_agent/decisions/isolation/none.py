"""No isolation: the container sees its cards and is trusted to keep to its share."""

from __future__ import annotations

from gpushare_agent.decisions.isolation.request import IsolationRequest
from gpushare_agent.model.allocations import ContainerEdits


def edit_none(request: IsolationRequest) -> ContainerEdits:
    """Nothing beyond the visible devices, which the device list gives."""
    return ContainerEdits()
