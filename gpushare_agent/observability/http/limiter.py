"""Lets connections in to an HTTP server: at most so many, none that only stands in the way, and the newest always.

A connection too many costs another one its place: of the peer that has most the one that has been idle longest. So those who
open hundreds push out each other, and a probe that sends its request at once is answered, also when it comes from the
same address. Accepted is one connection in a few turns of the loop: a flood waits in the kernel's queue, not in the agent.
With TLS a connection counts, and may be pushed out, from the moment it is accepted: a handshake that does not go on holds a
place like any other that idles, and no longer than its own time.
When descriptors run out that is said once a minute. (asyncio's own server would, on Python 3.11, multiply its attempts.)

Import it off the loop: it loads aiohttp. State owned: the open connections, what is known of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

log = structlog.get_logger(__name__)

ACCEPT_AGAIN_S = 0.5
SAY_AGAIN_S = 60.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_IPV6_SITE_BITS = 64
"""Whoever has one IPv6 address has all of its /64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorLimits:
    """`per_peer` counts an address, of IPv6 a /64. `headers_within_s` is from the connection to its first request,
    `idle_s` from an answer to the next request, both however many bytes come; `stalled_s` is how long a peer may take
    nothing of an answer."""

    connections: int = 256
    per_peer: int = 64
    headers_within_s: float = 10.0
    idle_s: float = 75.0
    stalled_s: float = 10.0
    max_headers: int = 64
    max_line_bytes: int = 8190
    look_period_s: float = 1.0
    handshake_s: float = 5.0
    """Of TLS; as long may its end take."""


class Door:
    """The application's first middleware must be `note_request`, or every connection counts as idle."""

    def __init__(
        self,
        runner: web.AppRunner,
        listeners: Sequence[socket.socket],
        limits: DoorLimits,
        *,
        name: str,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._runner = runner
        self._listeners = listeners
        self._limits = limits
        self._name = name
        self._tls = tls
        self._peers: dict[str, dict[_Connection, None]] = {}
        self._dropped = 0
        self._said_at: dict[str, float] = {}

    @property
    def open_count(self) -> int:
        return sum(map(len, self._peers.values()))

    async def run(self) -> NoReturn:
        """Let in until cancelled. The listeners stay the caller's to close."""
        async with asyncio.TaskGroup() as group:
            for listener in self._listeners:
                group.create_task(self._accept(listener, group), name=f"{self._name} door")
            while True:
                await asyncio.sleep(self._limits.look_period_s)
                self._look()
        raise AssertionError("unreachable: the loop has no end")

    async def _accept(self, listener: socket.socket, group: asyncio.TaskGroup) -> NoReturn:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as e:
                await self._bear(e)
                continue
            peer = peer_of(str(address[0]))
            self._make_room(peer)
            server = self._runner.server
            if server is None:  # it is being stopped
                sock.close()
                await asyncio.sleep(0)
                continue
            connection = _Connection(server, self, peer, self._limits, sock)
            self.entered(connection)
            if self._tls is None:
                await self._connect(connection, sock)
            else:  # a handshake takes as long as the peer likes
                connecting = group.create_task(self._connect(connection, sock), name=f"{self._name} handshake")
                connecting.add_done_callback(connection.close_unused)
                await asyncio.sleep(0)

    async def _connect(self, connection: _Connection, sock: socket.socket) -> None:
        limit_s = self._limits.handshake_s if self._tls is not None else None
        connection.is_begun = True
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=limit_s,
                ssl_shutdown_timeout=limit_s,
            )
        except OSError:  # the peer has gone again, was pushed out, or speaks no TLS; its transport closes the socket
            self._drop(connection)
        except asyncio.CancelledError:
            self._drop(connection)
            raise

    async def _bear(self, error: OSError) -> None:
        if error.errno not in _EXHAUSTED:  # of the one connection, which has gone again
            await asyncio.sleep(0)
            return
        if self._may_say("exhausted"):
            log.error(
                "connections_not_accepted",
                listener=self._name,
                error=str(error),
                open=self.open_count,
                then="the idle ones are closed, and tried again",
                cure="raise the limit of open files, or find who holds them",
            )
        if self._peers:
            self._drop(_victim(self._greediest()))
        await asyncio.sleep(ACCEPT_AGAIN_S)

    def _make_room(self, peer: str) -> None:
        own = self._peers.get(peer, {})
        of_peer, open_count = len(own), self.open_count
        if of_peer >= self._limits.per_peer:
            self._drop(_victim(own))
        elif open_count >= self._limits.connections:
            self._drop(_victim(self._greediest()))
        else:
            return
        self._dropped += 1
        if self._may_say("dropped"):
            log.warning(
                "connections_dropped",
                listener=self._name,
                peer=peer,
                of_peer=of_peer,
                open=open_count,
                dropped=self._dropped,
                most=self._limits.connections,
                most_of_peer=self._limits.per_peer,
            )

    def _greediest(self) -> Iterable[_Connection]:
        return max(self._peers.values(), key=len)

    def _drop(self, connection: _Connection) -> None:
        self.left(connection)
        connection.cut()

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        for connection in [one for own in self._peers.values() for one in own]:
            if connection.is_overdue(now):
                self._drop(connection)

    def _may_say(self, what: str) -> bool:
        now = asyncio.get_running_loop().time()
        if now - self._said_at.get(what, float("-inf")) < SAY_AGAIN_S:
            return False
        self._said_at[what] = now
        return True

    def entered(self, connection: _Connection) -> None:
        self._peers.setdefault(connection.peer, {})[connection] = None

    def left(self, connection: _Connection) -> None:
        own = self._peers.get(connection.peer, {})
        own.pop(connection, None)
        if not own:
            self._peers.pop(connection.peer, None)


class _Connection(web.RequestHandler):
    """One connection. `since` is when it began to be what it is: idle or busy."""

    __slots__ = (
        "_door",
        "_has_asked",
        "_is_cut",
        "_limits",
        "_moved_at",
        "_sock",
        "_unsent",
        "_wire",
        "is_begun",
        "is_busy",
        "peer",
        "since",
    )

    def __init__(self, server: web.Server, door: Door, peer: str, limits: DoorLimits, sock: socket.socket) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # what AppRunner takes too
            keepalive_timeout=limits.idle_s,
            lingering_time=1.0,
            max_headers=limits.max_headers,
            max_line_size=limits.max_line_bytes,
            max_field_size=limits.max_line_bytes,
        )
        self._door = door
        self._limits = limits
        self._sock = sock
        self._wire: asyncio.Transport | None = None
        self._is_cut = False
        self.is_begun = False
        self._has_asked = False
        self._unsent = 0
        self._moved_at = 0.0
        self.peer = peer
        self.is_busy = False
        self.since = self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._wire = cast("asyncio.Transport", transport)  # aiohttp forgets its own before the last bytes are sent
        if self._is_cut:  # while its handshake ended
            self._wire.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._door.left(self)
        super().connection_lost(exc)

    def asked(self) -> None:
        self.is_busy = self._has_asked = True
        self.since = self._loop.time()

    def log_access(self, request: web.BaseRequest, response: web.StreamResponse, time: float | None) -> None:
        """aiohttp calls this once an answer is handed over whole; nothing is logged."""
        self.is_busy = False
        self.since = self._loop.time()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Bytes that are no HTTP get a 400: anybody could fill the log with tracebacks of them."""
        if not isinstance(kw.get("exc_info"), HttpProcessingError):
            super().log_exception(*args, **kw)

    def is_overdue(self, now: float) -> bool:
        if not self._has_asked and now - self.since >= self._limits.headers_within_s:
            return True
        unsent = self._wire.get_write_buffer_size() if self._wire is not None else 0
        if unsent == 0 or unsent < self._unsent:
            self._moved_at = now
        self._unsent = unsent
        return unsent > 0 and now - self._moved_at >= self._limits.stalled_s

    def cut(self) -> None:
        """During a handshake nobody but asyncio has the transport: the end of the socket makes it give up."""
        self._is_cut = True
        if self._wire is not None:
            self._wire.abort()
        else:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def close_unused(self, _connecting: asyncio.Task[None]) -> None:
        """For a task that was cancelled before it began."""
        if not self.is_begun:
            self._sock.close()


@web.middleware
async def note_request(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Tells the door who is being answered."""
    if isinstance(request.protocol, _Connection):
        request.protocol.asked()
    return await handler(request)


def peer_of(address: str) -> str:
    """Whose connection it is, for the bound on each."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and not found.is_loopback:
        return str(ipaddress.ip_network((int(found), _IPV6_SITE_BITS), strict=False).network_address)
    return str(found)


def _victim(connections: Iterable[_Connection]) -> _Connection:
    """The one that is idle longest, else the one that is busy longest."""
    return min(connections, key=lambda one: (one.is_busy, one.since))
