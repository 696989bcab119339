"""The nodes as the API server shows them, for a person's credentials: all GPUs of the cluster, and the way to an agent.

What an annotation says is checked in observability/gpu_summaries.py and observability/inspection.py. The rights that
each command needs are listed in docs/cli.md. Nothing is kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gpushare_agent.agent.node_values import resource_names
from gpushare_agent.cli.agent_client import Query
from gpushare_agent.cluster.kube.client import KubeApi, KubeTimeouts, open_kube_api
from gpushare_agent.cluster.kube.pods import parse_pod
from gpushare_agent.cluster.kube.quantities import whole_number
from gpushare_agent.model.errors import Corrupt, NotFound, Unavailable
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.observability.gpu_summaries import GpuSummaries, gpus_of_node
from gpushare_agent.observability.inspection import NodeSums, node_sums
from gpushare_agent.settings.settings import Settings

AGENT_LABEL = "app.kubernetes.io/name=gpushare-agent"
AGENT_NAMESPACE = "gpushare-system"
HTTP_PORT = "http"
"""Name of the container's port where the agent serves."""
_LIST_TIMEOUT_S = 120.0
_GET_TIMEOUT_S = 15.0
_CURE = "check the rights of your own credentials; docs/cli.md lists those that are needed"
_NOT_OVER = "status.phase!=Succeeded,status.phase!=Failed"


@asynccontextmanager
async def open_cluster(settings: Settings) -> AsyncIterator[KubeApi]:
    """The API server of the kubeconfig. Lists of a large cluster may take a while."""
    timeouts = KubeTimeouts(list_s=_LIST_TIMEOUT_S)
    async with open_kube_api(kubeconfig=settings.kubeconfig, timeouts=timeouts, cure=_CURE) as api:
        yield api


async def read_cluster(api: KubeApi, settings: Settings) -> list[NodeSums]:
    """Every node that has GPUs, by name, with what its pods hold of them."""
    names = cluster_names(settings)
    nodes = sorted((node for node in await api.list_nodes(lambda raw: _node(raw, names)) if node), key=lambda n: n.name)
    pods: dict[str, list[Pod]] = {node.name: [] for node in nodes}
    for pod in await api.list_all_pods(lambda raw: _pod(raw, names), fields=_NOT_OVER):
        if pod.node_name in pods:
            pods[pod.node_name].append(pod)
    return [node_sums(node.name, node.gpus, pods[node.name], names) for node in nodes]


def cluster_names(settings: Settings) -> ResourceNames:
    """Also GPUShare's resource: whether this host's agent would offer it says nothing of the cluster."""
    enabled = settings.gpushare.model_copy(update={"enabled": True})
    return resource_names(settings.model_copy(update={"gpushare": enabled}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    name: str
    gpus: GpuSummaries


def _node(raw: dict[str, Any], names: ResourceNames) -> _Node | None:
    metadata, status = _mapping(raw.get("metadata")), _mapping(raw.get("status"))
    name, raw_capacity = metadata.get("name"), _mapping(status.get("capacity"))
    if not isinstance(name, str):
        return None
    capacity = {resource: _count(raw_capacity.get(resource)) for resource in names.names}
    gpus = gpus_of_node(_mapping(metadata.get("annotations")), capacity, names)
    return _Node(name=name, gpus=gpus) if gpus is not None else None


def _pod(raw: dict[str, Any], names: ResourceNames) -> Pod | None:
    """A pod that asks for something of ours; one that cannot be read has no share either, for its agent reads the same."""
    try:
        pod = parse_pod(raw, resources=names.names)
    except Corrupt:
        return None
    return pod if names.wants_any(pod) else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(quantity: Any) -> int:
    try:
        return whole_number(quantity, "capacity") if quantity is not None else 0
    except Corrupt:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPod:
    """Where an agent runs."""

    namespace: str
    name: str
    node: str
    port: int


class ProxyDoor:
    """The way to an agent through the API server's proxy to its pod."""

    def __init__(self, api: KubeApi, agent: AgentPod) -> None:
        self._api = api
        self._agent = agent

    @property
    def name(self) -> str:
        return f"node {self._agent.node} (pod {self._agent.namespace}/{self._agent.name})"

    async def get(self, path: str, query: Query) -> dict[str, Any]:
        agent = self._agent
        return await self._api.get_through_pod(agent.namespace, agent.name, agent.port, path, query)


async def find_agent(api: KubeApi, settings: Settings, *, node: str, namespace: str) -> AgentPod:
    """The agent of that node; with an empty `node`, of the only node that has one.

    Raises:
        NotFound: there is none, or there are several to choose from.
    """
    fields = f"spec.nodeName={node}" if node else ""
    found = await api.list_all_pods(
        lambda raw: _agent_pod(raw, settings.web.port), namespace=namespace, labels=AGENT_LABEL, fields=fields
    )
    agents = sorted((agent for agent in found if agent.node == node or not node), key=lambda agent: agent.node)
    place = f"with the label {AGENT_LABEL} in namespace {namespace or '(all)'}"
    if not agents:
        where = f"on node {node}" if node else "on any node"
        raise NotFound(
            f"no agent runs {where}: no running pod {place}; look with `kubectl get pods -A -l {AGENT_LABEL} -o wide`, and "
            "name its namespace with --agent-namespace"
        )
    if len(agents) > 1 and not node:
        names = ", ".join(agent.node for agent in agents[:10]) + (", …" if len(agents) > 10 else "")
        raise NotFound(f"{len(agents)} nodes have an agent ({names}): name one with --node NODE")
    return agents[0]


def _agent_pod(raw: dict[str, Any], usual_port: int) -> AgentPod | None:
    metadata, spec, status = (_mapping(raw.get(field)) for field in ("metadata", "spec", "status"))
    namespace, name, node = metadata.get("namespace"), metadata.get("name"), spec.get("nodeName")
    if status.get("phase") != "Running" or metadata.get("deletionTimestamp") is not None:
        return None
    if not (isinstance(namespace, str) and isinstance(name, str) and isinstance(node, str)):
        return None
    return AgentPod(namespace=namespace, name=name, node=node, port=_http_port(spec) or usual_port)


def _http_port(spec: Mapping[str, Any]) -> int | None:
    raw_containers = spec.get("containers")
    for container in raw_containers if isinstance(raw_containers, list) else ():
        raw_ports = _mapping(container).get("ports")
        for port in raw_ports if isinstance(raw_ports, list) else ():
            number = _mapping(port).get("containerPort")
            if _mapping(port).get("name") == HTTP_PORT and isinstance(number, int) and 0 < number < 65536:
                return number
    return None


async def node_of_pod(api: KubeApi, namespace: str, pod: str) -> str:
    """Where a pod runs or was refused.

    Raises:
        NotFound: there is no such pod.
        Unavailable: no node was chosen for it yet.
    """
    raw = await api.get_pod(namespace, pod, timeout_s=_GET_TIMEOUT_S)
    node = _mapping(raw.get("spec")).get("nodeName")
    if not isinstance(node, str) or not node:
        raise Unavailable(
            f"pod {namespace}/{pod} is on no node yet, so no agent has decided about it; its Events tell what the scheduler "
            f"waits for: kubectl describe pod -n {namespace} {pod}"
        )
    return node
