"""Lists and watches of the API server, objects as undecoded JSON: pages, limits, bookmarks, and what a broken stream means.

Errors are those of session.py. No state.
Protocol: Kubernetes API concepts, "Efficient detection of changes" and "Retrieving large results sets in chunks".
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from msgspec import Raw, Struct, field
from msgspec.json import Decoder
from msgspec.structs import replace

from gpushare_agent.cluster.kube.session import (
    STATUS,
    KubeSession,
    Request,
    Status,
    TooLong,
    error_for_status,
    excerpt,
    renamed,
)
from gpushare_agent.kit.json_schema import decoded, decoded_or
from gpushare_agent.model.errors import Conflict, Corrupt, Unavailable

if TYPE_CHECKING:
    from aiohttp import ClientResponse

T = TypeVar("T")

PAGE_SIZES = (500, 50, 5, 1)
"""Objects in one page, the next smaller where a page is too long: a pod has up to 1.5 MiB."""
PAGED_TRIES = 3
MAX_LINE_BYTES = 2 << 20
"""One watch event is one line: an object of at most 1.5 MiB and its frame."""


class KubeTimeouts(Struct, frozen=True, kw_only=True):
    """`watch_s` is what the server is asked for; `watch_idle_s` ends a watch on which not even a bookmark (one a minute)
    came, for a half-open connection looks exactly like that."""

    connect_s: float = 5.0
    request_s: float = 15.0
    list_s: float = 60.0
    watch_s: float = 290.0
    watch_idle_s: float = 120.0


class ListLimits(Struct, frozen=True, kw_only=True):
    """A list of the watch cache that is longer than `list_bytes` is read in pages of at most `page_bytes`.

    Reading an answer takes about four times its size for a moment. 250 pods of 20 KiB, which is much, are 5 MiB.
    """

    list_bytes: int = 16 << 20
    page_bytes: int = 8 << 20
    page_sizes: tuple[int, ...] = PAGE_SIZES


class Watched(Struct, frozen=True, kw_only=True):
    """A kind of objects, or some of them. `what` completes "list …" and "watch …"; `fields` and `labels` are selectors.

    Lists are consistent reads in pages. With `from_cache` the list is the watch cache's, which may lag and answers whole:
    what hundreds of agents start with must not be read from etcd.
    """

    what: str
    path: str
    fields: str = ""
    labels: str = ""
    from_cache: bool = False

    def request(self, verb: str) -> Request:
        selectors = (("fieldSelector", self.fields), ("labelSelector", self.labels))
        query = tuple((name, value) for name, value in selectors if value)
        return Request(what=f"{verb} {self.what}", method="GET", path=self.path, query=query)


class _ListMeta(Struct, rename="camel"):
    resource_version: str = ""
    token: str | None = field(name="continue", default=None)


class _Page(Struct):
    metadata: _ListMeta
    items: list[Raw] | None = None
    """Servers send null for an empty list at times."""


class WatchEvent(Struct):
    """One line of a watch."""

    type: str
    object: Raw


_PAGE, _EVENT = Decoder(_Page), Decoder(WatchEvent)


class KubeLists:
    """The base of the API clients: what reads many objects."""

    def __init__(self, session: KubeSession, timeouts: KubeTimeouts, limits: ListLimits) -> None:
        self._session = session
        self._timeouts = timeouts
        self._limits = limits

    async def list_all(self, watched: Watched, read: Callable[[Raw], T | None]) -> tuple[list[T], str]:
        """What `read` makes of each object, called as its page comes (None is left out), and the version to watch from.

        Where the server cannot go on with a list it begins anew: `read` may see an object twice.
        """
        request = watched.request("list")
        if watched.from_cache:
            # Version 0: whatever the watch cache has, without a read of etcd. It ignores the page's limit, so the
            # answer comes whole.
            whole = replace(request, query=(*request.query, ("resourceVersion", "0")))
            list_s, list_bytes = self._timeouts.list_s, self._limits.list_bytes
            with suppress(TooLong):  # left before going on: the error's frames keep what was read alive
                items, version, _ = await self._page(whole, read, timeout_s=list_s, limit_bytes=list_bytes)
                return items, version
        # A list of the cache that was too long for one answer has the whole time once more.
        ends_at = time.monotonic() + self._timeouts.list_s
        for _ in range(PAGED_TRIES - 1):
            with suppress(Conflict):  # the place to go on from is compacted away: start over
                return await self._pages(request, read, ends_at)
        # The last try raises what the others would have met.
        return await self._pages(request, read, ends_at)

    async def _pages(self, request: Request, read: Callable[[Raw], T | None], ends_at: float) -> tuple[list[T], str]:
        items: list[T] = []
        sizes, token = list(self._limits.page_sizes), ""
        while True:
            place = (("limit", str(sizes[0])), *((("continue", token),) if token else ()))
            page_request = replace(request, query=(*request.query, *place))
            # One time for all pages: a server that gives each of them slowly must not take hours.
            left_s = max(ends_at - time.monotonic(), 0.0)
            try:
                page, version, token = await self._page(
                    page_request, read, timeout_s=left_s, limit_bytes=self._limits.page_bytes
                )
            except TooLong:
                if len(sizes) == 1:
                    raise
                # The same place once more with fewer objects; the smaller size stays, for large objects come together.
                del sizes[0]
                continue
            items += page
            if not token:
                return items, version

    async def _page(
        self, request: Request, read: Callable[[Raw], T | None], *, timeout_s: float, limit_bytes: int
    ) -> tuple[list[T], str, str]:
        """The objects, the version, and where the next page begins, empty on the last."""
        page = await self._session.fetch(request, _PAGE, timeout_s=timeout_s, limit_bytes=limit_bytes)
        # Without a version there is nothing to watch from: some proxy has answered, not an API server.
        if not page.metadata.resource_version:
            raise Corrupt(f"cannot {request.what}: the answer is no list with a resourceVersion")
        items = [item for raw in page.items or () if (item := read(raw)) is not None]
        return items, page.metadata.resource_version, page.metadata.token or ""

    @asynccontextmanager
    async def watch_all(self, watched: Watched, resource_version: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """Events of the types ADDED, MODIFIED, DELETED and BOOKMARK, from after `resource_version`.

        The iterator ends when the server ends the watch. Entering or iterating raises Conflict where the version is too
        old (HTTP or ERROR event 410), Unavailable for silence or a cut line, Corrupt for a line that is no event.
        """
        request = watched.request("watch")
        # Jittered, so that the agents of a cluster do not all come back in one second.
        watch_s = int(self._timeouts.watch_s * random.uniform(1.0, 1.1))  # noqa: S311 - spreads load, no secret
        query = (
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", resource_version),
            ("timeoutSeconds", str(max(watch_s, 1))),
        )
        stream = self._session.stream(replace(request, query=(*request.query, *query)))
        with renamed(request.what):
            async with asyncio.timeout(self._timeouts.request_s):
                # By hand: the timeout is for the headers alone, the stream lasts for minutes.
                response = await stream.__aenter__()
        try:
            async with aclosing(self._events(response, request.what)) as events:
                yield events
        finally:
            await stream.__aexit__(None, None, None)

    async def _events(self, response: ClientResponse, what: str) -> AsyncGenerator[WatchEvent, None]:
        while True:
            with renamed(what):
                async with asyncio.timeout(self._timeouts.watch_idle_s):
                    line = await response.content.readuntil(b"\n", max_size=MAX_LINE_BYTES)
            if not line:
                return
            # The event may be half an object: the watch begins again after the last whole one.
            if not line.endswith(b"\n"):
                raise Unavailable(f"cannot {what}: the stream ended inside a line")
            if line.strip():
                yield _event(line, what)


def _event(line: bytes, what: str) -> WatchEvent:
    try:
        event = decoded(_EVENT, line, "it")
    except Corrupt as e:
        raise Corrupt(f"cannot {what}: a line of the stream is no event ({excerpt(line)})") from e
    # The status of a stream is sent before its errors are known, so they come as events.
    if event.type == "ERROR":
        status = decoded_or(STATUS, event.object, Status)
        raise error_for_status(status.code or 500, what, status.message[:500])
    return event
