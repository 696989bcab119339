"""Builds the node agent's parts from the settings and joins them. No loop runs here; apps/node_agent.py runs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from gpushare_agent.adapters.cgroups import Cgroups
from gpushare_agent.adapters.extra_config import read_extra_devices
from gpushare_agent.adapters.kubelet import register
from gpushare_agent.adapters.kubelet_checkpoint import KubeletCheckpoint
from gpushare_agent.adapters.node_probes import RUNTIME_SOCKETS
from gpushare_agent.adapters.pod_processes import PodProcesses
from gpushare_agent.adapters.pod_resources import PodResourcesClient
from gpushare_agent.adapters.runtime import RuntimeClient, runtime_endpoints
from gpushare_agent.adapters.simulated_gpus import SimulatedDriver
from gpushare_agent.adapters.vdevice_files import VDeviceFiles
from gpushare_agent.adapters.volume_config import read_volume_config
from gpushare_agent.apps.installed_driver import installed_driver_version
from gpushare_agent.decisions.admission import Policy
from gpushare_agent.decisions.container_edits import NodeDevices
from gpushare_agent.decisions.isolation import ISOLATIONS, IsolationPaths
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.driver_volumes import DriverVolume, VolumeName
from gpushare_agent.model.errors import Corrupt, Refused, Rejected, StartupError
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import VCORE_SOCKET, VMEMORY_SOCKET, PodUid
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.services.admission import Admission
from gpushare_agent.services.admission_news import AdmissionNews
from gpushare_agent.services.container_ids import ContainerIds
from gpushare_agent.services.container_processes import ContainerProcesses
from gpushare_agent.services.device_plugin import DevicePlugin
from gpushare_agent.services.garbage_collection import GarbageCollection
from gpushare_agent.services.gpu_watch import GpuDriver, GpuWatch
from gpushare_agent.services.identification import Identification, Patience
from gpushare_agent.services.kubelet_facts import KubeletFacts
from gpushare_agent.services.metrics import AgentMetrics, CardView, ContainerView
from gpushare_agent.services.plugin_endpoint import PluginEndpoint
from gpushare_agent.services.pod_annotations import PodAnnotations
from gpushare_agent.services.pod_events import PodEvents
from gpushare_agent.services.pod_informer import PodInformer
from gpushare_agent.services.pod_resources_gate import PodResourcesGate
from gpushare_agent.services.registration import Registrar
from gpushare_agent.services.rejected_pods import RejectedPods
from gpushare_agent.services.virtual_manager import VirtualManager
from gpushare_agent.services.web import WebServer
from gpushare_agent.settings import Settings
from gpushare_agent.state.allocation_cache import AllocationCache
from gpushare_agent.state.device_table import DeviceTable, check_size, device_rows
from gpushare_agent.state.gpu_inventory import GpuInventoryState
from gpushare_agent.state.pod_store import PodStore

KUBELET_SOCKET = "kubelet.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """Everything that runs, and the state it shares. `registered` is set once the kubelet has accepted both resources."""

    settings: Settings
    names: ResourceNames
    driver: GpuDriver
    inventory: GpuInventoryState
    gpu_watch: GpuWatch
    cache: AllocationCache
    store: PodStore
    gate: PodResourcesGate
    pod_resources: PodResourcesClient
    facts: KubeletFacts
    admission: Admission
    garbage: GarbageCollection
    registrar: Registrar
    registered: asyncio.Event
    informer: PodInformer
    annotations: PodAnnotations
    events: PodEvents
    rejected: RejectedPods
    metrics: AgentMetrics
    web: WebServer
    runtime: RuntimeClient
    cgroups: Cgroups
    volumes: Mapping[VolumeName, DriverVolume]
    virtual_manager: VirtualManager | None

    def not_ready(self) -> list[str]:
        """Why the agent is not ready, nothing when it is."""
        reasons = [
            f"{resource} is not registered with the kubelet"
            for resource in (self.names.vcore, self.names.vmemory)
            if not self.registrar.is_registered(resource)
        ]
        if not self.store.is_synced:
            reasons.append("the API server has not listed this node's pods yet")
        return reasons


def open_driver(settings: Settings) -> GpuDriver:
    """The driver that the settings name. Raises StartupError for a topology file that cannot be used."""
    if settings.driver == "nvml":
        from gpushare_agent.adapters.nvml import NvmlDriver

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
            cards=simulated.cards,
            card_memory_mib=simulated.card_memory_mib,
            topology_text=text,
            card_name=simulated.card_name,
            seed=settings.node_name,
            faults_file=simulated.faults,
        )
    except Corrupt as e:
        raise StartupError(f"topology file {simulated.topology}: {e}") from e


def build(settings: Settings, driver: GpuDriver) -> NodeParts:
    """The parts, joined but not started. Raises StartupError.

    Long and straight on purpose: this is the one place that shows what is joined to what, and nothing in it decides.
    """
    names = ResourceNames(
        vcore=settings.resources.vcore,
        vmemory=settings.resources.vmemory,
        memory_block_mib=settings.resources.memory_block_mib,
    )
    directory = settings.kubelet.device_plugin_path
    metrics, cache, store, inventory = AgentMetrics(), AllocationCache(), PodStore(), GpuInventoryState()
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
    informer = PodInformer(
        store=store, node_name=settings.node_name, resources=(names.vcore, names.vmemory), metrics=metrics
    )
    annotations = PodAnnotations(pods=store, metrics=metrics)
    events = PodEvents(node_name=settings.node_name, metrics=metrics)
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
    runtime, volumes = _runtime(settings), _volumes(settings)
    virtual_manager = None
    cgroups = Cgroups(settings.runtime.cgroup_root, settings.runtime.proc_root)
    if settings.isolation == "vcuda":
        virtual_manager = VirtualManager(
            files=VDeviceFiles(settings.virtual_manager.path),
            allocations=cache.view,
            pods=store,
            inventory=lambda: inventory.current,
            memory_block_mib=names.memory_block_mib,
            driver_version=_driver_version(volumes, inventory),
            processes=ContainerProcesses(ContainerIds(runtime, store), cgroups, clock=time.monotonic),
            identify=cgroups.identify_in_thread,
            metrics=metrics,
            complain=lambda pod, text: events.warned(pod, "CoreLimitIgnored", text),
            clock=time.monotonic,
        )
    refused_pods: set[PodUid] = set()
    admission = Admission(
        gate=gate,
        identification=Identification(
            pods=store,
            fetcher=informer,
            kubelet=facts,
            allocations=cache.view,
            refused=refused_pods,
            names=names,
            clock=time.monotonic,
            patience=Patience(
                lookup_s=settings.kubelet.pod_lookup_timeout_s, look_again_s=settings.kubelet.look_again_s
            ),
        ),
        cache=cache,
        pods=store,
        inventory=lambda: inventory.current,
        policy=Policy(names=names, share_policy=settings.placement.share_policy, share_mode=settings.share_mode),
        devices=NodeDevices(
            extra=read_extra_devices(settings.extra_config),
            has_card_nodes=settings.driver == "nvml" or settings.simulated.device_nodes,
        ),
        node_name=settings.node_name,
        refused_pods=refused_pods,
        observer=AdmissionNews(
            metrics=metrics,
            annotations=annotations,
            events=events,
            allocations=cache.view,
            inventory=lambda: inventory.current,
            names=names,
        ),
        records=checkpoint,
        settle=garbage.settle,
        isolation=ISOLATIONS[settings.isolation],
        paths=_isolation_paths(settings, volumes),
        prepare=virtual_manager.prepare if virtual_manager is not None else _prepare_nothing,
        clock=time.monotonic,
    )
    tables = {kind: DeviceTable() for kind in ResourceKind}
    registered, waiting = asyncio.Event(), {names.vcore, names.vmemory}

    def note_registered(resource: str) -> None:
        metrics.registered(resource)
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

    def cards_changed(found: GpuInventory) -> None:
        for kind, table in tables.items():
            table.set_devices(device_rows(found, kind, names.memory_block_mib))

    store.subscribe(pod_changed)
    inventory.subscribe(cards_changed)
    registrar = Registrar(
        device_plugin_path=directory,
        endpoints=[
            PluginEndpoint(
                device_plugin_path=directory,
                socket_name=VCORE_SOCKET if kind is ResourceKind.VCORE else VMEMORY_SOCKET,
                plugin=DevicePlugin(names.name(kind), table, admission, kind is ResourceKind.VCORE, metrics),
            )
            for kind, table in tables.items()
        ],
        register=register,
        on_registered=note_registered,
        on_kubelet_restart=kubelet_restarted,
    )
    ready: list[NodeParts] = []
    parts = NodeParts(
        settings=settings,
        names=names,
        driver=driver,
        inventory=inventory,
        gpu_watch=GpuWatch(driver, inventory, period_s=settings.health.check_period_s),
        cache=cache,
        store=store,
        gate=gate,
        pod_resources=pod_resources,
        facts=facts,
        admission=admission,
        garbage=garbage,
        registrar=registrar,
        registered=registered,
        informer=informer,
        annotations=annotations,
        events=events,
        rejected=RejectedPods(
            pods=store,
            resources=(names.vcore, names.vmemory),
            per_minute=settings.allocation.cleanup_per_minute,
            metrics=metrics,
        ),
        metrics=metrics,
        runtime=runtime,
        cgroups=cgroups,
        volumes=volumes,
        virtual_manager=virtual_manager,
        web=WebServer(settings.web.addr, settings.web.port, metrics=metrics, ready=lambda: _not_ready(ready)),
    )
    ready.append(parts)
    metrics.show_containers(lambda: container_views(parts))
    metrics.show_cards(lambda: card_views(parts))
    metrics.show_pod_event_age(lambda: _age(store.last_event_at))
    return parts


async def _prepare_nothing(keys: Collection[ContainerKey]) -> Refused | None:
    return None


def _runtime(settings: Settings) -> RuntimeClient:
    try:
        endpoints = runtime_endpoints(settings.runtime.endpoint, RUNTIME_SOCKETS)
    except Rejected as e:
        raise StartupError(str(e)) from e
    return RuntimeClient(endpoints, timeout_s=settings.runtime.request_timeout_s)


def _volumes(settings: Settings) -> Mapping[VolumeName, DriverVolume]:
    """The driver volumes of volume.conf; none without the setting, and none are mounted then."""
    if settings.volume_config is None or settings.isolation != "vcuda":
        return {}
    return {volume.name: volume for volume in read_volume_config(settings.volume_config)}


def _isolation_paths(settings: Settings, volumes: Mapping[VolumeName, DriverVolume]) -> IsolationPaths:
    """The driver directory is mounted where volume.conf says it is."""
    shared, whole = volumes.get(VolumeName.SHARED), volumes.get(VolumeName.ORIGIN)
    return IsolationPaths(
        virtual_manager=settings.virtual_manager.path,
        shared_driver=shared.directory if shared is not None else None,
        whole_driver=whole.directory if whole is not None else None,
    )


def _driver_version(volumes: Mapping[VolumeName, DriverVolume], inventory: GpuInventoryState) -> Callable[[], str]:
    """Of the libraries that containers get, as they are at the agent's start, else as the driver says."""
    found = [version for volume in volumes.values() if (version := installed_driver_version(volume)) is not None]
    installed = ".".join(map(str, max(found))) if found else ""
    return lambda: installed or inventory.current.driver_version


def _not_ready(built: list[NodeParts]) -> list[str]:
    return built[0].not_ready() if built else ["the agent is still being put together"]


def check_message_size(parts: NodeParts, found: GpuInventory) -> None:
    """Raises StartupError where the list of memory blocks would not fit a gRPC message."""
    check_size(found, parts.names.vmemory, parts.names.memory_block_mib)


def container_views(parts: NodeParts) -> list[ContainerView]:
    """What /metrics says of each container that holds a share."""
    index = {card.uuid: card.index for card in parts.inventory.current.cards}
    memory = {card.uuid: card.memory_mib for card in parts.inventory.current.cards}
    return [
        ContainerView(
            namespace=a.namespace,
            pod=a.pod_name,
            container=a.key.container,
            node=parts.settings.node_name,
            cores=a.cores,
            memory_mib=sum(memory.get(card, 0) for card in a.cards)
            if a.is_whole
            else a.memory_blocks * parts.names.memory_block_mib,
            cards=tuple(index[card] for card in a.cards if card in index),
        )
        for a in parts.cache
        if a.pod_name and not _is_over(parts, a)
    ]


def _is_over(parts: NodeParts, held: Allocation) -> bool:
    """An init container that has run: what it held is counted with the containers that took it over."""
    pod = parts.store.get(held.key.pod_uid)
    return held.kind is ContainerKind.INIT and pod is not None and pod.has_started


def card_views(parts: NodeParts) -> list[CardView]:
    """What /metrics says of each card."""
    cores, blocks = parts.cache.used_cores(), parts.cache.used_blocks()
    whole = {card for a in parts.cache if a.is_whole for card in a.cards}
    return [
        CardView(
            index=card.index,
            uuid=card.uuid,
            memory_mib=card.memory_mib,
            cores_allocated=cores.get(card.uuid, 0),
            memory_mib_allocated=card.memory_mib
            if card.uuid in whole
            else blocks.get(card.uuid, 0) * parts.names.memory_block_mib,
            is_healthy=card.is_healthy,
        )
        for card in parts.inventory.current.cards
    ]


def _age(at: float | None) -> float | None:
    return None if at is None else max(0.0, time.monotonic() - at)
