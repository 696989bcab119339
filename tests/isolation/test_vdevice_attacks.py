"""What a container can do to the agent through its socket, and that it ends there: others are served meanwhile.

The bounds are set low where that makes a test exact; the defaults are larger, never absent.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import Random

import pytest
from grpclib import Status
from h2.events import PingAckReceived

from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.agent.isolation.vdevice.server import HANDLING_COST_S, METHOD, VDeviceLimits, VDeviceServer
from gpushare_agent.core.kit.bounded_grpc import ServerLimits, SharedBudget
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.wire.vcuda import VDeviceRequest
from tests.agent.support_agent import poll_until
from tests.isolation.support_vdevice import ID, KEY, OTHER, OTHER_ID, OTHER_POD, POD, FakeNode, refusal_of, register
from tests.isolation.support_vdevice_raw import (
    ENDLESS,
    NEVER,
    OPENING,
    REQUEST,
    canned_calls,
    connected,
    flood,
    half_a_call,
    node_with,
)
from tests.kit.support_http2 import RawClient, frame, raw_client


async def fill(client: RawClient, content: bytes, up_to: int) -> int:
    """Writes `content` again and again until the kernel takes no more for a while, the server cuts the connection off, or
    `up_to` bytes are written."""
    sock = client.writer.get_extra_info("socket")
    written, refused = 0, 0
    while refused < 200 and written < up_to:
        try:
            written += os.write(sock.fileno(), content)
            refused = 0
        except BlockingIOError:
            refused += 1
        except ConnectionError:
            break
        await asyncio.sleep(0)
    return written


DENIED, INVALID, EXHAUSTED = Status.PERMISSION_DENIED, Status.INVALID_ARGUMENT, Status.RESOURCE_EXHAUSTED
TOO_LONG = "is over the limit of 4096 bytes"


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"pod_uid": OTHER_POD, "name": "cuda"}, DENIED, f"the message names pod {OTHER_POD}, but"),
        ({"name": "other"}, DENIED, "the message names container 'other', but"),
        ({"name": f"/k8s_cuda_p_n_{OTHER_POD}_0"}, DENIED, f"the message names pod {OTHER_POD}, but"),
        ({"name": "/k8s_x_p_n_" + POD}, DENIED, "names container 'x'"),
        ({"container_id": OTHER_ID}, DENIED, f"the message names container {OTHER_ID}"),
        ({"pod_uid": OTHER_POD, "container_id": OTHER_ID}, DENIED, f"the message names pod {OTHER_POD}, but"),
        ({}, INVALID, "neither container_name nor container_id is set"),
        ({"pod_uid": "", "name": "cuda"}, INVALID, "pod_uid '' (0 characters) is no pod UID"),
        ({"pod_uid": "../../etc", "name": "cuda"}, INVALID, "is no pod UID"),
        ({"pod_uid": f"../{OTHER_POD}", "name": "cuda"}, INVALID, "is no pod UID"),
        ({"pod_uid": POD + "\0", "name": "cuda"}, INVALID, "is no pod UID"),
        ({"name": "../cuda"}, INVALID, "container_name '../cuda' (7 characters)"),
        ({"name": "../../" + OTHER_POD + "/cuda"}, INVALID, "container_name '../../"),
        ({"name": "cuda\0/../.."}, INVALID, r"container_name 'cuda\x00/../..'"),
        ({"name": "x" * 64}, INVALID, "(64 characters)"),
        ({"container_id": "../" * 21 + "a"}, INVALID, "container_id '../../"),
        ({"container_id": "/" + "a" * 63}, INVALID, "is not 64 hexadecimal digits"),
        ({"container_id": ID.upper()}, INVALID, "is not 64 hexadecimal digits"),
        ({"name": "cuda", "bus_id": "0" * 16}, INVALID, "is no PCI bus ID"),
        ({"name": "cuda", "bus_id": "../" * 1000}, INVALID, "is no PCI bus ID"),
        ({"pod_uid": "a" * 2**20, "name": "cuda"}, EXHAUSTED, TOO_LONG),
        ({"name": "a" * 2**20}, EXHAUSTED, TOO_LONG),
        ({"container_id": "a" * 2**20}, EXHAUSTED, TOO_LONG),
    ],
)
async def test_no_message_writes_anything_but_the_callers_own_files(
    short_dir: Path, fields: dict[str, str], status: Status, says: str
) -> None:
    """A disagreement is PERMISSION_DENIED, what is no name INVALID_ARGUMENT, 1 MiB RESOURCE_EXHAUSTED; nothing around the
    root changes, nothing is refreshed."""
    async with node_with(short_dir) as node:
        before = node.tree()
        found, text = await refusal_of(node.socket, **fields)
        assert (found, says in text, node.outside.codes) == (status, True, [status.name])
        assert (
            found is not DENIED or f"this socket belongs to container cuda of pod {POD}: nothing is registered" in text
        )
        assert (node.outside.refreshed, node.tree()) == ([], before)
        await register(node.socket, container_id=ID)
        changed = dict(node.tree().items() ^ before.items())
        assert changed and all(path.startswith(f"{node.files.path(KEY)}/") for path in changed)
        await node.neighbour_is_served()
    assert node.outside.refreshed == [(KEY, ID)]


@pytest.mark.parametrize(
    ("planted", "code"), [("", "5"), ("vcuda.config", "0"), ("pids.config", "0"), (ID, "0"), (f"{ID}/pids.config", "0")]
)
async def test_a_link_planted_beside_a_serving_socket_is_never_written_through(
    short_dir: Path, planted: str, code: str
) -> None:
    """In the place of the directory, a file, the copy for an ID: a registration replaces it or is NOT_FOUND; what the
    link leads to, here the neighbour's, keeps its content."""
    async with node_with(short_dir) as node, raw_client(node.socket) as client:
        await node.neighbour_is_served()
        node.files.copy_for_id(OTHER, OTHER_ID)
        (node.files.path(OTHER) / OTHER_ID).rename(node.files.path(OTHER) / ID)
        by_id = bytes(VDeviceRequest(pod_uid=POD, container_id=ID))
        stream_id = client.call(METHOD, by_id)
        client.flush()
        assert (await client.status_of(stream_id))[0] == "0"
        place = node.files.path(KEY) / planted if planted else node.files.path(KEY)
        place.rename(short_dir / "moved")
        place.symlink_to(node.files.path(OTHER) / planted)
        before = node.tree()
        stream_id = client.call(METHOD, by_id)
        client.flush()
        assert (await client.status_of(stream_id))[0] == code
        after = node.tree()
        assert place.is_symlink() == (code == "5")
        theirs = str(node.files.path(OTHER))
        assert {p: c for p, c in after.items() if p.startswith(theirs)} == {
            p: c for p, c in before.items() if p.startswith(theirs)
        }


async def test_a_burst_beyond_the_budget_is_delayed_and_none_of_it_is_refused(short_dir: Path) -> None:
    """A program that starts ends where its registration is refused: 200 calls at the price of 20 are all answered OK."""
    limits = VDeviceLimits(server=ServerLimits(busy_burst_s=20 * HANDLING_COST_S, busy_share=0.5))
    async with node_with(short_dir, limits) as node:
        await flood(node.socket, 200)
        assert Counter(node.outside.codes) == {"OK": 200}


async def test_half_a_request_is_answered_when_its_time_is_up(short_dir: Path) -> None:
    """Headers without a message, half a prefix, half a message: DEADLINE_EXCEEDED, and the connection stays usable."""
    async with node_with(short_dir, VDeviceLimits(call_s=0.1)) as node, raw_client(node.socket) as client:
        for part in (b"", b"\0\0", struct.pack(">BI", 0, 100) + b"half"):
            stream_id = client.begin(METHOD)
            if part:
                client.h2.send_data(stream_id, part)
            client.flush()
            await node.neighbour_is_served()
            code, text = await client.status_of(stream_id)
            assert code == "4"
            assert text.startswith("the registration did not end within 0.1 s")
        code = "4"
        while code == "4":  # on a busy machine a tenth of a second may be over before a call is answered
            stream_id = client.call(METHOD, REQUEST)
            client.flush()
            code, _ = await client.status_of(stream_id)
        assert code == "0"


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
        await node.wait_empty()


async def test_pings_do_not_keep_a_connection_alive(short_dir: Path) -> None:
    """Only calls count as use: who only pings is cut off as an idle one is."""
    async with (
        node_with(short_dir, VDeviceLimits(server=ServerLimits(idle_s=0.3))) as node,
        raw_client(node.socket) as client,
    ):
        client.h2.ping(b"12345678")
        client.flush()
        while await client.read():
            client.h2.ping(b"12345678")
            client.flush()
    assert any(isinstance(event, PingAckReceived) for event in client.events)


@pytest.mark.parametrize("kind", ["pings", "calls"])
async def test_a_client_that_never_reads_is_not_read_from_and_then_cut_off(short_dir: Path, kind: str) -> None:
    """What it can send is bounded by the kernel's buffers and ours, not by its patience; its connection ends."""
    limits = VDeviceLimits(server=ServerLimits(bytes_per_s=ENDLESS, byte_burst=ENDLESS, idle_s=1.0))
    async with node_with(short_dir, limits) as node, raw_client(node.socket) as client:
        client.flush()
        if kind == "pings":
            for _ in range(500):
                client.h2.ping(b"12345678")
            written = await fill(client, client.h2.data_to_send(), 64 * 2**20)
            assert written < 8 * 2**20
        else:
            for _ in range(16):
                client.call(METHOD, b"")
            await fill(client, client.h2.data_to_send(), 1)
        await node.neighbour_is_served()
        await node.wait_empty()


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


async def churn(path: Path, content: bytes, attempts: int) -> int:
    """Connects, sends `content` and hangs up, again and again; how often before the socket took no more."""
    for done in range(attempts):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
            try:
                sock.connect(str(path))
                sock.send(content)
            except BlockingIOError:
                return done
        await asyncio.sleep(0)  # one connection is accepted in each turn
    return attempts


@pytest.mark.parametrize(
    "content",
    [b"", OPENING[:11], OPENING + frame(7, 0, 0, bytes(8)), OPENING + frame(1, 4, 1, b"\xff" * 5), b"no HTTP/2" * 9],
    ids=["nothing", "half a preface", "GOAWAY", "no headers", "no HTTP/2"],
)
async def test_connections_opened_and_closed_in_a_loop_are_charged(short_dir: Path, content: bytes) -> None:
    """Over its budget none of this socket's connections is accepted; the neighbour's are."""
    limits = VDeviceLimits(server=ServerLimits(busy_share=NEVER, busy_burst_s=0.01))
    async with node_with(short_dir, limits) as node:
        assert await churn(node.socket, content, 1000) < 100  # 0.2 ms each at least, and those that wait in the socket
        await node.neighbour_is_served()
        assert node.attacked.connections <= 64


async def test_after_a_loop_of_connections_the_container_is_served_again(short_dir: Path) -> None:
    """Its connections wait in the socket until what the loop took is given back."""
    limits = VDeviceLimits(server=ServerLimits(busy_share=0.5, busy_burst_s=0.01))
    async with node_with(short_dir, limits) as node:
        await churn(node.socket, b"", 1000)
        async with connected(node.socket, 1, OPENING + canned_calls(range(1))):
            while not node.outside.codes:
                await asyncio.sleep(0.01)  # the server has no event for the end of a call
    assert node.outside.codes == ["OK"]


@pytest.mark.parametrize("seed", range(4))
async def test_no_mutated_session_raises_out_of_the_server(short_dir: Path, seed: int) -> None:
    """Bytes of valid sessions flipped, left out, doubled: each ends in an answer or the end of its connection, none in a
    traceback, and the neighbour is served."""
    random = Random(seed)
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: raised.append(context))
    limits = VDeviceLimits(call_s=0.05, server=ServerLimits(busy_share=1.0, bytes_per_s=ENDLESS))
    async with node_with(short_dir, limits) as node:
        for _ in range(50):
            async with raw_client(node.socket) as client:
                client.writer.write(OPENING + mutated(random, SESSION))
                client.writer.write_eof()
                with suppress(ConnectionError):
                    await client.reader.read()
        await node.neighbour_is_served()
        await node.wait_empty()
    assert raised == []


SESSION = b"".join(
    (
        canned_calls(range(2)),
        frame(6, 0, 0, b"12345678"),
        frame(8, 0, 0, b"\0\0\1\0"),
        frame(4, 0, 0, b"\0\4\0\1\0\0"),
        frame(2, 0, 5, bytes(5)),
        half_a_call(5),
        frame(3, 0, 5, b"\0\0\0\x08"),
        frame(0xEE, 0, 0, b"unknown"),
        canned_calls(range(4, 6)),
    )
)


def mutated(random: Random, content: bytes) -> bytes:
    """With one to eight places changed, each by one of five ways."""
    out = bytearray(content)
    for _ in range(random.randint(1, 8)):
        at = random.randrange(len(out))
        length = random.randint(1, 40)
        piece = out[at : at + length]
        out[at : at + length] = random.choice(
            (
                bytes([out[at] ^ 1 << random.randrange(8)]) + piece[1:],
                b"",
                piece + piece,
                random.randbytes(length),
                piece[::-1],
            )
        )
    return bytes(out)


@pytest.mark.parametrize("kind", ["a seventeenth call at once", "headers of 9 KB"])
async def test_a_breach_of_the_servers_settings_ends_the_connection(short_dir: Path, kind: str) -> None:
    """They were sent first. A header list is memory before any handler sees it."""
    async with node_with(short_dir, VDeviceLimits(call_s=5.0)) as node:
        node.outside.refresh_hangs = True
        async with raw_client(node.socket) as client:
            if kind.startswith("headers"):
                client.begin(METHOD, ("x-large", "a" * 9000))
            else:
                for _ in range(17):
                    client.call(METHOD, REQUEST)
            client.flush()
            await client.wait_closed_by_server()
        assert len(node.outside.codes) <= (0 if kind.startswith("headers") else 16)
        await node.neighbour_is_served()


async def test_a_stopped_server_has_let_go_of_hostile_connections(short_dir: Path) -> None:
    """Half requests, unread answers and idle ones do not hold up stop, and none survives it."""
    async with node_with(short_dir) as node:
        node.outside.refresh_hangs = True
        async with raw_client(node.socket) as half, raw_client(node.socket) as silent, raw_client(node.socket) as hung:
            half.begin(METHOD)
            half.flush()
            hung.call(METHOD, REQUEST)
            hung.flush()
            for _ in range(1000):
                silent.h2.ping(b"12345678")
            silent.flush()
            await node.neighbour_is_served()
            await node.attacked.stop()
            for client in (half, silent, hung):
                await client.wait_closed_by_server()
    assert set(node.outside.codes) <= {"CANCELLED"}


async def test_the_sockets_of_one_pod_and_of_many_leave_others_connections(short_dir: Path) -> None:
    """A pod of 20 containers gets a sixteenth of the open files, all pods a quarter; every other one still registers."""
    shared = SharedBudget(clock=asyncio.get_running_loop().time, open_files=256)
    files = VDeviceFiles(short_dir)
    outside = FakeNode(files=files)
    crowd = [ContainerKey(PodUid(f"{number:08x}{POD[8:]}"), "cuda") for number in range(8)]
    keys = [*(ContainerKey(POD, f"c{number}") for number in range(20)), *crowd, OTHER]
    servers = [VDeviceServer(key, outside, shared=shared) for key in keys]
    async with AsyncExitStack() as started:
        for server in servers:
            files.prepare(server.key)
            await server.start(files.bind_socket(server.key))
            started.push_async_callback(server.stop)
        async with AsyncExitStack() as stack:
            for key in keys[:20]:
                await stack.enter_async_context(connected(files.path(key) / "vcuda.sock", 16, OPENING))
            await poll_until(
                lambda: sum(server.connections for server in servers) == 16, "a sixteenth of the open files"
            )
            for key in crowd:
                await stack.enter_async_context(connected(files.path(key) / "vcuda.sock", 16, OPENING))
            await poll_until(lambda: sum(server.connections for server in servers) >= 64, "a quarter of them")
            await register(files.path(OTHER) / "vcuda.sock", pod_uid=OTHER.pod_uid, name=OTHER.container)
            assert sum(server.connections for server in servers) <= 64 + 4 * len(crowd)
        await poll_until(lambda: not any(server.connections for server in servers), "their end")
        await register(files.path(keys[0]) / "vcuda.sock", name=keys[0].container)
    assert shared.admits(POD) and not shared._open
