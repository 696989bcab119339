"""The extender's HTTP server against those who would keep the scheduler out: idlers, half handshakes, slow bodies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.extender.bodies import LONG_OF_PEER, SHORT_BYTES
from gpushare_agent.extender.debug import MOST_NODES, StatePages
from gpushare_agent.extender.http import ExtenderVerbs, ExtenderWeb, WebDoor
from gpushare_agent.extender.messages import BindArgs, FilterAnswer, NodesArgs, PreemptArgs
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.tls import Tls
from gpushare_agent.model.resources import ResourceNames
from tests.support_kube import DEADLINE_S, running

DATA = Path(__file__).parent.parent / "data"
CA, KEY = DATA / "kube-ca.pem", DATA / "kube-server.key"
QUICK = 0.05
PLACES = 8
BAD_FILTER = b'gpushare_extender_requests_total{outcome="bad",verb="filter"} 1.0'
FILTER = json.dumps({"Pod": {"metadata": {"name": "a", "namespace": "b", "uid": "c"}}, "NodeNames": ["n"]}).encode()


class EverythingFits:
    """The verbs' answers, without a cluster."""

    async def filter(self, args: NodesArgs) -> FilterAnswer:
        return FilterAnswer(fitting=args.names, failed={}, unresolvable={})

    def prioritize(self, args: NodesArgs) -> list[tuple[str, int]]:
        return [(name, 0) for name in args.names]

    async def bind(self, _args: BindArgs) -> str:
        return ""

    def preempt(self, args: PreemptArgs) -> Mapping[str, Any]:
        return args.victims


class Nodes:
    """`going` has gone by the time that it is shown."""

    def __init__(self, count: int) -> None:
        self.known = {f"n{number:04}": {"name": f"n{number:04}", "cards": ["x" * 500]} for number in range(count)}
        self.going = ""

    def node_names(self) -> list[str]:
        return sorted(self.known)

    def node_document(self, name: str) -> dict[str, Any] | None:
        return self.known.get(name) if name != self.going else None


@contextlib.asynccontextmanager
async def served(nodes: Nodes | None = None, **door: Any) -> AsyncIterator[ExtenderWeb]:
    web = ExtenderWeb(
        door=WebDoor(port=0, shutdown_s=0.1, **door),
        verbs=ExtenderVerbs(EverythingFits(), ResourceNames()),  # type: ignore[arg-type]
        metrics=ExtenderMetrics(),
        ready=list,
        warm=list,
        pages=StatePages(head=lambda: {"is_leading": True}, nodes=nodes or Nodes(0)),
    )
    async with asyncio.timeout(DEADLINE_S), running(web.run):
        await web.wait_listening()
        yield web


class Peer:
    """A connection from one of this host's loopback addresses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, web: ExtenderWeb, address: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Peer:
        return cls(*await asyncio.open_connection("127.0.0.1", web.bound_port, local_addr=(address, 0), ssl=tls))

    def send(self, content: bytes) -> None:
        self._writer.write(content)

    def post(self, body: bytes = FILTER, *, length: int | None = None, header: str = "") -> None:
        """A filter request, of whose body `length` bytes are announced."""
        size = len(body) if length is None else length
        head = f"POST /scheduler/filter HTTP/1.1\r\nHost: x\r\n{header}Content-Length: {size}\r\n\r\n"
        self._writer.write(head.encode() + body)

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer; 0 where the connection is closed instead."""
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, b""
        fields = dict(line.split(": ", 1) for line in head[1:] if line)
        return int(head[0].split()[1]), await self._reader.readexactly(int(fields["Content-Length"]))

    async def get(self, path: str) -> tuple[int, bytes]:
        self.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return await self.answer()

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


def client() -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(CA))
    context.check_hostname = False
    return context


async def test_the_scheduler_gets_in_whoever_idles(peers: list[Peer]) -> None:
    """As many idle connections as there are places, twice, from its own address: it is answered, and so is a probe."""
    async with served(connections=PLACES) as web:
        for _ in range(2):
            peers += [await Peer.open(web) for _ in range(PLACES)]
            newcomer = await Peer.open(web)
            peers.append(newcomer)
            assert (await newcomer.get("/healthz"))[0] == 200
            newcomer.post()
            assert (await newcomer.answer())[0] == 200


async def test_half_open_handshakes_keep_nobody_out(peers: list[Peer]) -> None:
    """Connections that never say a word of TLS hold places like others, and lose them to whoever comes."""
    tls = Tls(cert=CA, key=KEY)
    async with served(connections=PLACES, tls=tls, handshake_s=600.0, headers_within_s=600.0) as web:
        silent = [await Peer.open(web) for _ in range(PLACES)]
        peers += silent
        for _ in range(PLACES):
            newcomer = await Peer.open(web, tls=client())
            peers.append(newcomer)
            newcomer.post()
            assert (await newcomer.answer())[0] == 200
        assert all([await peer.ended() for peer in silent])


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n"])
async def test_a_handshake_has_a_time(peers: list[Peer], sent: bytes) -> None:
    """Nothing, half a greeting and something else are given up; one that does not end stops no other."""
    async with served(handshake_s=QUICK, tls=Tls(cert=CA, key=KEY)) as web:
        dull = await Peer.open(web)
        peers.append(dull)
        dull.send(sent)
        while not await dull.ended():  # an alert may come first
            pass
        newcomer = await Peer.open(web, tls=client())
        peers.append(newcomer)
        assert (await newcomer.get("/healthz"))[0] == 200


async def test_the_end_during_a_handshake_leaves_nothing() -> None:
    """Sockets of connections that had not said a word are closed with the server."""
    opened = []
    async with served(tls=Tls(cert=CA, key=KEY)) as web:
        for _ in range(3):
            sock = socket.socket()
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", web.bound_port))
            opened.append(sock)
    async with asyncio.timeout(DEADLINE_S):
        for sock in opened:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
            sock.close()
    gc.collect()


async def test_idle_and_unasking_connections_are_closed(peers: list[Peer]) -> None:
    """After an answer, and before the first request."""
    async with served(headers_within_s=QUICK, idle_s=QUICK, look_period_s=QUICK / 2) as web:
        silent, done = await Peer.open(web), await Peer.open(web)
        peers += [silent, done]
        assert (await done.get("/healthz"))[0] == 200
        assert await silent.ended()
        assert await done.ended()


@pytest.mark.parametrize("length", [100, SHORT_BYTES + 1])
async def test_a_body_that_does_not_come_is_given_up(peers: list[Peer], length: int) -> None:
    """408, and the connection ends, however long the body would have been."""
    async with served(read_timeout_s=QUICK) as web:
        peer = await Peer.open(web)
        peers.append(peer)
        peer.post(b"{", length=length)
        status, text = await peer.answer()
        assert (status, b"no whole request within" in text) == (408, True)
        assert await peer.ended()


async def test_slow_long_bodies_of_one_keep_nobody_out(peers: list[Peer]) -> None:
    """Its further ones wait and are told 503 in time; short ones of the same peer and long ones of another are read."""
    async with served(read_timeout_s=1.0) as web:
        slow = [await Peer.open(web, "127.0.0.2") for _ in range(LONG_OF_PEER)]
        peers += slow
        for peer in slow:
            peer.post(b"{", length=SHORT_BYTES + 1)
        same, other, more = await Peer.open(web, "127.0.0.2"), await Peer.open(web), await Peer.open(web, "127.0.0.2")
        peers += [same, other, more]
        same.post()
        assert (await same.answer())[0] == 200
        other.post(FILTER.ljust(SHORT_BYTES + 1))
        assert (await other.answer())[0] == 200
        assert web._bodies.peers == 1
        more.post(b"{", length=SHORT_BYTES + 1)
        assert [(await peer.answer())[0] for peer in slow] == [408] * LONG_OF_PEER
        assert (await more.answer())[0] in (408, 503)
        while web._bodies.peers:
            await asyncio.sleep(0)


async def test_a_wait_for_a_place_is_bounded_too(peers: list[Peer]) -> None:
    """Those that got no place in time are told so."""
    async with served(read_timeout_s=QUICK) as web:
        asking = [await Peer.open(web) for _ in range(LONG_OF_PEER + 1)]
        peers += asking
        for peer in asking:
            peer.post(b"{", length=SHORT_BYTES + 1)
        found = sorted([await peer.answer() for peer in asking])
        assert [status for status, _ in found] == [408] * LONG_OF_PEER + [503]
        assert b"too many long requests" in found[-1][1]


@pytest.mark.parametrize("length", [100, SHORT_BYTES + 1])
async def test_who_goes_away_in_a_body_leaves_no_traceback(
    peers: list[Peer], caplog: pytest.LogCaptureFixture, length: int
) -> None:
    """It is counted as a bad request; the log stays empty and the place is free."""
    with caplog.at_level(logging.WARNING):
        async with served() as web:
            peer = await Peer.open(web)
            peers.append(peer)
            peer.post(b"{", length=length)
            while length > SHORT_BYTES and not web._bodies.peers:
                await asyncio.sleep(0.005)
            await peer._writer.drain()
            peer.close()
            while BAD_FILTER not in web._metrics.exposition("")[1]:
                await asyncio.sleep(0.005)
            assert web._bodies.peers == 0
    assert caplog.records == []


@pytest.mark.parametrize(("is_read", "status"), [(False, 400), (True, 408)])
async def test_malformed_http_is_a_bad_request_without_a_traceback(
    peers: list[Peer], caplog: pytest.LogCaptureFixture, is_read: bool, status: int
) -> None:
    """No error in the log: at once, or, where the body was being read, as one that does not come."""
    with caplog.at_level(logging.WARNING):
        async with served(read_timeout_s=0.5) as web:
            peer = await Peer.open(web)
            peers.append(peer)
            peer.send(b"POST /scheduler/filter HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            while is_read and not web._bodies.peers:
                await asyncio.sleep(0.005)
            peer.send(b"zz\r\n")
            assert (await peer.answer())[0] == status
    assert caplog.records == []


async def test_a_packed_or_too_long_body_is_refused_before_it_is_read(peers: list[Peer]) -> None:
    """By its headers: 415, as what it unpacks to is not known, and 413."""
    async with served(max_body_bytes=1 << 20) as web:
        packed, long = await Peer.open(web), await Peer.open(web)
        peers += [packed, long]
        packed.post(b"x", header="Content-Encoding: gzip\r\n", length=100)
        assert (await packed.answer())[0] == 415
        long.post(b"{", length=(1 << 20) + 1)
        assert (await long.answer())[0] == 413


async def test_the_state_is_shown_a_page_at_a_time(peers: list[Peer]) -> None:
    """Each page tells where the next begins; together they have every node once."""
    nodes = Nodes(MOST_NODES + 50)
    async with served(nodes) as web:
        peer = await Peer.open(web)
        peers.append(peer)
        found: list[str] = []
        path = "/debug/state"
        while path:
            status, text = await peer.get(path)
            page = json.loads(text)
            assert (status, page["is_leading"], page["known_nodes"]) == (200, True, len(nodes.known))
            assert len(page["nodes"]) <= MOST_NODES
            found += [node["name"] for node in page["nodes"]]
            path = f"/debug/state?after={page['next_after']}" if page["next_after"] else ""
        assert found == nodes.node_names()


async def test_one_node_can_be_asked_for(peers: list[Peer]) -> None:
    """By its name; one that is not known is 404, and a parameter that is not known 400."""
    async with served(Nodes(3)) as web:
        peer = await Peer.open(web)
        peers.append(peer)
        status, text = await peer.get("/debug/state?node=n0001")
        assert (status, [node["name"] for node in json.loads(text)["nodes"]]) == (200, ["n0001"])
        assert (await peer.get("/debug/state?node=zz"))[0] == 404
        assert (await peer.get("/debug/state?nodes=n0001"))[0] == 400
        assert (await peer.get(f"/debug/state?limit={MOST_NODES + 1}"))[0] == 400


async def test_a_node_that_goes_while_a_page_is_made_is_left_out(peers: list[Peer]) -> None:
    """What remains is still a document."""
    nodes = Nodes(3)
    nodes.going = "n0000"
    async with served(nodes) as web:
        peer = await Peer.open(web)
        peers.append(peer)
        page = json.loads((await peer.get("/debug/state"))[1])
        assert [node["name"] for node in page["nodes"]] == ["n0001", "n0002"]
