"""The node agent's parts, joined: each builds itself from the Node, in its own folder.

No loop runs here; agent/program.py runs them. `_Subscriptions` is the one place that says who hears of what.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from gpushare_agent.agent import share_readiness
from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.admission.claim_pods import ClaimPods
from gpushare_agent.agent.admission.decisions.former_devices import held_back
from gpushare_agent.agent.admission.outcomes import KEPT_DECISIONS, DecisionLog
from gpushare_agent.agent.admission.part import AdmissionPart
from gpushare_agent.agent.auto_isolation import NodeSettings
from gpushare_agent.agent.cluster.part import ClusterPart
from gpushare_agent.agent.cluster.pod_store import PodStore
from gpushare_agent.agent.gpus.inventory import GpuHealthObserver, GpuInventoryState
from gpushare_agent.agent.gpus.part import GpusPart, health_policy, open_driver
from gpushare_agent.agent.isolation import isolations
from gpushare_agent.agent.isolation.isolations import Isolations
from gpushare_agent.agent.isolation.resource_names import resource_names
from gpushare_agent.agent.kubelet.device_table import status_bytes
from gpushare_agent.agent.node import Node
from gpushare_agent.agent.node_configuration import NodeConfiguration
from gpushare_agent.agent.observability import part as observability_part
from gpushare_agent.agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.agent.observability.part import ObservabilityPart
from gpushare_agent.agent.share_readiness import ShareReadiness
from gpushare_agent.core.kube.informer import Informer
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.decision_records import CLAIMS_RESOURCE
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.names import PodUid, is_one_of
from gpushare_agent.core.model.pods import Pod

if TYPE_CHECKING:
    from gpushare_agent.agent.dra.part import DraPart


class NodeAgent(Struct, frozen=True, kw_only=True):
    """One generation of the agent, between two reloads of its settings."""

    node: Node
    gpus: GpusPart
    kubelet: AdmissionPart
    cluster: ClusterPart
    isolation: Isolations
    observability: ObservabilityPart
    dra: DraPart | None
    """None where there are no claims."""
    readiness: ShareReadiness

    async def leave(self) -> None:
        """Ends the service to the kubelet, in a moment that costs no pod anything where another agent waits to serve."""
        if self.dra is not None:
            await self.dra.leave()
        await self.kubelet.leave()

    def take_over(self, previous: NodeAgent) -> None:
        """Takes over what the generation before the reload knew and no file has."""
        self.kubelet.go_on_from(previous.kubelet)
        self.node.inventory.take_over(previous.node.inventory)
        self.node.decisions.take_over(previous.node.decisions)
        self.readiness.take_over(previous.readiness)
        if self.dra is not None and previous.dra is not None:
            self.dra.mig.take_over(previous.dra.mig)
        self.observability.take_over(previous.observability)


def build(
    chosen: NodeSettings,
    *,
    previous: NodeAgent | None = None,
    configuration: NodeConfiguration | None = None,
    request_reload: Callable[[str], None] = lambda reason: None,
) -> NodeAgent:
    """The parts, joined but not started; they go on with a `previous` generation. Raises StartupError."""
    settings, driver = chosen.settings, open_driver(chosen.settings)
    store, cache, inventory = PodStore(), AllocationCache(), GpuInventoryState(health_policy(settings))
    # Counters go on over a reload: a scrape must not see them fall.
    metrics = previous.node.metrics.begin_again() if previous is not None else AgentMetrics()
    node = Node(
        settings=settings,
        isolation_reason=chosen.isolation_reason,
        names=resource_names(settings, chosen.mig_profiles),
        metrics=metrics,
        inventory=inventory,
        pods=store,
        cache=cache,
        claim_pods=ClaimPods(store, cache),
        decisions=DecisionLog(KEPT_DECISIONS),
        # Records of an earlier agent count too: its claims still use GPUs where the setting names none any more.
        has_claims=settings.has_claims or chosen.has_claim_records,
    )
    cluster = ClusterPart(node)
    isolation = isolations.build(
        node, cluster.pod_events.warned, driver, note=cluster.node_events.note, choose_again=request_reload
    )
    kubelet = AdmissionPart(node, cluster, isolation, previous.kubelet if previous is not None else None)
    gpus = GpusPart(node, driver)
    dra = _build_dra(node, isolation, cluster, gpus)
    if dra is not None:
        cluster.further["dynamic resource allocation"] = dra.run
    if configuration is not None and settings.node_configuration.directory is not None:
        cluster.further["node configuration"] = partial(configuration.run, node, request_reload)
        metrics.show_node_configuration(lambda: bool(configuration.problem))

    readiness = share_readiness.build(node, isolation, driver, dra, kubelet.garbage.checkpoint)
    needs_restart = gpus.watch.needs_restart

    def not_ready() -> list[str]:
        return [*kubelet.not_ready(), *cluster.not_ready(), *readiness.not_ready(), *needs_restart()]

    agent = NodeAgent(
        node=node,
        gpus=gpus,
        kubelet=kubelet,
        cluster=cluster,
        isolation=isolation,
        observability=observability_part.build(
            node, driver, isolation, not_ready, needs_restart, dra.mig if dra is not None else None
        ),
        dra=dra,
        readiness=readiness,
    )
    _Subscriptions(agent).subscribe()
    if previous is not None:
        agent.take_over(previous)
    return agent


def _build_dra(node: Node, isolation: Isolations, cluster: ClusterPart, gpus: GpusPart) -> DraPart | None:
    """The part for claims; None where there are none: the start of an agent without any does not wait for its modules
    either."""
    records = node.settings.claim_directory
    if not node.has_claims or records is None:
        return None
    # Imported here: an agent without claims would load its modules for nothing.
    from gpushare_agent.agent.dra.part import DraPart
    from gpushare_agent.agent.mig.instances import MigInstances
    from gpushare_agent.agent.mig.records import InstanceRecords

    mig = MigInstances(node, gpus.driver, gpus.watch.poll, InstanceRecords(records.with_name("mig.json")))
    return DraPart(node, isolation, cluster.runtime_classes, records, mig)


class _Subscriptions:
    """The one list of who hears of what. Subscribers are called at once, in the order of the lines, and must not block."""

    def __init__(self, agent: NodeAgent) -> None:
        self._agent = agent
        changes = agent.observability.past.changes
        self._health = GpuHealthObserver(agent.node, agent.cluster.node_events, changes.health_changed)
        agent.node.inventory.on_event = changes.event_came

    def subscribe(self) -> None:
        agent, shown, metrics = self._agent, self._agent.observability, self._agent.node.metrics
        agent.node.inventory.subscribe(self._gpus_changed)
        agent.node.cache.subscribe(self._allocation_changed)
        agent.node.pods.subscribe(self._pod_changed)
        agent.kubelet.garbage.on_reconciled = self._health.reconciled
        agent.kubelet.registrar.on_registered = self._registered
        agent.kubelet.registrar.on_kubelet_restart = self._kubelet_restarted
        # History before expiry: a page that is made again has the sample in it.
        shown.usage.subscribe(shown.usage_history.add)
        shown.usage.subscribe(shown.consumption.add)
        shown.usage.subscribe(lambda _round: shown.expire())
        shown.usage.subscribe(agent.kubelet.resizing.usage_sampled)
        agent.kubelet.resizing.request_usage = shown.usage.request_round
        agent.isolation.follow_usage(shown.usage.subscribe, shown.usage.request_round)
        for watch in agent.isolation.watches.values():
            watch.subscribe(agent.kubelet.tables.request_refresh)
            watch.subscribe(shown.expire)
        metrics.know_resources(agent.node.names.names)
        if agent.dra is not None:
            metrics.know_admissions(CLAIMS_RESOURCE)
        metrics.show_node(shown.metrics_page)
        metrics.show_pod_event_age(partial(_silence_s, agent.cluster.informer, time.monotonic()))

    def _gpus_changed(self, inventory: GpuInventory) -> None:
        agent = self._agent
        self._health.inventory_changed(inventory)
        agent.gpus.writer.inventory_changed(inventory)
        agent.node.metrics.know_gpus(
            [gpu.uuid for gpu in inventory.gpus], status_bytes(inventory.gpus, agent.node.names)
        )
        # At once, not by request: a GPU that is lost must leave the lists before the next admission.
        agent.kubelet.tables.refresh()
        if agent.isolation.cdi_watch is not None:
            agent.isolation.cdi_watch.gpus_changed()
        agent.cluster.gpus_changed()
        agent.observability.consumption.gpus_changed()
        agent.cluster.annotations.compare_all()
        if agent.node.inventory.held:
            agent.kubelet.garbage.request_reconcile()  # with these GPUs the records may tell more
        self._changed()

    def _allocation_changed(self, old: Allocation | None, new: Allocation | None) -> None:
        agent, either = self._agent, new or old
        agent.kubelet.admission.identification.allocation_changed(old, new)
        # None: a resized share of which no record shows the container.
        uid = either.key.pod_uid if either is not None else None
        if any(one is not None and any(map(is_one_of, one.gpus)) for one in (old, new)):
            agent.node.inventory.hold(held_back(agent.node.cache))
        if either is not None and either.claim is not None:
            agent.kubelet.tables.request_refresh()  # a GPU that becomes free may go back to the device plugins
        # Of a device plugin: the kubelet's records of it are asked again, and the pod's annotation follows.
        else:
            agent.kubelet.garbage.allocation_changed(old, new)
            if new is not None:
                agent.cluster.annotations.compare(new.key.pod_uid)
            agent.kubelet.tables.allocation_changed(old, new)
        agent.cluster.allocations_changed(uid)
        if either is not None:
            agent.observability.consumption.changed(either.key)
        self._changed(uid)

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        agent = self._agent
        agent.kubelet.admission.identification.pod_changed(old, new)
        agent.kubelet.garbage.pod_changed(old, new)
        agent.kubelet.refused_pods.pod_changed(old, new)
        if agent.dra is not None and agent.dra.waker is not None:
            agent.dra.waker.pod_changed(old, new)
        agent.cluster.pod_changed(old, new)
        for uid in {uid for pod in (old, new) if pod is not None for uid in agent.node.claim_pods.subjects(pod)}:
            agent.cluster.allocations_changed(uid, is_pod=True)
            self._changed(uid, is_pod=True)

    def _changed(self, uid: PodUid | None = None, *, is_pod: bool = False) -> None:
        """Who compares what is with what should be, whatever has changed: of a pod or claim, an allocation of it, or
        (None) of all."""
        agent = self._agent
        if agent.dra is not None and not is_pod:
            agent.dra.changed()
        agent.kubelet.resizing.changed(uid)
        agent.isolation.changed(uid)
        agent.observability.expire()

    def _registered(self, resource: str) -> None:
        agent = self._agent
        agent.node.metrics.registered(resource)
        agent.observability.snapshots.expire()

    def _kubelet_restarted(self) -> None:
        agent = self._agent
        agent.kubelet.admission.kubelet_restarted()
        agent.kubelet.garbage.kubelet_restarted()
        # The new kubelet may be of another version: whether it has Get is detected again.
        agent.kubelet.pod_resources.forget()
        agent.kubelet.facts.kubelet_restarted()


def _silence_s(informer: Informer, began_at: float) -> float:
    # An API server that was never reached is silent too: no row would be no alert.
    last = informer.last_message_at
    return max(0.0, time.monotonic() - (began_at if last is None else last))
