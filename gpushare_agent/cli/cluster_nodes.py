"""The nodes as the API server shows them, for a person's credentials: all GPUs of the cluster with their allocations.

node_reports.py checks the nodes' annotations and adds up. The rights that each
command needs: docs/reference/cli.md. No state.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from msgspec import Raw, Struct

from gpushare_agent.cli.node_reports import InspectedNode, NodeReport, read_report, report_document
from gpushare_agent.cluster.kube.client import ALL_NODES, UNFINISHED, KubeApi, open_kube_api, pods
from gpushare_agent.cluster.kube.lists import KubeTimeouts
from gpushare_agent.cluster.kube.objects import Quantity, read_node_json, whole_number
from gpushare_agent.cluster.kube.pods import parse_pod, read_pod_json
from gpushare_agent.isolation.resource_names import resource_names
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.settings.settings import Settings

_LIST_TIMEOUT_S = 120.0
_CURE = "check your own credentials and their rights; docs/reference/cli.md lists those that are needed"


@asynccontextmanager
async def open_cluster(settings: Settings) -> AsyncIterator[KubeApi]:
    """The API server of the kubeconfig. Lists of a large cluster may take a while."""
    timeouts, kubeconfig = KubeTimeouts(list_s=_LIST_TIMEOUT_S), settings.kubeconfig
    async with open_kube_api(kubeconfig=kubeconfig, context=settings.context, timeouts=timeouts, advice=_CURE) as api:
        yield api


async def serve_dashboard(settings: Settings, port: int) -> int:
    """Until cancelled. Raises AgentError: the cluster cannot be read, or the port not used."""
    from gpushare_agent.cli.cluster_page import ClusterPage

    def on_listening(found: int) -> None:
        print(f"The cluster's GPUs are at http://localhost:{found}/ until Ctrl-C.", flush=True)

    async with open_cluster(settings) as api:
        await api.list_all(ALL_NODES, lambda _: None)  # ends here where the cluster cannot be read at all
        await ClusterPage(settings, cluster_names(settings), port=port).run(api, on_listening=on_listening)


async def read_cluster(api: KubeApi, settings: Settings) -> list[InspectedNode]:
    """Every node that has GPUs, by name, with what is allocated to its pods."""
    names = cluster_names(settings)
    nodes, _ = await api.list_all(ALL_NODES, lambda raw: _node(raw, names))
    of_node: dict[str, list[Pod]] = {node.name: [] for node in nodes}
    reported = {uid for node in nodes for uid in node.report.allocated or ()}
    found, _ = await api.list_all(pods(fields=UNFINISHED), lambda raw: _pod(raw, names, reported))
    for pod in found:
        if pod.node_name in of_node:
            of_node[pod.node_name].append(pod)
    return [
        report_document(node.name, node.report, of_node[node.name])
        for node in sorted(nodes, key=lambda node: node.name)
    ]


def cluster_names(settings: Settings) -> ResourceNames:
    """Also GPUShare's resource: this host's setting says nothing about the cluster."""
    enabled = settings.gpushare.model_copy(update={"enabled": True})
    return resource_names(settings.model_copy(update={"gpushare": enabled}))


class _Node(Struct, frozen=True, kw_only=True):
    name: str
    report: NodeReport


def _node(raw: Raw, names: ResourceNames) -> _Node | None:
    node = read_node_json(raw)
    if not node.meta.name:
        return None
    quantities = node.status.capacity or {}
    capacity = {resource: _count(quantities.get(resource)) for resource in names.names}
    report = read_report(node.meta.annotations, capacity, names)
    return _Node(name=node.meta.name, report=report) if report is not None else None


def _pod(raw: Raw, names: ResourceNames, reported: Collection[PodUid]) -> Pod | None:
    """A pod that asks for something of ours or has it (by NVIDIA's names); one that cannot be read has no share either, for
    its agent reads the same."""
    try:
        pod = parse_pod(read_pod_json(raw), resources=names.names)
    except Corrupt:
        return None
    return pod if names.wants_any(pod) or pod.uid in reported else None


def _count(quantity: Quantity | None) -> int:
    try:
        return whole_number(quantity, "capacity") if quantity is not None else 0
    except Corrupt:
        return 0
