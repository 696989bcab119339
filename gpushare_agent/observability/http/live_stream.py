"""`/api/v1/stream`: the node's document and then its changes, as server-sent events. The format is docs/reference/api.md.

Each change is computed and encoded once, whatever the number of readers; without a reader nothing is computed. A reader
first gets the document from which the next patch starts; one that falls behind is dropped and connects again, which gives
it a new document. State owned: the readers' queues, and the document that was sent to them last.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import structlog

from gpushare_agent.kit.supervision import wait_for
from gpushare_agent.model.decision_records import DecisionRecord
from gpushare_agent.observability.http.answers import BadQueryError, bad_query, encode, read_query
from gpushare_agent.observability.http.live_patch import CONTAINER_USE, GPU_USE, Document, patch, rounded
from gpushare_agent.observability.http.node_api import Decisions, brief_decision

if TYPE_CHECKING:
    from aiohttp import web

    from gpushare_agent.observability.http.answers import Route

log = structlog.get_logger(__name__)

PATH = "/api/v1/stream"
MOST_STREAMS = 32
MOST_WAITING = 8
"""Events that a reader may be behind."""
SEND_BUFFER_BYTES = 128 * 1024
"""Of the kernel, for one reader: without a bound it grows to megabytes before a slow one is noticed."""
WRITE_TIMEOUT_S = 10.0
HEARTBEAT_S = 15.0
RETRY_MS = 2000
MOST_NEW_DECISIONS = 50
PERIOD_S = 1.0
"""Least time between two events. A longer sample period does not delay a new allocation."""
_END = b""
_HEARTBEAT = b": still here\n\n"
_BUSY_HEADERS = {"Retry-After": "10", "Cache-Control": "no-store"}
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class _Reader:
    """One connection's events that are yet to be sent."""

    def __init__(self, transport: asyncio.Transport | None) -> None:
        self.queue: asyncio.Queue[bytes] = asyncio.Queue(MOST_WAITING)
        self.transport = transport

    def put(self, event: bytes) -> bool:
        """False, and the connection is cut, where too many wait already."""
        try:
            self.queue.put_nowait(event)
        except asyncio.QueueFull:
            if self.transport is not None:
                self.transport.abort()
            return False
        return True


class LiveStream:
    """`document` makes the whole document of the node, now; `run` publishes its changes while somebody reads."""

    def __init__(
        self,
        *,
        document: Callable[[], Document],
        decisions: Decisions,
        sample_period_s: float,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._document = document
        self._decisions = decisions
        self._period_s = min(sample_period_s, PERIOD_S)
        self._heartbeat_s = heartbeat_s
        self._readers: set[_Reader] = set()
        self._reported: Document | None = None
        self._reported_decision = 0
        self._first_event = b""
        self._is_closed = False
        self._has_reader = asyncio.Event()
        self._has_change = asyncio.Event()

    def routes(self) -> list[Route]:
        return [(PATH, self._serve)]

    @property
    def reader_count(self) -> int:
        return len(self._readers)

    def changed(self) -> None:
        """Something has changed. The next event follows as soon as the period since the last one allows."""
        self._has_change.set()

    def close(self) -> None:
        """End all streams at once, and accept no more."""
        self._is_closed = True
        for reader in list(self._readers):
            reader.put(_END)

    async def run(self) -> NoReturn:
        """Until cancelled. Changes without a call of `changed` are seen at the next period."""
        while True:
            await self._has_reader.wait()
            await asyncio.sleep(self._period_s)
            await wait_for(self._has_change, self._period_s)
            self._has_change.clear()
            try:
                self._publish()
            except Exception:  # one cycle of a periodic service: an open page must not end the agent
                log.exception("stream_not_published", path=PATH, then="tried again in the next period")

    def _publish(self) -> None:
        if self._reported is None or not self._readers:
            return
        new = rounded(self._document())
        found = patch(self._reported, new)
        decisions = self._new_decisions()
        if decisions:
            found = {"at": new["at"], **found, "decisions": decisions}
        self._reported = new
        if found:
            self._first_event = b""
            self._send(encode_event("patch", found))

    def _new_decisions(self) -> list[Document]:
        found = self._decisions.newest(MOST_NEW_DECISIONS, after=self._reported_decision)
        self._reported_decision = found[0].number if found else self._reported_decision
        return _brief(found)

    def _send(self, event: bytes) -> None:
        for reader in list(self._readers):
            if not reader.put(event):
                self._forget(reader)
                log.info("slow_reader_dropped", path=PATH, events_waiting=MOST_WAITING, then="it may connect again")

    @contextlib.contextmanager
    def _reading(self, transport: asyncio.Transport | None) -> Iterator[_Reader]:
        reader = _Reader(transport)
        if not self._readers:  # the last reader's state may be hours old
            self._reported, self._first_event = rounded(self._document()), b""
            self._reported_decision = 0
            self._new_decisions()
        self._readers.add(reader)
        reader.put(self._document_event())
        self._has_reader.set()
        try:
            yield reader
        finally:
            self._forget(reader)

    def _forget(self, reader: _Reader) -> None:
        self._readers.discard(reader)
        if not self._readers:
            self._has_reader.clear()
            self._reported, self._first_event = None, b""

    def _document_event(self) -> bytes:
        if not self._first_event and self._reported is not None:
            newest = self._decisions.newest(MOST_NEW_DECISIONS)
            reported = [one for one in newest if one.number <= self._reported_decision]
            document = {
                **self._reported,
                "use_fields": {"card": GPU_USE, "container": CONTAINER_USE},
                "decisions": _brief(reported),
            }
            self._first_event = f"retry: {RETRY_MS}\n".encode() + encode_event("node", document)
        return self._first_event

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        try:
            read_query(request.query, {})
        except BadQueryError as error:
            return bad_query(request, error)
        if request.method == "HEAD":
            return web.Response(headers=_HEADERS)
        if self._is_closed or len(self._readers) >= MOST_STREAMS:
            why = "the agent is stopping" if self._is_closed else f"{MOST_STREAMS} streams are open already"
            return web.Response(status=503, headers=_BUSY_HEADERS, text=f"no stream: {why}; try again\n")
        response = web.StreamResponse(headers=_HEADERS)
        with self._reading(request.transport) as reader, contextlib.suppress(TimeoutError, ConnectionError):
            _bound_buffer(request.transport)
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await response.prepare(request)
            await self._write_events(response, reader)
        return response

    async def _write_events(self, response: web.StreamResponse, reader: _Reader) -> None:
        """Until the end of the stream or of the reader. Raises TimeoutError for one that takes nothing."""
        while event := await self._next_event(reader):
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await response.write(event)
            except TimeoutError:
                if reader.transport is not None:
                    reader.transport.abort()
                raise

    async def _next_event(self, reader: _Reader) -> bytes:
        try:
            async with asyncio.timeout(self._heartbeat_s):
                return await reader.queue.get()
        except TimeoutError:
            return _HEARTBEAT


def encode_event(name: str, document: Document) -> bytes:
    """One server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + encode(document) + b"\n\n"


def _brief(records: Sequence[DecisionRecord]) -> list[dict[str, Any]]:
    """Without the candidates, which /api/v1/decisions?number=N has."""
    return [brief_decision(record) for record in records]


def _bound_buffer(transport: asyncio.Transport | None) -> None:
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is not None:
        with contextlib.suppress(OSError):  # a connection that has just ended
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
