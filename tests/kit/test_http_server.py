"""kit/http_server.py: floods, idlers, slow readers and hostile bodies; the probe, the loop and the log among them."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import resource
import socket
import ssl
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog
from aiohttp import web

from gpushare_agent.core.kit.http_server import UNREAD_BYTES, HttpLimits
from tests.kit.support_http import Peer, loop_time_s, send_in_thread, serving
from tests.support_deadline import DEADLINE_S

DATA = Path(__file__).parent.parent / "data"
CA, KEY = DATA / "kube-ca.pem", DATA / "kube-server.key"
QUICK, NEVER_S = 0.05, 3600.0
MOST_TURN_S = 0.05
MIB = 1 << 20
POST = b"POST /read HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


class Gate:
    """A handler that answers once it may."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def show(self, _request: web.Request) -> web.Response:
        self.has_begun.set()
        await self.may_answer.wait()
        return web.Response(text="late")


async def read(request: web.Request) -> web.Response:
    return web.Response(text=str(len(await request.read())))


async def ignore(_request: web.Request) -> web.Response:
    return web.Response(text="unread")


class Peers(list[Peer]):
    """Connections, closed at the end of the test."""

    async def open(self, port: int, tls: ssl.SSLContext | None = None, address: str = "127.0.0.1") -> Peer:
        self.append(peer := await Peer.open(port, address, tls))
        return peer


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    opened = Peers()
    yield opened
    for peer in opened:
        peer.close()
    await asyncio.sleep(0)


# --- connections ---


@pytest.mark.usefixtures("many_open_files")
async def test_health_is_answered_during_a_flood_from_the_same_address(peers: Peers) -> None:
    """Five times as many idle connections as the limit: each newcomer is served, the idle ones are closed."""
    async with serving() as port:
        for _ in range(8):
            for _ in range(160):
                await peers.open(port)
            assert await (await peers.open(port)).status("/healthz") == 200


async def test_the_connection_that_has_idled_longest_is_closed_first(peers: Peers) -> None:
    """A request makes a connection the youngest again."""
    async with serving(limits=HttpLimits(connections=3)) as port:
        for _ in range(3):
            assert await (await peers.open(port)).status("/healthz") == 200
        assert await peers[0].status("/healthz") == 200
        assert await (await peers.open(port)).status("/healthz") == 200
        assert await peers[1].ended()
        assert [await peers[number].status("/healthz") for number in (0, 2, 3)] == [200] * 3


async def test_a_connection_that_is_being_answered_is_closed_last(peers: Peers) -> None:
    """Idle connections go first, however young they are; without one the oldest request ends."""
    gate = Gate()
    async with serving(web.get("/late", gate.show), limits=HttpLimits(connections=2)) as port:
        busy = await peers.open(port)
        busy.ask("/late")
        await gate.has_begun.wait()
        for _ in range(4):
            assert await (await peers.open(port)).status("/healthz") == 200
        gate.has_begun.clear()
        peers[-1].ask("/late")
        await gate.has_begun.wait()
        assert await (await peers.open(port)).status("/healthz") == 200
        assert await busy.ended()
        gate.may_answer.set()
        assert (await peers[-2].answer())[0] == 200


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nX: "])
async def test_a_connection_without_a_whole_request_is_closed(peers: Peers, sent: bytes) -> None:
    """Bytes one at a time do not lengthen its time."""
    async with serving(limits=HttpLimits(headers_s=QUICK)) as port:
        peer = await peers.open(port)
        has_ended = asyncio.Event()

        async def dribble() -> None:
            while not has_ended.is_set():
                peer.send(sent[:1])
                await asyncio.sleep(QUICK / 5)

        peer.send(sent)
        async with asyncio.TaskGroup() as group:
            group.create_task(dribble())
            assert await peer.ended()
            has_ended.set()


async def test_an_idle_connection_is_closed_after_its_time_and_a_stream_is_not(peers: Peers) -> None:
    """The time runs between answers, not during one."""
    gate = Gate()
    async with serving(web.get("/late", gate.show), limits=HttpLimits(idle_s=QUICK)) as port:
        stream, idle = await peers.open(port), await peers.open(port)
        stream.ask("/late")
        assert await idle.status("/healthz") == 200
        assert await idle.ended()
        gate.may_answer.set()
        assert (await stream.answer())[0] == 200


class Sender:
    """A handler with an answer of 32 MiB, and the transports to which it was given."""

    def __init__(self) -> None:
        self.transports: list[asyncio.Transport] = []

    async def show(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        self.transports.append(request.transport)
        return web.Response(body=b"x" * 2**25)

    async def wait_closing(self, number: int) -> None:
        while len(self.transports) <= number or not self.transports[number].is_closing():
            await asyncio.sleep(QUICK / 5)


async def ask_and_read_nothing(port: int, sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    await asyncio.get_running_loop().sock_sendall(sock, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")


async def test_a_peer_that_takes_nothing_of_an_answer_is_cut_off() -> None:
    """It keeps its answer in memory no longer than that."""
    sender = Sender()
    async with serving(web.get("/large", sender.show), limits=HttpLimits(unread_s=QUICK)) as port:
        with socket.socket() as sock:
            await ask_and_read_nothing(port, sock)
            await sender.wait_closing(0)
            assert sender.transports[0].get_write_buffer_size() == 0


@pytest.mark.parametrize("is_tls", [False, True])
async def test_answers_that_nobody_reads_have_a_bound_together(peers: Peers, is_tls: bool) -> None:
    """The one that waits longest of the address with most ends for a further one, and who reads gets all of its own."""
    sender, tls = Sender(), _client_tls() if is_tls else None
    limits = HttpLimits(unread_s=NEVER_S, unsent_bytes=100 * MIB)
    routes, server_tls = web.get("/large", sender.show), _server_tls() if is_tls else None
    with structlog.testing.capture_logs() as logged:
        async with serving(routes, limits=limits, tls=server_tls) as port, asyncio.timeout(DEADLINE_S):
            for number, address in enumerate(("127.0.0.2", "127.0.0.1", "127.0.0.1")):
                (await peers.open(port, tls, address)).ask("/large")
                while len(sender.transports) <= number:
                    await asyncio.sleep(QUICK / 5)
            assert not any(transport.is_closing() for transport in sender.transports)
            status, body = await (await peers.open(port, tls)).get("/large")
            assert (status, len(body)) == (200, 32 * MIB)
            await sender.wait_closing(1)
            assert [transport.is_closing() for transport in sender.transports[:3]] == [False, True, False]
            assert (await peers[0].answer())[0] == 200
    assert [line["event"] for line in logged] == ["answers_dropped"]


async def test_without_descriptors_it_is_logged_once_and_served_again(peers: Peers) -> None:
    """Neither the loop nor the log is filled with attempts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    filled: list[socket.socket] = []
    with structlog.testing.capture_logs() as logged:
        async with serving() as port:
            waiting = [socket.socket() for _ in range(3)]
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
                with contextlib.suppress(OSError):
                    while True:
                        filled.append(socket.socket())
                for sock in waiting:
                    sock.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
                while not any(line["event"] == "connections_not_accepted" for line in logged):
                    await asyncio.sleep(QUICK)
            finally:
                for sock in (*filled, *waiting):
                    sock.close()
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert await (await peers.open(port)).status("/healthz") == 200
    assert [line["event"] for line in logged].count("connections_not_accepted") == 1


# --- TLS ---


def _server_tls() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CA, KEY)
    return context


def _client_tls() -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(CA))
    context.check_hostname = False
    return context


async def test_handshakes_count_as_connections(peers: Peers) -> None:
    """Connections that never send a byte of TLS are closed for those that do."""
    limits = HttpLimits(connections=3, handshake_s=NEVER_S, headers_s=NEVER_S)
    async with serving(limits=limits, tls=_server_tls()) as port, asyncio.timeout(DEADLINE_S):
        silent = [await peers.open(port) for _ in range(3)]
        for _ in range(3):
            assert await (await peers.open(port, _client_tls())).status("/healthz") == 200
        assert all([await peer.ended() for peer in silent])


async def test_a_peer_that_asks_for_the_end_ends_its_own_connection_alone(peers: Peers) -> None:
    """As a kubelet's probe does. asyncio of Python 3.11.2 (Debian 12's) fails to abort such a connection, which is closed
    already: the server ended with it."""
    async with serving(tls=_server_tls()) as port:
        for _ in range(2):
            probe = await peers.open(port, _client_tls())
            probe.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await probe.answer())[0] == 200
            assert await probe.ended()


async def test_a_peer_that_does_not_end_tls_costs_no_other_an_answer(peers: Peers) -> None:
    """Its transport is closed twice and in use until `handshake_s` is over: asyncio cannot be asked about it any more."""
    found: list[asyncio.Transport] = []

    def ask(port: int) -> ssl.SSLSocket:
        sock = _client_tls().wrap_socket(socket.create_connection(("127.0.0.1", port)))
        sock.sendall(b"GET /whose HTTP/1.1\r\nHost: x\r\n\r\n" + CHUNKED)
        return sock

    async def show(request: web.Request) -> web.Response:
        assert request.transport is not None
        found.append(request.transport)
        return web.Response()

    limits = HttpLimits(handshake_s=DEADLINE_S)
    async with serving(web.get("/whose", show), limits=limits, tls=_server_tls()) as port, asyncio.timeout(DEADLINE_S):
        with await asyncio.to_thread(ask, port):
            while not found or getattr(found[0], "_ssl_protocol", None) is not None:
                await asyncio.sleep(QUICK / 5)
            assert await (await peers.open(port, _client_tls())).status("/healthz") == 200


# --- bodies, and the time that they take of the loop ---


def _gzip_bomb() -> bytes:
    """500 MiB in 500 kB: the same block again and again, each ends with a full flush."""
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    packed = gzip.compress(b"")[:10] + 500 * (packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH))
    return POST + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed


def _of_length(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def test_no_body_of_a_mebibyte_keeps_the_loop_for_long() -> None:
    """Whole, in the smallest chunks, and many requests at once."""
    whole = _of_length(b"x" * MIB)
    chunks = CHUNKED + b"1\r\na\r\n" * (MIB // 6) + b"0\r\n\r\n"
    pipelined = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 1000
    async with serving(web.post("/read", read), limits=HttpLimits(body_bytes=MIB)) as port:
        for contents in ([whole], [chunks], [chunks] * 8, [pipelined]):
            assert (await loop_time_s(port, *contents))[0] < MOST_TURN_S


async def test_a_compressed_body_takes_no_time_of_the_loop() -> None:
    """Once and eight times at once; unpacked it would be a second each."""
    bomb = _gzip_bomb()
    async with serving(web.post("/read", read), limits=HttpLimits(body_bytes=MIB)) as port:
        for count in (1, 8):
            longest_s, total_s = await loop_time_s(port, *[bomb] * count)
            assert longest_s < MOST_TURN_S
            assert total_s < 0.1 * count


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "x-gzip", "identity, gzip"])
async def test_a_compressed_body_is_refused_and_not_unpacked(coding: str) -> None:
    """415 by its header alone, for routes that read bodies and others."""
    content = zlib.compress(b"{}")
    head = f"Host: x\r\nContent-Encoding: {coding}\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    async with serving(web.post("/read", read)) as port:
        for path in (b"/read", b"/healthz", b"/none"):
            answer = await send_in_thread(port, b"POST " + path + b" HTTP/1.1\r\n" + head + content)
            assert answer.startswith(b"HTTP/1.1 415 ")


async def test_a_body_beyond_the_limit_or_of_unknown_length_is_refused_by_its_headers() -> None:
    """413 for an announced length, 411 for chunks."""
    async with serving(web.post("/read", read), limits=HttpLimits(body_bytes=1000)) as port:
        assert (await send_in_thread(port, _of_length(b"x" * 1000))).startswith(b"HTTP/1.1 200 ")
        assert (await send_in_thread(port, _of_length(b"x" * 1001))).startswith(b"HTTP/1.1 413 ")
        assert (await send_in_thread(port, CHUNKED + b"1\r\nx\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 411 ")


async def test_of_a_body_longer_than_is_taken_a_mebibyte_is_read() -> None:
    """After the 413; the rest waits in the kernel."""
    head = b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (256 * MIB)
    async with serving(web.post("/read", read), limits=HttpLimits(body_bytes=128 * MIB)) as port:
        await send_in_thread(
            port, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        )  # the listener's buffer is small from now on
        answer, sent = await asyncio.to_thread(_send_until_closed, port, head)
    assert answer.startswith(b"HTTP/1.1 413")
    assert UNREAD_BYTES <= sent < UNREAD_BYTES + MIB


@pytest.mark.parametrize("path", ["/ignore", "/none"])
async def test_a_body_that_could_be_taken_is_read_to_its_end_after_its_answer(path: str, peers: Peers) -> None:
    """Whoever sends all before reading gets the answer: after one that needs no body, and at a path that is not there."""
    body = bytes(4 * UNREAD_BYTES)
    async with serving(web.post("/ignore", ignore), limits=HttpLimits(body_bytes=len(body))) as port:
        peer = await peers.open(port)
        peer.send(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        assert (await peer.answer())[0] == {"/ignore": 200, "/none": 404}[path]
        assert await peer.status("/healthz") == 200


def _send_until_closed(port: int, head: bytes) -> tuple[bytes, int]:
    """What was answered, and how much the kernel took after that; its own buffers are small."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
        sock.settimeout(DEADLINE_S)
        sock.connect(("127.0.0.1", port))
        sock.sendall(head)
        answer, sent = sock.recv(4096), 0
        with contextlib.suppress(ConnectionError):
            while sent < 32 * MIB:
                sent += sock.send(bytes(16 * 1024))
    return answer, sent


async def test_a_connection_is_used_again_after_a_body_that_nobody_read(peers: Peers) -> None:
    """It comes to its end after the answer."""
    body = bytes(UNREAD_BYTES // 2)
    async with serving(web.post("/ignore", ignore), limits=HttpLimits(body_bytes=MIB)) as port:
        peer = await peers.open(port)
        for _ in range(3):
            peer.send(b"POST /ignore HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
            assert await peer.answer() == (200, b"unread")
            peer.send(body)
        assert await peer.status("/healthz") == 200


# --- the log ---

BAD = {
    "bad deflate": POST + b"Content-Encoding: deflate\r\nContent-Length: 4\r\n\r\nzzzz",
    "bad gzip": POST + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nzzzz",
    "request line": b"\x16\x03\x01\x02\x00\x01" + b"\x00" * 100 + b"\r\n\r\n",
    "method": b"NO/PE / HTTP/1.1\r\n\r\n",
    "version": b"GET / HTTP/9.9\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "long line": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "long header": b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: a\r\n" % n for n in range(1000)) + b"\r\n",
    "bad header": b"GET / HTTP/1.1\r\nHost: x\r\nX y: z\r\n\r\n",
    "bad length": POST + b"Content-Length: x\r\n\r\n",
    "length and chunks": POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunk": CHUNKED + b"zz\r\n",
    "later bad chunk": CHUNKED + b"1\r\na\r\nzz\r\n",
    "unread bad chunk": CHUNKED.replace(b"/read", b"/ignore") + b"zz\r\n",
    "half a body": POST + b"Content-Length: 100\r\n\r\n{",
    "half an unread body": POST.replace(b"/read", b"/ignore") + b"Content-Length: 100\r\n\r\n{",
    "half a head": b"GET / HTTP/1.1\r\nHos",
    "upgrade": b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + b"\xff" * 1000,
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
async def test_a_bad_request_leaves_no_line_in_the_log(
    caplog: pytest.LogCaptureFixture, peers: Peers, content: bytes
) -> None:
    """Neither of a library nor of ours, however often it is sent; the next request is answered."""
    with caplog.at_level(logging.INFO), structlog.testing.capture_logs() as logged:
        async with serving(web.post("/read", read), web.post("/ignore", ignore)) as port:
            for _ in range(5):
                answer = await send_in_thread(port, content, then_ends=True)
                assert answer[:10] in (b"", b"HTTP/1.0 4", b"HTTP/1.1 4", b"HTTP/1.1 2")
                assert b"aiohttp" not in answer
            assert await (await peers.open(port)).status("/healthz") == 200
    assert [record for record in caplog.records if record.name.startswith("aiohttp")] == []
    assert logged == []


@pytest.mark.parametrize("kind", ["long line", "long header", "many headers"])
async def test_a_head_beyond_the_limits_is_refused(kind: str) -> None:
    """Of a page that is there, for a peer that waits for it."""
    async with serving() as port:
        answer = await send_in_thread(port, BAD[kind].replace(b"GET /", b"GET /healthz?", 1))
    assert answer[:10] in (b"", b"HTTP/1.0 4", b"HTTP/1.1 4")


async def test_a_peer_that_goes_during_an_answer_leaves_no_line_in_the_log(
    caplog: pytest.LogCaptureFixture, peers: Peers
) -> None:
    """Before it is written, and while it is."""
    gate = Gate()
    with caplog.at_level(logging.INFO), structlog.testing.capture_logs() as logged:
        async with serving(web.get("/late", gate.show), limits=HttpLimits(cancels_handlers=False)) as port:
            leaving = await peers.open(port)
            leaving.ask("/late")
            await gate.has_begun.wait()
            leaving.close()
            await asyncio.sleep(0)
            gate.may_answer.set()
            assert await (await peers.open(port)).status("/healthz") == 200
    assert [record for record in caplog.records if record.name.startswith("aiohttp")] == []
    assert logged == []


@pytest.mark.parametrize("error", [ValueError("a bug"), FileNotFoundError("a bug")])
async def test_a_handler_that_fails_is_a_500_and_one_line(peers: Peers, error: Exception) -> None:
    """A fault that a peer can set off again and again does not fill the log either."""

    async def fail(_request: web.Request) -> web.Response:
        raise error

    with structlog.testing.capture_logs() as logged:
        async with serving(web.get("/fail", fail)) as port:
            for _ in range(10):
                assert await (await peers.open(port)).status("/fail") == 500
    assert [line["event"] for line in logged] == ["http_request_failed"]
