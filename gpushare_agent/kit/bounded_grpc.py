"""A gRPC server for peers that may be hostile: the cost of one socket is bounded, whatever is sent to it.

| attack | bound |
|---|---|
| many connections, idle or half-open | `max_connections`, more are closed at accept; `idle_s` without a call cuts off |
| floods of pings or settings | `bytes_per_s` for all connections of the socket together, read in small pieces |
| whatever costs time (calls begun and reset) | `busy_share` of the processor for the socket, and of `SharedBudget` for all |
| peers that send and never read | nothing is read from a peer while answers to it wait |
| large requests, many calls at once | windows of 64 KiB, 16 calls a connection, 8 KiB of headers, `max_request_bytes` |

The answers must be small: a handler that sends more than a window waits for a peer that may not come. Limits of calls are
the handler's business. It uses private names of grpclib and h2, as kit/grpc_server.py does. State owned: the
connections and the byte budget of one server.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import structlog
from grpclib.config import Configuration
from grpclib.protocol import H2Protocol
from h2.settings import SettingCodes

from gpushare_agent.kit.grpc_server import GrpcServer
from gpushare_agent.kit.rate import TokenBucket

if TYPE_CHECKING:
    from grpclib._typing import IServable

log = structlog.get_logger(__name__)

_WINDOW_BYTES = 2**16 - 1
"""The smallest that HTTP/2 starts with and grpclib takes."""
_CALLS_PER_CONNECTION = 16
_HEADER_BYTES = 8 * 1024
_READ_BYTES = 256
"""A call that is begun and reset has 32 bytes: at most 8 of them are handled before other sockets are served."""
_CALL_COST_S = 0.0002
"""What a call costs besides the reading: its task, and the end of it. What its handler costs is the handler's to charge."""
_BACKLOG = 16
"""asyncio accepts so many connections of one socket before it serves the others."""
_WARNING_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Of one socket. `byte_burst` may be read at once, then `bytes_per_s`; the same for the time that it takes, where
    `busy_share` is a share of one processor."""

    max_request_bytes: int = 4096
    max_connections: int = 64
    idle_s: float = 60.0
    bytes_per_s: float = 64 * 1024
    byte_burst: float = 256 * 1024
    busy_share: float = 0.05
    busy_burst_s: float = 0.3


class SharedBudget:
    """Of all sockets together: the share of the processor that reading from them may take. A socket that has kept within
    half of its own burst is not delayed by others."""

    def __init__(self, *, busy_share: float = 0.2, busy_burst_s: float = 0.2, clock: Callable[[], float]) -> None:
        self.busy = TokenBucket(rate=busy_share, burst=busy_burst_s, clock=clock)


class BoundedGrpcServer(GrpcServer):
    """Serves `handlers` within `limits`. `fields` go into its log lines."""

    def __init__(
        self,
        handlers: Collection[IServable],
        *,
        limits: ServerLimits,
        fields: dict[str, str],
        shared: SharedBudget | None = None,
    ) -> None:
        super().__init__(handlers, max_request_bytes=limits.max_request_bytes)
        self._config = Configuration(
            http2_connection_window_size=_WINDOW_BYTES, http2_stream_window_size=_WINDOW_BYTES
        ).__for_server__()
        self.limits = limits
        self._fields = fields
        clock = asyncio.get_running_loop().time
        self._shared = shared
        self._bytes = TokenBucket(rate=limits.bytes_per_s, burst=limits.byte_burst, clock=clock)
        self._busy = TokenBucket(rate=limits.busy_share, burst=limits.busy_burst_s, clock=clock)
        self._bounded: set[_Bounded] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._warnings = TokenBucket(rate=1 / _WARNING_INTERVAL_S, burst=1, clock=clock)
        self._refused = 0

    async def serve(self, sock: socket.socket) -> None:
        """As GrpcServer.serve."""
        await self._listen(sock, lambda: _Bounded(self), backlog=_BACKLOG)

    @property
    def is_paused(self) -> bool:
        return self._pause is not None

    def register(self, connection: _Bounded) -> None:
        self._bounded.add(connection)

    def forget(self, connection: _Bounded) -> None:
        self._bounded.discard(connection)

    def charge(self, nbytes: int, seconds: float) -> None:
        """Counts the cost of one reading. A socket over its budget is read from on no connection until it has refilled."""
        wait_s = max(self._bytes.owe(nbytes), self._busy.owe(seconds))
        if self._shared is not None:
            shared_s = self._shared.busy.owe(seconds)
            if self._busy.level < self.limits.busy_burst_s / 2:
                wait_s = max(wait_s, shared_s)
        if wait_s <= 0 or self._pause is not None or self._is_stopping:
            return
        self._pause = asyncio.get_running_loop().call_later(wait_s, self._resume)
        for connection in self._bounded:
            connection.set_reading()

    def _resume(self) -> None:
        self._pause = None
        for connection in self._bounded:
            connection.set_reading()

    async def stop(self, grace_s: float = 0.5) -> None:
        """As GrpcServer.stop."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        await super().stop(grace_s)

    def admit(self) -> H2Protocol | None:
        """What handles one more connection; None where it is one too many, or was accepted while the server stopped."""
        if self._is_stopping:
            return None
        if self.connections < self.limits.max_connections:
            return self._protocol_factory()
        self._refused += 1
        if self._warnings.take():
            log.warning("grpc_connections_refused", refused=self._refused, open=self.connections, **self._fields)
            self._refused = 0
        return None


class _Bounded(asyncio.BufferedProtocol):
    """Between a transport and the connection that handles it: reads little, and only within the budget."""

    _inner: H2Protocol
    _transport: asyncio.Transport

    def __init__(self, server: BoundedGrpcServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._made_at = self._loop.time()
        self._buffer = bytearray()
        self._is_admitted = False
        self._idle: asyncio.TimerHandle | None = None
        self._is_write_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        started_at = time.perf_counter()
        inner = self._server.admit()
        if inner is None:
            self._transport.abort()
            return
        self._is_admitted = True
        self._buffer = bytearray(_READ_BYTES)
        self._inner = inner
        inner.connection_made(transport)
        h2 = inner.connection._connection
        h2.decoder.max_header_list_size = _HEADER_BYTES
        h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: _CALLS_PER_CONNECTION})
        h2.local_settings.acknowledge()  # in force from the start: a hostile peer would never acknowledge
        inner.connection.flush()
        self._watch(self._server.limits.idle_s)
        self._server.register(self)
        if self._server.is_paused:
            asyncio.get_running_loop().call_soon(self.set_reading)  # the transport begins to read after this call
        self._server.charge(0, time.perf_counter() - started_at)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._server.forget(self)
        if self._is_admitted:
            self._inner.connection_lost(cast(Exception | None, exc))

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        started_at, calls = time.perf_counter(), self._calls
        self._inner.data_received(bytes(memoryview(self._buffer)[:nbytes]))
        self._server.charge(nbytes, time.perf_counter() - started_at + (self._calls - calls) * _CALL_COST_S)

    @property
    def _calls(self) -> int:
        return cast(int, self._inner.handler.accepted)  # type: ignore[attr-defined]  # kit/grpc_server.py's handler

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._is_admitted else None

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self.set_reading()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self.set_reading()
        self._inner.resume_writing()

    def set_reading(self) -> None:
        """Reads, or not, as the answers' way out and the socket's budget allow."""
        if self._transport.is_closing():
            return
        if self._is_write_paused or self._server.is_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _watch(self, after_s: float) -> None:
        self._idle = self._loop.call_later(after_s, self._cut_off_if_idle)

    def _cut_off_if_idle(self) -> None:
        """Only a new call counts as activity: pings and pieces of a request cost a peer nothing."""
        # grpclib records it in time.monotonic(), which is the loop's clock too
        last = self._inner.connection.last_stream_created or self._made_at
        left_s = last + self._server.limits.idle_s - self._loop.time()
        if left_s > 0:
            self._watch(left_s)
        else:
            self._transport.abort()  # not close(): it would wait for a peer that does not read
