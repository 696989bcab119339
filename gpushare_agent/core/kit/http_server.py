"""The one HTTP server, on aiohttp, with bounds: of the web port, the extender and the control socket.

| what a peer does | what ends it |
|---|---|
| opens many connections, or TLS handshakes | `connections`: a further one closes the one that has been idle longest |
| sends no whole request | `headers_s`, from the connection to its first request |
| keeps a connection that it does not use | `idle_s`, by aiohttp |
| does not go on with its TLS handshake | `handshake_s`, by asyncio |
| takes nothing of an answer | `unread_s`, by the kernel (TCP_USER_TIMEOUT) |
| takes answers slowly, or many at once | `unsent_bytes` of all: a further answer closes the oldest of who has most |
| sends long lines, many header fields | `line_bytes`, `header_fields`, by aiohttp's parser: 400 |
| sends a body | `body_bytes`: 413; a compressed one: 415, never unpacked; one in chunks: 411 |
| goes on with a body after its answer | dropped: of one longer than `body_bytes` UNREAD_BYTES, then it waits in the kernel |
| sends much at once | `receive_bytes`: what is parsed of a connection in one turn of the loop (3 ms at most) |
| sends what is no HTTP, or goes away | 400 or nothing; no line in the log |

A connection that is being answered is closed only when no other one idles, so that a probe, which sends its request at
once, is answered during a flood. A flood itself waits in the kernel's queue: one connection is accepted in a turn of the
loop. A connection counts from its accept on: asyncio's own server would not count TLS handshakes, and logs each failed
accept when descriptors run out.

State owned: the open connections, idle and busy, and when a line was logged last, by event. Import it off the loop: it
loads aiohttp (190 ms).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NoReturn, cast

import structlog
from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct

from gpushare_agent.core.kit.rate import lines_by_event

log = structlog.get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ACCEPT_AGAIN_S = 0.5
LINGERING_S = 1.0
"""How long a connection stays open after the answer to a body that was not read, so that the peer reads the answer
first."""
UNREAD_BYTES = 1 << 20
"""How much of such a body is read and dropped meanwhile, where it is longer than any that is taken: 3 ms of the loop; a
second of it would be 0.8 s. Any other is dropped to its end: some clients send all before they read, as to a former
leader."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OF_PEER = (HttpProcessingError, web.RequestPayloadError, web.PayloadAccessError, ConnectionError)
"""Errors that a peer causes, and could cause as often as it likes."""


class HttpLimits(Struct, frozen=True, kw_only=True):
    """See the table above. `shutdown_s` is how long requests under way may take when the server ends."""

    connections: int = 256
    headers_s: float = 10.0
    idle_s: float = 75.0
    handshake_s: float = 5.0
    unread_s: float = 10.0
    unsent_bytes: int = 32 << 20
    line_bytes: int = 8190
    header_fields: int = 64
    body_bytes: int = 1024
    receive_bytes: int = 16 * 1024
    shutdown_s: float = 0.5
    cancels_handlers: bool = True
    """Whether a handler is cancelled when its peer has gone."""


class HttpServer:
    """`headers` are set on every answer. `serve` once."""

    def __init__(
        self,
        name: str,
        routes: Iterable[web.AbstractRouteDef],
        *,
        limits: HttpLimits,
        tls: ssl.SSLContext | None = None,
        middlewares: Sequence[Any] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._limits = limits
        self._tls = tls
        self.headers = {"Server": "gpushare-agent", **(headers or {})}
        self._open: dict[_Connection, None] = {}
        """In the order of their last change from idle to busy or back."""
        self._lines = lines_by_event(asyncio.get_running_loop().time)
        app = web.Application(middlewares=[self._bound_request, *middlewares], client_max_size=limits.body_bytes)
        app.add_routes(routes)
        # At the response's start, so that answers of middlewares and refusals have the headers too.
        app.on_response_prepare.append(self._set_headers)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=limits.shutdown_s, handler_cancellation=limits.cancels_handlers
        )

    async def serve(self, listeners: Sequence[socket.socket]) -> NoReturn:
        """Serve until cancelled; then the listeners are closed, and requests under way may end."""
        try:
            await self._runner.setup()
            # Outside the listeners' group: cancelling the listeners must leave requests under way their time.
            async with asyncio.TaskGroup() as connections:
                try:
                    async with asyncio.TaskGroup() as group:
                        for listener in listeners:
                            # accepted sockets inherit it; set on them it would shrink a window that is advertised already
                            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._limits.receive_bytes)
                            group.create_task(self._accept(listener, connections), name=f"{self._name} listener")
                finally:
                    for listener in listeners:
                        listener.close()
                    # Closes aiohttp's connections in order, which ends the tasks of `connections`.
                    await self._runner.cleanup()
        finally:
            for listener in listeners:
                listener.close()
        raise AssertionError("unreachable: accepting has no end")

    async def _accept(self, listener: socket.socket, group: asyncio.TaskGroup) -> NoReturn:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as e:
                await self._wait_after(e)
                continue
            # Before the new one is added: the place is made for it, so a probe gets in during a flood.
            if len(self._open) >= self._limits.connections:
                self._close_one()
                self._warn("connections_dropped", most=self._limits.connections, then="the longest idle one is closed")
            self._begin(sock, group)
            await asyncio.sleep(0)  # the rest of the process is next

    async def _wait_after(self, error: OSError) -> None:
        """Makes a pause and a place where descriptors have run out; any other error is of the one connection, which has
        gone."""
        # accept(2) passes on errors of the new connection, too, such as a peer's reset.
        is_exhausted = error.errno in _EXHAUSTED
        if is_exhausted:
            self._warn("connections_not_accepted", error=str(error), remedy="raise the limit of open files")
            self._close_one()
        await asyncio.sleep(ACCEPT_AGAIN_S if is_exhausted else 0)

    def _close_one(self) -> None:
        """The one that has idled longest; a busy one only where none idles."""
        if victim := min(self._open, key=lambda connection: connection.is_busy, default=None):
            self._close(victim)

    def _close(self, victim: _Connection) -> None:
        del self._open[victim]
        if victim.task is not None:
            victim.task.cancel()

    def _make_room(self, connection: _Connection) -> None:
        """Closes others until its answer fits too: 256 that nobody reads would be more memory than an agent may have."""
        unsent = {other: size for other in self._open if other is not connection and (size := other.unsent_bytes)}
        excess = sum(unsent.values()) + connection.answer_bytes - self._limits.unsent_bytes
        while excess > 0 and unsent:
            held = Counter({connection.address: connection.answer_bytes})
            for other, size in unsent.items():
                held[other.address] += size
            # Not just the oldest: who asks for many and reads none must not end a slow scrape of Prometheus.
            victim = max(unsent, key=lambda other: held[other.address])
            self._close(victim)
            excess -= unsent.pop(victim)
            self._warn("answers_dropped", most_bytes=self._limits.unsent_bytes, then="the oldest of who has most ends")

    def _note(self, connection: _Connection, *, is_busy: bool) -> None:
        connection.is_busy = is_busy
        # One that is closed meanwhile stays out.
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def _begin(self, sock: socket.socket, group: asyncio.TaskGroup) -> None:
        if sock.family != socket.AF_UNIX:  # not on the listener: its backlog may have connections from before
            with contextlib.suppress(OSError):  # of a connection that has gone again
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._limits.unread_s * 1000))
        connection = _Connection(cast("web.Server", self._runner.server), self, sock, self._limits)
        self._open[connection] = None
        connection.task = group.create_task(self._serve_connection(connection), name=f"{self._name} connection")
        connection.task.add_done_callback(connection.close_unused)

    async def _serve_connection(self, connection: _Connection) -> None:
        """One connection, from its handshake to its end; cancelled where another one needs its place."""
        connection.is_begun = True
        # asyncio refuses a limit of a handshake where there is no TLS.
        limit_s = self._limits.handshake_s if self._tls is not None else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                connection.sock,
                ssl=self._tls,
                ssl_handshake_timeout=limit_s,
                ssl_shutdown_timeout=limit_s,
            )
            await connection.has_ended.wait()
        except OSError:  # the peer has gone again, or speaks no TLS; its transport closes the socket
            pass
        finally:
            # Also where a handshake failed: it has counted since its accept.
            self._open.pop(connection, None)
            connection.cut()

    @web.middleware
    async def _bound_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = cast("_Connection", request.protocol)
        connection.note_request()
        # Only a whole header makes a connection busy: one that dribbles its bytes stays among those that are closed
        # first.
        self._note(connection, is_busy=True)
        try:
            refusal = self._refusal(request)
            if refusal is None:
                answer = await handler(request)
                connection.address, connection.answer_bytes = request.remote or "", answer.content_length or 0
                self._make_room(connection)
                return answer
            # The rest of a body in chunks has to be parsed to be dropped, which costs more than any other answer.
            if refusal.status == HTTPStatus.LENGTH_REQUIRED:
                await _end_with(refusal, request)
            return refusal
        finally:
            # After the handler: only what it has not read is left to be dropped.
            connection.note_answer(request, self._limits.body_bytes)
            self._note(connection, is_busy=False)

    def _refusal(self, request: web.Request) -> web.Response | None:
        """The refusal by the headers alone: what a compressed body unpacks to, and how long one in chunks is, is not
        known before."""
        # A gzip body of 522 kB kept the loop for a second (measured).
        coding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if coding != "identity":
            return _refused(415, "a compressed request is not read; send it without Content-Encoding")
        if "Transfer-Encoding" in request.headers:
            return _refused(411, "a request in chunks is not read; send it with Content-Length")
        if (request.content_length or 0) > self._limits.body_bytes:
            return _refused(413, f"the request's body is longer than {self._limits.body_bytes} bytes")
        return None

    async def _set_headers(self, _request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(self.headers)

    def _warn(self, event: str, **fields: object) -> None:
        if self._lines[event].take():
            log.warning(event, server=self._name, open=len(self._open), **fields)

    def log_failure(self, error: BaseException | None) -> None:
        """A handler's error that it did not answer itself. A peer's own errors are not logged."""
        if not isinstance(error, _OF_PEER) and self._lines["http_request_failed"].take():
            log.error("http_request_failed", server=self._name, exc_info=error)


class _Connection(web.RequestHandler):
    """aiohttp's protocol of one connection, with the time for its first request and with an end to wait for."""

    def __init__(self, server: web.Server, user: HttpServer, sock: socket.socket, limits: HttpLimits) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # what AppRunner takes too
            keepalive_timeout=limits.idle_s,
            lingering_time=LINGERING_S,
            max_headers=limits.header_fields,
            max_line_size=limits.line_bytes,
            max_field_size=limits.line_bytes,
            auto_decompress=False,
        )
        self._user = user
        self._headers_s = limits.headers_s
        self._wire: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unread: StreamReader | None = None
        self._unread_bytes = 0
        self.sock = sock
        self.task: asyncio.Task[None] | None = None
        self.is_begun = self.is_busy = False
        self.address = ""
        self.answer_bytes = 0
        self.has_ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Not aiohttp's, which it forgets before the last bytes are sent. Of TLS the one below: all of an answer is encrypted
        # at once and the upper one keeps nothing, nor can it be asked or aborted once it was closed twice.
        self._wire = cast(
            "asyncio.Transport", getattr(getattr(transport, "_ssl_protocol", None), "_transport", transport)
        )
        self._timer = self._loop.call_later(self._headers_s, self.cut)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.note_request()
        super().connection_lost(exc)
        self.has_ended.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # No answer before the end of its body: the usual case.
        if self._unread is None:
            return
        self._unread_bytes -= len(data)
        if self._unread.is_eof():
            self._unread = None
        elif self._unread_bytes <= 0:
            self.pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """aiohttp calls this whenever a body was read, also where it drops it after the answer."""
        # aiohttp resumes reading whenever it has dropped a part: this would undo the pause of `data_received`.
        if self._unread is None or self._unread_bytes > 0:
            super().resume_reading(resume_parser)

    def note_answer(self, request: web.Request, body_bytes: int) -> None:
        """The request is answered."""
        length = request.content_length or 0
        self._unread_bytes = length if UNREAD_BYTES < length <= body_bytes else UNREAD_BYTES
        self._unread = None if request.content.is_eof() else request.content

    @property
    def unsent_bytes(self) -> int:
        """The length of its answer while the peer has not taken all of it: until then aiohttp keeps the whole."""
        return self.answer_bytes if self._wire is not None and self._wire.get_write_buffer_size() else 0

    def note_request(self) -> None:
        """The first request is there: from now on `idle_s` bounds the time between two."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def handle_error(self, *args: Any, **kw: Any) -> web.StreamResponse:
        """aiohttp's own answers, to what is no HTTP; they would name its version and Python's."""
        response = super().handle_error(*args, **kw)
        response.headers.update(self._user.headers)
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        # aiohttp hands the error over as logging does.
        error = kw.get("exc_info")
        self._user.log_failure(error if isinstance(error, BaseException) else None)

    def cut(self) -> None:
        """During a handshake only asyncio has the transport: the end of the socket makes it give up."""
        if self._wire is not None:
            self._wire.abort()
            return
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close_unused(self, _task: asyncio.Task[None]) -> None:
        """Closes the socket of a task that was cancelled before it began."""
        if not self.is_begun:
            self.sock.close()


async def _end_with(refusal: web.Response, request: web.Request) -> None:
    """Closed at once, without reading on as after other answers: a MiB of one-byte chunks takes 170 ms to parse."""
    await refusal.prepare(request)
    await refusal.write_eof()
    if request.transport is not None:
        request.transport.close()


def _refused(status: int, text: str) -> web.Response:
    """The connection ends with it: its body is not read."""
    response = web.Response(status=status, text=text + "\n")
    response.force_close()
    return response
