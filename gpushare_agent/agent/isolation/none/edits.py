"""No isolation: the container sees its GPUs, and nothing enforces its share."""

from __future__ import annotations

from gpushare_agent.agent.isolation.kept import NOTHING_KEPT
from gpushare_agent.agent.isolation.request import Isolation, IsolationRequest
from gpushare_agent.core.model.allocations import ContainerEdits


def edit_none(request: IsolationRequest) -> ContainerEdits:
    """Nothing but the devices, which come from the device list."""
    return ContainerEdits()


ISOLATION = Isolation(name="none", edit=edit_none, keeps=NOTHING_KEPT)
