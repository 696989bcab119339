"""The vDevice directories of a node, joined for whichever isolations mount them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from gpushare_agent.isolation.container_ids import ContainerIds
from gpushare_agent.isolation.driver_volume.directory import installed_driver_version
from gpushare_agent.isolation.driver_volume.values import DriverVolume, VolumeName
from gpushare_agent.isolation.vdevice.configs import VDeviceConfigs
from gpushare_agent.isolation.vdevice.container_processes import ContainerProcesses
from gpushare_agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.isolation.vdevice.virtual_manager import VirtualManager
from gpushare_agent.model.gpus import KernelModule
from gpushare_agent.model.pods import Pod
from gpushare_agent.node import Node
from gpushare_agent.runtime.cgroups import Cgroups
from gpushare_agent.runtime.cri import RuntimeClient


def build_virtual_manager(
    node: Node,
    runtime: RuntimeClient,
    cgroups: Cgroups,
    module: KernelModule | None,
    volumes: Mapping[VolumeName, DriverVolume],
    warn: Callable[[Pod, str, str], None],
) -> VirtualManager:
    """Not started."""
    return VirtualManager(
        files=VDeviceFiles(node.settings.virtual_manager.path),
        allocations=node.claim_pods.shares,
        pods=node.claim_pods,
        configs=VDeviceConfigs(
            inventory=node.gpus,
            driver_version=_driver_version(node, volumes),
            names=node.names,
            on_problem=lambda pod, text: warn(pod, "CoreLimitIgnored", text),
        ),
        processes=ContainerProcesses(
            ContainerIds(runtime, node.pods),
            cgroups,
            clock=time.monotonic,
            module=module,
            sharers=node.claim_pods.sharers,
        ),
        identify=cgroups.identify_in_thread,
        metrics=node.metrics,
        clock=time.monotonic,
    )


def _driver_version(node: Node, volumes: Mapping[VolumeName, DriverVolume]) -> Callable[[], str]:
    """Of the libraries that containers get, as they are at the agent's start, else as the driver says."""
    found = [version for volume in volumes.values() if (version := installed_driver_version(volume)) is not None]
    installed = ".".join(map(str, max(found))) if found else ""
    return lambda: installed or node.gpus().driver_version
