"""The nodes as the API server shows them to a person's credentials, in the form of the agent's own document.

For `inspect --all-nodes`: what each agent reports on its Node object is checked and added up. Only names and requests of a
pod are read, for display: any tenant can write its annotations. A node without a list of GPUs, of an older agent or of
gpu-manager, still has its capacity: GPUs of equal size are derived from that. Formats: docs/reference/node-facts.md,
docs/reference/cli.md, which also has the rights that each command needs. No state; all but the lists is pure.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from operator import itemgetter
from typing import TypedDict

from msgspec import Raw, Struct
from msgspec.structs import replace

from gpushare_agent.core.kube.client import ALL_NODES, UNFINISHED, KubeApi, open_kube_api, pods
from gpushare_agent.core.kube.objects import read_node_json
from gpushare_agent.core.kube.pods import parse_pod, read_pod_json
from gpushare_agent.core.kube.scheduling import amount_of
from gpushare_agent.core.kube.session import KubeTimeouts
from gpushare_agent.core.model.allocations import NO_CHARGE, Charge, add_charges
from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.core.model.gpus import GpuReport
from gpushare_agent.core.model.names import MIB, GpuUuid, PodUid
from gpushare_agent.core.model.pods import ContainerKind, Pod
from gpushare_agent.core.model.resources import ResourceNames, request_of
from gpushare_agent.core.node_report.annotations import (
    ALLOCATIONS_ANNOTATION,
    GPUS_ANNOTATION,
    even_gpus,
    parse_allocations,
    parse_gpus,
)
from gpushare_agent.core.node_report.documents import MigGpu, ReportedGpu
from gpushare_agent.core.node_report.reported import reported_gpu, reported_state
from gpushare_agent.core.placement.gpu_account import account_of
from gpushare_agent.core.settings.resource_names import resource_names
from gpushare_agent.core.settings.settings import Settings

NO_NODE = (
    "no node has GPUs: none has the annotation gpushare-agent/gpus, or a capacity of the resources; is the agent installed"
    " (docs/how-to/install.md)?"
)
_LIST_TIMEOUT_S = 120.0
_REMEDY = "check your own credentials and their rights; docs/reference/cli.md lists those that are needed"


@asynccontextmanager
async def open_cluster(settings: Settings) -> AsyncIterator[KubeApi]:
    """The API server of the kubeconfig. Lists of a large cluster may take a while."""
    timeouts, kubeconfig = KubeTimeouts(list_s=_LIST_TIMEOUT_S), settings.kubeconfig
    async with open_kube_api(kubeconfig=kubeconfig, context=settings.context, timeouts=timeouts, advice=_REMEDY) as api:
        yield api


async def read_cluster(api: KubeApi, settings: Settings) -> list[InspectedNode]:
    """Every node that has GPUs, by name, with what is allocated to its pods."""
    names = cluster_names(settings)
    # Nodes first: the nodes' reports decide which pods are read.
    nodes, _ = await api.list_all(ALL_NODES, lambda raw: _node(raw, names))
    of_node: dict[str, list[Pod]] = {name: [] for name, _ in nodes}
    reported = {uid for _, report in nodes for uid in report.allocated or ()}
    found, _ = await api.list_all(pods(fields=UNFINISHED), lambda raw: _pod(raw, names, reported))
    for pod in found:
        # A node without GPUs is not shown, nor what pods ask for on it.
        if pod.node_name in of_node:
            of_node[pod.node_name].append(pod)
    return [report_document(name, report, of_node[name]) for name, report in sorted(nodes, key=itemgetter(0))]


def cluster_names(settings: Settings) -> ResourceNames:
    """The resources' names of the cluster, GPUShare's too: this host's setting says nothing about other nodes."""
    enabled = settings.gpushare.model_copy(update={"enabled": True})
    return resource_names(settings.model_copy(update={"gpushare": enabled}))


def _node(raw: Raw, names: ResourceNames) -> tuple[str, NodeReport] | None:
    """With its name."""
    node = read_node_json(raw)
    if not node.meta.name:
        return None
    quantities = node.status.capacity or {}
    # A node whose capacity cannot be read has none: it is left out, and the others are shown.
    capacity = {resource: amount_of(quantities.get(resource), is_cpu=False) for resource in names.names}
    report = read_report(node.meta.annotations, capacity, names)
    return (node.meta.name, report) if report is not None else None


def _pod(raw: Raw, names: ResourceNames, reported: Collection[PodUid]) -> Pod | None:
    """A pod that asks for something of ours or has it (by NVIDIA's names); one that cannot be read has no share either,
    because its agent reads the same."""
    try:
        pod = parse_pod(read_pod_json(raw), names.names)
    except Corrupt:
        return None
    return pod if names.wants_any(pod) or pod.uid in reported else None


class InspectedContainer(TypedDict):
    """One container with what it has. Without `gpus` it is charged to none, and `remark` says why."""

    namespace: str
    pod: str
    container: str
    gpus: list[int]
    cores: int
    memory_bytes: int
    remark: str


class InspectedNode(TypedDict):
    node: str
    remark: str
    gpus: list[ReportedGpu]
    mig_gpus: list[MigGpu]
    containers: list[InspectedContainer]


class NodeReport(Struct, frozen=True, kw_only=True):
    """The GPUs of one node by index, what each pod has of them (None where that is not known), and a note about what is
    missing. `names` have the node's size of memory blocks."""

    gpus: tuple[GpuReport, ...]
    names: ResourceNames
    mig_gpus: tuple[GpuReport, ...] = ()
    allocated: Mapping[PodUid, Mapping[int, Charge]] | None = None
    remark: str = ""


def read_report(annotations: Mapping[str, str], capacity: Mapping[str, int], names: ResourceNames) -> NodeReport | None:
    """The report in the annotation, else one made of the resources' capacity; None for a node that offers none of them."""
    text = annotations.get(GPUS_ANNOTATION)
    if text is None:
        return _by_capacity(capacity, names, f"no {GPUS_ANNOTATION}")
    try:
        # A Node's annotations are written by its agent, but also by everybody who may patch nodes: they are checked.
        reported = parse_gpus(text)
    except Corrupt as error:
        return _by_capacity(capacity, names, f"the annotation {GPUS_ANNOTATION} cannot be read ({error})")
    gpus = tuple(sorted(reported.gpus, key=lambda gpu: gpu.index))
    allocated, remark = _allocated(annotations.get(ALLOCATIONS_ANNOTATION), [gpu.index for gpu in gpus])
    # The node's agent may have another block size than this host's settings.
    names = replace(names, memory_block_mib=reported.memory_block_mib or names.memory_block_mib)
    return NodeReport(gpus=gpus, mig_gpus=reported.mig_gpus, names=names, allocated=allocated, remark=remark)


def _allocated(text: object, indexes: Collection[int]) -> tuple[Mapping[PodUid, Mapping[int, Charge]] | None, str]:
    """Each pod's part, and what is wrong with the report. A pod's own annotations are no substitute: tenants write them."""
    if text is None:
        return None, f"no {ALLOCATIONS_ANNOTATION}: what is allocated is not known; see the agent's log there"
    try:
        reported = parse_allocations(text, indexes)
    except Corrupt as error:
        problem = f"the annotation {ALLOCATIONS_ANNOTATION} cannot be read ({error})"
        return None, f"{problem}: what is allocated is not known; see the agent's log there"
    full = f"the annotation {ALLOCATIONS_ANNOTATION} has no room for all pods: more is allocated than is shown"
    return reported.of_pod, full if reported.is_truncated else ""


def _by_capacity(capacity: Mapping[str, int], names: ResourceNames, problem: str) -> NodeReport | None:
    """Equal GPUs: their number is the cores' hundreds, their memory an equal part of the blocks or units."""
    number, memory_mib = even_gpus(capacity, names)
    if not number:
        return None
    gpus = tuple(GpuReport(index=index, uuid=GpuUuid(""), memory_mib=memory_mib) for index in range(number))
    remark = (
        f"{problem}: GPUs of equal size are assumed from the node's capacity; their health, and what is allocated of them, "
        "are not known"
    )
    return NodeReport(gpus=gpus, names=names, remark=remark)


def report_document(node: str, report: NodeReport, pods: Sequence[Pod]) -> InspectedNode:
    """The node in the form of the agent's document; `pods` are those of the node. A GPU's sums come only from the report,
    whatever the pods say; requests of containers without a GPU are in no sum."""
    allocated = report.allocated or {}
    charged: dict[int, Charge] = {}
    for charges in allocated.values():
        add_charges(charged, charges)
    # A pod that has ended keeps its requests and has no GPU any more.
    by_uid = {pod.uid: pod for pod in pods if not pod.is_terminal}
    containers = [one for uid, pod in by_uid.items() for one in _containers_of(pod, allocated.get(uid, {}), report)]
    gone = "the API server lists no such pod on the node that runs"
    containers += [
        inspected_container("", uid, "", charges, _charged(charges, report), gone)
        for uid, charges in allocated.items()
        # The report is a little behind: such a pod may have ended, and still has its GPUs for its agent.
        if uid not in by_uid
    ]
    return {
        "node": node,
        "remark": report.remark,
        "gpus": [
            reported_gpu(gpu, account_of(gpu, report.names, charged.get(gpu.index, NO_CHARGE))) for gpu in report.gpus
        ],
        "mig_gpus": [reported_state(gpu) for gpu in report.mig_gpus],
        "containers": sorted(containers, key=lambda one: (one["namespace"], one["pod"])),
    }


def _containers_of(pod: Pod, charges: Mapping[int, Charge], report: NodeReport) -> list[InspectedContainer]:
    """The report is by pod: where there are several containers, each is shown with its request and all GPUs of the pod. An
    init container is left out: the main containers take over what it has."""
    names = report.names
    asking = [
        container for container in pod.containers if container.kind is not ContainerKind.INIT and names.asked(container)
    ]
    # With one container all of the pod's charges are its own.
    if charges and len(asking) <= 1:
        name = asking[0].name if asking else ""  # it asks by a name that the settings here do not have
        return [inspected_container(pod.namespace, pod.name, name, charges, _charged(charges, report))]
    remark = "the node's agent reports the GPUs of the whole pod" if len(charges) > 1 else ""
    remark = remark if charges else "the node's agent has not reported it"
    sizes = [(one.name, (request_of(one, names).cores, names.memory_mib(one) * MIB)) for one in asking]
    return [inspected_container(pod.namespace, pod.name, name, charges, size, remark) for name, size in sizes]


def inspected_container(
    namespace: str, pod: str, name: str, gpus: Collection[int], size: tuple[int, int], remark: str = ""
) -> InspectedContainer:
    """`size` is its cores and bytes."""
    return InspectedContainer(
        namespace=namespace, pod=pod, container=name, gpus=[*gpus], cores=size[0], memory_bytes=size[1], remark=remark
    )


def _charged(charges: Mapping[int, Charge], report: NodeReport) -> tuple[int, int]:
    """Cores and bytes."""
    by_index = {gpu.index: gpu for gpu in report.gpus}
    accounts = [account_of(by_index[index], report.names, charge) for index, charge in charges.items()]
    memory_mib = sum(account.allocated_mib for account in accounts)
    return sum(account.allocated_cores for account in accounts), memory_mib * MIB
