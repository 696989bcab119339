"""The port of a child process is free for that child alone."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from gpushare_agent.sandbox.held_port import free_port


async def test_a_free_port_is_for_the_server_that_is_started_there_again_and_again() -> None:
    """As the servers listen; whoever binds it otherwise gets an error."""
    port = free_port()
    for _ in range(2):
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", port)
        server.close()
        await server.wait_closed()
    with socket.socket() as other, pytest.raises(OSError) as failure:
        other.bind(("127.0.0.1", port))
    assert failure.value.errno == errno.EADDRINUSE
