"""Answers that cost milliseconds: one at a time, with a turn of the event loop between two, and few that wait.

Without it a hundred connections that ask for /metrics at once put a hundred answers between two turns of the loop that
admits pods. Of one peer only a part may wait, so that one who hammers does not shut out the others. Who finds no place is
told 503, a little later: to answer it at once would be work again. State owned: who waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MOST_WAITING = 32
MOST_OF_PEER = 8
REFUSE_AFTER_S = 0.5
RETRY_AFTER_S = 2


class Turns:
    """`one_at_a_time` wraps handlers; all that are wrapped share the turns."""

    def __init__(
        self,
        *,
        most_waiting: int = MOST_WAITING,
        most_of_peer: int = MOST_OF_PEER,
        refuse_after_s: float = REFUSE_AFTER_S,
    ) -> None:
        self._most_waiting = most_waiting
        self._most_of_peer = most_of_peer
        self._refuse_after_s = refuse_after_s
        self._lock = asyncio.Lock()
        self._waiting: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Requests, the one that is being answered among them."""
        return self._waiting.total()

    def one_at_a_time(self, handler: Handler) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            from aiohttp import web

            peer = request.remote or ""
            if self.waiting >= self._most_waiting or self._waiting[peer] >= self._most_of_peer:
                await asyncio.sleep(self._refuse_after_s)
                headers = {"Retry-After": str(RETRY_AFTER_S), "Cache-Control": "no-store"}
                return web.Response(status=503, headers=headers, text="too many requests at once; try again\n")
            self._waiting[peer] += 1
            try:
                async with self._lock:
                    response = await handler(request)
                    await asyncio.sleep(0)  # the rest of the agent is next
                    return response
            finally:
                self._waiting[peer] -= 1
                if not self._waiting[peer]:
                    del self._waiting[peer]

        return answer
