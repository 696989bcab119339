"""Serves PreStartContainer: a container may start once its allocation is known and its isolation is prepared on the host.

The kubelet calls it at each start of a container, also long after the admission. No state.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence

import structlog
from msgspec import Struct

from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.decisions.identity import Target
from gpushare_agent.admission.decisions.recovery import adopt
from gpushare_agent.admission.outcomes import OutcomeReporter
from gpushare_agent.kubelet.checkpoint import KubeletCheckpoint
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.errors import AgentError, Refused
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import DeviceId
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.node import Pods

log = structlog.get_logger(__name__)


class ContainerStarts(Struct, kw_only=True, eq=False):
    """`prepare` makes on the host what the isolation of these containers needs, and returns a refusal where it cannot."""

    cache: AllocationCache
    pods: Pods
    names: ResourceNames
    inventory: Callable[[], GpuInventory]
    records: KubeletCheckpoint
    prepare: Callable[[Collection[ContainerKey]], Awaitable[Refused | None]]
    observer: OutcomeReporter
    clock: Callable[[], float] = time.monotonic

    async def pre_start(self, resource: str, ids: Sequence[str]) -> Refused | None:
        """Check that the container about to start holds these IDs, and prepare its isolation. An allocation that the cache
        has lost is read from the kubelet's checkpoint."""
        kind = self.names.kind_of(resource)
        wanted = frozenset(DeviceId(device) for device in ids)
        refused = await self._adopt(kind, wanted) if not self._containers_with(kind, wanted) else None
        if refused is None:
            refused = await self.prepare(self._containers_with(kind, wanted))
        if refused is not None:
            self.observer.start_refused(self._last_target(self._containers_with(kind, wanted)), resource, refused)
        return refused

    async def _adopt(self, kind: ResourceKind, wanted: frozenset[DeviceId]) -> Refused | None:
        try:
            entries = await self.records.read()
        except AgentError as e:
            log.warning("kubelet_checkpoint_unreadable", error=str(e))
            entries = ()
        if self._containers_with(kind, wanted):
            return None  # allocated during the read
        adopted = adopt(entries, kind, wanted, self.cache.view(), self.names, self.inventory(), self.clock())
        if isinstance(adopted, Refused):
            log.warning("pre_start_refused", reason=adopted.reason.value, detail=adopted.detail)
            return adopted
        for allocation in adopted:
            self.cache.put(allocation)
        log.info("allocation_adopted", pod_uid=adopted[0].key.pod_uid, container=adopted[0].key.container)
        return None

    def _containers_with(self, kind: ResourceKind, ids: frozenset[DeviceId]) -> list[ContainerKey]:
        """Those that have exactly these IDs: several where an init container's IDs were passed on."""
        if not ids:
            return []
        keys = self.cache.holders(kind).get(next(iter(ids)), frozenset())
        return sorted(key for key in keys if (found := self.cache.get(key)) is not None and found.ids_of(kind) == ids)

    def _last_target(self, keys: Sequence[ContainerKey]) -> Target | None:
        pod = self.pods.get(keys[-1].pod_uid) if keys else None
        container = pod.container(keys[-1].container) if pod is not None else None
        return Target(pod=pod, container=container) if pod is not None and container is not None else None
