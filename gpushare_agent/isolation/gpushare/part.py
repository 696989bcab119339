"""Isolation gpushare on a node: the library, each container's files, and what is written into those of running ones."""

from __future__ import annotations

from collections.abc import Mapping

from gpushare_agent.isolation.gpushare.edits import live_limits
from gpushare_agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.isolation.gpushare.format import GpuLimits
from gpushare_agent.isolation.gpushare.observed import TIMEOUT_S, ObservedContainers
from gpushare_agent.isolation.part import IsolationHost, IsolationPart
from gpushare_agent.isolation.private_caches import PrivateCaches
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import MIB, GpuUuid
from gpushare_agent.model.pods import Pod
from gpushare_agent.settings.settings import Settings


def build(host: IsolationHost) -> IsolationPart:
    """Joined, not started."""
    node = host.node

    def limits_of(
        allocation: Allocation, pod: Pod | None, gpus: Mapping[GpuUuid, Gpu] | None = None
    ) -> GpuLimits | None:
        return live_limits(allocation, pod, node.gpus().by_uuid() if gpus is None else gpus, node.names)

    def limits(key: ContainerKey) -> GpuLimits | None:
        allocation = node.cache.get(key)
        return limits_of(allocation, node.claim_pods.get(key.pod_uid)) if allocation is not None else None

    def is_claims(key: ContainerKey) -> bool:
        allocation = node.cache.get(key)
        return allocation is not None and allocation.claim is not None

    def shares() -> dict[ContainerKey, GpuLimits]:
        found, gpus = {}, node.gpus().by_uuid()
        for key, allocation in node.cache.view().items():
            pod = node.claim_pods.get(key.pod_uid)
            if pod is None or not allocation.is_limited or not host.uses(pod, "gpushare"):
                continue
            if (wanted := limits_of(allocation, pod, gpus)) is not None:
                found[key] = wanted
        return found

    settings = node.settings.libgpushare
    files = GpushareFiles(settings.library, settings.directory, limits, is_claims)
    caches = PrivateCaches(files=files, allocations=node.cache.view, pods=node.pods)
    seen = ObservedContainers(files=files, shares=shares)
    thread = DaemonThread("gpushare-limits", advice=f"Check the disk of the setting {files.kind.setting}.")

    async def enforce(allocation: Allocation, pod: Pod) -> str:
        key, wanted = allocation.key, limits_of(allocation, pod)
        if wanted is None:
            return "its GPU's memory is not known, or it is not wholly allocated yet"

        def write() -> int:
            files.write_limits(key, wanted)
            return files.held_bytes(key) - (wanted.memory_bytes or 0)

        above = await thread.call(write, f"writing the limits of {key.container}", TIMEOUT_S)
        return f"its processes still have {-(-above // MIB)} MiB more" if above > 0 else ""

    return IsolationPart(
        services={"gpushare files": caches, "gpushare observed": seen},
        check=caches.check,
        look=caches.look,
        prepare=caches.prepare,
        prepare_ahead=caches.ahead.add,
        enforce=enforce,
        usage_sampled=seen.usage_sampled,
        request_usage_by=seen.request_usage_by,
    )


def gpushare_files(settings: Settings) -> GpushareFiles:
    """For what needs no container's limits."""
    return GpushareFiles(settings.libgpushare.library, settings.libgpushare.directory)
