"""The GPUs for one agent: the inventory with its health rules, what watches it, what remembers it, the control socket."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection
from typing import Protocol

import structlog

from gpushare_agent.agent.gpus.control_server import ControlServer
from gpushare_agent.agent.gpus.saved_health import HealthStateFile, HealthStateWriter
from gpushare_agent.agent.gpus.watch import GpuDriver, GpuWatch, log_found
from gpushare_agent.agent.kubelet.device_table import check_lists
from gpushare_agent.agent.node import Node
from gpushare_agent.core.kit.supervision import Tasks
from gpushare_agent.core.model.errors import AgentError, Corrupt, StartupError, os_errors_as
from gpushare_agent.core.model.gpu_health import HealthPolicy
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.isolation import MemoryLimiter
from gpushare_agent.core.model.mig import MigGpuInstance, MigPlacement
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.usage import SamplesBusy
from gpushare_agent.core.settings.sections import ControlSettings
from gpushare_agent.core.settings.settings import Settings

log = structlog.get_logger(__name__)


class NodeDriver(GpuDriver, MemoryLimiter, SamplesBusy, Protocol):
    """All that the agent asks of the GPUs' driver. `in_use`, which `build` sets, are the GPUs that containers have: a MIG
    instance of theirs that is removed stays in the inventory."""

    in_use: Callable[[], Collection[GpuUuid]]

    async def create_instance(self, place: MigPlacement, *, is_new: bool = False) -> MigGpuInstance:
        """Makes the GPU instance at this place, and in it one compute instance that has all of it; where the GPU instance
        is there, the compute instance alone, but not if it `is_new`. Cancelled, the call goes on in its thread.

        Raises Conflict: the place is taken; Rejected: this process has not the right, with the remedy; NotFound: there is no
        such GPU or place; Unavailable: the driver does not answer, and may have made it all the same."""

    async def destroy_instance(self, parent: GpuUuid, instance: MigGpuInstance) -> None:
        """Removes the compute instances, then the GPU instance; one that is gone is removed. Raises Conflict: somebody uses
        it, and a part of it may be gone; else as `create_instance`."""


class GpusPart:
    def __init__(self, node: Node, driver: NodeDriver) -> None:
        """Joined, not started."""
        state, socket = node.settings.state_directory, node.settings.control.socket
        # A function, not a value: what containers have changes between polls.
        driver.in_use = lambda: {uuid for allocation in node.cache for uuid in allocation.gpus}
        self.node = node
        self.driver = driver
        self.watch = GpuWatch(node, driver)
        self.writer = HealthStateWriter(
            node.inventory, HealthStateFile(state / "health.json") if state is not None else None
        )
        self.control = None
        if socket is not None:
            self.control = ControlServer(socket, node.inventory, self.writer, poll_soon=self.watch.poll_soon)

    async def read(self) -> GpuInventory | None:
        """The first reading of the driver; None where it cannot be read, and the node may wait for one.

        Raises StartupError: the driver or every GPU cannot be read.
        """
        must_succeed = self.node.settings.fail_on_init_error
        try:
            found = await self.driver.read()
        # Settings that cannot work, such as sizes: waiting does not change them.
        except StartupError:
            raise
        except AgentError as e:
            if must_succeed:
                raise StartupError(
                    f"{e} (To keep the agent running on nodes without a usable driver: --fail-on-init-error=false.)"
                ) from e
            log.error("gpus_unreadable", error=str(e), then="no device is offered; the driver is read again every 30 s")
            return None
        # The driver answers and every GPU fails: an agent that offered nothing would look healthy.
        if not found.known and found.unreadable and must_succeed:
            index, reason = found.unreadable[0]
            raise StartupError(
                f"none of the {len(found.unreadable)} GPUs can be read (GPU {index}: {reason}). Look at nvidia-smi and "
                "the kernel log on this node; --fail-on-init-error=false keeps the agent waiting for them"
            )
        # Before registration: the kubelet would end the stream of a list over 4 MiB, again and again.
        self.check_sizes(found)
        return found

    def check_sizes(self, found: GpuInventory) -> None:
        """Raises StartupError: the kubelet cannot receive the lists of these GPUs' devices."""
        check_lists(found, self.node.names)

    async def offer(self, found: GpuInventory | None) -> None:
        """What `read` found, after what was remembered of the GPUs: a cordoned one is never offered."""
        # Before the GPUs: a cordoned one must not be offered for a moment.
        await self.writer.restore()
        if found is None:
            return
        self.node.inventory.read(found)
        log_found(self.node.inventory.current.known, found.unreadable)

    def tasks(self) -> Tasks:
        return {"gpu watch": self.watch.run, "health state": self.writer.run}

    def late_tasks(self) -> Tasks:
        return {"control socket": self.control.run} if self.control is not None else {}


def health_policy(settings: Settings) -> HealthPolicy:
    health, socket = settings.health, settings.control.socket
    return HealthPolicy(
        ignored_xids=frozenset(health.ignored_xids),
        reset_xids=frozenset(health.reset_xids),
        recovery_probes=health.recovery_probes,
        recovery_period_s=health.recovery_period_s,
        control=""
        if socket in (None, ControlSettings().socket)
        else f" --socket {shlex.quote(str(socket.absolute()))}",
    )


def open_driver(settings: Settings) -> NodeDriver:
    """The driver that the settings name. Raises StartupError for a topology file that cannot be used."""
    # Claims can ask for each instance, whatever the device plugin does with them.
    with_instances = settings.nvidia.mig_strategy != "none" or settings.has_claims
    if settings.driver == "nvml":
        # The modules of this driver only, as below.
        from gpushare_agent.agent.gpus.nvml.driver import NvmlDriver

        return NvmlDriver(
            with_instances=with_instances,
            on_demand=settings.mig.on_demand,
            unified_memory_mib=settings.resources.unified_memory_mib,
        )
    from gpushare_agent.agent.gpus.simulated.driver import SimulatedDriver

    simulated = settings.simulated
    text = None
    if simulated.topology is not None:
        remedy = "it should hold the text of `nvidia-smi topo -m`"
        with os_errors_as(StartupError, f"topology file {simulated.topology} cannot be read", otherwise=remedy):
            # errors=replace: the text comes from a terminal, with whatever letters.
            text = simulated.topology.read_text(encoding="utf-8", errors="replace")
    try:
        return SimulatedDriver(
            gpus=simulated.gpus,
            gpu_memory_mib=simulated.gpu_memory_mib,
            topology_text=text,
            gpu_name=simulated.gpu_name,
            seed=settings.node_name,
            faults_file=simulated.faults,
            usage_file=simulated.usage,
            with_instances=with_instances,
            on_demand=settings.mig.on_demand,
        )
    except Corrupt as e:
        raise StartupError(f"topology file {simulated.topology}: {e}") from e
