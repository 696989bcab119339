"""Faults of the embedded API server that tests inject: failed requests, stalls, expired watches.

State owned: what is injected at the moment.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from gpushare_agent.sandbox.api.responses import status_response
from gpushare_agent.sandbox.api.store import ObjectStore


class ApiFaults:
    def __init__(self, store: ObjectStore) -> None:
        self.watch_epoch = 0
        self.is_stopping = False
        self._store = store
        self._failures: list[int] = []
        self._running = asyncio.Event()
        self._running.set()

    def fail_next(self, count: int, status: int) -> None:
        """The next `count` requests are answered with this HTTP status."""
        self._failures.extend([status] * count)

    def stall(self) -> None:
        """From now on requests are accepted and not answered, and open watches send nothing."""
        self._running.clear()

    def unstall(self) -> None:
        """Delayed requests are answered now."""
        self._running.set()
        self.wake_watches()

    def expire_watches(self) -> None:
        """Ends every open watch with a 410 Gone event."""
        self.watch_epoch += 1
        self.wake_watches()

    def wake_watches(self) -> None:
        for signal in (*self._store.signals.values(), self._store.signal):
            signal.notify()

    async def wait_running(self) -> None:
        await self._running.wait()

    async def before_answer(self) -> web.Response | None:
        """Waits while stalled; the response in place of the answer where the request is to fail."""
        await self.wait_running()
        if not self._failures:
            return None
        return status_response(self._failures.pop(0), "InternalError", "an injected fault of the embedded API server")
