"""Isolation vcuda on a node: the vDevice directories, and the driver volume that they are of use with."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import structlog

from gpushare_agent.isolation.container_ids import ContainerIds
from gpushare_agent.isolation.driver_volume.check import SharedVolumeCheck
from gpushare_agent.isolation.driver_volume.config import driver_volumes
from gpushare_agent.isolation.driver_volume.directory import installed_driver_version
from gpushare_agent.isolation.driver_volume.values import VolumeName
from gpushare_agent.isolation.part import Check, IsolationHost, IsolationPart, NodeProbe
from gpushare_agent.isolation.vdevice.configs import VDeviceConfigs
from gpushare_agent.isolation.vdevice.container_processes import ContainerProcesses
from gpushare_agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.isolation.vdevice.virtual_manager import VirtualManager
from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.memory_limits import MemoryLimiter
from gpushare_agent.model.pods import Pod
from gpushare_agent.settings.settings import Settings

log = structlog.get_logger(__name__)


def build(host: IsolationHost) -> IsolationPart:
    """Joined, not started."""
    settings, cgroups = host.node.settings, host.cgroups
    manager = VirtualManager(
        files=VDeviceFiles(settings.virtual_manager.path),
        allocations=host.node.claim_pods.shares,
        pods=host.node.claim_pods,
        configs=VDeviceConfigs(
            inventory=host.node.gpus,
            driver_version=_driver_version(host),
            names=host.node.names,
            on_problem=lambda pod, text: host.warn(pod, "CoreLimitIgnored", text),
        ),
        processes=ContainerProcesses(
            ContainerIds(host.runtime, host.node.pods),
            cgroups,
            clock=time.monotonic,
            module=host.module,
            sharers=host.node.claim_pods.sharers,
        ),
        identify=cgroups.identify_in_thread,
        metrics=host.node.metrics,
        clock=time.monotonic,
    )
    # simulated GPUs have no driver to mount
    shared = SharedVolumeCheck(host.volumes.get(VolumeName.SHARED)).check if settings.driver == "nvml" else None

    async def enforce(allocation: Allocation, pod: Pod) -> str:
        await manager.enforce(allocation.key)
        return ""

    async def log_contradictions() -> None:
        try:
            difference = await cgroups.check_driver_in_thread(settings.runtime.cgroup_driver)
        except Unavailable as e:
            difference = str(e)
        if difference:
            log.warning("cgroup_driver_differs", detail=difference)

    return IsolationPart(
        services={"virtual manager": manager},
        check=partial(_both, manager.check, shared),
        look=partial(_both, manager.look, shared),
        prepare=manager.prepare,
        prepare_ahead=manager.ahead.add,
        enforce=enforce,
        changed=manager.changed,
        log_contradictions=log_contradictions,
    )


def probe(settings: Settings, driver: MemoryLimiter) -> NodeProbe:
    shared = SharedVolumeCheck(driver_volumes(settings).get(VolumeName.SHARED))
    return NodeProbe(check=shared.check, pods=VDeviceFiles(settings.virtual_manager.path).pod_names)


def _driver_version(host: IsolationHost) -> Callable[[], str]:
    """Of the libraries that containers get, as they are at the agent's start, else as the driver says."""
    found = [version for volume in host.volumes.values() if (version := installed_driver_version(volume)) is not None]
    installed = ".".join(map(str, max(found))) if found else ""
    return lambda: installed or host.node.gpus().driver_version


async def _both(first: Check, second: Check | None) -> None:
    await first()
    if second is not None:
        await second()
