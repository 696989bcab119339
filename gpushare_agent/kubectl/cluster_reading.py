"""Reads a cluster once, with a person's own rights, as `ClusterView`: the base of all advice about its pods.

It reads nodes, pods, the quota's ConfigMap, and the budgets where they are asked for. Nothing is written. The
GPUs are those that agents report, as the extender reads them (extender/objects.py). State: what is read, until its end.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from msgspec import Raw, Struct
from msgspec.json import Decoder
from msgspec.structs import replace

from gpushare_agent.core.kit.json_schema import decoded_or
from gpushare_agent.core.kube.client import ALL_NODES, LIVE_PODS, config_map
from gpushare_agent.core.kube.objects import read_node_json
from gpushare_agent.core.kube.pods import PodJson, read_pod_json, scheduler_message
from gpushare_agent.core.kube.scheduling import NodeOffer, node_offer, pod_needs
from gpushare_agent.core.kube.session import KubeLists, Watched
from gpushare_agent.core.model.errors import Corrupt, NotFound, Rejected
from gpushare_agent.core.model.gpus import GpuReport
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.node_report.annotations import GPUS_ANNOTATION, ReportedGpus, parse_gpus
from gpushare_agent.core.settings.settings import Settings
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.decisions.ledger import NodeLedger
from gpushare_agent.extender.decisions.quota import Quota
from gpushare_agent.extender.objects import asks_for_ours, lean_pod, read_node, read_quota, resources_of_node
from gpushare_agent.extender.values import ClusterNode, ClusterPolicy
from gpushare_agent.kubectl.cluster_nodes import cluster_names
from gpushare_agent.kubectl.decisions.cluster_view import ClusterView, NodeView, PodView
from gpushare_agent.kubectl.decisions.instances import ClaimCluster, ClaimJson, SliceJson

T = TypeVar("T")
_NAME_LABEL, EXTENDER_NAME = "app.kubernetes.io/name", "gpushare-agent-extender"
QUOTA_NOT_ENFORCED = "no extender enforces it here: none is Ready"


class ReadCluster(Struct, frozen=True, kw_only=True):
    """`state` is the extender's of the same cluster. `quota_problem` is why the quota does not count, if so."""

    view: ClusterView
    state: ClusterState
    quota_problem: str = ""


class NodeFacts(Struct, frozen=True):
    """What the extender's state does not keep of a node: what it offers, the GPUs that an uncordon would bring back, and
    those on which MIG instances are made on demand."""

    offer: NodeOffer
    uncordonable: frozenset[int]
    is_ready: bool
    mig_gpus: tuple[GpuReport, ...]


async def read_cluster_view(api: KubeLists, settings: Settings) -> ReadCluster:
    """Raises AgentError: nodes or pods cannot be listed."""
    reader = NodesReader(settings)
    nodes, _ = await api.list_all(ALL_NODES, reader.node)
    state = new_state(settings, reader.names)
    quota, problem = await read_quota_of(api, settings)
    state.put_resources(reader.resources)
    for node, _ in nodes:
        state.put_node(node, 0.0)
    reader_of_pods = _PodsReader(reader.names)
    pods, _ = await api.list_all(LIVE_PODS, reader_of_pods.pod)
    if quota.namespaces and not reader_of_pods.has_extender:
        quota, problem = Quota(), QUOTA_NOT_ENFORCED
    state.quota.quota = quota
    for one in pods:
        state.put_pod(one.pod, 0.0)
    facts = {node.name: of_node for node, of_node in nodes}
    used = reader_of_pods.used
    view = view_of(state, facts, {one.pod.uid: one for one in pods}, lambda ledger: used[ledger.node.name])
    return ReadCluster(view=view, state=state, quota_problem=problem)


def new_state(settings: Settings, names: ResourceNames) -> ClusterState:
    """The extender's, of a cluster of which nothing is known yet."""
    placement, node_policy = settings.placement, settings.extender.node_policy
    policy = ClusterPolicy(names=names, share_policy=placement.share_policy, node_policy=node_policy)
    return ClusterState(policy=policy)


def view_of(
    state: ClusterState,
    facts: Mapping[str, NodeFacts],
    pods: Mapping[PodUid, PodView],
    used: Callable[[NodeLedger], Mapping[str, int]],
) -> ClusterView:
    """All nodes that the state knows; `used` is what a node's pods ask for of other resources than GPUs."""
    ledgers = [ledger for name in state.node_names() if (ledger := state.node_ledger(name)) is not None]
    nodes = tuple(
        NodeView(ledger=one, used=used(one), offer=known.offer, uncordonable=known.uncordonable)
        for one in ledgers
        for known in (facts[one.node.name],)
    )
    return ClusterView(policy=state.policy, nodes=nodes, pods=pods, quotas=state.quota)


class NodesReader:
    """Reads nodes. `names` have the size of memory blocks that the first agent reports: it is the same everywhere."""

    def __init__(self, settings: Settings) -> None:
        # A node's object does not show NVIDIA's units.
        self.names: ResourceNames = replace(cluster_names(settings), gpu=())
        self._labels = settings.extender
        self._has_report = False
        self.resources: set[str] = set()

    def node(self, raw: Raw) -> tuple[ClusterNode, NodeFacts] | None:
        text = read_node_json(raw).meta.annotations.get(GPUS_ANNOTATION)
        if text is not None and not self._has_report:
            with suppress(Corrupt):
                if (size_mib := parse_gpus(text).memory_block_mib) is not None:
                    self._has_report = True
                    self.names = replace(self.names, memory_block_mib=size_mib)
        labels = self._labels
        node = read_node(raw, self.names, model_label=labels.model_label, pool_label=labels.pool_label).node
        self.resources |= resources_of_node(raw)
        return (node, node_facts(raw, node)) if node is not None else None


def node_facts(raw: Raw, node: ClusterNode | None) -> NodeFacts:
    """`node` is None where it offers nothing of ours."""
    read = read_node_json(raw)
    try:
        reported = parse_gpus(read.meta.annotations[GPUS_ANNOTATION])
    except (KeyError, Corrupt):
        reported = ReportedGpus(gpus=())
    uncordonable = _uncordonable(node, reported.gpus) if node is not None else frozenset()
    return NodeFacts(node_offer(raw), uncordonable, read.is_ready, reported.mig_gpus)


def _uncordonable(node: ClusterNode, reported: Sequence[GpuReport]) -> frozenset[int]:
    """The cordoned GPUs with which nothing else is wrong."""
    # Where GPUs in service are offered by nobody either, the agent is away, and no uncordon helps.
    if not any(gpu.is_healthy for gpu in node.gpus) and any(gpu.is_healthy and not gpu.cordoned for gpu in reported):
        return frozenset()
    return frozenset(gpu.index for gpu in reported if gpu.cordoned and gpu.would_be_healthy)


def shows_extender(pod: PodJson) -> bool:
    """Whether it is a Ready extender, or waits because one refused it for the quota: a sandbox's extender has no pod."""
    if pod.meta.labels.get(_NAME_LABEL) == EXTENDER_NAME:
        return any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions)
    # Other schedulers have quotas of their own.
    return not pod.spec.node_name and "quota of " in scheduler_message(pod)


class _PodsReader:
    """Reads pods. `used` is what they ask of each node; `has_extender`: one of them shows an extender."""

    def __init__(self, names: ResourceNames) -> None:
        self._names = names
        self.used: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.has_extender = False

    def pod(self, raw: Raw) -> PodView | None:
        """One that asks for GPUs."""
        try:
            read = read_pod_json(raw)
        except Corrupt:
            return None
        self.has_extender = self.has_extender or shows_extender(read)
        if read.spec.node_name:
            self.used[read.spec.node_name].update(pod_needs(read.spec, self._names.names).requests)
        return pod_view(read, self._names)


def pod_view(read: PodJson, names: ResourceNames) -> PodView | None:
    """A pod that asks for GPUs."""
    if not asks_for_ours(read, names):
        return None
    try:
        pod = lean_pod(read, names)
    except Corrupt:
        return None
    # Its containers ask for none of it: `0` is a limit, too.
    if not pod.containers:
        return None
    owner = next((one.kind or "" for one in read.meta.owners if one.controller), "")
    needs = pod_needs(read.spec, names.names)
    return PodView(pod=pod, needs=needs, labels=read.meta.labels, owner=owner)


async def read_claims(api: KubeLists) -> ClaimCluster:
    """Raises AgentError."""
    return ClaimCluster(
        slices=await _read_all(api, "resourceslices", SliceJson),
        claims=await _read_all(api, "resourceclaims", ClaimJson),
        classes=await _read_all(api, "deviceclasses", ClaimJson),
    )


async def _read_all(api: KubeLists, name: str, kind: type[T]) -> list[T]:
    """Without those that are not as Kubernetes defines them."""
    decoder, watched = Decoder(kind), Watched(what=f"the {name}", path=f"/apis/resource.k8s.io/v1/{name}")
    try:
        return (await api.list_all(watched, lambda raw: decoded_or(decoder, raw, lambda: None)))[0]
    except NotFound:
        return []  # before Kubernetes 1.34


async def read_quota_of(api: KubeLists, settings: Settings) -> tuple[Quota, str]:
    """The quota, and why it is not known: then it limits nobody."""
    where = settings.extender
    try:
        found, _ = await api.list_all(config_map(where.quota_namespace, where.quota_name), lambda raw: raw)
        # A megabyte of quotas takes longer than the loop of a page has: 20,000 namespaces a tenth of a second (measured).
        quota = await asyncio.to_thread(read_quota, found[0]) if found else Quota()
    # Few have this right. A quota that exists and cannot be read refuses every pod, or leaves an older quota in force.
    except (Rejected, NotFound, Corrupt) as error:
        return Quota(), str(error)
    return quota, ""
