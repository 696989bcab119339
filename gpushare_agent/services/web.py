"""The agent's HTTP server: metrics, health, readiness, version, the dashboard, and the routes that others bring.

Reads only; whoever reaches the address may read. Which name the reader used for it (the Host header) is not looked at:
the address is meant to be reached by many names. aiohttp is imported in a thread once `run` begins, for it takes 190 ms
that the registration with the kubelet should not wait for. Paths kept from gpu-manager: docs/formats.md, section 8.
The state is the listening sockets.
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
from gpushare_agent.model.errors import StartupError
from gpushare_agent.services.metrics import AgentMetrics
from gpushare_agent.services.web_answers import accepts_html, add_security_headers
from gpushare_agent.services.web_page import PREFIX, WebPage

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
    Route = tuple[str, Handler]

log = structlog.get_logger(__name__)

RESOLVE_TIMEOUT_S = 5.0
BACKLOG = 64
SHUTDOWN_TIMEOUT_S = 0.5
"""The agent ends within two seconds of SIGTERM, whatever a reader of /metrics does."""


class WebServer:
    """`routes` are further paths for GET. `ready` returns why the agent is not ready, nothing when it is. `on_stop` is
    called before the connections are closed, to end answers that have no end of their own."""

    def __init__(
        self,
        addr: str,
        port: int,
        *,
        metrics: AgentMetrics,
        ready: Callable[[], Sequence[str]],
        routes: Sequence[Route] = (),
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._addr = addr
        self._port = port
        self._metrics = metrics
        self._ready = ready
        self._extra_routes = tuple(routes)
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
        _close_all(self._listeners)
        self._listeners = []

    async def run(self) -> NoReturn:
        """Serve until cancelled.

        Raises:
            StartupError: the address cannot be listened on.
        """
        await asyncio.to_thread(self._load)
        async with self._serving():
            await asyncio.Event().wait()
        raise AssertionError("unreachable: nobody sets that event")

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        from aiohttp import web

        app = web.Application()
        app.on_response_prepare.append(add_security_headers)
        for path, handler in self._routes():
            app.router.add_get(path, handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
        await runner.setup()
        try:
            await self.bind()
            while self._listeners:
                await web.SockSite(runner, self._listeners[0]).start()
                self._listeners.pop(0)  # the site's from here on
            self._is_listening.set()
            log.info("web_listening", addr=self._addr, port=self.bound_port)
            yield
        finally:
            self._is_listening.clear()
            self._on_stop()
            await runner.cleanup()

    async def _listen(self) -> list[socket.socket]:
        """One socket for each address of the name; one that this machine lacks (often ::1) is left out."""
        what = f"cannot serve metrics on {self._addr}:{self._port}"
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                resolved = await asyncio.get_running_loop().getaddrinfo(
                    self._addr or None, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )
        except (OSError, TimeoutError) as e:
            raise StartupError(f"{what}: the address is unknown ({e or 'no answer'}); check --query-addr") from e
        listeners: list[socket.socket] = []
        absent: OSError | None = None
        for family, address in sorted({(family, address) for family, _, _, _, address in resolved}, key=str):
            try:
                listeners.append(_bind(family, (address[0], self.bound_port or self._port, *address[2:])))
            except OSError as e:
                if e.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    _close_all(listeners)
                    cure = "end the other program or choose another --query-port" if e.errno == errno.EADDRINUSE else ""
                    raise StartupError(f"{what}: {e.strerror or e}; {cure or 'check --query-addr'}") from e
                absent = e
            else:
                self.bound_port = listeners[0].getsockname()[1]
        if not listeners:
            raise StartupError(f"{what}: this machine has no such address; check --query-addr") from absent
        return listeners

    def _routes(self) -> list[Route]:
        from gpushare_agent.services.metrics_web import metrics_handler

        show_metrics: Handler = metrics_handler(self._metrics)
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


def _bind(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _close_all(listeners: list[socket.socket]) -> None:
    for listener in listeners:
        listener.close()
