"""For the tests of hostile peers at the vDevice socket: two served containers, and clients that send what they like.

Canned calls are HTTP/2 frames made once, with headers that need no state: any number of them costs a client next to nothing,
so that what is measured is the server.
"""

from __future__ import annotations

import asyncio
import socket
import stat
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import hpack
from msgspec.structs import replace

from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.agent.isolation.vdevice.server import METHOD, VDeviceLimits
from gpushare_agent.core.wire.vcuda import VDeviceRequest
from tests.isolation.support_vdevice import KEY, OTHER, OTHER_POD, POD, FakeNode, register, server_of, share_config
from tests.kit.support_http2 import frame, hang_up, request_fields, with_length
from tests.support_deadline import DEADLINE_S

NEVER = 1e-6
"""A rate that gives nothing back within a test."""
ENDLESS = 1e12
REQUEST = bytes(VDeviceRequest(pod_uid=POD, container_name="cuda"))
CALLS_AT_ONCE = 16
"""So many a connection may have open."""

_HEADERS_FRAME, _DATA_FRAME, _SETTINGS_FRAME = 1, 0, 4
_END_STREAM, _END_HEADERS = 1, 4
FIELDS = request_fields(METHOD)
_BLOCK = hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*field) for field in FIELDS])
OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS_FRAME, 0, 0, 0, 0, 0])
"""What a client begins its connection with."""


def canned_calls(numbers: Iterable[int], message: bytes = REQUEST) -> bytes:
    """One whole call for each number, which is the connection's how many-th call it is, from 0."""
    content = with_length(message)
    return b"".join(
        frame(_HEADERS_FRAME, _END_HEADERS, 2 * n + 1, _BLOCK) + frame(_DATA_FRAME, _END_STREAM, 2 * n + 1, content)
        for n in numbers
    )


def half_a_call(stream_id: int = 1) -> bytes:
    """Its headers, and no message."""
    return frame(_HEADERS_FRAME, _END_HEADERS, stream_id, _BLOCK)


class EndsCounter:
    """Counts the calls that ended in what a server sends: frames that carry END_STREAM."""

    def __init__(self) -> None:
        self.count = 0
        self._left = b""

    def feed(self, content: bytes) -> None:
        self._left += content
        while len(self._left) >= 9:
            size = int.from_bytes(self._left[:3], "big")
            if len(self._left) < 9 + size:
                return
            kind, flags = self._left[3], self._left[4]
            self.count += kind in (_HEADERS_FRAME, _DATA_FRAME) and bool(flags & _END_STREAM)
            self._left = self._left[9 + size :]


def connect_many(path: Path, count: int, content: bytes) -> list[socket.socket]:
    """Opens connections as fast as they are accepted and sends `content` on each; for a thread of its own.

    The server may close one at once: it is in the result like the others. Blocking sockets: with a time limit Python takes
    a full backlog for a connection that is under way.
    """
    opened: list[socket.socket] = []
    for _ in range(count):
        sock = socket.socket(socket.AF_UNIX)
        opened.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(DEADLINE_S), 0))
        sock.connect(str(path))
        with suppress(ConnectionError):
            sock.sendall(content)
    return opened


@asynccontextmanager
async def connected(path: Path, count: int, content: bytes) -> AsyncIterator[list[socket.socket]]:
    """As `connect_many`; closed with the block."""
    opened = await asyncio.to_thread(connect_many, path, count, content)
    try:
        yield opened
    finally:
        for sock in opened:
            sock.close()


def read_to_end(sock: socket.socket) -> bytes:
    """What the server sent before it closed the connection, which it must; for a thread of its own."""
    sock.settimeout(DEADLINE_S)
    content = b""
    with suppress(ConnectionError):
        while part := sock.recv(65536):
            content += part
    return content


async def flood(path: Path, calls: int, *, at_once: int = CALLS_AT_ONCE) -> None:
    """So many calls on one connection, some at a time, whatever the answers are."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(OPENING)
        ended = EndsCounter()
        for first in range(0, calls, at_once):
            batch = range(first, min(first + at_once, calls))
            writer.write(canned_calls(batch))
            while ended.count < batch.stop:
                content = await reader.read(65536)
                assert content, "the server closed the connection"
                ended.feed(content)
    finally:
        await hang_up(writer)


def resident_mib() -> float:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


class Node:
    """The attacker's server (KEY) and a neighbour's (OTHER) below one root."""

    def __init__(self, root: Path, limits: VDeviceLimits, outside: type[FakeNode] = FakeNode) -> None:
        self.root = root
        self.files = VDeviceFiles(root)
        self.outside = outside(files=self.files, writes=True)
        self.neighbours_outside = FakeNode(files=self.files, writes=True)
        self.attacked = server_of(self.files, self.outside, KEY, limits)
        # A call may be delayed on a busy machine.
        patient = replace(limits, call_s=DEADLINE_S, server=replace(limits.server, idle_s=DEADLINE_S))
        self.neighbour = server_of(self.files, self.neighbours_outside, OTHER, patient)
        self.socket = self.files.path(KEY) / "vcuda.sock"

    async def start(self) -> None:
        for server in (self.attacked, self.neighbour):
            self.files.prepare(server.key)
            self.files.write(server.key, config=share_config(server.key))
            self.files.write(server.key, pids=[1])
            await server.start(self.files.bind_socket(server.key))

    async def stop(self) -> None:
        await self.attacked.stop()
        await self.neighbour.stop()

    async def neighbour_is_served(self) -> None:
        await register(self.files.path(OTHER) / "vcuda.sock", pod_uid=OTHER_POD, name="cuda")

    async def wait_empty(self) -> None:
        """Until the attacked server has no connection."""
        while self.attacked.connections:
            await asyncio.sleep(0.01)  # the server has no event for the end of a connection

    def tree(self) -> dict[str, tuple[str, bytes]]:
        """Everything around the root with kind and content."""
        return {
            str(path): (stat.filemode(path.lstat().st_mode), path.read_bytes() if path.is_file() else b"")
            for path in sorted(self.root.parent.rglob("*"))
        }


@asynccontextmanager
async def node_with(
    short_dir: Path, limits: VDeviceLimits | None = None, outside: type[FakeNode] = FakeNode
) -> AsyncIterator[Node]:
    node = Node(short_dir / "vm", limits or VDeviceLimits(), outside)
    await node.start()
    try:
        yield node
    finally:
        await node.stop()
