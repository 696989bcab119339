"""gpu-manager's `display.GPUDisplay` on a unix socket, and the same messages as JSON for the web port.

The socket is for root alone (mode 0600, in effect what gpu-manager's is): the answers name all tenants' pods, users and
processes, and a call takes time of the loop that admits pods. A socket that another process serves is left to it. The
messages are made in observability/display_document.py. State owned: the server and the identity of its socket file.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import structlog
from grpclib import GRPCError, Status
from grpclib.const import Cardinality
from grpclib.const import Handler as RpcHandler
from grpclib.server import Stream
from msgspec import Struct, field

from gpushare_agent.kit.bounded_grpc import BoundedGrpcServer, ServerLimits
from gpushare_agent.kit.http_answers import at_once, json_answer
from gpushare_agent.kit.sockets import FileIdentity, bind_unix_socket, connectable_path, file_identity, remove_socket
from gpushare_agent.kit.supervision import ReportOnce
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.observability.node_snapshot import NodeSnapshot

if TYPE_CHECKING:
    from aiohttp import web

    from gpushare_agent.kit.http_answers import Handler, Route

log = structlog.get_logger(__name__)

ReadSnapshot = Callable[[], NodeSnapshot]

SERVICE = "display.GPUDisplay"
RETRY_S = 30.0
_SOCKET_MODE = 0o600
_CALL_S = 5.0
_PROBE_S = 1.0
_SLOW_MODULES = ("gpushare_agent.observability.display_document", "gpushare_agent.wire.display")
"""Loaded once the kubelet has its resources, off the loop."""
_LIMITS = ServerLimits(max_connections=16)


class DisplayServer(Struct, eq=False):
    """Serves at `path`; while it cannot, it tries again every `retry_s`. `before_reading` is awaited before a snapshot is
    read."""

    path: Path
    snapshot: ReadSnapshot
    before_reading: Callable[[], Awaitable[None]] = at_once
    retry_s: float = RETRY_S
    _server: BoundedGrpcServer | None = None
    _identity: FileIdentity | None = None
    _reported: ReportOnce = field(default_factory=ReportOnce)

    @property
    def is_serving(self) -> bool:
        """The server runs, and its socket is the one at the path."""
        return self._server is not None and self._identity == file_identity(self.path)

    async def run(self) -> NoReturn:
        """Serve until cancelled."""
        for name in _SLOW_MODULES:
            await asyncio.to_thread(importlib.import_module, name)
        try:
            while True:
                await self._ensure_serving()
                await asyncio.sleep(self.retry_s)
        finally:
            await self._stop()

    async def _ensure_serving(self) -> None:
        if self.is_serving:
            return
        await self._stop()
        try:
            await self._serve()
        except Unavailable as e:
            if self._reported.is_new(str(e)):
                log.warning("display_unavailable", error=str(e), again_in_s=self.retry_s)
        else:
            self._reported.is_over()
            log.info("display_serving", socket=str(self.path))

    async def _serve(self) -> None:
        if await _is_answered(self.path):
            raise Unavailable(
                f"serving {SERVICE} at {self.path} was not tried: another process (gpu-manager?) serves this socket. End "
                "it, or choose another display.socket; empty switches this off"
            )
        try:
            sock = bind_unix_socket(self.path, mode=_SOCKET_MODE)
        except OSError as e:
            raise Unavailable(
                f"serving {SERVICE} at {self.path} failed: {e}. Make its directory, or choose another display.socket; "
                "empty switches this off"
            ) from e
        self._identity = file_identity(self.path)
        server = BoundedGrpcServer(
            [_Display(self.snapshot, self.before_reading)], limits=_LIMITS, fields={"service": SERVICE}
        )
        try:
            await server.serve(sock)
        except BaseException:
            remove_socket(self.path, self._identity)
            raise
        self._server = server

    async def _stop(self) -> None:
        server, self._server = self._server, None
        try:
            if server is not None:
                await server.stop()
        finally:
            remove_socket(self.path, self._identity)


async def _is_answered(path: Path) -> bool:
    """Whether a process accepts connections here; true for one that does not answer in time."""
    if not path.is_socket():
        return False
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with connectable_path(path) as name:
            async with asyncio.timeout(_PROBE_S):
                await asyncio.get_running_loop().sock_connect(probe, name)
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except (OSError, TimeoutError):
        return True
    finally:
        probe.close()
    return True


class _Display:
    """The three calls, each answered from one snapshot."""

    def __init__(self, snapshot: ReadSnapshot, before_reading: Callable[[], Awaitable[None]]) -> None:
        self._snapshot = snapshot
        self._before_reading = before_reading

    def __mapping__(self) -> dict[str, RpcHandler]:
        from gpushare_agent.observability.display_document import encode_usage, graph_text, usage_document
        from gpushare_agent.wire.display import GraphResponse, UsageResponse, VersionResponse
        from gpushare_agent.wire.google.protobuf import Empty

        calls: list[tuple[str, Callable[[NodeSnapshot], object], type]] = [
            ("PrintGraph", lambda seen: GraphResponse(graph=graph_text(seen)), GraphResponse),
            ("PrintUsages", lambda seen: encode_usage(usage_document(seen)), UsageResponse),
            ("Version", lambda seen: VersionResponse(version=seen.agent.version), VersionResponse),
        ]
        return {
            f"/{SERVICE}/{name}": RpcHandler(self._answering(answer), Cardinality.UNARY_UNARY, Empty, kind)
            for name, answer, kind in calls
        }

    def _answering(self, answer: Callable[[NodeSnapshot], object]) -> Callable[[Stream[Any, Any]], Awaitable[None]]:
        async def serve(stream: Stream[Any, Any]) -> None:
            try:
                async with asyncio.timeout(_CALL_S):
                    await stream.recv_message()
                    await self._before_reading()
                    await stream.send_message(answer(self._snapshot()))
            except TimeoutError as e:
                text = f"the call was not over within {_CALL_S:g} s: the request or the reading of the answer is late"
                raise GRPCError(Status.DEADLINE_EXCEEDED, text) from e

        return serve


def routes(snapshot: ReadSnapshot) -> list[Route]:
    """`/graph`, `/usage`, `/version` for the web port."""
    return [(path, _json_handler(snapshot, path)) for path in ("/graph", "/usage", "/version")]


def _json_handler(snapshot: ReadSnapshot, path: str) -> Handler:
    async def show(request: web.Request) -> web.Response:
        from gpushare_agent.observability.display_document import graph_text, usage_document

        seen = snapshot()
        if path == "/usage":
            return json_answer(request, usage_document(seen))
        return json_answer(
            request, {"graph": graph_text(seen)} if path == "/graph" else {"version": seen.agent.version}
        )

    return show
