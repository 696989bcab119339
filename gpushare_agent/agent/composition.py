"""The node agent's four sides, joined: the kubelet, the GPUs, the API server, observability (and the isolations in use).

No loop runs here; agent/agent.py runs them. `_Subscriptions` is the one place that says who hears of what.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.decision_log import DecisionLog
from gpushare_agent.agent.claim_pods import ClaimPods
from gpushare_agent.agent.cluster_side import ClusterSide, build_cluster_side
from gpushare_agent.agent.gpu_side import GpuSide, NodeDriver, build_gpu_side, health_policy
from gpushare_agent.agent.isolation_side import IsolationSide, build_isolation_side
from gpushare_agent.agent.kubelet_build import build_kubelet_facts, build_kubelet_side
from gpushare_agent.agent.kubelet_side import KubeletSide
from gpushare_agent.agent.node_configuration import ConfigurationWatch, NodeConfiguration
from gpushare_agent.agent.observability_side import ObservabilitySide, build_observability_side
from gpushare_agent.agent.share_readiness import ShareReadiness
from gpushare_agent.agent.state import NodeState
from gpushare_agent.agent.values import resource_names
from gpushare_agent.cluster.pod_store import PodStore
from gpushare_agent.gpus.inventory import GpuInventoryState
from gpushare_agent.gpus.observer import GpuHealthObserver
from gpushare_agent.isolation.cdi.specs import CdiWatch
from gpushare_agent.kit.directories import has_files
from gpushare_agent.kubelet.device_table import status_bytes
from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.errors import AgentError, Unavailable
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.pods import Pod
from gpushare_agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.runtime.node_probes import connect_to_socket
from gpushare_agent.settings.settings import Settings

if TYPE_CHECKING:
    from gpushare_agent.agent.dra_side import DraSide

CONNECT_TIMEOUT_S = 5.0


class NodeAgent(Struct, frozen=True, kw_only=True):
    """One life of the agent, between two reloads of its settings."""

    state: NodeState
    gpus: GpuSide
    kubelet: KubeletSide
    cluster: ClusterSide
    isolation: IsolationSide
    observability: ObservabilitySide
    dra: DraSide | None
    """None where there are no claims."""
    readiness: ShareReadiness

    async def leave(self) -> None:
        """Ends the service to the kubelet, in a moment that costs no pod anything where another agent waits to serve."""
        if self.dra is not None:
            await self.dra.leave()
        await self.kubelet.leave()

    def take_over(self, earlier: NodeAgent) -> None:
        """What the life before the reload knew and no file keeps."""
        self.kubelet.go_on_from(earlier.kubelet)
        self.state.inventory.take_over(earlier.state.inventory)
        self.state.decisions.take_over(earlier.state.decisions)
        self.readiness.take_over(earlier.readiness)
        self.observability.usage_history.take_over(earlier.observability.usage_history)


def build(
    settings: Settings,
    driver: NodeDriver,
    *,
    earlier: NodeAgent | None = None,
    isolation_reason: str = "",
    configuration: NodeConfiguration | None = None,
    request_new_life: Callable[[str], None] = lambda reason: None,
    mig_profiles: Collection[str] = (),
) -> NodeAgent:
    """The sides, joined but not started. They go on with the metrics and the kubelet's queue of an `earlier` life;
    `take_over` is to follow. `isolation_reason` is why the isolation was chosen, where the setting was auto;
    `mig_profiles` are those of the node's MIG instances, after which resources are named. Raises StartupError."""
    store, cache = PodStore(), AllocationCache()
    state = NodeState(
        settings=settings,
        isolation_reason=isolation_reason,
        names=resource_names(settings, mig_profiles),
        metrics=earlier.state.metrics.begin_anew() if earlier is not None else AgentMetrics(),
        inventory=GpuInventoryState(health_policy(settings)),
        store=store,
        cache=cache,
        has_claims=bool(settings.dra.gpus) or has_files(settings.dra.record_directory),
        claim_pods=ClaimPods(store, cache),
        decisions=DecisionLog(settings.decisions.kept),
        request_new_life=request_new_life,
    )
    facts = build_kubelet_facts(settings)
    cluster = build_cluster_side(state, facts)
    isolation = build_isolation_side(state, cluster.pod_events, driver)
    kubelet = build_kubelet_side(state, facts, cluster, isolation, earlier.kubelet if earlier is not None else None)
    dra = _build_dra_side(state, isolation)
    cluster.further["dynamic resource allocation"] = dra
    if configuration is not None and settings.node_configuration.directory is not None:
        cluster.further["node configuration"] = ConfigurationWatch(configuration, state)
        state.metrics.show_node_configuration(lambda: bool(configuration.problem))

    readiness = ShareReadiness(
        {
            "kubelet.pod_resources_socket": partial(_connect, settings.kubelet.pod_resources_socket),
            **isolation.looks(),
            "cdi": partial(_look_for_names, isolation.cdi_watch, state, driver),
        }
    )

    def not_ready() -> list[str]:
        return [*kubelet.not_ready(), *cluster.not_ready(), *readiness.not_ready()]

    agent = NodeAgent(
        state=state,
        gpus=build_gpu_side(state, driver),
        kubelet=kubelet,
        cluster=cluster,
        isolation=isolation,
        observability=build_observability_side(state, driver, isolation, not_ready),
        dra=dra,
        readiness=readiness,
    )
    _Subscriptions(agent).subscribe()
    return agent


async def _connect(socket: Path) -> None:
    """Sends nothing: a List could disturb an admission of the agent that serves. Raises Unavailable."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await connect_to_socket(socket)
    except TimeoutError as e:
        raise Unavailable(f"{socket} does not answer within {CONNECT_TIMEOUT_S:g} s") from e


async def _look_for_names(watch: CdiWatch | None, state: NodeState, driver: NodeDriver) -> None:
    """Of an agent that does not serve the inventory is empty. Raises Unavailable."""
    if watch is None:
        return
    gpus = state.gpus().gpus
    if not gpus:
        try:
            gpus = (await driver.read()).gpus
        except AgentError:
            return  # `fail_on_init_error` says whether the agent starts without a driver
    await watch.look(gpus)


def _build_dra_side(state: NodeState, isolation: IsolationSide) -> DraSide | None:
    """None where there are no claims: the start of an agent without any does not wait for its modules either."""
    if not state.has_claims:
        return None
    from gpushare_agent.agent.dra_side import build_dra_side

    return build_dra_side(state, isolation)


class _Subscriptions:
    """Who hears of what. Subscribers are called at once, in the order of the lines, and must not block."""

    def __init__(self, agent: NodeAgent) -> None:
        self._state = agent.state
        self._gpus = agent.gpus
        self._kubelet = agent.kubelet
        self._cluster = agent.cluster
        self._isolation = agent.isolation
        self._shown = agent.observability
        self._dra = agent.dra
        self._health = GpuHealthObserver(agent.state.inventory, agent.cluster.node_events, agent.state.metrics)

    def subscribe(self) -> None:
        state, shown, metrics = self._state, self._shown, self._state.metrics
        state.inventory.subscribe(self._gpus_changed)
        state.cache.subscribe(self._allocation_changed)
        state.store.subscribe(self._pod_changed)
        self._kubelet.registrar.subscribe(on_registered=self._registered, on_kubelet_restart=self._kubelet_restarted)
        shown.usage.subscribe(shown.usage_history.add)
        shown.usage.subscribe(lambda _round: shown.expire())
        shown.usage.subscribe(self._kubelet.resizing.usage_sampled)
        self._kubelet.resizing.request_usage_by(shown.usage.request)
        for watch in self._isolation.watches.values():
            watch.subscribe(self._kubelet.tables.request_refresh)
            watch.subscribe(shown.expire)
        metrics.know_resources(state.names.names)
        metrics.show_node(shown.metrics_page)
        metrics.show_pod_event_age(lambda: _age(self._cluster.informer.last_message_at))

    def _gpus_changed(self, inventory: GpuInventory) -> None:
        self._health.inventory_changed(inventory)
        self._gpus.writer.inventory_changed(inventory)
        self._state.metrics.know_gpus(
            [gpu.uuid for gpu in inventory.gpus], status_bytes(inventory.gpus, self._state.names)
        )
        self._kubelet.tables.refresh()
        self._kubelet.resizing.changed()
        self._isolation.changed()
        if self._isolation.cdi_watch is not None:
            self._isolation.cdi_watch.gpus_changed()
        if self._cluster.node_facts is not None:
            self._cluster.node_facts.changed()
        self._cluster.annotations.compare_all()
        if self._dra is not None:
            self._dra.changed()
        self._shown.expire()

    def _allocation_changed(self, old: Allocation | None, new: Allocation | None) -> None:
        if self._dra is not None:
            self._dra.changed()
        if any(one is not None and one.claim is not None for one in (old, new)):
            self._kubelet.tables.request_refresh()  # a GPU that becomes free may go back to the device plugins
            self._kubelet.resizing.changed()
            self._isolation.changed()
            self._shown.expire()
            return
        self._kubelet.garbage.allocation_changed(old, new)
        if new is not None:
            self._cluster.annotations.compare(new.key.pod_uid)
        self._kubelet.tables.allocation_changed(old, new)
        self._kubelet.resizing.changed()
        self._isolation.changed()
        if self._cluster.node_allocations is not None:
            self._cluster.node_allocations.changed()
        self._shown.expire()

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        self._kubelet.garbage.pod_changed(old, new)
        self._kubelet.refused_pods.pod_changed(old, new)
        if self._dra is not None and self._dra.waker is not None:
            self._dra.waker.pod_changed(old, new)
        self._cluster.annotations.pod_changed(old, new)
        self._kubelet.resizing.changed()
        self._isolation.changed()
        if self._cluster.node_allocations is not None:
            self._cluster.node_allocations.changed()
        self._shown.expire()

    def _registered(self, resource: str) -> None:
        self._state.metrics.registered(resource)
        self._kubelet.first_registration.registered(resource)
        self._shown.snapshots.expire()

    def _kubelet_restarted(self) -> None:
        self._kubelet.admission.kubelet_restarted()
        self._kubelet.garbage.kubelet_restarted()
        self._kubelet.pod_resources.forget()
        self._kubelet.facts.kubelet_restarted()


def _age(at: float | None) -> float | None:
    return None if at is None else max(0.0, time.monotonic() - at)
