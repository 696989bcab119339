"""Lets the isolation of each running share enforce its size of now: the Enforcement of admission/resizing.py. No state."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from gpushare_agent.isolation import ISOLATIONS, Isolation
from gpushare_agent.isolation.hami_core.limits import RegionLimits
from gpushare_agent.isolation.vcuda.virtual_manager import VirtualManager
from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.isolation import IsolationName
from gpushare_agent.model.pods import Pod


class ShareEnforcement:
    """`chosen` is the isolation of a pod, None where it names one that the node does not allow. A part is None where nothing
    on this node needs it."""

    def __init__(
        self,
        *,
        chosen: Callable[[Pod], IsolationName | None],
        virtual_manager: VirtualManager | None,
        region_limits: RegionLimits | None,
    ) -> None:
        self._chosen = chosen
        self._virtual_manager = virtual_manager
        self._region_limits = region_limits

    def isolation_of(self, pod: Pod) -> Isolation | None:
        name = self._chosen(pod)
        return ISOLATIONS[name] if name is not None else None

    async def enforce(self, allocation: Allocation, pod: Pod) -> str:
        """Why the share's limits are not what they are to be (yet), empty where they are. Raises AgentError."""
        name = self._chosen(pod)
        match name:
            case IsolationName.VCUDA if self._virtual_manager is not None:
                await self._virtual_manager.enforce(allocation.key)
                return ""
            case IsolationName.HAMI_CORE if self._region_limits is not None:
                return await self._region_limits.enforce(allocation, pod)
            case IsolationName.MPS | IsolationName.NONE:
                return ""  # nothing of a running container can be changed, so nothing was
            case IsolationName.VCUDA | IsolationName.HAMI_CORE | None:
                return "the pod's isolation is not in use on this node"
        assert_never(name)
