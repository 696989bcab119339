"""The debug listener: pages about the inside of a running agent, for operators, apart from the web port.

By default it listens on this host only; any other address needs a token (observability/http/debug_guard.py). What
changes something needs POST or PUT. A port that is taken costs the pages, not the agent. State owned: the listening
sockets.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NoReturn

import structlog

from gpushare_agent.kit.tcp_listeners import close_all, listen_tcp
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.observability.http.debug_guard import Guard, check_debug_settings
from gpushare_agent.observability.http.debug_pages import DebugSources
from gpushare_agent.settings.observation import DebugSettings

if TYPE_CHECKING:
    from gpushare_agent.observability.http.limiter import Door

log = structlog.get_logger(__name__)

LOOK_AGAIN_S = 30.0
MAX_CONNECTIONS = 32
HEADERS_WITHIN_S = 10.0
"""Of a request, from the connection or the last answer on: who sends them byte by byte is cut off."""
_SLOW_MODULES = (
    "aiohttp.web",
    "gpushare_agent.observability.http.debug_routes",
    "gpushare_agent.observability.http.limiter",
)
"""Loaded once the kubelet has its resources, off the loop."""
_BACKLOG = 16
_SHUTDOWN_S = 0.5
_MAX_HEADERS = 64
_MAX_LINE_BYTES = 4096


class DebugServer:
    """Raises StartupError where the settings would show the pages to other hosts without a token."""

    def __init__(self, settings: DebugSettings, sources: DebugSources, *, look_again_s: float = LOOK_AGAIN_S) -> None:
        check_debug_settings(settings)
        self._settings = settings
        self._sources = sources
        self._look_again_s = look_again_s
        self._guard = Guard(settings.token_file)
        self._is_listening = asyncio.Event()
        self._complaint = ""
        self.bound_port = 0

    async def wait_listening(self) -> int:
        """Wait until requests are served; the port."""
        await self._is_listening.wait()
        return self.bound_port

    async def run(self) -> NoReturn:
        """Serve until cancelled; where the address cannot be had, try again every now and then."""
        for name in _SLOW_MODULES:
            await asyncio.to_thread(importlib.import_module, name)
        while True:
            try:
                listeners = await self._listen()
            except Unavailable as e:
                self._complain(str(e))
                await asyncio.sleep(self._look_again_s)
                continue
            async with self._serving(listeners) as door:
                await door.run()

    async def _listen(self) -> list[socket.socket]:
        return await listen_tcp(
            self._settings.addr,
            self._settings.port,
            backlog=_BACKLOG,
            only_loopback=self._settings.token_file is None,
        )

    def _complain(self, error: str) -> None:
        if error != self._complaint:
            cure = "end the other program, or choose another debug.addr or debug.port"
            log.warning(
                "debug_unavailable", error=error, lost="the debug pages", cure=cure, again_in_s=self._look_again_s
            )
        self._complaint = error

    @asynccontextmanager
    async def _serving(self, listeners: Sequence[socket.socket]) -> AsyncIterator[Door]:
        from aiohttp import web

        from gpushare_agent.observability.http.debug_routes import application
        from gpushare_agent.observability.http.debug_tools import DebugTools
        from gpushare_agent.observability.http.limiter import Door, DoorLimits, note_request

        tools = DebugTools()
        app = application(self._sources, self._guard, tools)
        app.middlewares.insert(0, note_request)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S, handler_cancellation=True)
        limits = DoorLimits(
            connections=MAX_CONNECTIONS,
            per_peer=MAX_CONNECTIONS,
            headers_within_s=HEADERS_WITHIN_S,
            idle_s=HEADERS_WITHIN_S,
            max_headers=_MAX_HEADERS,
            max_line_bytes=_MAX_LINE_BYTES,
        )
        try:
            await runner.setup()
            self.bound_port = listeners[0].getsockname()[1]
            self._complaint = ""
            self._is_listening.set()
            log.info("debug_listening", addr=self._settings.addr, port=self.bound_port)
            yield Door(runner, listeners, limits, name="debug")
        finally:
            self._is_listening.clear()
            tools.close()
            close_all(listeners)
            await runner.cleanup()
