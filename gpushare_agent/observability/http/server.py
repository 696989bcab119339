"""The agent's HTTP server: metrics, health, readiness, version, the dashboard, and the routes that others bring.

Reads only; whoever reaches the address may read. Which name the reader used for it (the Host header) is not looked at:
the address is meant to be reached by many names. aiohttp is imported in a thread once `run` begins, for it takes 190 ms
that the registration with the kubelet should not wait for. Paths kept from gpu-manager: docs/formats.md, section 8.
Who is let in is web_door.py's. The state is the listening sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import structlog

from gpushare_agent import __version__
from gpushare_agent.kit.tcp_listeners import close_all, listen_tcp
from gpushare_agent.model.errors import StartupError, Unavailable
from gpushare_agent.observability.http.answers import accepts_html, add_security_headers
from gpushare_agent.observability.http.page import PREFIX, WebPage
from gpushare_agent.observability.http.request_queue import Turns
from gpushare_agent.observability.metrics.agent import AgentMetrics

if TYPE_CHECKING:
    from aiohttp import web

    from gpushare_agent.observability.http.limiter import Door, DoorLimits

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
    Route = tuple[str, Handler]

log = structlog.get_logger(__name__)

BACKLOG = 128
"""Of the kernel: those who wait to be let in."""
SHUTDOWN_TIMEOUT_S = 0.5
"""The agent ends within two seconds of SIGTERM, whatever a reader of /metrics does."""


class WebServer:
    """`routes` are further paths for GET, answered one at a time (web_turns.py); `streams` those whose answers have no end.
    `ready` returns why the agent is not ready, nothing when it is. `on_stop` is called before the connections are closed,
    to end the streams."""

    def __init__(  # noqa: PLR0913 - the composition hands in every collaborator by name
        self,
        addr: str,
        port: int,
        *,
        metrics: AgentMetrics,
        ready: Callable[[], Sequence[str]],
        routes: Sequence[Route] = (),
        streams: Sequence[Route] = (),
        on_stop: Callable[[], None] = lambda: None,
        limits: DoorLimits | None = None,
    ) -> None:
        self._addr = addr
        self._port = port
        self._metrics = metrics
        self._ready = ready
        self._turns = Turns()
        self._extra_routes = (*((path, self._turns.one_at_a_time(handler)) for path, handler in routes), *streams)
        self._limits = limits
        self._on_stop = on_stop
        self._page = WebPage()
        self._is_listening = asyncio.Event()
        self._listeners: list[socket.socket] = []
        self.bound_port = 0

    async def wait_listening(self) -> int:
        """Wait until requests are served; the port (another than asked for where that was 0)."""
        await self._is_listening.wait()
        return self.bound_port

    async def bind(self) -> None:
        """Take the port now, so that a busy one is told before anything else starts. `run` does it where nobody did.

        Raises:
            StartupError: the address cannot be listened on.
        """
        if not self._listeners:
            self._listeners = await self._listen()

    def close(self) -> None:
        """Give up what `bind` took and `run` did not get to serve."""
        close_all(self._listeners)
        self._listeners = []

    async def run(self) -> NoReturn:
        """Serve until cancelled.

        Raises:
            StartupError: the address cannot be listened on.
        """
        await asyncio.to_thread(self._load)
        async with self._serving() as door:
            await door.run()
        raise AssertionError("unreachable: the door is open until it is cancelled")

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[Door]:
        from aiohttp import web

        from gpushare_agent.observability.http.limiter import Door, DoorLimits, note_request

        app = web.Application(middlewares=[note_request])
        app.on_response_prepare.append(add_security_headers)
        for path, handler in self._routes():
            app.router.add_get(path, handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S, handler_cancellation=True)
        await runner.setup()
        try:
            await self.bind()
            self._is_listening.set()
            log.info("web_listening", addr=self._addr, port=self.bound_port)
            yield Door(runner, self._listeners, self._limits or DoorLimits(), name="web")
        finally:
            self._is_listening.clear()
            self.close()
            self._on_stop()
            await runner.cleanup()

    async def _listen(self) -> list[socket.socket]:
        try:
            listeners = await listen_tcp(self._addr, self._port, backlog=BACKLOG)
        except Unavailable as e:
            is_taken = isinstance(e.__cause__, OSError) and e.__cause__.errno == errno.EADDRINUSE
            cure = "end the other program or choose another --query-port" if is_taken else "check --query-addr"
            raise StartupError(f"cannot serve metrics: {e}; {cure}") from e
        self.bound_port = listeners[0].getsockname()[1]
        return listeners

    def _routes(self) -> list[Route]:
        from gpushare_agent.observability.metrics.routes import metrics_handler

        show_metrics: Handler = self._turns.one_at_a_time(metrics_handler(self._metrics))
        own: list[Route] = [
            ("/", self._show_index),
            ("/healthz", self._show_health),
            ("/readyz", self._show_readiness),
            ("/version", self._show_version),
            ("/metrics", show_metrics),
            ("/metric", show_metrics),
            *self._page.routes(),
        ]
        taken = {path for path, _ in self._extra_routes}
        return [*(route for route in own if route[0] not in taken), *self._extra_routes]

    async def _show_index(self, request: web.Request) -> web.Response:
        """The dashboard for a browser, the list of paths for everything else."""
        from aiohttp import web

        if accepts_html(request):
            return self._page.index(request)
        listed = sorted(path for path, _ in self._routes() if not path.startswith(PREFIX))
        paths = "".join(f"  {path}\n" for path in listed)
        return web.Response(text=f"gpushare-agent {__version__}\n\n{paths}", headers={"Vary": "Accept"})

    async def _show_health(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        return web.Response(text="ok\n")

    async def _show_readiness(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        reasons = self._ready()
        if not reasons:
            return web.Response(text="ok\n")
        return web.Response(status=503, text="".join(f"{reason}\n" for reason in reasons))

    async def _show_version(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        return web.Response(text=json.dumps({"version": __version__}) + "\n", content_type="application/json")

    def _load(self) -> None:
        self._page.load()
        _import_library()


def _import_library() -> None:
    importlib.import_module("aiohttp.web")
    importlib.import_module("gpushare_agent.observability.http.limiter")
