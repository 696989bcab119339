"""As much of HTTP/2 and gRPC as a benchmark's kubelet needs, with next to no time of its own.

A general gRPC library in Python needs about a millisecond for each side of a call; here it would be charged to the agent.
So frames are written by hand, headers are sent as literals, and only received headers go through a real HPACK decoder.
Both roles are in one class: calls are made, and calls are answered where `handlers` are given.

Not for use outside of the benchmark: faults of the peer end in an exception. Formats: RFC 9113, RFC 7541, gRPC over HTTP/2.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import hpack

Handler = Callable[[bytes], Awaitable[bytes]]
"""Answers the bytes of a request message with those of the response. Raises CallError to refuse."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 0x1, 0x1, 0x4, 0x8
_INITIAL_WINDOW_SIZE = 4
_MAX_FRAME_BYTES = 16384
_DEFAULT_WINDOW_BYTES = 65535
_RECEIVE_WINDOW_BYTES = 1 << 30
"""Far more than one benchmark receives on a connection, so it is granted once."""


class CallError(Exception):
    """A call ended with another status than OK."""


def _literal(name: str, value: str) -> bytes:
    """A header field that enters no table."""
    return b"\0" + b"".join(bytes((len(text),)) + text.encode() for text in (name, value))


_REQUEST_START = b"\x83\x86" + _literal(":authority", "localhost")
_REQUEST_END = _literal("content-type", "application/grpc") + _literal("te", "trailers")
_RESPONSE_HEADERS = b"\x88" + _literal("content-type", "application/grpc")
_TRAILERS_OK = _literal("grpc-status", "0")


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


@dataclass(slots=True)
class _Stream:
    window: int
    received: bytearray = field(default_factory=bytearray)
    headers: dict[str, str] = field(default_factory=dict)
    done: asyncio.Future[bytes] | None = None
    on_message: Callable[[bytes], None] | None = None


class Http2Connection(asyncio.Protocol):
    """One connection. A server's has both arguments: `handlers` by gRPC path, and `tasks` in which answers are made."""

    def __init__(self, handlers: Mapping[str, Handler] | None = None, tasks: asyncio.TaskGroup | None = None) -> None:
        self._handlers = handlers or {}
        self._tasks = tasks
        self._is_client = tasks is None
        self._transport: asyncio.Transport | None = None
        self._decoder = hpack.Decoder()
        self._input = bytearray()
        self._preface_left = 0 if self._is_client else len(_PREFACE)
        self._streams: dict[int, _Stream] = {}
        self._next_stream = 1
        self._window = _DEFAULT_WINDOW_BYTES
        self._stream_window = _DEFAULT_WINDOW_BYTES
        self._window_grew = asyncio.Event()
        self.closed = asyncio.Event()

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=1 << 24)
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _RECEIVE_WINDOW_BYTES)
        grant = struct.pack(">I", _RECEIVE_WINDOW_BYTES - _DEFAULT_WINDOW_BYTES)
        start = _PREFACE if self._is_client else b""
        self._write(start + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, grant))

    def data_received(self, data: bytes) -> None:
        self._input += data
        if self._preface_left:
            taken = min(self._preface_left, len(self._input))
            del self._input[:taken]
            self._preface_left -= taken
        position = 0
        while len(self._input) - position >= 9:
            length_and_kind, flags, stream = struct.unpack_from(">IBI", self._input, position)
            end = position + 9 + (length_and_kind >> 8)
            if end > len(self._input):
                break
            self._receive(length_and_kind & 0xFF, flags, stream, bytes(self._input[position + 9 : end]))
            position = end
        del self._input[:position]

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        self._fail_all(f"the connection was lost: {exc or 'closed'}")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # --- calls ---

    async def call(self, path: str, message: bytes) -> bytes:
        """Sends one message and returns the one that answers it. Raises CallError."""
        number, stream = self._open(path)
        stream.done = asyncio.get_running_loop().create_future()
        await self._send(number, stream, message, ends=True)
        return await stream.done

    async def subscribe(self, path: str, on_message: Callable[[bytes], None]) -> None:
        """Sends an empty message and hands over every message of the answer, synchronously; returns when it ends."""
        number, stream = self._open(path)
        stream.done = asyncio.get_running_loop().create_future()
        stream.on_message = on_message
        await self._send(number, stream, b"", ends=True)
        await stream.done

    def _open(self, path: str) -> tuple[int, _Stream]:
        number, self._next_stream = self._next_stream, self._next_stream + 2
        stream = self._streams[number] = _Stream(window=self._stream_window)
        headers = _REQUEST_START + _literal(":path", path) + _REQUEST_END
        self._write(_frame(_HEADERS, _END_HEADERS, number, headers))
        return number, stream

    async def _send(self, number: int, stream: _Stream, message: bytes, *, ends: bool) -> None:
        """Sends a gRPC message as fast as the peer's windows allow."""
        data = b"\0" + struct.pack(">I", len(message)) + message
        position = 0
        while position < len(data):
            frames = []
            while position < len(data) and (size := min(self._window, stream.window, _MAX_FRAME_BYTES)) > 0:
                chunk = data[position : position + size]
                position += len(chunk)
                self._window -= len(chunk)
                stream.window -= len(chunk)
                flags = _END_STREAM if ends and position == len(data) else 0
                frames.append(_frame(_DATA, flags, number, chunk))
            self._write(b"".join(frames))
            if position < len(data):
                self._window_grew.clear()
                await self._window_grew.wait()

    async def _answer(self, number: int, stream: _Stream) -> None:
        try:
            answer = await self._handlers[stream.headers[":path"]](bytes(stream.received[5:]))
        except CallError as error:
            trailers = _literal("grpc-status", "8") + _literal("grpc-message", str(error))
            self._write(_frame(_HEADERS, _END_HEADERS | _END_STREAM, number, _RESPONSE_HEADERS + trailers))
            return
        finally:
            self._streams.pop(number, None)
        self._write(_frame(_HEADERS, _END_HEADERS, number, _RESPONSE_HEADERS))
        await self._send(number, stream, answer, ends=False)
        self._write(_frame(_HEADERS, _END_HEADERS | _END_STREAM, number, _TRAILERS_OK))

    # --- received frames ---

    def _receive(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if flags & _PADDED and kind in (_DATA, _HEADERS):
            raise AssertionError("the agent's library pads no frames, so this module cannot read padded ones")
        if kind == _DATA:
            self._receive_data(number, payload)
        elif kind == _HEADERS:
            self._receive_headers(number, payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self._receive_settings(payload)
        elif kind == _WINDOW_UPDATE:
            self._receive_window(number, struct.unpack(">I", payload)[0])
        elif kind == _PING and not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, payload))
        elif kind == _RST_STREAM:
            self._fail(number, "the stream was reset")
        elif kind == _GOAWAY:
            self._fail_all("the peer sent GOAWAY")
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            self._end(number)

    def _receive_data(self, number: int, payload: bytes) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.received += payload
        while stream.on_message is not None and len(stream.received) >= 5:
            end = 5 + struct.unpack_from(">I", stream.received, 1)[0]
            if len(stream.received) < end:
                break
            message = bytes(stream.received[5:end])
            del stream.received[:end]
            stream.on_message(message)

    def _receive_headers(self, number: int, payload: bytes) -> None:
        """Decoded in any case: the decoder's table depends on every header block."""
        headers = {str(name): str(value) for name, value in self._decoder.decode(payload)}
        if not self._is_client and number not in self._streams:
            self._streams[number] = _Stream(window=self._stream_window)
        if number in self._streams:
            self._streams[number].headers.update(headers)

    def _receive_settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == _INITIAL_WINDOW_SIZE:
                for stream in self._streams.values():
                    stream.window += value - self._stream_window
                self._stream_window = value
        self._window_grew.set()
        self._write(_frame(_SETTINGS, _ACK, 0, b""))

    def _receive_window(self, number: int, increment: int) -> None:
        if not number:
            self._window += increment
        elif number in self._streams:
            self._streams[number].window += increment
        self._window_grew.set()

    def _end(self, number: int) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        if self._tasks is not None:
            self._tasks.create_task(self._answer(number, stream), name=f"answer {stream.headers.get(':path')}")
            return
        status = stream.headers.get("grpc-status")
        if status != "0":
            self._fail(number, f"status {status}: {stream.headers.get('grpc-message', '')}")
            return
        del self._streams[number]
        if stream.done is not None and not stream.done.done():
            stream.done.set_result(bytes(stream.received[5:]))

    def _fail(self, number: int, reason: str) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None and stream.done is not None and not stream.done.done():
            stream.done.set_exception(CallError(reason))

    def _fail_all(self, reason: str) -> None:
        for number in list(self._streams):
            self._fail(number, reason)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def dial(path: Path) -> Http2Connection:
    """A client's connection to a unix socket. Raises OSError."""
    _, connection = await asyncio.get_running_loop().create_unix_connection(Http2Connection, str(path))
    return connection
