"""Connections that behave as no good client would, and the longest time for which a request keeps the event loop."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from aiohttp import web

from gpushare_agent.core.kit.http_server import HttpLimits, HttpServer
from gpushare_agent.core.kit.tcp_listeners import listen_tcp
from tests.cluster.support_kube import running
from tests.support_deadline import DEADLINE_S

TRIES = 3
YARDSTICK = b"[" + b"1.5,null," * 100_000 + b"0]"
YARDSTICK_S = 0.02


def free_port() -> int:
    """Free until it is bound, seconds later: it is below those that the kernel gives to whoever connects or binds port 0."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = random.sample(range(lowest // 2, lowest), 100) if lowest > 10_000 else [0]
    for port in ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise AssertionError("a hundred ports are taken")


class Peer:
    """A connection from one of this host's loopback addresses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int, address: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Peer:
        return cls(*await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0), ssl=tls))

    def send(self, content: bytes) -> None:
        self._writer.write(content)

    def ask(self, path: str) -> None:
        self.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    async def drain(self) -> None:
        await self._writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer; 0 where the connection is closed instead."""
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, b""
        fields = dict(line.split(": ", 1) for line in head[1:] if line)
        return int(head[0].split()[1]), await self._reader.readexactly(int(fields["Content-Length"]))

    async def get(self, path: str) -> tuple[int, bytes]:
        self.ask(path)
        return await self.answer()

    async def status(self, path: str) -> int:
        return (await self.get(path))[0]

    async def ended(self) -> bool:
        """Waits for the end; false where bytes came."""
        try:
            return await self._reader.read(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def serving(
    *routes: web.AbstractRouteDef, limits: HttpLimits | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """The port of a server with these routes and /healthz."""

    async def show_health(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    listeners = await listen_tcp("127.0.0.1", 0, backlog=128)
    port = listeners[0].getsockname()[1]
    server = HttpServer("test", [web.get("/healthz", show_health), *routes], limits=limits or HttpLimits(), tls=tls)
    async with running(lambda: server.serve(listeners)):
        yield port


async def send_in_thread(port: int, content: bytes, *, then_ends: bool = False) -> bytes:
    """Sends all on one connection, and the end where that is wanted; the beginning of what comes back, else nothing."""

    def talk() -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as sock:
            try:
                sock.sendall(content)
                if then_ends:
                    sock.shutdown(socket.SHUT_WR)
                return sock.recv(4096)
            except OSError:
                return b""

    return await asyncio.to_thread(talk)


async def loop_time_s(port: int, *contents: bytes) -> tuple[float, float]:
    """Processor time of the loop's thread while all of these are sent at once: in its longest turn, and in all. The least of
    some tries; time in which the machine does something else does not count.

    On a machine that takes longer than YARDSTICK_S to decode YARDSTICK (slow, or so busy that its processors share caches
    and clock rate) in seconds of one that does not. A faster one may be faster at that alone: its seconds are not changed.
    """
    found = []
    for _ in range(TRIES):
        longest_s, total_s = await _loop_time_once_s(port, contents)
        scale = min(1.0, YARDSTICK_S / min(_decoding_s() for _ in range(TRIES)))
        found.append((longest_s * scale, total_s * scale))
    return min(longest for longest, _ in found), min(total for _, total in found)


def _decoding_s() -> float:
    began = time.thread_time()
    json.loads(YARDSTICK)
    return time.thread_time() - began


async def _loop_time_once_s(port: int, contents: tuple[bytes, ...]) -> tuple[float, float]:
    longest = 0.0
    async with asyncio.TaskGroup() as group:
        sending = [group.create_task(send_in_thread(port, content)) for content in contents]
        began = last = time.thread_time()
        while not all(task.done() for task in sending):
            await asyncio.sleep(0.001)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
    return longest, last - began
