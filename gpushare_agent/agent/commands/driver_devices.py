"""Serves NVIDIA's device nodes to this project's own pods, on nodes without NVIDIA's container runtime.

A container may open a device only where its cgroup allows it, which a container runtime sets for a privileged container, or
for what a device plugin answered. An agent that is neither privileged nor under NVIDIA's runtime therefore asks for the
resource `gpushare-agent/driver`. Its own plugins cannot serve it, because they need the GPUs first: this process needs none.

Every GPU of the node is in each answer, so the cluster must keep the resource from other pods
(manifests/components/driver-from-host has the policy). The right to make MIG instances is in it with mig.on_demand alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn

import structlog

from gpushare_agent.agent.kubelet.device_plugin import DevicePlugin
from gpushare_agent.agent.kubelet.device_table import DeviceRow, DeviceTable
from gpushare_agent.agent.kubelet.registration import PluginEndpoint, Registrar
from gpushare_agent.core.cli.command_line import Invocation
from gpushare_agent.core.kit.supervision import set_by_signals
from gpushare_agent.core.model.allocations import ContainerEdits, DeviceNode
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.names import DeviceId

log = structlog.get_logger(__name__)

RESOURCE = "gpushare-agent/driver"
SOCKET = "gpushare-driver.sock"
UNITS = 8
"""Pods of a node that may have it at once: two agents that hand over, a check, and what an operator adds."""
PERIOD_S = 5.0
_CONTROL = "nvidiactl"
"""Without it no program opens the driver."""
_DIRECTORIES = (".", "nvidia-caps")
_MIG_CONFIG = "/dev/nvidia-caps/nvidia-cap1"
"""The right to make and destroy MIG instances, `mig/config` (NVIDIA's MIG user guide, "Device Nodes and Capabilities")."""


def driver_nodes(dev: Path, *, with_mig_config: bool = False) -> tuple[str, ...]:
    """The host's paths of the driver's device nodes, of which `dev` shows the host's /dev; none where it is not loaded."""
    found = sorted(
        f"/dev/{path.relative_to(dev)}"
        for directory in _DIRECTORIES
        for path in (dev / directory).glob("nvidia*")
        if path.is_char_device()
    )
    if f"/dev/{_CONTROL}" not in found:
        return ()
    return tuple(path for path in found if with_mig_config or path != _MIG_CONFIG)


class AllNodes:
    """Every container that asks gets all of them, as they are then."""

    def __init__(self, dev: Path, *, with_mig_config: bool) -> None:
        self._dev = dev
        self._with_mig_config = with_mig_config

    async def preferred(
        self, resource: str, available: Collection[DeviceId], must_include: Sequence[DeviceId], size: int
    ) -> Sequence[str]:
        return [*must_include, *(one for one in available if one not in must_include)][:size]

    async def allocate(self, resource: str, ids: Sequence[DeviceId]) -> ContainerEdits | Refused:
        # Files of devtmpfs, which is memory.
        nodes = driver_nodes(self._dev, with_mig_config=self._with_mig_config)
        if not nodes:
            return Refused(reason=RefusalReason.NO_HEALTHY_GPU, detail=f"the node has no /dev/{_CONTROL} any more")
        return ContainerEdits(devices=tuple(DeviceNode(host_path=path, container_path=path) for path in nodes))

    async def pre_start(self, resource: str, ids: Sequence[DeviceId]) -> Refused | None:
        return None


async def run(call: Invocation) -> int:
    """Until SIGTERM or SIGINT."""
    settings, dev = call.settings(None), call.options.dev
    device_plugin_path = settings.kubelet.device_plugin_path
    nodes = AllNodes(dev, with_mig_config=bool(settings.mig.on_demand))
    table = DeviceTable(_rows(dev))
    # This process has no metrics: a call is a start of an agent, and in the log.
    plugin = DevicePlugin(RESOURCE, table, nodes, lambda *_: None, DeviceIds())
    endpoint = PluginEndpoint(device_plugin_path=device_plugin_path, socket_name=SOCKET, plugin=plugin)
    registrar = Registrar(device_plugin_path=device_plugin_path, endpoints=[endpoint])
    stop = set_by_signals()
    async with asyncio.TaskGroup() as tasks:
        parts = [tasks.create_task(registrar.run()), tasks.create_task(_follow(table, dev))]
        await stop.wait()
        for part in parts:
            part.cancel()
    return 0


async def _follow(table: DeviceTable, dev: Path) -> NoReturn:
    """A driver that is loaded later, or gone: until it is there the agent's pod waits unscheduled."""
    while True:
        await asyncio.sleep(PERIOD_S)
        if table.set_devices(_rows(dev)):
            log.info("driver_devices_changed", nodes=driver_nodes(dev))


def _rows(dev: Path) -> list[DeviceRow]:
    is_loaded = bool(driver_nodes(dev))
    return [DeviceRow(id=f"driver-{number}", healthy=is_loaded) for number in range(UNITS)]
