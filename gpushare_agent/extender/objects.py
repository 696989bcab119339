"""Reads Nodes, Pods and the quota's ConfigMap of the API server as the extender has them.

For a node it also reads what is allocated to which pod. Everything is checked and bounded; `read_node` never raises: where
the annotations cannot be read, the node's resource counts are used instead, and `problem` names the reason. There are fifty
thousand pods, so containers that ask for nothing of ours are left out (the others keep their positions), and so are all
fields that a tenant can write, except the requests; equal containers are one object. No state but caches of values. Formats:
docs/reference/node-facts.md, Kubernetes core/v1 Node and Pod.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType

from msgspec import Raw, Struct
from msgspec.json import Decoder
from msgspec.structs import replace

from gpushare_agent.core.kit.json_schema import decoded
from gpushare_agent.core.kube.objects import KubeObject, NodeStatus, Quantity, read_node_json, whole_number
from gpushare_agent.core.kube.pods import PodJson, PodSpec, parse_pod
from gpushare_agent.core.kube.scheduling import CPU, MEMORY, amount_of, asked_of_node, values_of_label
from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.core.model.gpus import GpuReport, Link, LinkKind, Topology
from gpushare_agent.core.model.names import (
    GPU_CHOICE_ANNOTATIONS,
    GPUSHARE_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSUME_TIME_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    PREDICATE_GPU_INDEX_PREFIX,
    GpuUuid,
)
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, HostRequest, Pod, Rank
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.node_report.annotations import (
    ALLOCATIONS_ANNOTATION,
    GPUS_ANNOTATION,
    even_gpus,
    parse_allocations,
    parse_gpus,
)
from gpushare_agent.core.placement.topology import build_topology, link_of_word
from gpushare_agent.extender.decisions.quota import Quota, parse_quota
from gpushare_agent.extender.values import ClusterNode

MAX_GPUS = 64
"""The most GPUs of a node, and the highest index plus one: the tree over their links takes the cube of it in steps."""
_MAX_LABEL_CHARS = 63
_MAX_NAME_CHARS = 253
_MOST_PRIORITY = 1 << 31
_MAX_TOPOLOGIES = 256
"""Nodes of one build are alike: a cluster has few."""
_MAX_ALIKE = 16384
_MIB = 20
"""Bits."""
_MOST = 1 << 40
"""Milli-CPUs, or MiB."""
_NOT_OFFERED = "the kubelet offers no GPU of this node now: does its agent run?"
_NOTHING: Mapping[str, str] = MappingProxyType({})
_CHOOSES_GPUS: Mapping[str, str] = MappingProxyType({PREDICATE_GPU_INDEX_PREFIX: ""})
_OF_GPUSHARE = (GPUSHARE_INDEX_ANNOTATION, GPUSHARE_ASSIGNED_ANNOTATION, GPUSHARE_ASSUME_TIME_ANNOTATION)


class NodeReading(Struct, frozen=True, kw_only=True):
    """`node` is None where it offers nothing of ours. `problem` is for the log: what cannot be read, and what is used
    instead; else empty."""

    node: ClusterNode | None
    problem: str = ""


def read_node(raw: Raw, names: ResourceNames, *, model_label: str, pool_label: str) -> NodeReading:
    """`names` must be those of the node's agent. `model_label` and `pool_label` name the node's labels."""
    read = read_node_json(raw)
    name = read.meta.name
    # The schema reads anything that is no node as empty.
    if not name:
        return NodeReading(node=None, problem="a node without a name is left out")
    counts = _counts(read.status, names)
    # The device plugin's resources say that an agent serves this node; annotations of a removed agent may be left
    # behind.
    offered = [counts[resource] for resource in (names.vcore, names.gpu_mem) if resource in counts]
    if not offered:
        return NodeReading(node=None)
    labels, annotations = read.meta.labels, read.meta.annotations
    reported, allocated, problem = None, None, ""
    annotation, instead = GPUS_ANNOTATION, "Its capacity is divided evenly instead"
    try:
        if (text := annotations.get(annotation)) is not None:
            reported = _reported(text, names, is_offered=any(offered))
            annotation, instead = ALLOCATIONS_ANNOTATION, "Its pods are charged by what they ask for"
            if (text := annotations.get(annotation)) is not None:
                allocated = parse_allocations(text, {gpu.index for gpu in reported[0]}).of_pod
    except Corrupt as error:
        problem = (
            f"node {name}: the annotation {annotation} cannot be used: {error}. {instead}; see the agent's log there"
        )
    # gpu-manager's nodes have no annotation, nor has a node whose agent may not write it: the counts are all there is.
    gpus, topology = reported or _even_gpus(counts, names)
    if not gpus:
        return NodeReading(node=None, problem=problem)
    amounts = read.status.allocatable or {}
    cpu_milli, memory_mib = _bounded(
        amount_of(amounts.get(CPU), is_cpu=True), amount_of(amounts.get(MEMORY), is_cpu=False)
    )
    node = ClusterNode(
        name=name,
        gpus=gpus,
        topology=topology,
        model=_label(labels, model_label),
        pool=_label(labels, pool_label),
        is_exact=reported is not None,
        is_cordoned=read.is_cordoned,
        is_ready=read.is_ready,
        is_avoided=b'"PreferNoSchedule"' in bytes(read.spec.raw_taints),
        allocated=allocated,
        cpu_milli=cpu_milli,
        memory_mib=memory_mib,
    )
    return NodeReading(node=node, problem=problem)


def resources_of_node(raw: Raw) -> frozenset[str]:
    """The names of all extended resources that it has, also of those of which nothing can be given now."""
    return frozenset(name for name in read_node_json(raw).status.capacity or {} if "/" in name)


# --- a node's GPUs ---


def _reported(text: object, names: ResourceNames, *, is_offered: bool) -> tuple[tuple[GpuReport, ...], Topology]:
    """The GPUs and links of the annotation. Where the kubelet offers nothing now, no GPU is of use."""
    reported = parse_gpus(text)
    gpus = sorted(reported.gpus, key=lambda gpu: gpu.index)
    if not gpus:
        if reported.mig_gpus:  # nothing here is the device plugins'
            return (), _topology_of(())
        raise Corrupt("it lists no GPUs")
    # Checked before the matrix of links is made, which has the square of it.
    if gpus[-1].index >= MAX_GPUS:
        raise Corrupt(f"it has a GPU {gpus[-1].index}; only indexes below {MAX_GPUS} are supported")
    # With other blocks the same number would be another amount of memory: plans would not fit.
    if reported.memory_block_mib not in (None, names.memory_block_mib):
        raise Corrupt(
            f"its memory blocks are of {reported.memory_block_mib} MiB, here they are of {names.memory_block_mib}: make the "
            "setting memory_block_mib the same everywhere"
        )
    uuids = [gpu.uuid or _substitute_uuid(gpu.index) for gpu in gpus]
    if len(set(uuids)) != len(uuids):
        raise Corrupt("two GPUs have the same UUID")
    found = tuple(
        replace(  # without what the topology has
            gpu,
            uuid=uuid,
            # Allocatable 0: the device plugin is not registered now, whatever the annotation says of the GPUs.
            is_healthy=is_offered and gpu.is_healthy and not gpu.cordoned,
            unhealthy_reason=gpu.unhealthy_reason or ("" if is_offered else _NOT_OFFERED),
            # A cluster has a few models and tens of thousands of GPUs.
            name=sys.intern(gpu.name),
            numa=None,
            links=(),
        )
        for gpu, uuid in zip(gpus, uuids, strict=True)
    )
    return found, _topology_of(reported.gpus)


def _substitute_uuid(index: int) -> GpuUuid:
    """A UUID for a GPU without one: placement distinguishes GPUs by it."""
    return GpuUuid(sys.intern(f"gpu-{index}"))


def _topology_of(gpus: Iterable[GpuReport]) -> Topology:
    """`links` of a GPU follow the order of the list, the matrix the indexes. A GPU without links is far from all."""
    in_order = tuple(gpus)
    size = len(in_order)
    # A shorter list would attribute links to the wrong GPUs.
    if any(len(gpu.links) not in (0, size) for gpu in in_order):
        raise Corrupt("the `links` of a GPU are not one text for each GPU")
    return _topology(
        tuple(gpu.index for gpu in in_order),
        tuple(gpu.links for gpu in in_order),
        tuple(gpu.numa for gpu in in_order),
    )


@lru_cache(maxsize=_MAX_TOPOLOGIES)
def _topology(indexes: tuple[int, ...], texts: tuple[tuple[str, ...], ...], numa: tuple[int | None, ...]) -> Topology:
    """One object for all nodes of one build."""
    size = max(indexes, default=-1) + 1
    # Far from all until the annotation says otherwise: an index may be missing where a GPU is gone.
    kinds = ((LinkKind.SELF if a == b else LinkKind.SYS for b in range(size)) for a in range(size))
    matrix = [[Link(kind=kind) for kind in row] for row in kinds]
    nodes: list[int | None] = [None] * size
    for a, row, numa_node in zip(indexes, texts, numa, strict=True):
        nodes[a] = numa_node
        for b, text in zip(indexes, row, strict=False):
            link = link_of_word(text)
            if link is None or (link.kind is LinkKind.SELF) != (a == b):
                raise Corrupt(f"the link of GPUs {a} and {b} is {text[:20]!r}")
            matrix[a][b] = link
    for a in range(size):
        for b in range(a):
            # Links have no direction: where the two differ one of them is wrong, and the tree would depend on which is
            # read first.
            if matrix[a][b] != matrix[b][a]:
                raise Corrupt(f"the links of GPUs {b} and {a} to each other differ")
    return build_topology(matrix, nodes)


def _even_gpus(counts: Mapping[str, int], names: ResourceNames) -> tuple[tuple[GpuReport, ...], Topology]:
    number, memory_mib = even_gpus(counts, names)
    # Anybody who may patch the node's status can write the capacity.
    indexes = tuple(range(min(number, MAX_GPUS)))
    gpus = tuple(GpuReport(index=index, uuid=_substitute_uuid(index), memory_mib=memory_mib) for index in indexes)
    return gpus, _topology(indexes, ((),) * len(indexes), (None,) * len(indexes))


# --- the rest of a node ---


def _counts(status: NodeStatus, names: ResourceNames) -> dict[str, int]:
    """Allocatable of each resource that the node has: without the devices of unhealthy GPUs."""
    capacity, allocatable = status.capacity or {}, status.allocatable or {}
    # Allocatable leaves out unhealthy devices. A node that has just registered may have capacity alone.
    reported = {name: allocatable.get(name, capacity.get(name)) for name in names.names}
    return {name: _count(quantity) for name, quantity in reported.items() if quantity is not None}


def _count(quantity: Quantity) -> int:
    try:
        return whole_number(quantity, "what the node can give")
    except Corrupt:
        return 0


def _bounded(cpu_milli: int, memory: int) -> tuple[int, int]:
    """CPU in milli-CPUs and main memory in MiB."""
    return min(cpu_milli, _MOST), min(-(-memory >> _MIB), _MOST)


def _label(labels: Mapping[str, str], name: str) -> str:
    """Empty where the node has no such label, or one that Kubernetes would not take."""
    value = labels.get(name, "")
    # Longer ones are not Kubernetes' labels; interned, because nodes share a few values.
    return sys.intern(value) if len(value) <= _MAX_LABEL_CHARS else ""


# --- pods ---


def asks_for_ours(pod: PodJson, names: ResourceNames) -> bool:
    """A quick check: most of a cluster's pods ask for nothing of ours."""
    containers = (*(pod.spec.containers or ()), *(pod.spec.init_containers or ()))
    # Limits: extended resources cannot be overcommitted, so Kubernetes makes requests equal to them.
    return any(not one.limits.keys().isdisjoint(names.names) for one in containers)


def lean_pod(read: PodJson, names: ResourceNames, model_label: str = "") -> Pod:
    """`model_label` is the node label by which pods name GPU models; without it none is read. Raises Corrupt as parse_pod
    does."""
    pod = parse_pod(read, names.names, has_env_and_mounts=False)
    return Pod(
        uid=pod.uid,
        namespace=pod.namespace,
        name=pod.name,
        phase=pod.phase,
        containers=tuple(
            _container(c.name, c.kind, c.position, tuple(sorted(c.requests.items())))
            for c in pod.containers
            if any(c.requests.values())
        ),
        resource_version=pod.resource_version,
        node_name=pod.node_name,
        is_deleting=pod.is_deleting,
        is_static=pod.is_static,
        annotations=_annotations(pod, read),
        labels=_NOTHING,
        container_ids=_NOTHING,
        host_request=host_request(read.spec, model_label),
        rank=_rank(read),
    )


def _rank(read: PodJson) -> Rank:
    """Without a priority 0, as kube-scheduler has it."""
    priority, status = read.spec.priority, read.status
    return Rank(
        priority=priority if type(priority) is int and abs(priority) <= _MOST_PRIORITY else 0,
        started_at=(status.start_time or "")[:_MAX_LABEL_CHARS],
        preempts=read.spec.preemption_policy != "Never",
        nominated_node=sys.intern((status.nominated_node_name or "")[:_MAX_NAME_CHARS]),
    )


def _annotations(pod: Pod, read: PodJson) -> Mapping[str, str]:
    """The annotations by which the owner leaves GPUs out, and whether an extender chose GPUs by one: a bind has to remove
    those. The others are not stored: fifty thousand pods' annotations are most of their memory."""
    left_out = {name: pod.annotations[name] for name in GPU_CHOICE_ANNOTATIONS if name in pod.annotations}
    chosen = _CHOOSES_GPUS if any(map(chooses_gpus, read.meta.annotations)) else _NOTHING
    return {**left_out, **chosen} if left_out else chosen


def chooses_gpus(annotation: str) -> bool:
    """Chooses a pod's GPUs by its name, or states that an extender did."""
    return annotation.startswith(PREDICATE_GPU_INDEX_PREFIX) or annotation in _OF_GPUSHARE


def host_request(spec: PodSpec, model_label: str = "") -> HostRequest:
    """A pod's request of its node's CPU and main memory, as kube-scheduler counts it, and the GPU models that it may run
    on."""
    cpu_milli, memory_mib = _bounded(asked_of_node(spec, CPU), asked_of_node(spec, MEMORY))
    return _host_request(cpu_milli, memory_mib, values_of_label(spec, model_label) if model_label else ())


@lru_cache(maxsize=_MAX_ALIKE)
def _host_request(cpu_milli: int, memory_mib: int, models: tuple[str, ...]) -> HostRequest:
    return HostRequest(cpu_milli, memory_mib, models)


@lru_cache(maxsize=_MAX_ALIKE)
def _container(name: str, kind: ContainerKind, position: int, requests: tuple[tuple[str, int], ...]) -> ContainerSpec:
    return ContainerSpec(
        name=name, kind=kind, position=position, requests=MappingProxyType(dict(requests)), env=_NOTHING
    )


# --- the quota ---


class _ConfigMap(KubeObject):
    data: dict[str, str] | None = None


_CONFIG_MAP = Decoder(_ConfigMap)


def read_quota(raw: Raw) -> Quota:
    """The quota of a ConfigMap; none where it has no such key. Raises Corrupt."""
    return parse_quota(decoded(_CONFIG_MAP, raw, "quota: the ConfigMap").data or {})
