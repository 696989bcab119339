"""Builds the node agent's parts from the settings and joins them. No loop runs here; agent/node_agent.py runs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gpushare_agent.admission.admission import Admission
from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.decision_log import DecisionLog
from gpushare_agent.admission.decisions.ledger import Policy
from gpushare_agent.admission.device_tables import DeviceTables
from gpushare_agent.admission.garbage_collection import GarbageCollection
from gpushare_agent.admission.identification import Identification, Timeouts
from gpushare_agent.admission.notifications import AdmissionObserver
from gpushare_agent.admission.pod_processes import PodProcesses
from gpushare_agent.admission.rejected_pods import RejectedPods
from gpushare_agent.agent.health_parts import HealthParts, build_health
from gpushare_agent.agent.isolation_parts import IsolationParts, build_isolation
from gpushare_agent.agent.node_values import driver_volumes, edit_policy, resource_names, runtime_client
from gpushare_agent.agent.node_views import node_snapshot, wanted_allocations, wanted_facts
from gpushare_agent.agent.usage_parts import build_usage, show_node
from gpushare_agent.cluster.decisions.node_facts import NodeFacts
from gpushare_agent.cluster.events import PodEvents
from gpushare_agent.cluster.informer import Informer
from gpushare_agent.cluster.kube.client import pods_of_node
from gpushare_agent.cluster.node_fields import ALLOCATIONS, CAPACITY, FACTS, NodeFieldsWriter
from gpushare_agent.cluster.node_pods import NodePods
from gpushare_agent.cluster.pod_annotations import PodAnnotations
from gpushare_agent.cluster.pod_store import PodStore
from gpushare_agent.gpus.inventory import GpuInventoryState
from gpushare_agent.gpus.simulated.driver import SimulatedDriver
from gpushare_agent.gpus.watch import GpuDriver, GpuWatch
from gpushare_agent.isolation.driver_volume.values import DriverVolume, VolumeName
from gpushare_agent.kubelet.checkpoint import KubeletCheckpoint
from gpushare_agent.kubelet.device_plugin import DevicePlugin
from gpushare_agent.kubelet.device_table import check_size, check_unit_size
from gpushare_agent.kubelet.facts import KubeletFacts
from gpushare_agent.kubelet.plugin_endpoint import PluginEndpoint
from gpushare_agent.kubelet.pod_resources import PodResourcesClient
from gpushare_agent.kubelet.pod_resources_gate import PodResourcesGate
from gpushare_agent.kubelet.registration import Registrar
from gpushare_agent.kubelet.registration_client import register
from gpushare_agent.model.errors import Corrupt, StartupError
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import GPU_MEM_SOCKET, VCORE_SOCKET, VMEMORY_SOCKET, PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.observability.display import DisplayServer
from gpushare_agent.observability.display import routes as display_routes
from gpushare_agent.observability.http.debug_pages import DebugSources
from gpushare_agent.observability.http.debug_server import DebugServer
from gpushare_agent.observability.http.live_stream import LiveStream
from gpushare_agent.observability.http.node_api import NodeApi
from gpushare_agent.observability.http.server import WebServer
from gpushare_agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.observability.snapshot_cache import MAX_AGE_S, SnapshotCache
from gpushare_agent.observability.usage_history import UsageHistory
from gpushare_agent.observability.usage_sampling import UsageSampling
from gpushare_agent.runtime.cri import RuntimeClient
from gpushare_agent.settings.settings import Settings

KUBELET_SOCKET = "kubelet.sock"
SOCKETS = {
    ResourceKind.VCORE: VCORE_SOCKET,
    ResourceKind.VMEMORY: VMEMORY_SOCKET,
    ResourceKind.GPU_MEM: GPU_MEM_SOCKET,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """Everything that runs, and the state it shares. `registered` is set once the kubelet has accepted both resources."""

    settings: Settings
    names: ResourceNames
    driver: GpuDriver
    inventory: GpuInventoryState
    gpu_watch: GpuWatch
    health: HealthParts
    cache: AllocationCache
    store: PodStore
    gate: PodResourcesGate
    pod_resources: PodResourcesClient
    facts: KubeletFacts
    admission: Admission
    garbage: GarbageCollection
    registrar: Registrar
    registered: asyncio.Event
    node_pods: NodePods
    informer: Informer
    annotations: PodAnnotations
    events: PodEvents
    rejected: RejectedPods
    metrics: AgentMetrics
    web: WebServer
    live_stream: LiveStream
    display: DisplayServer | None
    debug: DebugServer | None
    runtime: RuntimeClient
    volumes: Mapping[VolumeName, DriverVolume]
    tables: DeviceTables
    node_capacity: NodeFieldsWriter[Mapping[str, int]] | None
    node_facts: NodeFieldsWriter[NodeFacts] | None
    node_allocations: NodeFieldsWriter[str] | None
    isolation: IsolationParts
    decisions: DecisionLog
    usage: UsageSampling
    usage_history: UsageHistory
    snapshots: SnapshotCache
    """What everything that shows the node is made from."""
    started_at: float
    """Seconds since the epoch."""

    def not_ready(self) -> list[str]:
        """Why the agent is not ready, nothing when it is."""
        reasons = [
            f"{resource} is not registered with the kubelet"
            for resource in self.names.names
            if not self.registrar.is_registered(resource)
        ]
        if not self.store.is_synced:
            reasons.append("the API server has not listed this node's pods yet")
        return reasons


def open_driver(settings: Settings) -> GpuDriver:
    """The driver that the settings name. Raises StartupError for a topology file that cannot be used."""
    if settings.driver == "nvml":
        from gpushare_agent.gpus.nvml.driver import NvmlDriver

        return NvmlDriver()
    simulated = settings.simulated
    text = None
    if simulated.topology is not None:
        try:
            text = simulated.topology.read_text(encoding="utf-8", errors="replace")
        except OSError as e:
            raise StartupError(
                f"topology file {simulated.topology} cannot be read: {e.strerror}. It should hold the text of "
                "`nvidia-smi topo -m`"
            ) from e
    try:
        return SimulatedDriver(
            gpus=simulated.cards,
            gpu_memory_mib=simulated.card_memory_mib,
            topology_text=text,
            gpu_name=simulated.card_name,
            seed=settings.node_name,
            faults_file=simulated.faults,
            usage_file=simulated.usage,
        )
    except Corrupt as e:
        raise StartupError(f"topology file {simulated.topology}: {e}") from e


def build(settings: Settings, driver: GpuDriver, *, metrics: AgentMetrics | None = None) -> NodeParts:
    """The parts, joined but not started; `metrics` are those of an earlier life, which then count on. Raises StartupError.

    Long and straight on purpose: this is the one place that shows what is joined to what, and nothing in it decides.
    """
    names = resource_names(settings)
    directory = settings.kubelet.device_plugin_path
    metrics = metrics.begin_anew() if metrics is not None else AgentMetrics()
    cache, store = AllocationCache(), PodStore()
    health = build_health(settings, driver, metrics)
    inventory = health.inventory
    checkpoint = KubeletCheckpoint(directory)
    pod_resources = PodResourcesClient(settings.kubelet.pod_resources_socket)
    gate = PodResourcesGate(
        pod_resources,
        clock=time.monotonic,
        on_list=metrics.pod_resources_listed,
        on_overlap=lambda: metrics.pod_resources_listed("overlapped"),
    )
    facts = KubeletFacts(
        node_name=settings.node_name,
        kubelet_socket=directory / KUBELET_SOCKET,
        allow_unsupported=settings.kubelet.allow_unsupported,
    )
    node_pods = NodePods(store=store, node_name=settings.node_name, resources=names.names)
    annotations, events = (
        PodAnnotations(pods=store, metrics=metrics),
        PodEvents(settings.node_name, count=metrics.pod_event),
    )
    garbage = GarbageCollection(
        cache=cache,
        pods=store,
        gate=gate,
        pod_resources=pod_resources,
        checkpoint=checkpoint,
        processes=PodProcesses(settings.runtime.cgroup_root),
        names=names,
        inventory=lambda: inventory.current,
        kubelet_age_s=facts.age_s,
        clock=time.monotonic,
        period_s=settings.allocation.check_period_s,
        on_correction=metrics.reconcile_corrected,
    )
    runtime, volumes = runtime_client(settings), driver_volumes(settings)
    isolation = build_isolation(
        settings,
        names=names,
        cache=cache,
        store=store,
        inventory=inventory,
        runtime=runtime,
        volumes=volumes,
        metrics=metrics,
        events=events,
    )
    refused_pods: set[PodUid] = set()
    decisions = DecisionLog(settings.decisions.kept)
    usage, usage_history = build_usage(
        settings, driver=driver, runtime=runtime, cache=cache, store=store, metrics=metrics
    )
    admission = Admission(
        gate=gate,
        identification=Identification(
            pods=store,
            fetcher=node_pods,
            kubelet=facts,
            allocations=cache.view,
            refused=refused_pods,
            names=names,
            clock=time.monotonic,
            timeouts=Timeouts(
                lookup_s=settings.kubelet.pod_lookup_timeout_s, look_again_s=settings.kubelet.look_again_s
            ),
            on_identified=metrics.identified,
        ),
        cache=cache,
        pods=store,
        inventory=lambda: inventory.current,
        policy=Policy(
            names=names,
            share_policy=settings.placement.share_policy,
            share_mode=settings.share_mode,
            max_shares_of_gpu=settings.mps.max_clients if isolation.mps_watch is not None else None,
        ),
        edits=edit_policy(settings, names, volumes),
        node_name=settings.node_name,
        refused_pods=refused_pods,
        observer=AdmissionObserver(
            metrics=metrics,
            annotations=annotations,
            events=events,
            allocations=cache.view,
            inventory=lambda: inventory.current,
            names=names,
            decisions=decisions,
        ),
        records=checkpoint,
        settle=garbage.settle,
        prepare=isolation.prepare,
        daemon_trouble=isolation.daemon_trouble,
        clock=time.monotonic,
    )
    tables = DeviceTables(names=names, inventory=lambda: inventory.current, cache=cache, no_shares=isolation.no_shares)
    if isolation.mps_watch is not None:
        isolation.mps_watch.subscribe(tables.look_again)
    cache.subscribe(tables.allocation_changed)
    registered, waiting = asyncio.Event(), set(names.names)

    def note_registered(resource: str) -> None:
        metrics.registered(resource)
        snapshots.expire()
        waiting.discard(resource)
        if not waiting:
            registered.set()

    def kubelet_restarted() -> None:
        admission.kubelet_restarted()
        pod_resources.forget()
        facts.kubelet_restarted()

    def pod_changed(old: Pod | None, new: Pod | None) -> None:
        garbage.pod_changed(old, new)
        if new is None and old is not None:
            refused_pods.discard(old.uid)

    store.subscribe(pod_changed)
    inventory.subscribe(lambda _: tables.refresh())
    registrar = Registrar(
        device_plugin_path=directory,
        endpoints=[
            PluginEndpoint(
                device_plugin_path=directory,
                socket_name=SOCKETS[kind],
                plugin=DevicePlugin(names.name(kind), table, admission, kind.binds_gpu, metrics),
            )
            for kind, table in tables.tables.items()
        ],
        register=register,
        on_registered=note_registered,
        on_kubelet_restart=kubelet_restarted,
    )
    ready: list[NodeParts] = []
    snapshots = SnapshotCache(lambda: node_snapshot(ready[0]), max_age_s=min(settings.sample_period_s, MAX_AGE_S))
    live_stream = LiveStream(
        document=snapshots.document,
        decisions=decisions,
        sample_period_s=settings.sample_period_s,
    )
    node_api = NodeApi(
        snapshot=snapshots.current,
        history=usage_history,
        decisions=decisions,
        kept_decisions=settings.decisions.kept,
    )
    parts = NodeParts(
        settings=settings,
        names=names,
        driver=driver,
        inventory=inventory,
        gpu_watch=health.watch,
        health=health,
        cache=cache,
        store=store,
        gate=gate,
        pod_resources=pod_resources,
        facts=facts,
        admission=admission,
        garbage=garbage,
        registrar=registrar,
        registered=registered,
        node_pods=node_pods,
        informer=Informer(kind="pods", watched=pods_of_node(settings.node_name), handler=node_pods, metrics=metrics),
        annotations=annotations,
        events=events,
        rejected=RejectedPods(
            pods=store,
            resources=names.names,
            per_minute=settings.allocation.cleanup_per_minute,
            metrics=metrics,
        ),
        metrics=metrics,
        runtime=runtime,
        volumes=volumes,
        tables=tables,
        node_capacity=_node_capacity(settings, inventory),
        node_facts=_node_facts(settings, inventory, ready),
        node_allocations=_node_allocations(settings, cache, store, ready),
        isolation=isolation,
        decisions=decisions,
        usage=usage,
        usage_history=usage_history,
        snapshots=snapshots,
        started_at=time.time(),
        live_stream=live_stream,
        display=DisplayServer(settings.display.socket, snapshots.current)
        if settings.display.socket is not None
        else None,
        debug=_debug(settings, cache, store, snapshots),
        web=WebServer(
            settings.web.addr,
            settings.web.port,
            metrics=metrics,
            ready=lambda: _not_ready(ready),
            routes=[*node_api.routes(), *display_routes(snapshots.current)],
            streams=live_stream.routes(),
            on_stop=live_stream.close,
        ),
    )
    ready.append(parts)
    show_node(parts)
    metrics.show_pod_event_age(lambda: _age(parts.informer.last_message_at))
    return parts


def _node_capacity(settings: Settings, inventory: GpuInventoryState) -> NodeFieldsWriter[Mapping[str, int]] | None:
    if not settings.gpushare.enabled:
        return None
    resource = settings.gpushare.count_resource
    return NodeFieldsWriter(
        CAPACITY, node_name=settings.node_name, wanted=lambda: {resource: len(inventory.current.gpus)}
    )


def _node_facts(
    settings: Settings, inventory: GpuInventoryState, built: list[NodeParts]
) -> NodeFieldsWriter[NodeFacts] | None:
    if not settings.facts.is_written:
        return None
    writer = NodeFieldsWriter(FACTS, node_name=settings.node_name, wanted=lambda: wanted_facts(built[0]))
    inventory.subscribe(lambda _: writer.changed())
    return writer


def _node_allocations(
    settings: Settings, cache: AllocationCache, store: PodStore, built: list[NodeParts]
) -> NodeFieldsWriter[str] | None:
    if not settings.facts.is_written:
        return None
    writer = NodeFieldsWriter(ALLOCATIONS, node_name=settings.node_name, wanted=lambda: wanted_allocations(built[0]))
    cache.subscribe(lambda old, new: writer.changed())
    store.subscribe(lambda old, new: writer.changed())
    return writer


def _debug(settings: Settings, cache: AllocationCache, store: PodStore, snapshots: SnapshotCache) -> DebugServer | None:
    """Raises StartupError where other hosts could read the pages without a token."""
    if not settings.debug.addr:
        return None
    sources = DebugSources(
        settings=settings,
        snapshot=snapshots.current,
        allocations=lambda: cache,
        pods=store.pods,
        now=time.monotonic,
    )
    return DebugServer(settings.debug, sources)


def _not_ready(built: list[NodeParts]) -> list[str]:
    return built[0].not_ready() if built else ["the agent is still being put together"]


def check_message_size(parts: NodeParts, found: GpuInventory) -> None:
    """Raises StartupError where the list of memory blocks or units would not fit a gRPC message."""
    check_size(found, parts.names.vmemory, parts.names.memory_block_mib)
    check_unit_size(found, parts.names)


def _age(at: float | None) -> float | None:
    return None if at is None else max(0.0, time.monotonic() - at)
