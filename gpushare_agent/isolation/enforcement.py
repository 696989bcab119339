"""Lets the isolation of each running share enforce its size of now: the Enforcement of admission/resizing.py. No state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from gpushare_agent.isolation import ISOLATIONS, Isolation
from gpushare_agent.isolation.part import IsolationPart
from gpushare_agent.isolation.request import Follows
from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.isolation import isolation_parts
from gpushare_agent.model.pods import Pod


class ShareEnforcement:
    """`chosen` is the isolation of a pod, None where it names one that the node does not allow; `parts` are those in use."""

    def __init__(self, *, chosen: Callable[[Pod], str | None], parts: Mapping[str, IsolationPart]) -> None:
        self._chosen = chosen
        self._parts = parts

    def isolation_of(self, pod: Pod) -> Isolation | None:
        name = self._chosen(pod)
        if name is None:
            return None
        if any(self._parts[part].is_memory_fixed for part in isolation_parts(name)):
            return replace(ISOLATIONS[name], memory_follows=Follows.NOBODY)
        return ISOLATIONS[name]

    async def enforce(self, allocation: Allocation, pod: Pod) -> str:
        """Why the share's limits are not what they are to be (yet), empty where they are. Raises AgentError."""
        name = self._chosen(pod)
        if name is None:
            return "the pod's isolation is not in use on this node"
        for part in isolation_parts(name):
            if problem := await self._parts[part].enforce(allocation, pod):
                return problem
        return ""
