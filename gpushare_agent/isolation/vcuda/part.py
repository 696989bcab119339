"""Isolation vcuda on a node: the vDevice directories, and the driver volume that they are of use with."""

from __future__ import annotations

from functools import partial

import structlog

from gpushare_agent.isolation.choice import Standing
from gpushare_agent.isolation.driver_volume.check import SharedVolumeCheck
from gpushare_agent.isolation.driver_volume.config import driver_volumes
from gpushare_agent.isolation.driver_volume.values import VolumeName
from gpushare_agent.isolation.part import IsolationHost, IsolationPart, NodeProbe, all_of
from gpushare_agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.isolation import MemoryLimiter
from gpushare_agent.model.pods import Pod
from gpushare_agent.settings.settings import Settings

log = structlog.get_logger(__name__)


def build(host: IsolationHost) -> IsolationPart:
    """Joined, not started."""
    settings, cgroups = host.node.settings, host.cgroups
    manager = host.vdevices()
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
        check=partial(all_of, manager.check, shared),
        look=partial(all_of, manager.look, shared),
        prepare=(manager.prepare,),
        prepare_ahead=(manager.ahead.add,),
        enforce=enforce,
        changed=manager.changed,
        log_contradictions=log_contradictions,
    )


def probe(settings: Settings, driver: MemoryLimiter) -> NodeProbe:
    shared = SharedVolumeCheck(driver_volumes(settings).get(VolumeName.SHARED))
    standing = Standing(place=40, because="its control library is installed")
    return NodeProbe(check=shared.check, standing=standing, pods=VDeviceFiles(settings.virtual_manager.path).pod_names)
