"""Reads an agent's document of its node and its decisions, for `top`, `inspect` and `explain`.

The agent of a node is found at its own address, or as a pod behind the API server's proxy. On a node the agent of this very
node is meant; `kubectl gpushare` runs on a person's own machine and always goes through the API server. There is a client
for each way. Formats: core/node_report/documents.py. State: the connection.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from gpushare_agent.core.cli.command_line import KUBECTL, Invocation
from gpushare_agent.core.kit.tcp_listeners import host_port
from gpushare_agent.core.kube.client import KubeApi, pods
from gpushare_agent.core.kube.objects import object_meta
from gpushare_agent.core.kube.pods import read_pod_json
from gpushare_agent.core.model.errors import AgentError, Corrupt, NotFound, Rejected, Unavailable
from gpushare_agent.core.node_report.documents import (
    DecisionDocument,
    DecisionsDocument,
    HistoryDocument,
    NodeDocument,
    check_document,
)
from gpushare_agent.core.settings.settings import Settings
from gpushare_agent.kubectl.cluster_nodes import open_cluster

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 32 << 20
"""200 containers on 16 GPUs take a quarter of a megabyte; 500 decisions with 16 candidates take two megabytes."""
MAX_DECISIONS = 500
_EVERY_ADDRESS = {"0.0.0.0": "localhost", "::": "::1", "": "localhost"}

Query = Mapping[str, str]


class AgentClient(Struct, frozen=True):
    """Requests to one agent. `name` is for messages; `get` returns the JSON object at a path, and raises AgentError."""

    name: str
    get: Callable[[str, Query], Awaitable[dict[str, Any]]]


async def read_node(agent: AgentClient, *, has_processes: bool = False) -> NodeDocument:
    """With `has_processes` with each process, as far as the agent knows them. Raises AgentError, Corrupt where the answer is
    of a format that this program does not know."""
    query = {"processes": "true"} if has_processes else {}
    return check_document(NodeDocument, await agent.get("/api/v1/node", query), agent.name)


async def read_gpu_history(agent: AgentClient) -> HistoryDocument:
    """Raises AgentError, and Corrupt like `read_node`."""
    return check_document(HistoryDocument, await agent.get("/api/v1/history", {"only": "gpus"}), agent.name)


async def read_decisions(
    agent: AgentClient, *, pod: str = "", namespace: str = "", limit: int = MAX_DECISIONS
) -> Sequence[DecisionDocument]:
    """The newest first; only those of one pod where it is named. Raises AgentError, and Corrupt like `read_node`."""
    query = {"pod": pod, "namespace": namespace, "limit": str(limit)}
    answer = await agent.get("/api/v1/decisions", {key: value for key, value in query.items() if value})
    return check_document(DecisionsDocument, answer, agent.name)["decisions"]


def local_url(address: str, port: int) -> str:
    """The URL of what listens there on this host; a client connects to localhost where it listens on every address."""
    # 0.0.0.0 is where a server listens; as a destination it works on Linux alone. `::` is IPv6, which localhost may not be.
    return f"http://{host_port(_EVERY_ADDRESS.get(address.strip('[]'), address), port)}"


@asynccontextmanager
async def open_agent_client(url: str, *, timeout_s: float = TIMEOUT_S) -> AsyncIterator[AgentClient]:
    """For the agent's own address. Connects on first use."""
    import aiohttp

    # As a browser does for an address that a person typed: the agent is served so by any name (core/web/debug_guard.py).
    headers = {"Accept": "application/json", "Sec-Fetch-Site": "none"}
    async with aiohttp.ClientSession(headers=headers) as session:
        yield AgentClient(url, partial(_get, session, url, timeout_s))


async def _get(session: ClientSession, url: str, timeout_s: float, path: str, query: Query) -> dict[str, Any]:
    from aiohttp import ClientConnectorError, ClientError

    what = f"cannot read {url}{path}"
    try:
        async with asyncio.timeout(timeout_s), session.get(url + path, params=query) as response:
            return _json_object(await _content(response, what), what)
    except TimeoutError as e:
        late = f"no answer within {timeout_s:g} s; if the agent runs, its log has the reason"
        raise Unavailable(f"{what}: {late}") from e
    # Before ClientError, its base class: nobody listens, which has its own remedies.
    except ClientConnectorError as e:
        raise Unavailable(
            f"{what}: {_reason(e.os_error)}. Is the agent running there? Its address and port are web.addr and web.port"
            " (--query-addr, --query-port); --server URL names another, --node NODE goes through the API server"
        ) from e
    except (ClientError, OSError, ValueError) as e:
        raise Unavailable(f"{what}: {e or type(e).__name__}; is this the agent's address?") from e


async def _content(response: ClientResponse, what: str) -> bytes:
    content = bytearray()
    async for part in response.content.iter_any():
        content += part
        # Counted while reading: Content-Length may be missing or wrong, and the address may be another program's.
        if len(content) > MAX_ANSWER_BYTES:
            raise Corrupt(
                f"{what}: the answer is longer than {MAX_ANSWER_BYTES >> 20} MiB; is this the agent's address?"
            )
    # After the body, which says why.
    if response.status != 200:
        raise _status_error(response.status, bytes(content), what)
    return bytes(content)


def _reason(error: OSError) -> str:
    """asyncio's text for a refused connection has no reason."""
    # Where a name has several addresses asyncio joins their errors into one text without a number.
    is_refused = error.errno == errno.ECONNREFUSED or "Connect call failed" in str(error)
    return "the connection is refused" if is_refused else str(error.strerror or error)


def _status_error(status: int, content: bytes, what: str) -> AgentError:
    body = " ".join(content[:300].decode("utf-8", "replace").split())
    text = f"{what}: the answer is {status} ({body or 'no text'})"
    if status == 404:
        return NotFound(f"{text}; another program answers: is this the agent's address?")
    # The agent answers 503 while too many requests wait.
    if status in (429, 503):
        return Unavailable(f"{text}; try again")
    return Rejected(text)


def _json_object(content: bytes, what: str) -> dict[str, Any]:
    try:
        # Not with msgspec, which refuses half a surrogate pair: a node's annotation may hold one.
        return msgspec.convert(json.loads(content), dict[str, Any])
    # Deeply nested brackets end in RecursionError, not in a ValueError.
    except (ValueError, RecursionError) as e:
        raise Corrupt(f"{what}: the answer is no JSON object; is this the agent's address?") from e


AGENT_LABEL = "app.kubernetes.io/name=gpushare-agent"
HTTP_PORT = "http"
"""Name of the container's port where the agent serves."""
_GET_TIMEOUT_S = 15.0
_NOT_REACHED = (
    'where the API server answers `kubectl get pods`, check that the agent listens on its pod\'s address (web.addr: "") and '
    "that a NetworkPolicy lets the API servers in"
)


def node_of(call: Invocation) -> str:
    """The node that the options of a command name, empty where they name none; some take it only by --node."""
    return str(call.options.node or getattr(call.options, "node_name", None) or "")


@asynccontextmanager
async def open_agent(call: Invocation, settings: Settings, node: str) -> AsyncIterator[AgentClient]:
    """The agent of that node; where it is empty, of this host, and for kubectl gpushare of the only node that has one.
    Raises AgentError."""
    server = getattr(call.options, "server", None)  # kubectl gpushare has no such option
    # The agent's own address first: it needs no rights in the cluster.
    if server or not (node or call.program == KUBECTL):
        async with open_agent_client(server or local_url(settings.web.addr, settings.web.port)) as agent:
            yield agent
        return
    async with open_cluster(settings) as api:
        agent_pod = await find_agent(api, settings, node=node, namespace=call.options.agent_namespace)
        yield _behind_api_server(api, agent_pod)


class AgentPod(Struct, frozen=True, kw_only=True):
    """The pod of an agent, its node and its HTTP port."""

    namespace: str
    name: str
    node: str
    port: int


def _behind_api_server(api: KubeApi, agent: AgentPod) -> AgentClient:
    """Through the API server's proxy to the agent's pod."""
    name = f"node {agent.node} (pod {agent.namespace}/{agent.name})"

    async def get(path: str, query: Query) -> dict[str, Any]:
        return _json_object(await read_through_pod(api, agent, path, query), f"cannot read {path} of {name}")

    return AgentClient(name, get)


async def read_through_pod(api: KubeApi, agent: AgentPod, path: str, query: Query) -> bytes:
    """The agent's answer, a JSON object. Raises AgentError."""
    try:
        return bytes(await api.get_through_pod(agent.namespace, agent.name, agent.port, path, query))
    except Unavailable as e:
        raise Unavailable(f"{e}; {_NOT_REACHED}") from e


async def find_agent(api: KubeApi, settings: Settings, *, node: str, namespace: str) -> AgentPod:
    """The agent of that node; with an empty `node`, of the only node that has one.

    Raises:
        NotFound: there is none, or there are several to choose from.
    """
    fields = f"spec.nodeName={node}" if node else ""
    watched = pods(namespace, labels=AGENT_LABEL, fields=fields)
    found, _ = await api.list_all(watched, lambda raw: _agent_pod(raw, settings.web.port))
    agents = sorted((agent for agent in found if agent.node == node or not node), key=lambda agent: agent.node)
    place = f"with the label {AGENT_LABEL} in namespace {namespace or '(all)'}"
    if not agents:
        where = f"on node {node}" if node else "on any node"
        raise NotFound(
            f"no agent runs {where}: no running pod {place}; check `kubectl get pods -A -l {AGENT_LABEL} -o wide`, and "
            "name its namespace with --agent-namespace; if there is none, install it (docs/how-to/install.md)"
        )
    # Two on one node are an upgrade's, and either shows the node.
    if len(agents) > 1 and not node:
        names = ", ".join(agent.node for agent in agents[:10]) + (", …" if len(agents) > 10 else "")
        raise NotFound(f"{len(agents)} nodes have an agent ({names}): name one with --node NODE")
    return agents[0]


def _agent_pod(raw: Raw, usual_port: int) -> AgentPod | None:
    pod = read_pod_json(raw)
    meta, node = pod.meta, pod.spec.node_name
    # During an upgrade a node has two agents: the one that is being deleted may be gone before it answers.
    if pod.status.phase != "Running" or meta.deleted_at is not None or not (meta.namespace and meta.name and node):
        return None
    ports = (port for container in pod.spec.containers or () for port in container.ports if port.name == HTTP_PORT)
    # A custom manifest may have left the port's name out.
    port = next((one.container_port for one in ports if 0 < one.container_port < 65536), usual_port)
    return AgentPod(namespace=meta.namespace, name=meta.name, node=node, port=port)


async def read_pod(api: KubeApi, namespace: str, pod: str) -> Raw:
    """The pod; an empty namespace means any. Raises NotFound: there is no such pod, or several."""
    # Names of pods are unique in a namespace alone.
    if not namespace:
        namespace = await _only_namespace(api, pod)
    try:
        return await api.get_pod(namespace, pod, timeout_s=_GET_TIMEOUT_S)
    except NotFound as e:
        raise NotFound(
            f"there is no pod {namespace}/{pod}: -n names another namespace, -A looks in all. Of a deleted pod the agent of"
            " its node has the last decisions: --node NODE"
        ) from e


async def _only_namespace(api: KubeApi, pod: str) -> str:
    """Where the only pod of this name is. Raises NotFound."""
    named = pods(fields=f"metadata.name={pod}")

    def namespace_of(raw: Raw) -> str | None:
        meta = object_meta(raw, "pod")
        return meta.namespace if meta.name == pod else None

    found, _ = await api.list_all(named, namespace_of)
    if not found:
        raise NotFound(f"there is no pod {pod} in any namespace")
    if len(found) > 1:
        names = ", ".join(sorted(found)[:10])
        raise NotFound(f"pod {pod} is in {len(found)} namespaces ({names}): name one with -n")
    return found[0]
