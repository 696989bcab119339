"""A gRPC server that stays usable under cancelled calls, unknown methods, oversized and malformed requests, and stop.

grpclib 0.4.9 has defects that the tests of this module reproduce; they are corrected here, by means of names that are
private to grpclib: hence `grpclib<0.5` in pyproject.toml. One name is private to asyncio (`_accept`).

| defect | without this module |
|---|---|
| the bytes of a call cancelled before its task first ran are never acknowledged | every later call of the connection hangs |
| an unknown method is answered without content-type | the client reads UNKNOWN, not UNIMPLEMENTED |
| close() leaves connections open | on Python 3.12 wait_closed() hangs while a client stays |
| a request has no size limit, and faults in it are "Internal Server Error" | memory grows; the peer gets no reason |
| an unknown frame, or a header that is no text, raises out of the protocol | a traceback in the log for each |
| a breach of the protocol closes the connection without the GOAWAY that h2 prepared | the peer gets no reason |

State owned: the open connections of one server.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import structlog
from grpclib import GRPCError, Status
from grpclib.const import Cardinality
from grpclib.const import Handler as RpcHandler
from grpclib.exceptions import ProtocolError, StreamTerminatedError
from grpclib.protocol import Buffer, H2Protocol
from grpclib.protocol import Stream as H2Stream
from grpclib.server import Handler, Server, Stream
from h2.errors import ErrorCodes
from h2.events import UnknownFrameReceived
from h2.exceptions import ProtocolError as H2ProtocolError
from hpack.exceptions import HPACKError, OversizedHeaderListError

from gpushare_agent.core.kit.grpc_codec import Decoder, StrictCodec
from gpushare_agent.core.kit.protobuf import MalformedMessageError
from gpushare_agent.core.kit.rate import lines_by_event
from gpushare_agent.core.kit.sockets import FileIdentity, bind_unix_socket, file_identity, remove_socket
from gpushare_agent.core.model.errors import Unavailable, os_errors_as

if TYPE_CHECKING:
    from grpclib._typing import IServable, IServerMethodFunc

log = structlog.get_logger(__name__)

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""The limit that gRPC implementations agree on."""

_BACKLOG = 16
"""So many connections of one socket may wait to be accepted; one is accepted at a time."""
_ACCEPT_RETRY_S = 1.0
"""After one could not be accepted, as without a free descriptor."""
_PREFIX = struct.Struct(">BI")
"""The prefix of each message: whether it is compressed, and its length."""
_MAX_REQUEST_FIELDS = 256
"""The limit of fields in requests without a decoder of their own, which are small. The generated classes take 5 us for each,
and for each unknown one as long as it takes to copy those before it."""


class GrpcServer(Server):
    """Serves `handlers`. `decoders` maps generated request classes to faster decoders of their bytes.

    Start it with `serve(sock)`; end streaming handlers before `stop()`. It accepts connections itself, one in a turn of
    the loop: asyncio's own server takes up to a backlog of them, cannot be paused, and leaks one that it accepted just
    before its end.
    """

    def __init__(
        self,
        handlers: Collection[IServable],
        *,
        decoders: Mapping[type, Decoder] | None = None,
        max_request_bytes: int = MAX_REQUEST_BYTES,
    ) -> None:
        super().__init__(handlers, codec=StrictCodec(decoders, max_fields=_MAX_REQUEST_FIELDS))
        # Wrapped once and not at each call.
        self._mapping = _Methods(
            {path: rpc._replace(func=_guarded(path, rpc.func)) for path, rpc in self._mapping.items()}
        )
        self.max_request_bytes = max_request_bytes
        self.open: set[Connection] = set()
        self.is_stopping = False
        self._listener: socket.socket | None = None
        self._fields: Mapping[str, str] = {}
        """The fields of its log lines."""
        self._lines = lines_by_event(asyncio.get_running_loop().time)

    @property
    def connections(self) -> int:
        return len(self.open)

    async def serve(self, sock: socket.socket) -> None:
        """Listens on a bound unix socket, which the server owns from here on; its file is the caller's to remove."""
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._listener, self.is_stopping = sock, False
        self._watch_listener()

    async def stop(self, grace_s: float = 0.5) -> None:
        """Cancels the calls, sends GOAWAY and closes every connection; after `grace_s` those left are aborted."""
        if self._listener is None:
            return
        # First: what is attached from here on is cut off in connection_made.
        self.is_stopping = True
        self._leave_listener()
        self._listener.close()
        for handler in self._handlers:
            handler.close()
        for connection in list(self.open):
            connection.send_goaway()
        try:
            async with asyncio.timeout(grace_s):
                for handler in list(self._handlers):
                    await handler.wait_closed()
                for connection in list(self.open):
                    await connection.lost.wait()
        except TimeoutError:
            log.warning("grpc_server_cut_off", connections=len(self.open), grace_s=grace_s)
        finally:
            for connection in self.open:
                connection.abort()
        await asyncio.sleep(0)  # the loop closes aborted transports on its next turn

    def _watch_listener(self) -> None:
        sock = self._listener
        # A timer may call this after the server has closed its socket.
        if sock is not None and sock.fileno() >= 0 and not self.is_stopping:
            asyncio.get_running_loop().add_reader(sock.fileno(), self._accept, sock)

    def _leave_listener(self) -> None:
        if self._listener is not None and self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        # The peer has gone again before it was accepted.
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as e:
            # The listener stays readable: without this the loop would call here again at once, for ever.
            self._leave_listener()
            asyncio.get_running_loop().call_later(_ACCEPT_RETRY_S, self._watch_listener)
            if self._lines["grpc_accept_failed"].take():
                log.warning("grpc_accept_failed", error=e.strerror, retry_after_s=_ACCEPT_RETRY_S, **self._fields)
            return
        # grpclib's own factory sweeps closed connections here; this one replaces it.
        self.__gc_step__()
        connection = self._admitted()
        # Accepted and closed, not left in the backlog: there it would keep out later connections.
        if connection is None:
            sock.close()
            return
        sock.setblocking(False)
        # Private, because asyncio has no public way to attach an accepted socket without a turn of the loop in between.
        asyncio.get_running_loop()._make_socket_transport(sock, connection)  # type: ignore[attr-defined]

    def _admitted(self) -> Connection | None:
        """What handles one more connection; None where it is one too many."""
        return Connection(self)

    def new_calls(self) -> Calls:
        """A handler for each connection, as in grpclib: its calls end with the connection."""
        calls = Calls(self._mapping, self._codec, None, self.__dispatch__)
        calls.max_request_bytes = self.max_request_bytes
        self._handlers.add(calls)
        return calls


class ServedSocket:
    """A server on a socket file of its own at `path`; `make` makes one for each `serve`. One caller at a time."""

    def __init__(self, path: Path, make: Callable[[], GrpcServer], *, mode: int = 0o600) -> None:
        self.path = path
        self._make = make
        self._mode = mode
        self._server: GrpcServer | None = None
        self._identity: FileIdentity | None = None

    @property
    def is_serving(self) -> bool:
        """The server runs, and the socket at the path is its own."""
        return self._server is not None and self._identity == file_identity(self.path)

    @property
    def is_replaced(self) -> bool:
        """The server runs, but another file is at its path."""
        return self._server is not None and file_identity(self.path) not in (None, self._identity)

    @property
    def connections(self) -> int:
        return self._server.connections if self._server is not None else 0

    async def serve(self) -> None:
        """Serves at the path, again if need be; a socket that is there is replaced. Raises Unavailable: the directory is
        missing or not writable, or a file that is no socket is at the path."""
        # The former server would go on at a file that nobody finds.
        await self.stop()
        with os_errors_as(Unavailable, f"{self.path} cannot be served"):
            sock, server = bind_unix_socket(self.path, mode=self._mode), self._make()
            # Before anything else can go wrong: only the file with this identity is ever removed.
            self._identity = file_identity(self.path)
            try:
                await server.serve(sock)
            # Also where it is cancelled: the socket file would stay, and nobody would be behind it.
            except BaseException:
                with suppress(OSError):  # else a cancellation would be lost
                    remove_socket(self.path, self._identity)
                raise
        self._server = server

    async def stop(self) -> None:
        """Removes the socket if it still is ours, then ends the server, in 0.5 s at most: who watches the file must not
        connect to a server that ends."""
        server, self._server = self._server, None
        if server is not None:
            with suppress(OSError):
                remove_socket(self.path, self._identity)
            await server.stop()


class Connection(H2Protocol):
    """One client's connection, in `server.open` until connection_lost."""

    handler: Calls

    def __init__(self, server: GrpcServer) -> None:
        super().__init__(server.new_calls(), server._config, server._h2_config)
        self._server = server
        self.lost = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        server.open.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Accepted before the stop, attached after it: nobody else would close it.
        if self._server.is_stopping:
            cast(asyncio.Transport, transport).abort()
            return
        self._transport = cast(asyncio.Transport, transport)
        super().connection_made(transport)
        self.processor.processors[UnknownFrameReceived] = _ignore  # RFC 9113, 5.5

    def data_received(self, data: bytes) -> None:
        """A breach of the protocol ends the connection with GOAWAY; raised, each would be a traceback in asyncio's log."""
        try:
            # grpclib's own method, with all of it under one `except`: an event may be a breach too.
            events = self.connection.feed(data)
            self.connection.flush()
            for event in events:
                self.processor.process(event)
            if not self.connection.is_closing():
                self.connection.flush()
        except (H2ProtocolError, UnicodeDecodeError) as e:
            self._end(e)

    def _end(self, error: Exception) -> None:
        """Sends GOAWAY instead of what h2 prepared since, and closes once that has left."""
        if not self.connection.is_closing():
            h2 = self.connection._connection
            # h2 may have prepared frames that the peer must not see after its breach.
            h2.clear_outbound_data_buffer()
            h2.close_connection(_error_code(error))
            self.connection.flush()
        self.processor.close("Protocol error")

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.open.discard(self)
        self.lost.set()
        if self._transport is not None:  # else it was not admitted
            self._transport = None
            super().connection_lost(exc)

    def send_goaway(self) -> None:
        """Sends GOAWAY and closes once what is buffered has left."""
        if self._transport is None or self.connection.is_closing():
            return
        try:
            self.connection._connection.close_connection()
            self.connection.flush()
        except H2ProtocolError:
            pass  # the peer broke the protocol: GOAWAY cannot be sent
        self.connection.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _ignore(_event: object) -> None:
    """An event that needs no answer."""


def _error_code(error: Exception) -> ErrorCodes:
    """RFC 9113, 4.3: a header block that cannot be decoded is a COMPRESSION_ERROR; h2 calls it PROTOCOL_ERROR."""
    cause = error.__cause__
    # A header list that is too large was decoded well: only its size is refused.
    if isinstance(cause, HPACKError) and not isinstance(cause, OversizedHeaderListError):
        return ErrorCodes.COMPRESSION_ERROR
    code = getattr(error, "error_code", None)
    return code if isinstance(code, ErrorCodes) else ErrorCodes.PROTOCOL_ERROR


class Calls(Handler):
    """The calls of one connection."""

    max_request_bytes = MAX_REQUEST_BYTES
    accepted = 0

    def accept(self, stream: H2Stream, headers: list[tuple[str, str]], release_stream: Callable[[], Any]) -> None:
        self.accepted += 1
        is_released = False

        def release_once(_task: object = None) -> None:
            nonlocal is_released
            if not is_released:
                is_released = True
                release_stream()

        # Known before the first byte of the body: an unknown method must not be sent 4 MiB.
        method = self.mapping.get(dict(headers).get(":path", ""))
        needs_message = method is not None and not method.cardinality.client_streaming
        stream.buffer = _RequestBuffer(stream.buffer._ack_callback, self.max_request_bytes, needs_message=needs_message)
        super().accept(stream, headers, release_once)
        # A task that is cancelled before its first step runs no `finally`: the bytes of its call would never go back to
        # the window (grpclib #217).
        self._tasks[stream].add_done_callback(release_once)
        self._tasks[stream].add_done_callback(partial(_reset_unanswered, stream))


def _reset_unanswered(stream: H2Stream, _task: object) -> None:
    """grpclib gives some calls no answer at all, as one with metadata that is not base64."""
    if not stream.connection.is_closing() and stream.closable:
        stream.reset_nowait(ErrorCodes.INTERNAL_ERROR)


class _RequestBuffer(Buffer):
    """Reads prefix and message in turn, as grpclib asks for them, and refuses what must not be read."""

    def __init__(self, ack_callback: Callable[[int], None], limit: int, *, needs_message: bool) -> None:
        super().__init__(ack_callback)
        self._limit = limit
        self._needs_message = needs_message
        self._is_at_prefix = True

    async def read(self, size: int) -> bytes:
        # grpclib reads five bytes of prefix, then the message, in turn; the size does not tell them apart, because a message
        # may have five bytes.
        is_prefix, self._is_at_prefix = self._is_at_prefix, not self._is_at_prefix
        try:
            content = await super().read(size)
        except AssertionError as e:  # grpclib's error for a request that ends early
            raise GRPCError(Status.INVALID_ARGUMENT, f"the request ended before its {size} bytes were there") from e
        if is_prefix:
            self._check_prefix(content)
        return content

    def _check_prefix(self, prefix: bytes) -> None:
        # Empty: the peer has ended its side. That ends a stream; for a single message it is a fault.
        if not prefix:
            if self._needs_message:
                raise GRPCError(Status.INVALID_ARGUMENT, "the request holds no message")
            return
        self._needs_message = False
        is_compressed, length = _PREFIX.unpack(prefix)
        if is_compressed:
            raise GRPCError(Status.UNIMPLEMENTED, "compressed requests are not supported: send them uncompressed")
        if length > self._limit:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED, f"the request of {length} bytes is over the limit of {self._limit} bytes"
            )


class _Methods(dict[str, RpcHandler]):
    """The methods by path; a path that is not there is answered UNIMPLEMENTED by a handler of its own."""

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key) or RpcHandler(_refuse_unknown(key), Cardinality.UNARY_UNARY, bytes, bytes)


async def send_answer(stream: Stream[Any, Any], message: Any) -> None:
    """Sends the whole answer of a unary call at once: grpclib writes head, message and status one by one, and wakes the peer
    for each. The peer has the status then: what the handler does afterwards delays nobody. Raises as
    `Stream.send_message`."""
    content = stream._codec.encode(message, stream._send_type)
    sent, h2 = stream._stream, stream._stream._h2_connection
    await sent.connection.write_ready.wait()
    # In parts, as the peer's window allows; and a call whose stream is closed ends with grpclib's error.
    if sent.id not in h2.streams or len(content) + _PREFIX.size > min(
        h2.local_flow_control_window(sent.id), h2.max_outbound_frame_size
    ):
        await stream.send_message(content)
        await stream.send_trailing_metadata()
        return
    h2.send_headers(sent.id, [(":status", "200"), ("content-type", stream._content_type)])
    h2.send_data(sent.id, _PREFIX.pack(False, len(content)) + content)
    h2.send_headers(sent.id, [("grpc-status", "0")], end_stream=True)
    # Not `connection.flush()`: a connection that was closed has no transport.
    sent._transport.write(h2.data_to_send())
    stream._send_initial_metadata_done = stream._send_message_done = stream._send_trailing_metadata_done = True


def _refuse_unknown(path: str) -> IServerMethodFunc:
    async def refuse(stream: Stream[Any, Any]) -> None:
        raise GRPCError(Status.UNIMPLEMENTED, f"unknown method {path[:200]}")

    return refuse


def _guarded(path: str, method: IServerMethodFunc) -> IServerMethodFunc:
    """Answers every fault with a reason; grpclib alone answers "Internal Server Error"."""

    async def call(stream: Stream[Any, Any]) -> None:
        try:
            await method(stream)
        except GRPCError:  # an answer already
            raise
        # The end of the connection: nobody is there to be answered.
        except (StreamTerminatedError, ProtocolError, H2ProtocolError):
            # The call was cancelled, and a call of its own took that for itself: a kubelet that ends cuts off both at once.
            # Else grpclib logs an error with a traceback.
            wrapper = stream._stream.wrapper
            if wrapper is not None and wrapper.cancelled:
                raise asyncio.CancelledError from None
            raise
        except MalformedMessageError as e:
            raise GRPCError(Status.INVALID_ARGUMENT, str(e)) from e
        except Exception as e:  # the servicer's edge: the peer gets a status, the log the traceback
            log.exception("rpc_failed", method=path)
            text = f"{path} failed unexpectedly; the agent's log has the traceback (event rpc_failed)"
            raise GRPCError(Status.INTERNAL, text) from e

    return call
