"""Isolation hami-core on a node: the library, each container's cache file, and what is written into running ones."""

from __future__ import annotations

import time
from functools import partial

from msgspec.structs import replace

from gpushare_agent.isolation.hami_core.caches import FILES_TIMEOUT_S, PrivateCaches
from gpushare_agent.isolation.hami_core.edits import LIBRARY_PATH, lifts_cores, opts_out
from gpushare_agent.isolation.hami_core.files import HamiCoreFiles
from gpushare_agent.isolation.hami_core.limits import RegionLimits
from gpushare_agent.isolation.hami_core.region_watch import RegionWatch
from gpushare_agent.isolation.kept import Circumstances
from gpushare_agent.isolation.part import IsolationHost, IsolationPart, NodeProbe
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.memory_limits import MemoryLimiter
from gpushare_agent.model.pods import ContainerSpec, Pod
from gpushare_agent.settings.settings import Settings


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
        prepare=caches.prepare,
        prepare_ahead=caches.ahead.add,
        enforce=limits.enforce,
        circumstances=circumstances,
    )


def probe(settings: Settings, driver: MemoryLimiter) -> NodeProbe:
    files = hami_core_files(settings)
    thread = DaemonThread("isolation-files", advice="Check the disk of the setting hami_core.directory.")
    check = partial(thread.call, files.check_library, "reading HAMi-core's library", FILES_TIMEOUT_S)
    return NodeProbe(check=check, pods=files.list_pods, is_for_sandbox=True)


def hami_core_files(settings: Settings) -> HamiCoreFiles:
    return HamiCoreFiles(settings.hami_core.library, settings.hami_core.directory, LIBRARY_PATH)
