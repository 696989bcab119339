"""Isolation hami-core on a node: the library, each container's cache file, and what is written into running ones.

Changed limits of running shares are written into HAMi-core's shared region: a live resize, and the pod's elastic ceiling.
The library follows a new memory limit at its next allocation, and a new compute limit in processes that start from then on.
Under a limit below what its processes have, cuMemGetInfo fails with CUDA_ERROR_INVALID_VALUE, which programs do not expect
(HAMi-core 8f3a89c, src/cuda/memory.c). So a memory limit is lowered no further than to what they have, again and again.

Its first process makes the region from the environment, which keeps what Allocate answered: so the limits are compared again
each period. The tenant can write the region as well; that changes what his own container has, until the next period.

State owned: the elastic shares whose region was written, and those whose failure was logged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.isolation.choice import Standing
from gpushare_agent.isolation.hami_core.edits import (
    hides_compute,
    lifts_cores,
    live_limits,
    opts_out,
)
from gpushare_agent.isolation.hami_core.files import HamiCoreFiles
from gpushare_agent.isolation.hami_core.region_watch import RegionWatch
from gpushare_agent.isolation.kept import Circumstances
from gpushare_agent.isolation.part import IsolationHost, IsolationPart, NodeProbe, ProbedDriver
from gpushare_agent.isolation.private_caches import FILES_TIMEOUT_S, PrivateCaches
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.allocations import Allocation, ContainerKey, ResizedShare
from gpushare_agent.model.errors import AgentError
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import CORE_LIMIT_ANNOTATION
from gpushare_agent.model.pods import ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.node import ClaimPods
from gpushare_agent.runtime.machine import read_kernel_module
from gpushare_agent.settings.sections import HamiCoreSettings
from gpushare_agent.settings.settings import Settings

log = structlog.get_logger(__name__)

TIMEOUT_S = 5.0
PERIOD_S = 1.0
NO_REGION = "no process of the container has called cuInit since it started"


class RegionLimits(Struct, kw_only=True, eq=False):
    """`enforce` at any time, `run` once. `is_in_use` is whether the pod's isolation is hami-core."""

    files: HamiCoreFiles
    config: HamiCoreSettings
    names: ResourceNames
    inventory: Callable[[], GpuInventory]
    allocations: Callable[[], Mapping[ContainerKey, Allocation]]
    resized: Callable[[], Mapping[ContainerKey, ResizedShare]]
    pods: ClaimPods
    is_in_use: Callable[[Pod], bool]
    period_s: float = PERIOD_S
    _thread: DaemonThread = field(
        default_factory=lambda: DaemonThread(
            "region-limits", advice="Check the disk of the setting hami_core.directory."
        )
    )
    _elastic: set[ContainerKey] = field(default_factory=set)
    _logged: set[ContainerKey] = field(default_factory=set)

    async def enforce(self, allocation: Allocation, pod: Pod) -> str:
        """Make the region's limits those of the share as it is now; why they are not, empty where they are.

        Raises:
            Corrupt: the tenant made something else of the file.
            NotFound, Unavailable: it is not there, or the file system refuses.
        """
        gpus = self.inventory().by_uuid()
        limits = live_limits(allocation, pod.annotations, gpus, self.names, self.config)
        share = self.resized().get(allocation.key)
        charged = allocation if share is None else replace(allocation, resized_to=share.charged)
        most = live_limits(charged, pod.annotations, gpus, self.names, self.config)
        if limits is None or most is None:
            return "its GPU's memory is not known, or it is not wholly allocated yet"
        write = partial(self._write, allocation.key, *limits, most[0])
        return await self._thread.call(write, f"writing the limits of {allocation.key.container}", TIMEOUT_S)

    async def run(self) -> NoReturn:
        """Until cancelled: keeps the limits of shares with an elastic ceiling, and of those whose ceiling was removed."""
        while True:
            for allocation in list(self.allocations().values()):
                await self._follow_ceiling(allocation)
            self._elastic &= self.allocations().keys()
            self._logged &= self.allocations().keys()
            await asyncio.sleep(self.period_s)

    async def _follow_ceiling(self, allocation: Allocation) -> None:
        key, pod = allocation.key, self.pods.get(allocation.key.pod_uid)
        # A claim's ceiling is fixed when it is prepared, so there is nothing to follow.
        if pod is None or not allocation.is_limited or allocation.claim is not None or not self.is_in_use(pod):
            return
        if CORE_LIMIT_ANNOTATION in pod.annotations and not allocation.unit_ids:
            self._elastic.add(key)
        # Once more after the annotation is gone, for the region still has the ceiling.
        elif key not in self._elastic:
            return
        try:
            await self.enforce(allocation, pod)
        except AgentError as e:
            if key not in self._logged:  # once: the tenant can write what is in the text, and make it come and go
                self._logged.add(key)
                log.warning(
                    "region_limits_not_written", pod_uid=key.pod_uid, container=key.container, error=str(e),
                    then="it is tried again, and not logged again for it",
                )  # fmt: skip

    def _write(self, key: ContainerKey, memory_bytes: int, percent: int, most_bytes: int) -> str:
        """`most_bytes` is what is charged for the share, and so the most that its processes can have."""
        with self.files.opened_region(key) as region:
            head = region.head() if region is not None else None
            if region is None or head is None:
                return NO_REGION
            if head.core_limits[0] != percent:
                region.set_core_limit(0, percent)
            used = sum(slot.used_bytes[0] for slot in region.slots(region.tail().slots))
            # Under a limit below what processes have cuMemGetInfo fails. `used` is what the tenant wrote, so no more is
            # believed than was charged.
            limit = max(memory_bytes, min(used, most_bytes))
            if head.memory_limits[0] != limit:
                region.set_memory_limit(0, limit)
        return f"its processes still have {limit - memory_bytes >> 20} MiB more" if limit > memory_bytes else ""


def build(host: IsolationHost) -> IsolationPart:
    """Joined, not started."""
    files, config = hami_core_files(host.node.settings), host.node.settings.hami_core

    def is_in_use(pod: Pod) -> bool:
        return host.uses(pod, "hami-core")

    caches = PrivateCaches(
        files=files, allocations=host.node.cache.view, pods=host.node.pods, running_claims=host.node.claim_pods.running
    )
    limits = RegionLimits(
        files=files,
        config=config,
        names=host.node.names,
        inventory=host.node.gpus,
        allocations=host.node.cache.view,
        resized=lambda: host.node.cache.resized,
        pods=host.node.claim_pods,
        is_in_use=is_in_use,
    )
    watch = RegionWatch(
        files=files,
        allocations=host.node.cache.view,
        pods=host.node.claim_pods,
        is_in_use=is_in_use,
        cgroups=host.cgroups,
        clock=time.monotonic,
        users=host.node.claim_pods.containers_of,
        module=host.module,
    )

    def circumstances(
        found: Circumstances, allocation: Allocation | None, container: ContainerSpec | None
    ) -> Circumstances:
        is_out = container is not None and opts_out(container, config)
        # HAMi-core mistakes the processes of containers that share a claim for each other's. Such a claim is refused where
        # they are known when it is prepared; a pod that comes later is not.
        sharers = host.node.claim_pods.sharers(allocation.key) if allocation is not None else None
        is_shared = sum(map(bool, (sharers or {}).values())) > 1
        return replace(
            found, has_library=not is_out and not is_shared, has_core_limit=not lifts_cores(container, config)
        )

    return IsolationPart(
        services={"private caches": caches, "region limits": limits, "region watch": watch},
        check=caches.check,
        look=caches.look,
        prepare=(caches.prepare,),
        prepare_ahead=(caches.ahead.add,),
        enforce=limits.enforce,
        circumstances=circumstances,
    )


def probe(settings: Settings, driver: ProbedDriver) -> NodeProbe:
    files = hami_core_files(settings)
    thread = DaemonThread("isolation-files", advice="Check the disk of the setting hami_core.directory.")
    check = partial(thread.call, files.check_library, "reading HAMi-core's library", FILES_TIMEOUT_S)
    return NodeProbe(check=check, standing=_standing(settings), pods=files.list_pods, is_for_sandbox=True)


def _standing(settings: Settings) -> Standing:
    """When `auto` takes hami-core: behind mps where the kernel module keeps it from seeing its own use of compute."""
    because = "HAMi-core's library is there for this machine"
    module = read_kernel_module(settings.runtime.proc_root) if settings.driver == "nvml" else None
    if module is None or not hides_compute(module):
        return Standing(place=20, because=because)
    drawback = f"does not keep compute under the open kernel modules {module.version}"
    return Standing(place=35, because=because, drawback=drawback)


def hami_core_files(settings: Settings) -> HamiCoreFiles:
    return HamiCoreFiles(settings.hami_core.library, settings.hami_core.directory)
