"""Costs of HTTP/2 that are left out: h2 and hyperframe have them at every call, and the admission of a pod is six calls.

| what they do | here |
|---|---|
| remember how each of 65,536 streams of a connection was closed | of 512 |
| make a text of every received frame for a logger that drops it | its kind, stream and length |
| handle each DATA frame by itself: a List answer has two dozen | those that lie there together are one |

It uses private names of grpclib and h2, as kit/grpc_server.py does.
"""

from __future__ import annotations

import asyncio

from grpclib.protocol import H2Protocol
from h2.connection import H2Connection
from h2.frame_buffer import FrameBuffer
from hyperframe.frame import DataFrame, Frame

MAX_CLOSED_STREAMS = 512
"""Of a connection. They are remembered for frames that come late, within a round trip."""
_HEADER_BYTES = 9
"""Of each frame: three of length, one of its type, one of flags, four of the stream's number."""


def bound_closed_streams() -> None:
    """Bounds what connections remember that are made from now on. Calling it again changes nothing.

    h2 remembers how each of the last 65,536 streams of a connection was closed, 107 bytes for one (measured). The kubelet
    keeps its connections for months, and each pod takes about ten streams: a kilobyte for each pod, until it is 7 MiB a
    connection.
    """
    H2Connection.MAX_CLOSED_STREAMS = MAX_CLOSED_STREAMS


def shorten_frame_texts() -> None:
    """Leaves flags and content out of the repr of frames. Calling it again changes nothing.

    h2 4.4 hands `repr(frame)` of every received frame to its logger, which by default drops it. For a DATA frame that text
    is formatted from all of its bytes in hexadecimal: 0.4 ms of a List answer of 390 kB, which every admission waits for
    (docs/reference/measurements.md).
    """
    Frame.__repr__ = _text  # type: ignore[method-assign]  # hyperframe offers no other way


def _text(frame: Frame) -> str:
    return f"{type(frame).__name__}(stream_id={frame.stream_id}, {frame.body_len} bytes)"


class JoinedDataFrames(FrameBuffer):
    """Received frames, in which DATA frames of one stream that follow each other without a flag are one: where a sender
    cuts its data means nothing in HTTP/2 (RFC 9113, 6.1), and flow control counts bytes. grpc-go cuts at 16 KiB."""

    def __next__(self) -> Frame:
        frame = super().__next__()
        # Flags are padding and the end of the stream: such a frame is left as it is.
        if not isinstance(frame, DataFrame) or frame.flags:
            return frame
        received, at = self._data, 0
        parts: list[bytes | memoryview] = [frame.data]
        view = memoryview(received)
        same = b"\0\0" + frame.stream_id.to_bytes(4, "big")  # type DATA, no flags, the stream
        while received[at + 3 : at + _HEADER_BYTES] == same:
            end = at + _HEADER_BYTES + int.from_bytes(received[at : at + 3], "big")
            # Not there in full yet, or longer than it may be: h2's own reader finds out which.
            if end > len(received) or end - at > _HEADER_BYTES + self.max_frame_size:
                break
            parts.append(view[at + _HEADER_BYTES : end])
            at = end
        if at:
            frame.data = b"".join(parts)
            frame.body_len = len(frame.data)
        parts.clear()
        view.release()  # a buffer that is looked at cannot shrink
        del received[:at]
        return frame


class LeanH2Protocol(H2Protocol):
    """grpclib's connection without these costs."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        h2 = self.connection._connection
        h2.incoming_buffer = JoinedDataFrames(server=not h2.config.client_side)
