"""The agent's web port: metrics, health, readiness, version, the dashboard, /debug, and the routes of other modules.

Any client that reaches the address may read all but /debug, which has a guard of its own. By a name that a web page may have
nothing is served but health and version (`may_read`). aiohttp is imported in a thread once `run` begins, because it takes
190 ms for which the registration with the kubelet should not wait. Limits and connections are kit/http_server.py's. Paths
kept from gpu-manager: docs/reference/formats.md, section 8.
State owned: the listening sockets between `bind` and `run`.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import structlog
from msgspec import Struct, field

from gpushare_agent import __version__
from gpushare_agent.agent.observability.http.debug_pages import DebugSources
from gpushare_agent.agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.core.kit.http_answers import (
    SECURITY_HEADERS,
    RequestQueue,
    accepts_gzip,
    accepts_html,
    at_once,
    json_answer,
    packed,
    text_answer,
)
from gpushare_agent.core.kit.supervision import in_pool
from gpushare_agent.core.kit.tcp_listeners import close_all, listen_tcp
from gpushare_agent.core.model.errors import StartupError, Unavailable, file_remedy
from gpushare_agent.core.web.debug_guard import may_read
from gpushare_agent.core.web.page import PREFIX, WebPage

if TYPE_CHECKING:
    from aiohttp import web

    from gpushare_agent.core.kit.http_answers import Handler, Route

log = structlog.get_logger(__name__)

_MISDIRECTED = "the Host header has to name an address, the node or a Service; a proxy has to set it\n"
_FOR_ANY_NAME = ("/healthz", "/readyz", "/version")
BACKLOG = 128
"""The kernel's queue of connections that wait to be accepted."""


class WebServer(Struct, eq=False):
    """`routes` are further paths for GET, answered one at a time. `before_reading` is awaited before any of them and
    the metrics. `ready` returns why the agent is not ready, nothing when it is, `needs_restart` why it is to be ended."""

    addr: str
    port: int
    metrics: AgentMetrics
    ready: Callable[[], Sequence[str]]
    needs_restart: Callable[[], Sequence[str]] = tuple
    routes: Sequence[Route] = ()
    before_reading: Callable[[], Awaitable[None]] = at_once
    node_name: str = ""
    debug: DebugSources | None = None
    """The sources of /debug; None: there is no such page."""
    all_series: bool = False
    """Show at /metrics what /metric does."""
    _page: WebPage = field(default_factory=WebPage)
    _paths: list[str] = field(default_factory=list)
    _is_listening: asyncio.Event = field(default_factory=asyncio.Event)
    _listeners: list[socket.socket] = field(default_factory=list)
    bound_port: int = 0

    async def wait_listening(self) -> int:
        """Wait until requests are served; returns the port (not the configured one if that is 0)."""
        await self._is_listening.wait()
        return self.bound_port

    async def bind(self) -> None:
        """Take the port now, so that a busy one is reported before anything else starts. `run` does it if nobody did.

        Raises StartupError: the address cannot be listened on.
        """
        if not self._listeners:
            self._listeners = await self._listen()

    def close(self) -> None:
        """Give up what `bind` took and `run` did not get to serve."""
        close_all(self._listeners)
        self._listeners = []

    async def run(self) -> NoReturn:
        """Serve until cancelled. Raises StartupError: the address cannot be listened on."""
        # Imports in a thread still hold the interpreter's lock, but let the loop run between them.
        await in_pool(self._load, "web_not_loaded")
        from aiohttp import web

        from gpushare_agent.agent.observability.http.debug_routes import debug_routes
        from gpushare_agent.core.kit.http_server import HttpLimits, HttpServer

        handlers = self._handlers()
        self._paths = sorted(handlers)
        routes: list[web.AbstractRouteDef] = [
            web.get(path, handler if path in _FOR_ANY_NAME else self._guarded(handler))
            for path, handler in handlers.items()
        ]
        if self.debug is not None:
            routes += debug_routes(self.debug)
            self._paths.append("/debug/")
        server = HttpServer("web", routes, limits=HttpLimits(), headers=SECURITY_HEADERS)
        try:
            await self.bind()
            self._is_listening.set()
            log.info("web_listening", addr=self.addr or "*", port=self.bound_port)
            await server.serve(self._listeners)
        finally:
            self._is_listening.clear()
            self.close()

    async def _listen(self) -> list[socket.socket]:
        try:
            listeners = await listen_tcp(self.addr, self.port, backlog=BACKLOG)
        except Unavailable as e:
            # The two mistakes have different remedies, and the wrapped text does not tell them apart.
            is_taken = isinstance(e.__cause__, OSError) and e.__cause__.errno == errno.EADDRINUSE
            otherwise = "end the other program or choose another web.port" if is_taken else "check web.addr"
            raise StartupError(f"cannot serve metrics: {e}; {file_remedy(e, otherwise)}") from e
        self.bound_port = listeners[0].getsockname()[1]
        return listeners

    def _handlers(self) -> dict[str, Handler]:
        """By path."""
        queue = RequestQueue()
        # Costly requests wait in the queue. The kubelet's probes are answered outside it: a slow scrape must not
        # restart the agent.
        show_metrics = queue.one_at_a_time(self._refreshed(self._show_metrics))
        return {
            "/": self._show_index,
            "/healthz": self._show_health,
            "/readyz": self._show_readiness,
            "/version": self._show_version,
            "/metrics": show_metrics,
            # gpu-manager's path, where its readers expect its series.
            "/metric": show_metrics,
            **dict(self._page.routes()),
            **{path: queue.one_at_a_time(self._refreshed(handler)) for path, handler in self.routes},
        }

    def _guarded(self, handler: Handler) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            if may_read(request.headers, self.node_name):
                return await handler(request)
            return text_answer(_MISDIRECTED, status=421)

        return answer

    def _refreshed(self, handler: Handler) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            await self.before_reading()
            return await handler(request)

        return answer

    async def _show_index(self, request: web.Request) -> web.StreamResponse:
        """The dashboard for a browser, the list of paths for everything else."""
        # One address for both, as the port's number is all that a person remembers.
        if accepts_html(request):
            return await self._page.index(request)
        # The dashboard's files are no pages of their own.
        paths = "".join(f"  {path}\n" for path in self._paths if not path.startswith(PREFIX))
        text = f"gpushare-agent {__version__}: the dashboard, in a browser; for programs:\n\n{paths}"
        return text_answer(text, headers={"Vary": "Accept"})

    async def _show_health(self, _request: web.Request) -> web.Response:
        return _probed(self.needs_restart())

    async def _show_readiness(self, _request: web.Request) -> web.Response:
        return _probed(self.ready())

    async def _show_version(self, request: web.Request) -> web.Response:
        return json_answer(request, {"version": __version__})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        """In the format that the Accept header names."""
        from aiohttp import web

        accept = ",".join(request.headers.getall("Accept", []))
        is_all = self.all_series or request.path == "/metric"
        await self.metrics.prepare(is_all=is_all)
        content_type, body = self.metrics.exposition(accept, is_all=is_all)
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
        if accepts_gzip(request):
            headers["Content-Encoding"] = "gzip"
            # A full node has thousands of rows: packing them takes longer than the loop, which admits pods, should
            # stand still.
            body = await asyncio.to_thread(packed, body)
        return web.Response(body=body, headers=headers)

    def _load(self) -> None:
        self._page.load()
        for name in ("core.kit.http_server", "agent.observability.http.debug_routes"):
            importlib.import_module(f"gpushare_agent.{name}")


def _probed(reasons: Sequence[str]) -> web.Response:
    return text_answer("".join(f"{one}\n" for one in reasons or ("ok",)), status=503 if reasons else 200)
