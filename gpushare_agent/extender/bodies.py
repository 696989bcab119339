"""Reads the bodies of requests to the extender: so long at most, in so much time, and few long ones at once.

The time runs from the headers, the wait for a place in it. A short body needs no place: its bound is that of connections.
Of the places for long ones a peer has a part, so that one that sends byte by byte leaves the others theirs. State owned:
who reads and waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

READ_TIMEOUT_S = 10.0
SHORT_BYTES = 512 * 1024
"""The names of 10,000 nodes."""
LONG_AT_ONCE = 8
LONG_OF_PEER = 2


class UnreadError(Exception):
    """The request cannot be read. `status` and text are for whoever sent it; its connection is of no use any more."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Bodies:
    def __init__(
        self,
        *,
        most_bytes: int,
        within_s: float = READ_TIMEOUT_S,
        long_at_once: int = LONG_AT_ONCE,
        long_of_peer: int = LONG_OF_PEER,
    ) -> None:
        self._most_bytes = most_bytes
        self._within_s = within_s
        self._long_of_peer = long_of_peer
        self._places = asyncio.Semaphore(long_at_once)
        self._of_peer: dict[str, asyncio.Semaphore] = {}
        self._asking: Counter[str] = Counter()

    @property
    def peers(self) -> int:
        """Those with long bodies now."""
        return len(self._of_peer)

    async def read(self, request: web.Request) -> bytes:
        """The whole body.

        Raises:
            UnreadError: it is too long, packed, late, malformed, or its sender has gone.
        """
        length = request.content_length
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UnreadError(415, "a packed request is not read; send it without Content-Encoding")
        if length is not None and length > self._most_bytes:
            raise self._too_long()
        is_placed = is_short = length is not None and length <= SHORT_BYTES
        try:
            async with asyncio.timeout(self._within_s):
                if is_short:
                    return await self._content(request)
                async with self._place(request):
                    is_placed = True
                    return await self._content(request)
        except TimeoutError as e:
            if is_placed:
                raise UnreadError(408, f"no whole request within {self._within_s:g} s") from e
            raise UnreadError(
                503, f"too many long requests are being read; none ended within {self._within_s:g} s"
            ) from e

    async def _content(self, request: web.Request) -> bytes:
        from aiohttp import web

        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge as e:
            raise self._too_long() from e
        except (OSError, web.PayloadAccessError, web.RequestPayloadError) as e:
            raise UnreadError(400, f"the request did not come to its end: {e or type(e).__name__}") from e

    def _too_long(self) -> UnreadError:
        return UnreadError(413, f"the request is longer than {self._most_bytes >> 20} MiB (extender.max_body_mib)")

    @asynccontextmanager
    async def _place(self, request: web.Request) -> AsyncIterator[None]:
        from gpushare_agent.observability.http.limiter import peer_of

        peer = peer_of(request.remote or "")
        own = self._of_peer.setdefault(peer, asyncio.Semaphore(self._long_of_peer))
        self._asking[peer] += 1
        try:
            async with own, self._places:
                yield
        finally:
            self._asking[peer] -= 1
            if not self._asking[peer]:
                del self._asking[peer], self._of_peer[peer]
