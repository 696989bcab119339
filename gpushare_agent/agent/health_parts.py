"""Builds what watches the GPUs: the inventory, the watch, the state file, the observer and the control socket."""

from __future__ import annotations

from dataclasses import dataclass

from gpushare_agent.cluster.node_events import NodeEvents
from gpushare_agent.gpus.control_server import ControlServer
from gpushare_agent.gpus.decisions.health import HealthPolicy
from gpushare_agent.gpus.inventory import GpuInventoryState
from gpushare_agent.gpus.observer import GpuHealthObserver
from gpushare_agent.gpus.state_file import HealthStateFile
from gpushare_agent.gpus.state_writer import HealthStateWriter
from gpushare_agent.gpus.watch import GpuDriver, GpuWatch
from gpushare_agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.settings.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthParts:
    """`control` is None where the setting names no socket."""

    inventory: GpuInventoryState
    watch: GpuWatch
    writer: HealthStateWriter
    events: NodeEvents
    control: ControlServer | None


def health_policy(settings: Settings) -> HealthPolicy:
    health = settings.health
    return HealthPolicy(
        ignored_xids=frozenset(health.ignored_xids),
        reset_xids=frozenset(health.reset_xids),
        recovery_probes=health.recovery_probes,
        recovery_period_s=health.recovery_period_s,
        recovery_period_max_s=health.recovery_period_max_s,
    )


def build_health(settings: Settings, driver: GpuDriver, metrics: AgentMetrics) -> HealthParts:
    """Joined, not started."""
    inventory = GpuInventoryState(health_policy(settings))
    events = NodeEvents(node_name=settings.node_name)
    observer = GpuHealthObserver(inventory, events, metrics)
    watch = GpuWatch(
        driver,
        inventory,
        period_s=settings.health.check_period_s,
        event_period_s=settings.health.event_period_s,
        metrics=metrics,
    )
    state_file, socket = settings.health.state_file, settings.control.socket
    writer = HealthStateWriter(inventory, HealthStateFile(state_file) if state_file is not None else None)
    inventory.subscribe(observer.inventory_changed)
    inventory.subscribe(writer.inventory_changed)
    return HealthParts(
        inventory=inventory,
        watch=watch,
        writer=writer,
        events=events,
        control=ControlServer(socket, inventory, writer, poll_soon=watch.poll_soon) if socket is not None else None,
    )
