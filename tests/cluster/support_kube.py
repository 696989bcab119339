"""A small API server on a real TCP socket, with bad manners on request, and makers of raw pods.

Each behaviour is a coroutine function (server, request, connection) named for what it does. `lists`, `watches` and
`others` are scripts: each request takes the next behaviour, and the last one stays.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from gpushare_agent.cluster.kube.client import KubeApi, open_kube_api
from gpushare_agent.cluster.kube.session import KubeTimeouts, ListLimits
from gpushare_agent.cluster.pod_store import PodStore
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.names import VCORE_RESOURCE, VMEMORY_RESOURCE, PodUid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod, PodPhase
from tests.support_deadline import DEADLINE_S, Changes

NODE = "node-1"
FAST = Backoff(base_s=0.005, cap_s=0.02)


class NotedBackoff(Backoff, frozen=True, kw_only=True):
    """Notes for which number of failures it was asked, and waits next to nothing."""

    base_s: float = 0.0
    cap_s: float = 0.0
    asked: list[int]

    def delay_s(self, failures: int) -> float:
        self.asked.append(failures)
        return 0.001


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") == "true"


@dataclass
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, content: bytes) -> None:
        self.writer.write(content)
        await self.writer.drain()

    async def send_chunk(self, content: bytes) -> None:
        await self.send(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    async def open_stream(self) -> None:
        await self.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def until_client_leaves(self) -> None:
        while await self.reader.read(4096):
            pass


Behaviour = Callable[["FakeApiServer", Seen, Connection], Awaitable[None]]


def answers(status: int, body: Any, content_type: str = "application/json") -> Behaviour:
    """One whole answer; `body` is sent as JSON unless it is bytes."""

    async def behave(_server: FakeApiServer, _request: Seen, connection: Connection) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nContent-Length: {len(content)}\r\n\r\n"
        await connection.send(head.encode() + content)

    return behave


def raw_status(code: int, message: str = "on request") -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}


answers_gone = answers(410, raw_status(410, "too old resource version"))
answers_html_502 = answers(502, b"<html><h1>Bad Gateway</h1></html>", "text/html")
answers_garbage = answers(200, b"\x00\xff{ not json")


async def lists_pods(server: FakeApiServer, request: Seen, connection: Connection) -> None:
    """The pods that the server has now."""
    body = {"kind": "PodList", "items": server.pods, "metadata": {"resourceVersion": server.version}}
    await answers(200, body)(server, request, connection)


async def stalls_before_headers(_server: FakeApiServer, _request: Seen, connection: Connection) -> None:
    await connection.until_client_leaves()


async def stalls_after_headers(_server: FakeApiServer, _request: Seen, connection: Connection) -> None:
    await connection.open_stream()
    await connection.until_client_leaves()


async def resets(_server: FakeApiServer, _request: Seen, connection: Connection) -> None:
    connection.writer.transport.abort()


async def ends_empty(_server: FakeApiServer, _request: Seen, connection: Connection) -> None:
    """A watch that is over as soon as it began."""
    await connection.open_stream()
    await connection.send(b"0\r\n\r\n")


def streams(*events: dict[str, Any], then: str = "stays") -> Behaviour:
    """Sends the events; `then` is stays (silent), ends (cleanly), cuts (inside a line) or drops (inside a chunk)."""

    async def behave(_server: FakeApiServer, _request: Seen, connection: Connection) -> None:
        await connection.open_stream()
        for event in events:
            await connection.send_chunk(json.dumps(event).encode() + b"\n")
        if then == "stays":
            await connection.until_client_leaves()
        elif then == "ends":
            await connection.send(b"0\r\n\r\n")
        elif then == "cuts":
            await connection.send_chunk(b'{"type": "ADDED", "object": {"meta')
            await connection.send(b"0\r\n\r\n")
        elif then == "drops":
            await connection.send(b'ff\r\n{"type": ')
            connection.writer.close()

    return behave


def streams_bytes(content: bytes) -> Behaviour:
    async def behave(_server: FakeApiServer, _request: Seen, connection: Connection) -> None:
        await connection.open_stream()
        await connection.send_chunk(content)
        await connection.send(b"0\r\n\r\n")

    return behave


@dataclass
class FakeApiServer:
    """Records what it was asked in `requests`; `wait_for` waits until they satisfy a condition."""

    pods: list[dict[str, Any]] = field(default_factory=list)
    version: str = "100"
    lists: list[Behaviour] = field(default_factory=lambda: [lists_pods])
    watches: list[Behaviour] = field(default_factory=lambda: [stalls_after_headers])
    others: list[Behaviour] = field(default_factory=lambda: [answers(200, {})])
    requests: list[Seen] = field(default_factory=list)
    port: int = 0
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self._changed = Changes()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """On the port of the first start."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections and cut those there are."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        async with asyncio.timeout(DEADLINE_S):
            await self._server.wait_closed()
        await self.wait_hung_up()

    async def wait_for(self, condition: Callable[[Sequence[Seen]], bool]) -> None:
        await self._changed.until(lambda: condition(self.requests))

    async def wait_hung_up(self) -> None:
        """Wait until no connection is open; a silent watch ends only when the client closes it."""
        await self._changed.until(lambda: not self._writers)

    async def wait_watches(self, count: int) -> list[Seen]:
        await self.wait_for(lambda requests: sum(request.is_watch for request in requests) >= count)
        return [request for request in self.requests if request.is_watch]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while (request := await _read_request(reader)) is not None:
                self.requests.append(request)
                self._changed.set()
                await self._behaviour(request)(self, request, Connection(reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self._writers.discard(writer)
            self._changed.set()

    def _behaviour(self, request: Seen) -> Behaviour:
        listing = self.watches if request.is_watch else self.lists
        script = listing if request.path == "/api/v1/pods" else self.others
        return script.pop(0) if len(script) > 1 else script[0]


async def _read_request(reader: asyncio.StreamReader) -> Seen | None:
    line = (await reader.readline()).decode()
    if not line:
        return None
    method, target, _ = line.split()
    headers = {}
    while (header := (await reader.readline()).decode().strip()) != "":
        name, _, value = header.partition(":")
        headers[name.lower()] = value.strip()
    content = await reader.readexactly(int(headers.get("content-length", "0")))
    parts = urlsplit(target)
    return Seen(
        method=method,
        path=unquote(parts.path),
        query=dict(parse_qsl(parts.query)),
        headers=headers,
        body=json.loads(content) if content else None,
    )


@asynccontextmanager
async def fake_api(**behaviour: Any) -> AsyncIterator[FakeApiServer]:
    server = FakeApiServer(**behaviour)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def opened(
    url: str,
    *,
    timeouts: KubeTimeouts | None = None,
    user: dict[str, Any] | None = None,
    limits: ListLimits | None = None,
) -> AsyncIterator[KubeApi]:
    """Our client, configured by a kubeconfig file for that URL."""
    with_kubeconfig = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    try:
        kubeconfig = write_kubeconfig(with_kubeconfig, url, user or {"token": "secret"})
        async with open_kube_api(kubeconfig=kubeconfig, timeouts=timeouts, limits=limits) as api:
            yield api
    finally:
        shutil.rmtree(with_kubeconfig)


DATA = Path(__file__).parents[1] / "data"


def server_tls() -> ssl.SSLContext:
    """The fake's certificate, which tests/data/kube-ca.pem vouches for."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(DATA / "kube-ca.pem", DATA / "kube-server.key")
    return context


def write_kubeconfig(directory: Path, url: str, user: dict[str, Any]) -> Path:
    path = directory / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(json.dumps(config))
    return path


def raw_pod(
    name: str = "p", *, uid: str = "", version: str = "1", cores: str | None = "30", **parts: Any
) -> dict[str, Any]:
    """A pod of the API with one container `main`; `parts` replace status, spec or add to metadata."""
    limits = {} if cores is None else {VCORE_RESOURCE: cores, VMEMORY_RESOURCE: "4", "cpu": "1"}
    container = {"name": "main", "image": "x", "resources": {"limits": limits}}
    metadata = {"name": name, "namespace": "default", "uid": uid or f"uid-{name}", "resourceVersion": version}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata | parts.get("metadata", {}),
        "spec": {"nodeName": NODE, "containers": [container]} | parts.get("spec", {}),
        "status": {"phase": "Pending"} | parts.get("status", {}),
    }


def added(raw: dict[str, Any], kind: str = "ADDED") -> dict[str, Any]:
    return {"type": kind, "object": raw}


def bookmark(version: str) -> dict[str, Any]:
    return {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": version}}}


def pod(name: str = "p", *, uid: str = "", version: str = "1", **fields: Any) -> Pod:
    """A parsed pod with one main container that asks for a share."""
    container = ContainerSpec(name="main", kind=ContainerKind.MAIN, position=0, requests={VCORE_RESOURCE: 30})
    defaults: dict[str, Any] = {
        "namespace": "default",
        "phase": PodPhase.PENDING,
        "containers": (container,),
        "node_name": NODE,
    }
    return Pod(
        uid=PodUid(uid or f"uid-{name}"),
        name=name,
        resource_version=version,
        **(defaults | fields),
    )


def pod_named(store: PodStore, name: str) -> Pod | None:
    return next((pod for pod in store.pods() if pod.name == name), None)


async def wait_store(store: PodStore, condition: Callable[[PodStore], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition(store):
            await store.wait_change(store.version)


@asynccontextmanager
async def running(*bodies: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Runs endless bodies beside the test and cancels them at its end; one that fails fails the test."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_awaited(body)) for body in bodies]
        yield
        for task in tasks:
            task.cancel()


async def _awaited(body: Callable[[], Awaitable[Any]]) -> None:
    await body()
