"""Builds the kubelet's side of one life of the agent (kubelet_side.py): every part with what it needs, none started."""

from __future__ import annotations

import time
from collections.abc import Mapping

from gpushare_agent.admission.admission import Admission
from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.container_starts import ContainerStarts
from gpushare_agent.admission.decision_log import DecisionLog
from gpushare_agent.admission.decisions.ledger import Policy
from gpushare_agent.admission.decisions.resize import ResizePolicy
from gpushare_agent.admission.device_tables import DeviceTables
from gpushare_agent.admission.garbage_collection import GarbageCollection
from gpushare_agent.admission.identification import Identification, Timeouts
from gpushare_agent.admission.outcomes import OutcomeReporter
from gpushare_agent.admission.pending import RefusedPods
from gpushare_agent.admission.pod_processes import PodProcesses
from gpushare_agent.admission.resize_file import ResizeFile
from gpushare_agent.admission.resize_reports import ResizeReporter
from gpushare_agent.admission.resizing import ShareResizing
from gpushare_agent.agent.isolation_side import IsolationSide
from gpushare_agent.agent.kubelet_side import FirstRegistration, KubeletSide
from gpushare_agent.agent.values import edit_policy
from gpushare_agent.cluster.part import ClusterPart
from gpushare_agent.kubelet.checkpoint import KubeletCheckpoint
from gpushare_agent.kubelet.device_ids import DeviceIds
from gpushare_agent.kubelet.device_plugin import DevicePlugin
from gpushare_agent.kubelet.facts import KubeletFacts
from gpushare_agent.kubelet.handover import (
    Handover,
    QueuedCalls,
    ServingLock,
    instance_socket_name,
)
from gpushare_agent.kubelet.plugin_endpoint import PluginEndpoint
from gpushare_agent.kubelet.pod_resources import PodResourcesClient
from gpushare_agent.kubelet.pod_resources_gate import PodResourcesGate
from gpushare_agent.kubelet.registration import KUBELET_SOCKET, Registrar
from gpushare_agent.kubelet.registration_client import register
from gpushare_agent.model.names import GPU_MEM_SOCKET, GPU_SOCKET, VCORE_SOCKET, VMEMORY_SOCKET
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.node import Node
from gpushare_agent.settings.settings import Settings

SOCKETS: Mapping[ResourceKind, str] = {
    ResourceKind.VCORE: VCORE_SOCKET,
    ResourceKind.VMEMORY: VMEMORY_SOCKET,
    ResourceKind.GPU_MEM: GPU_MEM_SOCKET,
    ResourceKind.GPU: GPU_SOCKET,
}


def build_kubelet_facts(settings: Settings) -> KubeletFacts:
    return KubeletFacts(
        node_name=settings.node_name,
        kubelet_socket=settings.kubelet.device_plugin_path / KUBELET_SOCKET,
        allow_unsupported=settings.kubelet.allow_unsupported,
    )


def build_kubelet_side(
    node: Node,
    cache: AllocationCache,
    decisions: DecisionLog,
    facts: KubeletFacts,
    cluster: ClusterPart,
    isolation: IsolationSide,
    earlier: KubeletSide | None = None,
) -> KubeletSide:
    """Joined, not started. The sockets of new resources have the handover and the queue of the `earlier` life."""
    settings = node.settings
    ids = DeviceIds()
    pod_resources = PodResourcesClient(settings.kubelet.pod_resources_socket, ids)
    gate = _build_gate(node, pod_resources)
    checkpoint = KubeletCheckpoint(settings.kubelet.device_plugin_path, ids)
    garbage = _build_garbage_collection(node, cache, facts, cluster, gate, pod_resources, checkpoint)
    refused_pods, outcomes = RefusedPods(), _build_outcomes(node, decisions, cluster)
    admission = Admission(
        gate=gate,
        identification=_build_identification(node, facts, cluster, refused_pods),
        cache=cache,
        pods=node.pods,
        inventory=node.plugins_gpus,
        policy=_policy(node, isolation),
        edits=edit_policy(settings, node.names, isolation.volumes),
        node_name=settings.node_name,
        refused_pods=refused_pods,
        observer=outcomes,
        wait_for_release=garbage.wait_for_release,
        prepare_ahead=isolation.prepare_ahead,
        isolation_unavailable_reason=isolation.unavailable_reason,
        clock=time.monotonic,
    )
    starts = _build_starts(node, cache, isolation, checkpoint, outcomes)
    tables = _build_tables(node, cache, isolation, ids)
    handover = earlier.handover if earlier is not None else Handover()
    calls = earlier.calls if earlier is not None else QueuedCalls()
    return KubeletSide(
        settings=settings,
        names=node.names,
        store=cluster.store,
        cache=cache,
        gate=gate,
        pod_resources=pod_resources,
        facts=facts,
        admission=admission,
        garbage=garbage,
        resizing=_build_resizing(node, cache, cluster, isolation),
        refused_pods=refused_pods,
        tables=tables,
        registrar=_build_registrar(node, calls, handover, tables, ids),
        first_registration=FirstRegistration(node.names.names),
        lock=ServingLock(settings.kubelet.device_plugin_path),
        handover=handover,
        calls=calls,
        starts=starts,
    )


def _build_gate(node: Node, pod_resources: PodResourcesClient) -> PodResourcesGate:
    return PodResourcesGate(
        pod_resources,
        clock=time.monotonic,
        on_list=node.metrics.pod_resources_listed,
        on_overlap=lambda: node.metrics.pod_resources_listed("overlapped"),
    )


def _build_tables(node: Node, cache: AllocationCache, isolation: IsolationSide, ids: DeviceIds) -> DeviceTables:
    return DeviceTables(
        names=node.names,
        inventory=node.gpus,
        offered=node.plugins_devices,
        cache=cache,
        ids=ids,
        no_shares=isolation.has_no_shares,
        no_replicas=isolation.has_no_replicas,
    )


def _build_starts(
    node: Node,
    cache: AllocationCache,
    isolation: IsolationSide,
    checkpoint: KubeletCheckpoint,
    outcomes: OutcomeReporter,
) -> ContainerStarts:
    return ContainerStarts(
        cache=cache,
        pods=node.pods,
        names=node.names,
        inventory=node.gpus,
        records=checkpoint,
        prepare=isolation.prepare,
        observer=outcomes,
        clock=time.monotonic,
    )


def _build_resizing(
    node: Node, cache: AllocationCache, cluster: ClusterPart, isolation: IsolationSide
) -> ShareResizing:
    settings = node.settings.resize
    return ShareResizing(
        cache=cache,
        pods=node.claim_pods,
        inventory=node.gpus,
        policy=ResizePolicy(names=node.names, mode=settings.mode),
        file=ResizeFile(settings.state_file) if settings.state_file is not None else None,
        enforcement=isolation.enforcement(),
        observer=ResizeReporter(cluster.annotations, cluster.pod_events, node.claim_pods.using),
        clock=time.monotonic,
    )


def _build_garbage_collection(
    node: Node,
    cache: AllocationCache,
    facts: KubeletFacts,
    cluster: ClusterPart,
    gate: PodResourcesGate,
    pod_resources: PodResourcesClient,
    checkpoint: KubeletCheckpoint,
) -> GarbageCollection:
    return GarbageCollection(
        cache=cache,
        pods=node.pods,
        static_pods=cluster.node_pods,
        gate=gate,
        pod_resources=pod_resources,
        checkpoint=checkpoint,
        processes=PodProcesses(node.settings.runtime.cgroup_root),
        names=node.names,
        inventory=node.gpus,
        kubelet_age_s=facts.age_s,
        clock=time.monotonic,
        period_s=node.settings.allocation.check_period_s,
        on_correction=node.metrics.reconcile_corrected,
    )


def _build_outcomes(node: Node, decisions: DecisionLog, cluster: ClusterPart) -> OutcomeReporter:
    return OutcomeReporter(
        metrics=node.metrics,
        events=cluster.pod_events,
        inventory=node.gpus,
        decisions=decisions,
    )


def _build_identification(
    node: Node, facts: KubeletFacts, cluster: ClusterPart, refused_pods: RefusedPods
) -> Identification:
    kubelet = node.settings.kubelet
    return Identification(
        pods=cluster.store,
        fetcher=cluster.node_pods,
        kubelet=facts,
        allocations=node.cache.view,
        refused=refused_pods,
        names=node.names,
        clock=time.monotonic,
        timeouts=Timeouts(lookup_s=kubelet.pod_lookup_timeout_s, poll_again_s=kubelet.look_again_s),
        on_identified=node.metrics.identified,
    )


def _policy(node: Node, isolation: IsolationSide) -> Policy:
    settings = node.settings
    return Policy(
        names=node.names,
        share_policy=settings.placement.share_policy,
        share_mode=settings.share_mode,
        max_shares_of_gpu=isolation.max_shares_of_gpu(),
    )


def _socket(resource: str, names: ResourceNames) -> str:
    """Of NVIDIA's resources each has its own: two names may differ in their prefixes alone."""
    kind = names.kind_of(resource)
    return f"{SOCKETS[kind]}{names.gpu.index(resource)}" if kind is ResourceKind.GPU else SOCKETS[kind]


def _build_registrar(
    node: Node, calls: QueuedCalls, handover: Handover, tables: DeviceTables, ids: DeviceIds
) -> Registrar:
    directory = node.settings.kubelet.device_plugin_path
    return Registrar(
        device_plugin_path=directory,
        endpoints=[
            PluginEndpoint(
                device_plugin_path=directory,
                socket_name=instance_socket_name(_socket(resource, node.names)),
                plugin=DevicePlugin(
                    resource,
                    table,
                    calls,
                    node.metrics,
                    ids,
                    pre_start=calls.pre_start if node.names.kind_of(resource).binds_gpu else None,
                ),
                handover=handover,
            )
            for resource, table in tables.tables.items()
        ],
        register=register,
    )
