"""Writes how many GPUs the node has into its capacity, as GPUShare's tools expect (`aliyun.com/gpu-count`).

Level, not edge: a kubelet that registers anew may reset it, so it is compared again every minute. Only with GPUShare's
resource, for it takes the right to patch the status of nodes. No state but the last complaint.
Source: docs/formats.md, section 7.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import structlog

from gpushare_agent.cluster.kube.slot import ApiSlot
from gpushare_agent.model.errors import AgentError

log = structlog.get_logger(__name__)

PERIOD_S = 60.0
CALL_TIMEOUT_S = 10.0


class PatchesNodes(Protocol):
    async def get_node(self, name: str) -> dict[str, Any]: ...
    async def patch_node_capacity(self, name: str, resource: str, count: int) -> None: ...


class NodeCapacity:
    """`run` once, `attach` when the API server can be reached."""

    def __init__(self, *, node_name: str, resource: str, count: Callable[[], int], period_s: float = PERIOD_S) -> None:
        self._node_name = node_name
        self._resource = resource
        self._count = count
        self._period_s = period_s
        self._api: ApiSlot[PatchesNodes] = ApiSlot(None)
        self._trouble = ""

    def attach(self, api: PatchesNodes) -> None:
        self._api.put(api)

    async def run(self) -> NoReturn:
        """Until cancelled."""
        api = await self._api.get()
        while True:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self._compare(api)
                self._trouble = ""
            except (AgentError, TimeoutError) as e:
                text = str(e) or f"no answer within {CALL_TIMEOUT_S:g} s"
                if text != self._trouble:
                    log.warning("node_capacity_not_written", resource=self._resource, error=text)
                self._trouble = text
            await asyncio.sleep(self._period_s)

    async def _compare(self, api: PatchesNodes) -> None:
        node = await api.get_node(self._node_name)
        status = node.get("status")
        capacity = status.get("capacity") if isinstance(status, dict) else None
        written = capacity.get(self._resource) if isinstance(capacity, dict) else None
        count = self._count()
        if written != str(count):
            await api.patch_node_capacity(self._node_name, self._resource, count)
            log.info("node_capacity_written", resource=self._resource, count=count)
