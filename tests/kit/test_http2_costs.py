"""What is left out of HTTP/2's costs, and that the peer sees the same."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import FrameTooLargeError
from hyperframe.frame import DataFrame, Frame, PingFrame
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.kit.grpc_client import UnixChannel
from gpushare_agent.kit.grpc_server import GrpcServer
from gpushare_agent.kit.http2_costs import (
    MAX_CLOSED_STREAMS,
    JoinedDataFrames,
    bound_closed_streams,
    shorten_frame_texts,
)


@pytest.fixture
def _own_text() -> Iterator[None]:
    text = Frame.__repr__
    yield
    Frame.__repr__ = text  # type: ignore[method-assign]


@pytest.mark.usefixtures("_own_text")
def test_the_text_of_a_frame_leaves_its_content_out() -> None:
    """What h2 logs of a frame costs no time that grows with it, and still names which it was."""
    shorten_frame_texts()
    data = DataFrame(5)
    data.parse_body(memoryview(b"x" * 16384))
    assert (repr(data), repr(PingFrame())) == ("DataFrame(stream_id=5, 16384 bytes)", "PingFrame(stream_id=0, 0 bytes)")


def _data(content: bytes, stream: int = 1, **fields: object) -> bytes:
    return DataFrame(stream, content, **fields).serialize()


def _received(*pieces: bytes, limit: int = 16384) -> list[tuple[int, bytes, int]]:
    """Stream, content and what flow control counts of each DATA frame, as the pieces come."""
    buffer, found = JoinedDataFrames(), []
    buffer.max_frame_size = limit
    for piece in pieces:
        buffer.add_data(piece)
        found += [
            (frame.stream_id, frame.data, frame.flow_controlled_length)
            for frame in buffer
            if isinstance(frame, DataFrame)
        ]
    return found


def test_data_frames_of_one_stream_are_joined() -> None:
    """With all their bytes, for flow control too; another stream's, another kind and the end of the stream stand alone."""
    ends = _data(b"end", flags=["END_STREAM"])
    stream = b"".join(
        [_data(b"a"), _data(b"bc"), _data(b""), _data(b"x", 3), PingFrame().serialize(), _data(b"d"), ends]
    )
    assert _received(stream) == [(1, b"abc", 3), (3, b"x", 1), (1, b"d", 1), (1, b"end", 3)]


def test_padding_is_no_content_and_counts() -> None:
    """A padded frame is left as it is."""
    padded = _data(b"b", pad_length=3, flags=["PADDED"])
    assert _received(_data(b"a") + padded + _data(b"c")) == [(1, b"a", 1), (1, b"b", 5), (1, b"c", 1)]


async def test_the_connections_of_servers_and_clients_join_them() -> None:
    """Those that a server accepts and those that a channel makes."""
    loop, (accepted, connected) = asyncio.get_running_loop(), socket.socketpair()
    ends = [
        await loop.connect_accepted_socket(GrpcServer([])._protocol_factory, accepted),
        await loop.create_unix_connection(UnixChannel(Path("none"))._protocol_factory, sock=connected),
    ]
    buffers = [protocol.connection._connection.incoming_buffer for _, protocol in ends]
    for transport, _ in ends:
        transport.abort()
    await asyncio.sleep(0)  # the loop closes aborted transports on its next turn
    assert [type(buffer) for buffer in buffers] == [JoinedDataFrames] * 2


@given(st.lists(st.binary(max_size=40), min_size=1), st.integers(1, 50))
def test_frames_are_joined_wherever_the_bytes_are_cut(contents: list[bytes], size: int) -> None:
    """Nothing is lost, doubled or held back: what has come in full is handed on at once."""
    stream = b"".join(map(_data, contents))
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert b"".join(data for _, data, _ in _received(*pieces)) == b"".join(contents)


def test_a_frame_that_is_too_long_is_refused_behind_others() -> None:
    """By h2's own rule, and not joined to them."""
    with pytest.raises(FrameTooLargeError):
        _received(_data(b"fits") + _data(b"x" * 11), limit=10)


def test_a_connection_remembers_few_of_the_streams_that_it_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kubelet's connections last for months."""
    monkeypatch.setattr(H2Connection, "MAX_CLOSED_STREAMS", H2Connection.MAX_CLOSED_STREAMS)
    bound_closed_streams()
    client, server = H2Connection(H2Configuration()), H2Connection(H2Configuration(client_side=False))
    client.initiate_connection()
    server.initiate_connection()
    headers = [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "localhost")]
    for _ in range(MAX_CLOSED_STREAMS + 100):
        stream = client.get_next_available_stream_id()
        client.send_headers(stream, headers, end_stream=True)
        server.receive_data(client.data_to_send())
        server.send_headers(stream, [(":status", "200")], end_stream=True)
        client.receive_data(server.data_to_send())
        assert client.open_outbound_streams == server.open_inbound_streams == 0
    assert len(client._closed_streams) == len(server._closed_streams) == MAX_CLOSED_STREAMS
