"""What is left out of HTTP/2's costs, and that the peer sees the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from hyperframe.frame import DataFrame, Frame, PingFrame

from gpushare_agent.core.kit.http2_costs import MAX_CLOSED_STREAMS, bound_closed_streams, shorten_frame_texts


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
