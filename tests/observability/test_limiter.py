"""observability/http/limiter.py and web_turns.py behind the real web server: floods, idlers, slow readers, the probe
among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
from aiohttp import web

from gpushare_agent.observability.http.limiter import DoorLimits, peer_of
from gpushare_agent.observability.http.request_queue import MOST_OF_PEER, Turns
from gpushare_agent.observability.http.server import WebServer
from gpushare_agent.observability.metrics.agent import AgentMetrics
from tests.support_kube import DEADLINE_S, running

QUICK = 0.05


@contextlib.asynccontextmanager
async def served(limits: DoorLimits | None = None, **others: Any) -> AsyncIterator[int]:
    """A running web server's port."""
    server = WebServer("127.0.0.1", 0, metrics=AgentMetrics(), ready=list, limits=limits, **others)
    async with asyncio.timeout(DEADLINE_S), running(server.run):
        yield await server.wait_listening()


class Peer:
    """A connection from one of this host's loopback addresses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int, address: str = "127.0.0.1") -> Peer:
        return cls(*await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0)))

    def send(self, path: str) -> None:
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    def send_raw(self, content: bytes) -> None:
        self._writer.write(content)

    async def read_status(self) -> int:
        """Of the next answer, whose body is read; 0 where the connection is closed instead."""
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0
        fields = dict(line.split(": ", 1) for line in head[1:] if line)
        await self._reader.readexactly(int(fields["Content-Length"]))
        return int(head[0].split()[1])

    async def ask(self, path: str) -> int:
        self.send(path)
        return await self.read_status()

    async def ended(self) -> bool:
        """Waits for the end; false where bytes came."""
        try:
            return await self._reader.read(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self._writer.transport.abort()


@pytest.fixture
async def peers() -> AsyncIterator[list[Peer]]:
    """Whatever is put in is closed at the end."""
    opened: list[Peer] = []
    yield opened
    for peer in opened:
        peer.close()
    await asyncio.sleep(0)


async def test_health_is_answered_during_a_flood_from_the_same_address(peers: list[Peer]) -> None:
    """Five times as many idle connections as there is room for: each newcomer is served, the idle ones make room."""
    async with served() as port:
        for _ in range(8):
            peers += [await Peer.open(port) for _ in range(160)]
            probe = await Peer.open(port)
            peers.append(probe)
            assert await probe.ask("/healthz") == 200


async def test_one_address_cannot_take_the_places_of_another(peers: list[Peer]) -> None:
    """The flood of one pushes out its own connections; who sits idle elsewhere stays."""
    async with served(DoorLimits(connections=12, per_peer=4)) as port:
        quiet = [await Peer.open(port, "127.0.0.2") for _ in range(3)]
        peers += quiet
        for peer in quiet:
            assert await peer.ask("/healthz") == 200
        for _ in range(20):
            peers.append(await Peer.open(port, "127.0.0.3"))
            assert await peers[-1].ask("/healthz") == 200
        assert [await peer.ask("/healthz") for peer in quiet] == [200, 200, 200]
        assert await peers[3].ended()


async def test_when_all_places_are_taken_the_greediest_address_loses_one(peers: list[Peer]) -> None:
    """A newcomer with few connections is let in, and those with few keep theirs."""
    async with served(DoorLimits(connections=6, per_peer=4)) as port:
        greedy = [await Peer.open(port, "127.0.0.2") for _ in range(4)]
        modest = [await Peer.open(port, "127.0.0.3") for _ in range(2)]
        peers += greedy + modest
        for peer in peers:
            assert await peer.ask("/healthz") == 200
        newcomer = await Peer.open(port, "127.0.0.4")
        peers.append(newcomer)
        assert await newcomer.ask("/healthz") == 200
        assert await greedy[0].ended()
        assert [await peer.ask("/healthz") for peer in greedy[1:] + modest] == [200] * 5


async def test_who_is_being_answered_is_pushed_out_last(peers: list[Peer]) -> None:
    """Idle connections go first, however young they are."""
    may_answer = asyncio.Event()

    async def show(_request: web.Request) -> web.Response:
        await may_answer.wait()
        return web.Response(text="late")

    async with served(DoorLimits(per_peer=3), streams=[("/late", show)]) as port:
        busy = await Peer.open(port)
        peers.append(busy)
        busy.send("/late")
        for _ in range(6):
            peers.append(await Peer.open(port))
            assert await peers[-1].ask("/healthz") == 200
        may_answer.set()
        assert await busy.read_status() == 200


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nX: "])
async def test_a_connection_without_a_whole_request_is_closed(peers: list[Peer], sent: bytes) -> None:
    """Bytes one at a time do not lengthen its time."""
    async with served(DoorLimits(headers_within_s=QUICK, look_period_s=QUICK / 2)) as port:
        peer = await Peer.open(port)
        peers.append(peer)
        ended = asyncio.Event()

        async def dribble() -> None:
            while not ended.is_set():
                peer.send_raw(sent or b"")
                await asyncio.sleep(QUICK / 5)

        async with asyncio.TaskGroup() as group:
            group.create_task(dribble())
            assert await peer.ended()
            ended.set()


async def test_an_idle_connection_is_closed_after_its_time_and_a_stream_is_not(peers: list[Peer]) -> None:
    """The time runs between answers, not during one."""
    may_answer = asyncio.Event()

    async def show(_request: web.Request) -> web.Response:
        await may_answer.wait()
        return web.Response(text="late")

    limits = DoorLimits(headers_within_s=QUICK, idle_s=QUICK, look_period_s=QUICK / 2)
    async with served(limits, streams=[("/late", show)]) as port:
        stream, idle = await Peer.open(port), await Peer.open(port)
        peers += [stream, idle]
        stream.send("/late")
        assert await idle.ask("/healthz") == 200
        assert await idle.ended()
        may_answer.set()
        assert await stream.read_status() == 200


async def test_who_takes_nothing_of_an_answer_is_cut_off() -> None:
    """A slow reader holds its answer in memory no longer than that."""
    sending: list[asyncio.Transport] = []

    async def show(request: web.Request) -> web.Response:
        assert request.transport is not None
        sending.append(request.transport)
        return web.Response(body=b"x" * 2**25)

    limits = DoorLimits(stalled_s=QUICK, look_period_s=QUICK / 2)
    async with served(limits, routes=[("/large", show)]) as port:
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            while not sending or not sending[0].is_closing():
                await asyncio.sleep(QUICK / 5)
            assert sending[0].get_write_buffer_size() == 0


async def test_without_descriptors_it_says_so_once_and_serves_again(peers: list[Peer]) -> None:
    """Neither the loop nor the log is filled with attempts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[socket.socket] = []
    with structlog.testing.capture_logs() as logged:
        async with served() as port:
            waiting = [socket.socket() for _ in range(3)]
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
                with contextlib.suppress(OSError):
                    while True:
                        held.append(socket.socket())
                for sock in waiting:
                    sock.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
                while not any(line["event"] == "connections_not_accepted" for line in logged):
                    await asyncio.sleep(QUICK)
            finally:
                for sock in (*held, *waiting):
                    sock.close()
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            peers.append(await Peer.open(port))
            assert await peers[-1].ask("/healthz") == 200
    assert [line["event"] for line in logged].count("connections_not_accepted") == 1


async def test_costly_answers_are_made_one_at_a_time_and_cheap_ones_between(peers: list[Peer]) -> None:
    """While one costs its time the probe is answered, and no second is begun."""
    running_now, may_answer, began = [0], asyncio.Event(), asyncio.Event()

    async def show(_request: web.Request) -> web.Response:
        running_now[0] += 1
        assert running_now[0] == 1
        began.set()
        await may_answer.wait()
        running_now[0] -= 1
        return web.Response(text="costly")

    async with served(routes=[("/costly", show)]) as port:
        asking = [await Peer.open(port) for _ in range(MOST_OF_PEER)]
        peers += asking
        for peer in asking:
            peer.send("/costly")
        await began.wait()
        peers.append(await Peer.open(port))
        assert await peers[-1].ask("/healthz") == 200
        may_answer.set()
        assert {await peer.read_status() for peer in asking} == {200}


async def test_who_asks_too_much_at_once_is_reported_503_and_others_are_not(peers: list[Peer]) -> None:
    """With Retry-After; an address of its own still finds a place."""
    may_answer, began = asyncio.Event(), asyncio.Event()

    async def show(_request: web.Request) -> web.Response:
        began.set()
        await may_answer.wait()
        return web.Response(text="costly")

    turns = Turns(most_waiting=4, most_of_peer=2, refuse_after_s=0.0)
    async with served(streams=[("/costly", turns.one_at_a_time(show))]) as port:
        first, second, third = [await Peer.open(port) for _ in range(3)]
        other = await Peer.open(port, "127.0.0.2")
        peers += [first, second, third, other]
        first.send("/costly")
        await began.wait()
        second.send("/costly")
        assert await second_is_waiting(turns)
        assert await third.ask("/costly") == 503
        other.send("/costly")
        may_answer.set()
        assert [await peer.read_status() for peer in (first, second, other)] == [200, 200, 200]
        assert await third.ask("/costly") == 200


async def second_is_waiting(turns: Turns) -> bool:
    while turns.waiting < 2:
        await asyncio.sleep(0)
    return True


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::9%eth0", "2001:db8:1:2::"),
        ("::1", "::1"),
        ("", ""),
    ],
)
def test_a_peer_is_an_address_or_an_ipv6_site(address: str, peer: str) -> None:
    """Whoever has one address of a /64 has them all."""
    assert peer_of(address) == peer
