"""A gRPC client that sends exactly the HTTP/2 frames that a test names, and reads only on request."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import Event, ResponseReceived, StreamEnded, TrailersReceived


def frame(kind: int, flags: int, stream_id: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream_id) + content


def request_fields(method: str) -> tuple[tuple[str, str], ...]:
    """The headers of a call."""
    fixed = (":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "x")
    return (*fixed, ("te", "trailers"), ("content-type", "application/grpc"))


def with_length(message: bytes) -> bytes:
    """As gRPC sends a message."""
    return struct.pack(">BI", 0, len(message)) + message


class RawClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.h2 = H2Connection(H2Configuration(client_side=True))
        self.h2.initiate_connection()
        self.events: list[Event] = []

    def begin(self, method: str, *headers: tuple[str, str]) -> int:
        """The headers of a call, which is the number that it returns."""
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, [*request_fields(method), *headers])
        return stream_id

    def call(self, method: str, message: bytes) -> int:
        """A whole call."""
        stream_id = self.begin(method)
        self.h2.send_data(stream_id, with_length(message), end_stream=True)
        return stream_id

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    async def read(self) -> bool:
        """Answers settings and pings. Whether there was something to read before the end of the connection."""
        try:
            content = await self.reader.read(65536)
        except ConnectionError:
            return False
        self.events += self.h2.receive_data(content)
        self.flush()
        return bool(content)

    async def read_until(self, is_there: Callable[[Event], bool]) -> None:
        while not any(map(is_there, self.events)):
            assert await self.read(), "the server closed the connection"

    async def headers_of(self, stream_id: int) -> dict[bytes, bytes]:
        """All headers and trailers of a call, once it has ended."""
        await self.read_until(lambda e: isinstance(e, StreamEnded) and e.stream_id == stream_id)
        found: dict[bytes, bytes] = {}
        for event in self.events:
            if isinstance(event, ResponseReceived | TrailersReceived) and event.stream_id == stream_id:
                found.update(event.headers or ())  # type: ignore[arg-type]
        return found

    async def status_of(self, stream_id: int) -> tuple[str, str]:
        """gRPC code and text of a call, once it has ended."""
        found = await self.headers_of(stream_id)
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
        await hang_up(writer)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(ConnectionError):
        await writer.wait_closed()
