"""Lets the isolation of each running share enforce its size of now: the Enforcement of admission/resizing.py. No state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpushare_agent.isolation import ISOLATIONS, Isolation
from gpushare_agent.isolation.driver.limits import DriverLimits
from gpushare_agent.isolation.hami_core.limits import RegionLimits
from gpushare_agent.isolation.request import Follows
from gpushare_agent.isolation.vcuda.virtual_manager import VirtualManager
from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.isolation import IsolationName
from gpushare_agent.model.pods import Pod

_NOT_IN_USE = "the pod's isolation is not in use on this node"


class ShareEnforcement:
    """`chosen` is the isolation of a pod, None where it names one that the node does not allow. A part is None where nothing
    on this node needs it."""

    def __init__(
        self,
        *,
        chosen: Callable[[Pod], IsolationName | None],
        virtual_manager: VirtualManager | None,
        region_limits: RegionLimits | None,
        driver_limits: DriverLimits | None,
    ) -> None:
        self._chosen = chosen
        self._virtual_manager = virtual_manager
        self._region_limits = region_limits
        self._driver_limits = driver_limits

    def isolation_of(self, pod: Pod) -> Isolation | None:
        """Where NVIDIA's toolkit sets the driver's limits, nobody changes them afterwards."""
        name = self._chosen(pod)
        if name is None:
            return None
        is_fixed = self._driver_limits is not None and not self._driver_limits.may_set
        if IsolationName.DRIVER in name.parts and is_fixed:
            return replace(ISOLATIONS[name], memory_follows=Follows.NOBODY)
        return ISOLATIONS[name]

    async def enforce(self, allocation: Allocation, pod: Pod) -> str:
        """Why the share's limits are not what they are to be (yet), empty where they are. Raises AgentError."""
        name = self._chosen(pod)
        for part in name.parts if name is not None else ():
            if problem := await self._enforce(part, allocation, pod):
                return problem
        return "" if name is not None else _NOT_IN_USE

    async def _enforce(self, part: IsolationName, allocation: Allocation, pod: Pod) -> str:
        match part:
            case IsolationName.VCUDA if self._virtual_manager is not None:
                await self._virtual_manager.enforce(allocation.key)
                return ""
            case IsolationName.HAMI_CORE if self._region_limits is not None:
                return await self._region_limits.enforce(allocation, pod)
            case IsolationName.DRIVER if self._driver_limits is not None:
                return await self._driver_limits.enforce(allocation.key)
            case IsolationName.MPS | IsolationName.NONE:
                return ""  # nothing of a running container can be changed, so nothing was
        return _NOT_IN_USE
