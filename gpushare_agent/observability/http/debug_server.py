"""The debug listener: pages about the inside of a running agent, for operators, apart from the web port.

By default it listens on this host only; any other address needs a token (observability/http/debug_guard.py). What
changes something needs POST or PUT. A port that is taken costs the pages, not the agent. State owned: whether it listens.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import structlog

from gpushare_agent.kit.http_answers import SECURITY_HEADERS
from gpushare_agent.kit.supervision import ReportOnce
from gpushare_agent.kit.tcp_listeners import listen_tcp
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.observability.http.debug_guard import Guard, check_debug_settings
from gpushare_agent.observability.http.debug_pages import DebugSources
from gpushare_agent.settings.sections import DebugSettings

if TYPE_CHECKING:
    from gpushare_agent.kit.http_server import HttpLimits

log = structlog.get_logger(__name__)

RETRY_S = 30.0
_SLOW_MODULES = ("gpushare_agent.kit.http_server", "gpushare_agent.observability.http.debug_routes")
"""Loaded once the kubelet has its resources, off the loop."""
_BACKLOG = 16
_HEADERS = {**SECURITY_HEADERS, "Cache-Control": "no-store"}


class DebugServer:
    """Raises StartupError where the settings would show the pages to other hosts without a token."""

    def __init__(
        self,
        settings: DebugSettings,
        sources: DebugSources,
        *,
        retry_s: float = RETRY_S,
        limits: HttpLimits | None = None,
    ) -> None:
        check_debug_settings(settings)
        self._settings = settings
        self._sources = sources
        self._retry_s = retry_s
        self._limits = limits
        self._guard = Guard(settings.token_file)
        self._reported = ReportOnce()
        self._is_listening = asyncio.Event()
        self.bound_port = 0

    async def wait_listening(self) -> int:
        """Wait until requests are served; the port."""
        await self._is_listening.wait()
        return self.bound_port

    async def run(self) -> NoReturn:
        """Serve until cancelled; where the address cannot be had, try again every `retry_s`."""
        for name in _SLOW_MODULES:
            await asyncio.to_thread(importlib.import_module, name)
        while True:
            try:
                listeners = await listen_tcp(
                    self._settings.addr,
                    self._settings.port,
                    backlog=_BACKLOG,
                    # `localhost` is resolved by the host's files: without a token its addresses are checked, too.
                    only_loopback=self._settings.token_file is None,
                )
            except Unavailable as e:
                # Tried again, for during an upgrade the outgoing agent may hold the port for a while.
                self._report(str(e))
                await asyncio.sleep(self._retry_s)
                continue
            await self._serve(listeners)

    def _report(self, error: str) -> None:
        if self._reported.is_new(error):
            remedy = "end the other program, or choose another debug.addr or debug.port"
            log.warning("debug_unavailable", error=error, lost="the debug pages", cure=remedy, again_in_s=self._retry_s)

    async def _serve(self, listeners: Sequence[socket.socket]) -> NoReturn:
        from gpushare_agent.kit.http_server import HttpLimits, HttpServer
        from gpushare_agent.observability.http.debug_routes import debug_routes, guarding

        server = HttpServer(
            "debug",
            debug_routes(self._sources),
            limits=self._limits or HttpLimits(connections=32, idle_s=10.0, line_bytes=4096),
            middlewares=[guarding(self._guard)],
            headers=_HEADERS,
        )
        self.bound_port = listeners[0].getsockname()[1]
        self._is_listening.set()
        log.info("debug_listening", addr=self._settings.addr, port=self.bound_port)
        try:
            await server.serve(listeners)
        finally:
            self._is_listening.clear()
