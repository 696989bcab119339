"""A gRPC server for peers that may be hostile: the cost of one socket is bounded, whatever is sent to it.

| attack | bound |
|---|---|
| many connections, idle or half-open | `max_connections`, more are closed at accept; `idle_s` without a call cuts off |
| the same on many sockets of a pod, or of many pods | a part of the process's open files, see `SharedBudget` |
| connections opened and closed in a loop | charged as reading is; over its budget nothing of a socket is accepted |
| floods of pings or settings | `bytes_per_s` for all connections of the socket together, read in small pieces |
| whatever costs time (calls begun and reset, faults) | `busy_share` of a processor for a socket; `SharedBudget` for all |
| peers that send and never read | nothing is read from a peer while answers to it wait |
| large requests, many calls at once | windows of 64 KiB, 16 calls a connection, 8 KiB of headers, `max_request_bytes` |

The answers must be small: a handler that sends more than a window waits for a peer that may not come. Limits of calls are
the handler's business. Time is the thread's processor time: waiting for a busy node is not charged. It uses private names
of grpclib and h2, as kit/grpc_server.py does. State owned: the budgets of one server, and its pause.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, cast

import structlog
from grpclib.config import Configuration
from h2.settings import SettingCodes
from msgspec import Struct

from gpushare_agent.core.kit.grpc_server import Connection, GrpcServer
from gpushare_agent.core.kit.rate import TokenBucket

if TYPE_CHECKING:
    from grpclib._typing import IServable

log = structlog.get_logger(__name__)

_WINDOW_BYTES = 2**16 - 1
"""The smallest that HTTP/2 starts with and grpclib takes. Its default is 4 MiB: so much would be kept of each peer's
requests."""
_CONFIGURATION = Configuration(
    http2_connection_window_size=_WINDOW_BYTES, http2_stream_window_size=_WINDOW_BYTES
).__for_server__()
"""Of every server: each container has one, and grpclib checks all of it each time."""
_CALLS_PER_CONNECTION = 16
_HEADER_BYTES = 8 * 1024
_READ_BYTES = 256
"""A call that is begun and reset has 32 bytes: at most 8 of them are handled before other sockets are served."""
_READING_COST_S = 0.00008
"""The cost of a reading without the handling of its content: the loop's turn, and the kernel's copy."""
_CALL_COST_S = 0.0002
"""The cost of a call without the reading: its task, and the end of it. The handler charges its own cost."""
_CONNECTION_COST_S = 0.0002
"""The cost of a connection without what is measured: the loop's turns for accept, begin and end, and the kernel's close."""
_LEAST_PAUSE_S = 0.05
"""The pause of a socket over its budget: one after each reading would cost more turns of the loop than are charged."""


class ServerLimits(Struct, frozen=True, kw_only=True):
    """The limits of one socket. `byte_burst` may be read at once, then `bytes_per_s`; the same for the time that it
    takes, where `busy_share` is a share of one processor."""

    max_request_bytes: int = 4096
    max_connections: int = 64
    idle_s: float = 60.0
    bytes_per_s: float = 64 * 1024
    byte_burst: float = 256 * 1024
    busy_share: float = 0.05
    busy_burst_s: float = 0.3


_PART_OF_FILES, _PART_OF_OWNER = 4, 16
_MOST_OF_OWNER, _LEAST_OF_OWNER = 512, 4
_BUSY_SHARE, _BUSY_BURST_S = 0.2, 0.2


class SharedBudget:
    """The budget of all sockets together: the share of the processor that reading from them may take, and the connections. A
    socket that has kept within half of its own burst is not delayed by others.

    Connections get a quarter of `open_files`, those of one owner with all its sockets a sixteenth. Where the quarter is used
    up an owner may still have 4: others cannot keep it out."""

    def __init__(self, *, clock: Callable[[], float], open_files: int = 1 << 16) -> None:
        self.busy = TokenBucket(rate=_BUSY_SHARE, burst=_BUSY_BURST_S, clock=clock)
        self._open: Counter[str] = Counter()
        self._most = open_files // _PART_OF_FILES
        self._most_of_owner = min(_MOST_OF_OWNER, open_files // _PART_OF_OWNER)

    def admits(self, owner: str) -> bool:
        own = self._open[owner]
        return own < self._most_of_owner and (self._open.total() < self._most or own < _LEAST_OF_OWNER)

    def count(self, owner: str, change: int) -> None:
        self._open[owner] += change
        if not self._open[owner]:
            del self._open[owner]


class BoundedGrpcServer(GrpcServer):
    """Serves `handlers` within `limits`. `fields` go into its log lines. `owner` is whom its connections count for in the
    shared budget."""

    def __init__(
        self,
        handlers: Collection[IServable],
        *,
        limits: ServerLimits,
        fields: dict[str, str],
        shared: SharedBudget | None = None,
        owner: str = "",
    ) -> None:
        super().__init__(handlers, max_request_bytes=limits.max_request_bytes)
        self._config = _CONFIGURATION
        self.limits = limits
        self._fields = fields
        clock = asyncio.get_running_loop().time
        self._shared = shared
        self._owner = owner
        self._bytes = TokenBucket(rate=limits.bytes_per_s, burst=limits.byte_burst, clock=clock)
        self._busy = TokenBucket(rate=limits.busy_share, burst=limits.busy_burst_s, clock=clock)
        self._pause: asyncio.TimerHandle | None = None
        self._refused = 0

    @property
    def is_paused(self) -> bool:
        return self._pause is not None

    def _accept(self, listener: socket.socket) -> None:
        started_at = time.thread_time()
        super()._accept(listener)
        self.charge(0, time.thread_time() - started_at + _CONNECTION_COST_S)

    def _admitted(self) -> Connection | None:
        if len(self.open) < self.limits.max_connections and (self._shared is None or self._shared.admits(self._owner)):
            self.count(1)
            return _Bounded(self)
        self._refused += 1
        if self._lines["grpc_connections_refused"].take():
            log.warning("grpc_connections_refused", refused=self._refused, open=len(self.open), **self._fields)
            self._refused = 0
        return None

    def count(self, change: int) -> None:
        if self._shared is not None:
            self._shared.count(self._owner, change)

    def charge(self, nbytes: int, seconds: float) -> None:
        """Counts the cost of one reading or connection. A socket over its budget reads nothing and accepts nothing until
        it has refilled."""
        # Charged in any case, also where the socket is paused already: what is in flight costs as much.
        wait_s = self._owe(nbytes, seconds)
        if wait_s > 0 and self._pause is None and not self.is_stopping:
            self._pause = asyncio.get_running_loop().call_later(max(wait_s, _LEAST_PAUSE_S), self._resume)
            self._leave_listener()
            self._set_reading()

    def _owe(self, nbytes: int, seconds: float) -> float:
        """The time for which nothing may be read, in seconds from now."""
        wait_s = max(self._bytes.owe(nbytes), self._busy.owe(seconds))
        if self._shared is not None:
            shared_s = self._shared.busy.owe(seconds)
            # The common budget delays those that use much of their own: a quiet container registers at once during a
            # flood.
            if self._busy.level < self.limits.busy_burst_s / 2:
                wait_s = max(wait_s, shared_s)
        return wait_s

    def _resume(self) -> None:
        wait_s = self._owe(0, 0.0)
        if wait_s > 0:  # connections that ended meanwhile were charged too
            self._pause = asyncio.get_running_loop().call_later(wait_s, self._resume)
            return
        self._pause = None
        self._watch_listener()
        self._set_reading()

    def _set_reading(self) -> None:
        # Switching many connections takes time too, which the flood has caused.
        started_at = time.thread_time()
        for connection in self.open:
            cast(_Bounded, connection).set_reading()
        self._owe(0, time.thread_time() - started_at)

    async def stop(self, grace_s: float = 0.5) -> None:
        """Stops as GrpcServer.stop does."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        await super().stop(grace_s)


class _Bounded(Connection, asyncio.BufferedProtocol):
    """A connection that reads little, and only within the server's budget."""

    _server: BoundedGrpcServer

    def __init__(self, server: BoundedGrpcServer) -> None:
        super().__init__(server)
        self._loop = asyncio.get_running_loop()
        self._made_at = self._loop.time()
        self._buffer = bytearray(_READ_BYTES)
        self._idle: asyncio.TimerHandle | None = None
        self._is_write_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        started_at = time.thread_time()
        super().connection_made(transport)
        # GOAWAY and the settings would be written to a connection that is closed.
        if not transport.is_closing():  # the server stops
            self._begin()
        self._server.charge(0, time.thread_time() - started_at)

    def _begin(self) -> None:
        connection = self.connection
        h2 = connection._connection
        # Before the first frame: compressed headers may unpack to any size.
        h2.decoder.max_header_list_size = _HEADER_BYTES
        h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: _CALLS_PER_CONNECTION})
        h2.local_settings.acknowledge()  # in force from the start: a hostile peer would never acknowledge
        connection.flush()
        # From the connection on, so that a peer that never sends its preface is cut off too.
        self._watch(self._server.limits.idle_s)
        if self._server.is_paused:
            self._loop.call_soon(self.set_reading)  # the transport begins to read after this call

    def connection_lost(self, exc: BaseException | None) -> None:
        started_at = time.thread_time()
        if self._idle is not None:
            self._idle.cancel()
        super().connection_lost(exc)
        self._server.count(-1)
        self._server.charge(0, time.thread_time() - started_at)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        started_at, calls = time.thread_time(), self.handler.accepted
        try:
            # A copy: h2 keeps parts of what it is fed, and the buffer is used again.
            self.data_received(bytes(memoryview(self._buffer)[:nbytes]))
        finally:
            spent_s = time.thread_time() - started_at + _READING_COST_S + (self.handler.accepted - calls) * _CALL_COST_S
            self._server.charge(nbytes, spent_s)

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self.set_reading()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self.set_reading()
        super().resume_writing()

    def set_reading(self) -> None:
        """Reads, or not, as the answers' way out and the socket's budget allow."""
        if self._transport is None or self._transport.is_closing():
            return
        # A peer that does not read its answers must not be read from: its answers would pile up here.
        if self._is_write_paused or self._server.is_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _watch(self, after_s: float) -> None:
        self._idle = self._loop.call_later(after_s, self._cut_off_if_idle)

    def _cut_off_if_idle(self) -> None:
        """Cuts off a peer without a call. Only a new call counts as activity: pings and pieces of a request cost a peer
        nothing."""
        # grpclib records it in time.monotonic(), which is the loop's clock too
        last = self.connection.last_stream_created or self._made_at
        left_s = last + self._server.limits.idle_s - self._loop.time()
        if left_s > 0:
            self._watch(left_s)
        else:
            self.abort()  # not close(): it would wait for a peer that does not read
