"""Reads an agent's document of its node and its decisions, for `top`, `inspect`, `graph` and `explain`.

Two clients exist: of the agent's own HTTP address, here, and of the API server's proxy to the agent's pod (agent_pods.py).
Formats: docs/reference/api.md. State: the connection.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from gpushare_agent.model.errors import AgentError, Corrupt, NotFound, Rejected, Unavailable

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

    from gpushare_agent.cli.agent_documents import DecisionDocument, NodeDocument

AGENT_NAMESPACE = "gpushare-system"
"""Of the manifests; --agent-namespace names another."""
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 32 << 20
"""200 containers on 16 GPUs are a quarter of a megabyte; 500 decisions of 16 candidates two."""
MAX_DECISIONS = 500
_EVERY_ADDRESS = {"0.0.0.0": "localhost", "::": "localhost", "": "localhost"}

Query = Mapping[str, str]


class AgentClient(Protocol):
    """Requests to one agent. `name` is for messages."""

    @property
    def name(self) -> str: ...

    async def get(self, path: str, query: Query) -> dict[str, Any]:
        """The JSON object at that path. Raises AgentError."""
        ...


async def read_node(agent: AgentClient) -> NodeDocument:
    """Raises AgentError, Corrupt where the answer is of a format that this program does not know."""
    from gpushare_agent.cli.agent_documents import NODE, check_document  # takes time that `run` has not

    return check_document(NODE, await agent.get("/api/v1/node", {}), agent.name)


async def read_decisions(
    agent: AgentClient, *, pod: str = "", namespace: str = "", limit: int = MAX_DECISIONS
) -> list[DecisionDocument]:
    """The newest first: of one pod where it is named. Raises AgentError, Corrupt as `read_node`."""
    from gpushare_agent.cli.agent_documents import DECISIONS, check_document

    wanted = {"pod": pod, "namespace": namespace, "limit": str(limit)}
    answer = await agent.get("/api/v1/decisions", {key: value for key, value in wanted.items() if value})
    return check_document(DECISIONS, answer, agent.name)["decisions"]


def local_url(address: str, port: int) -> str:
    """Of what listens there on this host; a client connects to localhost where it listens on every address."""
    address = _EVERY_ADDRESS.get(address, address)
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"


def check_url(url: str) -> str:
    """The URL without its last slash. Raises Rejected where it is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as e:
        raise Rejected(f"--server {url[:200]!r} is no URL: {e}; give one such as http://localhost:5678") from e
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise Rejected(f"--server {url[:200]!r} is no URL of an agent; give one such as http://localhost:5678")
    return url.rstrip("/")


class DirectAgentClient:
    """An AgentClient for the agent's own address."""

    def __init__(self, session: ClientSession, url: str, *, timeout_s: float) -> None:
        self._session = session
        self._url = url
        self._timeout_s = timeout_s

    @property
    def name(self) -> str:
        return self._url

    async def get(self, path: str, query: Query) -> dict[str, Any]:
        from aiohttp import ClientConnectorError, ClientError

        what = f"cannot read {self._url}{path}"
        try:
            async with asyncio.timeout(self._timeout_s), self._session.get(self._url + path, params=query) as response:
                content = await _content(response, what)
        except TimeoutError as e:
            raise Unavailable(
                f"{what}: no answer within {self._timeout_s:g} s; if the agent runs, its log has the reason"
            ) from e
        except ClientConnectorError as e:
            raise Unavailable(
                f"{what}: {_reason(e.os_error)}. Is the agent running there? Its address and port are web.addr and"
                " web.port (--query-addr, --query-port); --server URL names another, --node NODE goes through the API"
                " server"
            ) from e
        except (ClientError, OSError, ValueError) as e:
            raise Unavailable(f"{what}: {e or type(e).__name__}; is this the agent's address?") from e
        return _json_object(content, what)


@asynccontextmanager
async def open_agent_client(url: str, *, timeout_s: float = TIMEOUT_S) -> AsyncIterator[DirectAgentClient]:
    """Connects on first use."""
    import aiohttp

    async with aiohttp.ClientSession(headers={"Accept": "application/json"}) as session:
        yield DirectAgentClient(session, url, timeout_s=timeout_s)


async def _content(response: ClientResponse, what: str) -> bytes:
    content = bytearray()
    async for part in response.content.iter_any():
        content += part
        if len(content) > MAX_ANSWER_BYTES:
            raise Corrupt(
                f"{what}: the answer is longer than {MAX_ANSWER_BYTES >> 20} MiB; is this the agent's address?"
            )
    if response.status != 200:
        raise _status_error(response.status, bytes(content), what)
    return bytes(content)


def _reason(error: OSError) -> str:
    """asyncio's text for a refused connection has no reason."""
    is_refused = error.errno == errno.ECONNREFUSED or "Connect call failed" in str(error)
    return "the connection is refused" if is_refused else str(error.strerror or error)


def _status_error(status: int, content: bytes, what: str) -> AgentError:
    body = " ".join(content[:300].decode("utf-8", "replace").split())
    text = f"{what}: the answer is {status} ({body or 'no text'})"
    if status == 404:
        return NotFound(f"{text}; this is another program, or an agent older than these commands")
    if status in (429, 503):
        return Unavailable(f"{text}; try again")
    return Rejected(text)


def _json_object(content: bytes, what: str) -> dict[str, Any]:
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as e:
        raise Corrupt(f"{what}: the answer is no JSON; is this the agent's address?") from e
    if not isinstance(answer, dict):
        raise Corrupt(f"{what}: the answer is no JSON object; is this the agent's address?")
    return answer
