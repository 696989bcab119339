"""What a container can do to the agent through its socket, and that it ends there: others are served meanwhile.

The bounds are set low where that makes a test exact; the defaults are larger, never absent.
"""

from __future__ import annotations

import asyncio
import stat
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import structlog
from grpclib import GRPCError
from grpclib.client import Channel
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import Event, PingAckReceived, ResponseReceived, StreamEnded, TrailersReceived

from gpushare_agent.adapters.vdevice_files import VDeviceFiles
from gpushare_agent.kit.bounded_grpc import ServerLimits
from gpushare_agent.services.vdevice_server import METHOD, VDeviceLimits, VDeviceServer
from gpushare_agent.wire.vcuda import VcudaServiceStub, VDeviceRequest
from tests.support_vdevice import (
    ID,
    KEY,
    OTHER,
    OTHER_ID,
    OTHER_POD,
    POD,
    FakeNode,
    register,
    server_of,
    share_config,
)

DEADLINE_S = 20.0
NEVER = 1e-6
"""A rate that gives nothing back within a test."""
ENDLESS = 1e12
REQUEST = bytes(VDeviceRequest(pod_uid=POD, container_name="cuda"))


class Node:
    """The attacker's server (KEY) and a neighbour's (OTHER) below one root."""

    def __init__(self, root: Path, limits: VDeviceLimits) -> None:
        self.root = root
        self.files = VDeviceFiles(root)
        self.outside = FakeNode()
        self.neighbours_outside = FakeNode()
        self.attacked = server_of(self.files, self.outside, KEY, limits)
        self.neighbour = server_of(self.files, self.neighbours_outside, OTHER, limits)
        self.socket = self.files.path(KEY) / "vcuda.sock"

    async def start(self) -> None:
        for server in (self.attacked, self.neighbour):
            self.files.prepare(server.key)
            self.files.write_config(server.key, share_config(server.key))
            self.files.write_pids(server.key, [1])
            await server.start()

    async def stop(self) -> None:
        await self.attacked.stop()
        await self.neighbour.stop()

    async def neighbour_is_served(self) -> None:
        await register(self.files.path(OTHER) / "vcuda.sock", pod_uid=OTHER_POD, name="cuda")

    def tree(self) -> dict[str, tuple[str, bytes]]:
        """Everything around the root with kind and content."""
        return {
            str(path): (stat.filemode(path.lstat().st_mode), path.read_bytes() if path.is_file() else b"")
            for path in sorted(self.root.parent.rglob("*"))
        }


@asynccontextmanager
async def node_with(short_dir: Path, limits: VDeviceLimits | None = None) -> AsyncIterator[Node]:
    node = Node(short_dir / "vm", limits or VDeviceLimits())
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


class RawClient:
    """An HTTP/2 client that sends the frames it is told to and reads only when it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.h2 = H2Connection(H2Configuration(client_side=True))
        self.h2.initiate_connection()
        self.events: list[Event] = []

    def begin(self, *headers: tuple[str, str]) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        fixed = [(":method", "POST"), (":scheme", "http"), (":path", METHOD), (":authority", "x")]
        self.h2.send_headers(stream_id, [*fixed, ("te", "trailers"), ("content-type", "application/grpc"), *headers])
        return stream_id

    def call(self, message: bytes = REQUEST) -> int:
        stream_id = self.begin()
        self.h2.send_data(stream_id, struct.pack(">BI", 0, len(message)) + message, end_stream=True)
        return stream_id

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    async def read(self) -> bool:
        """Whether there was something to read before the end of the connection."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                content = await self.reader.read(65536)
            except ConnectionError:
                return False
        self.events += self.h2.receive_data(content)
        self.flush()
        return bool(content)

    async def status_of(self, stream_id: int) -> tuple[str, str]:
        """gRPC code and text of a call, once it has ended."""
        while not any(isinstance(e, StreamEnded) and e.stream_id == stream_id for e in self.events):
            assert await self.read(), "the server closed the connection"
        found: dict[bytes, bytes] = {}
        for event in self.events:
            if isinstance(event, ResponseReceived | TrailersReceived) and event.stream_id == stream_id:
                found.update(event.headers or ())  # type: ignore[arg-type]
        return found[b"grpc-status"].decode(), found.get(b"grpc-message", b"").decode()

    async def wait_closed_by_server(self) -> None:
        while await self.read():
            pass


@asynccontextmanager
async def raw_client(path: Path) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def fill(client: RawClient, content: bytes, up_to: int) -> int:
    """Writes `content` again and again until the kernel takes no more for a while, or `up_to` bytes are written."""
    sock = client.writer.get_extra_info("socket")
    written, refused = 0, 0
    while refused < 200 and written < up_to:
        try:
            written += sock._sock.send(content)
            refused = 0
        except BlockingIOError:
            refused += 1
        await asyncio.sleep(0)
    return written


@pytest.mark.parametrize(
    "fields",
    [
        {"pod_uid": OTHER_POD, "container_name": "cuda"},
        {"pod_uid": POD, "container_id": OTHER_ID},
        {"pod_uid": OTHER_POD, "container_id": OTHER_ID},
        {"pod_uid": POD, "container_name": "../../" + OTHER_POD + "/cuda"},
        {"pod_uid": f"../{OTHER_POD}", "container_name": "cuda"},
        {"pod_uid": POD + "\0", "container_name": "cuda"},
        {"pod_uid": POD, "container_name": "cuda\0/../.."},
        {"pod_uid": POD, "container_id": "../" * 21 + "a"},
        {"pod_uid": POD, "container_id": "/" + "a" * 63},
        {"pod_uid": "a" * 2**20, "container_name": "cuda"},
        {"pod_uid": POD, "container_name": "a" * 2**20},
        {"pod_uid": POD, "container_id": "a" * 2**20},
        {"pod_uid": POD, "container_name": "cuda", "bus_id": "../" * 1000},
    ],
)
async def test_no_message_writes_anything_but_the_callers_own_files(short_dir: Path, fields: dict[str, str]) -> None:
    """Another container's names, paths, NUL and 1 MiB are refused; nothing around the root changes, nothing is asked for."""
    async with node_with(short_dir) as node:
        before = node.tree()
        async with Channel(path=str(node.socket)) as channel:
            with pytest.raises(GRPCError):
                await VcudaServiceStub(channel).register_v_device(VDeviceRequest(**fields), timeout=DEADLINE_S)
            assert (node.outside.refreshed, node.tree()) == ([], before)
            await VcudaServiceStub(channel).register_v_device(
                VDeviceRequest(pod_uid=POD, container_id=ID), timeout=DEADLINE_S
            )
        await node.neighbour_is_served()
    assert node.outside.refreshed == [(KEY, ID)]


async def test_thousands_of_registrations_cost_the_neighbours_nothing(short_dir: Path) -> None:
    """Of 3,000 in a row exactly the allowed burst is refreshed; the rest is RESOURCE_EXHAUSTED; neighbours are served."""
    limits = VDeviceLimits(
        calls_per_s=NEVER, call_burst=30, server=ServerLimits(bytes_per_s=ENDLESS, byte_burst=ENDLESS)
    )
    with structlog.testing.capture_logs() as logs:
        async with node_with(short_dir, limits) as node, asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(flood(node.socket, 1000))
            for _ in range(10):
                await node.neighbour_is_served()
    assert Counter(node.outside.codes) == {"OK": 30, "RESOURCE_EXHAUSTED": 2970}
    assert len(node.outside.refreshed) == 30
    assert Counter(node.neighbours_outside.codes) == {"OK": 10}
    assert Counter(entry["event"] for entry in logs if entry["pod_uid"] == POD) == {
        "vdevice_rate_limited": 1,
        "vdevice_peer_unknown": 1,
    }


async def flood(path: Path, calls: int) -> None:
    """One call after the other, ten at a time, on one connection, whatever the answers are."""
    async with raw_client(path) as client:
        for _ in range(calls // 10):
            streams = [client.call() for _ in range(10)]
            client.flush()
            for stream_id in streams:
                await client.status_of(stream_id)
            client.events.clear()


async def test_the_rate_is_given_back_with_time(short_dir: Path) -> None:
    """After a refusal the same client registers again as soon as the rate allows it."""
    async with node_with(short_dir, VDeviceLimits(calls_per_s=1000.0, call_burst=1)) as node:
        async with asyncio.timeout(DEADLINE_S):
            while node.outside.codes.count("OK") < 5 or "RESOURCE_EXHAUSTED" not in node.outside.codes:
                with suppress(GRPCError):
                    await register(node.socket, name="cuda")
                    await flood(node.socket, 10)


async def test_of_200_idle_connections_the_allowed_ones_stay_until_they_are_idle_too_long(short_dir: Path) -> None:
    """Those beyond the limit are closed at accept; the rest is cut off; then the container itself is served again."""
    limits = VDeviceLimits(server=ServerLimits(max_connections=64, idle_s=0.5))
    async with node_with(short_dir, limits) as node:
        clients = [await asyncio.open_unix_connection(str(node.socket)) for _ in range(200)]
        await node.neighbour_is_served()
        assert node.attacked.connections <= 64
        async with asyncio.timeout(DEADLINE_S):
            greeted = 0
            for reader, writer in clients:
                with suppress(ConnectionError):
                    content = await reader.read()  # up to the end of the connection, which comes
                    greeted += bool(content)
                writer.transport.abort()
                with suppress(ConnectionError):
                    await writer.wait_closed()
        assert 1 <= greeted <= 64
        await wait_empty(node.attacked)
        await register(node.socket, name="cuda")


async def wait_empty(server: VDeviceServer) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while server.connections:
            await asyncio.sleep(0.01)  # the server has no event for the end of a connection


async def test_half_a_request_is_answered_when_its_time_is_up(short_dir: Path) -> None:
    """Headers without a message, half a prefix, half a message: DEADLINE_EXCEEDED, and the connection stays usable."""
    async with node_with(short_dir, VDeviceLimits(call_s=0.1)) as node, raw_client(node.socket) as client:
        for part in (b"", b"\0\0", struct.pack(">BI", 0, 100) + b"half"):
            stream_id = client.begin()
            if part:
                client.h2.send_data(stream_id, part)
            client.flush()
            await node.neighbour_is_served()
            code, text = await client.status_of(stream_id)
            assert code == "4"
            assert text.startswith("the registration was not through within 0.1 s")
        stream_id = client.call()
        client.flush()
        assert (await client.status_of(stream_id))[0] == "0"


@pytest.mark.parametrize("content", [b"", b"PRI * HTTP/2.0\r\n", b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(10_000)])
async def test_what_is_no_http2_is_cut_off(short_dir: Path, content: bytes) -> None:
    """At once where it cannot become a call any more, else when it was idle too long."""
    async with (
        node_with(short_dir, VDeviceLimits(server=ServerLimits(idle_s=0.2))) as node,
        raw_client(node.socket) as client,
    ):
        client.writer.write(content)
        await node.neighbour_is_served()
        await client.wait_closed_by_server()
        await wait_empty(node.attacked)


async def test_pings_do_not_keep_a_connection_alive(short_dir: Path) -> None:
    """Only calls count as use: who only pings is cut off as an idle one is."""
    async with (
        node_with(short_dir, VDeviceLimits(server=ServerLimits(idle_s=0.3))) as node,
        raw_client(node.socket) as client,
    ):
        client.h2.ping(b"12345678")
        client.flush()
        async with asyncio.timeout(DEADLINE_S):
            while await client.read():
                client.h2.ping(b"12345678")
                client.flush()
    assert any(isinstance(event, PingAckReceived) for event in client.events)


@pytest.mark.parametrize("kind", ["pings", "calls"])
async def test_a_client_that_never_reads_is_not_read_from_and_then_cut_off(short_dir: Path, kind: str) -> None:
    """What it can send is bounded by the kernel's buffers and ours, not by its patience; its connection ends."""
    limits = VDeviceLimits(
        calls_per_s=ENDLESS,
        call_burst=ENDLESS,
        server=ServerLimits(bytes_per_s=ENDLESS, byte_burst=ENDLESS, idle_s=1.0),
    )
    async with node_with(short_dir, limits) as node, raw_client(node.socket) as client:
        client.flush()
        if kind == "pings":
            for _ in range(500):
                client.h2.ping(b"12345678")
            written = await fill(client, client.h2.data_to_send(), 64 * 2**20)
            assert written < 8 * 2**20
        else:
            for _ in range(16):
                client.call(b"")
            await fill(client, client.h2.data_to_send(), 1)
        await node.neighbour_is_served()
        await wait_empty(node.attacked)


async def test_what_a_socket_reads_is_bounded_by_bytes_and_shared_by_its_connections(short_dir: Path) -> None:
    """A flood of pings over four connections is handled up to the budget; the neighbour's socket has its own."""
    limits = VDeviceLimits(server=ServerLimits(bytes_per_s=NEVER, byte_burst=8 * 1024))
    async with node_with(short_dir, limits) as node:
        answered = 0
        for _ in range(4):
            async with raw_client(node.socket) as client:
                for _ in range(2000):
                    client.h2.ping(b"12345678")
                client.flush()
                await node.neighbour_is_served()
                await node.neighbour_is_served()
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        while await client.read():
                            pass
                answered += sum(isinstance(event, PingAckReceived) for event in client.events)
    # each connection reads once, at most 4 KiB, before it learns that the budget is spent; a ping has 17 bytes
    assert 8 * 1024 / 17 / 2 < answered < (8 + 4 + 4 * 4) * 1024 / 17


async def test_more_calls_at_once_than_allowed_end_the_connection(short_dir: Path) -> None:
    """The seventeenth call of one connection is a breach of the settings that the server sent first."""
    async with node_with(short_dir, VDeviceLimits(call_s=5.0)) as node:
        node.outside.refresh_hangs = True
        async with raw_client(node.socket) as client:
            for _ in range(17):
                client.call()
            client.flush()
            await client.wait_closed_by_server()
        assert len(node.outside.codes) <= 16
        await node.neighbour_is_served()


async def test_headers_beyond_8_kib_end_the_connection(short_dir: Path) -> None:
    """A header list is memory before any handler sees it."""
    async with node_with(short_dir) as node, raw_client(node.socket) as client:
        client.begin(("x-large", "a" * 9000))
        client.flush()
        await client.wait_closed_by_server()
        assert node.outside.codes == []
        await node.neighbour_is_served()


async def test_a_stopped_server_has_let_go_of_hostile_connections(short_dir: Path) -> None:
    """Half requests, unread answers and idle ones do not hold up stop, and none survives it."""
    async with node_with(short_dir) as node:
        node.outside.refresh_hangs = True
        async with raw_client(node.socket) as half, raw_client(node.socket) as silent, raw_client(node.socket) as hung:
            half.begin()
            half.flush()
            hung.call()
            hung.flush()
            for _ in range(1000):
                silent.h2.ping(b"12345678")
            silent.flush()
            await node.neighbour_is_served()
            await node.attacked.stop()
            for client in (half, silent, hung):
                await client.wait_closed_by_server()
    assert set(node.outside.codes) <= {"CANCELLED"}
