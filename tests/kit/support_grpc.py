from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from grpclib.client import UnaryUnaryMethod
from grpclib.encoding.base import CodecBase

from gpushare_agent.core.kit.grpc_client import UnixChannel
from gpushare_agent.core.kit.grpc_server import GrpcServer
from gpushare_agent.core.kit.sockets import bind_unix_socket


@asynccontextmanager
async def served_at(path: Path, *services: Any, mode: int = 0o600, **options: Any) -> AsyncIterator[Path]:
    """gRPC services on a unix socket, which is gone at the end; its connections end as those of a process that ends."""
    server = GrpcServer(services, **options)
    await server.serve(bind_unix_socket(path, mode=mode))
    try:
        yield path
    finally:
        await server.stop()
        path.unlink(missing_ok=True)


class RawCodec(CodecBase):
    """Bytes as they are, in both directions."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> bytes:
        return data


async def called(path: Path, method: str, request: bytes = b"") -> bytes:
    """The answer of whoever serves the socket, as bytes."""
    channel = UnixChannel(path)
    try:
        answer: bytes = await UnaryUnaryMethod(channel, method, bytes, bytes)(request)
        return answer
    finally:
        channel.close()
