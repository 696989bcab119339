"""gRPC with raw bytes: the codec, the unix server and the client channel of the embedded kubelet.

The server leaves its socket file behind when it closes, as a kubelet does. It uses private names of grpclib, as
kit/grpc_server does: hence the upper bound on its version.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

from grpclib import GRPCError, Status
from grpclib.client import Channel
from grpclib.encoding.base import CodecBase
from grpclib.protocol import H2Protocol
from grpclib.server import Server

MESSAGE_LIMIT = 4 * 2**20
"""grpc-go's default for messages received; the kubelet does not raise it."""
_CLOSE_TIMEOUT_S = 2.0


class BytesCodec(CodecBase):
    """Messages are the encoded bytes themselves."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> bytes:
        if len(data) > MESSAGE_LIMIT:
            text = f"grpc: received message larger than max ({len(data)} vs. {MESSAGE_LIMIT})"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, text)
        return data


def open_channel(path: Path) -> Channel:
    return Channel(path=str(path), codec=BytesCodec())


class UnixServer(Server):
    """Serves on one unix socket; `stop` ends every connection at once."""

    def __init__(self, handlers: Collection[Any]) -> None:
        super().__init__(handlers, codec=BytesCodec())
        self._protocols: weakref.WeakSet[H2Protocol] = weakref.WeakSet()

    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        self._protocols.add(protocol)
        return protocol

    async def start_at(self, path: Path) -> None:
        """Replaces whatever socket is there by a new one."""
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        keeps_file = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        self._server = await asyncio.get_running_loop().create_unix_server(
            self._protocol_factory,
            sock=listener,
            **keeps_file,  # type: ignore[arg-type]  # the argument exists from 3.13 on only
        )
        self._server_closed_fut = asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        """Also where it never started."""
        if self._server is None or not self._server.is_serving():
            return
        self.close()
        for protocol in list(self._protocols):
            connection = getattr(protocol, "connection", None)
            if connection is not None and not connection.is_closing():
                connection.close()
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await self.wait_closed()
