"""The bounded gRPC client against servers on real sockets: each way in which a call fails has one name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from grpclib import GRPCError, Status
from grpclib.const import Cardinality, Handler

from gpushare_agent.core.kit.grpc_client import MessageTooLargeError, RpcFailed, UnixChannel
from tests.kubelet.support_plugin import serving

METHOD, STREAM = "/test.Echo/Unary", "/test.Echo/Stream"


class Echo:
    """Answers with what `answer` returns for the request; the stream answers it twice."""

    def __init__(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._answer = answer

    def __mapping__(self) -> dict[str, Handler]:
        async def unary(stream: Any) -> None:
            await stream.send_message(await self._answer(await stream.recv_message()))

        async def twice(stream: Any) -> None:
            answer = await self._answer(await stream.recv_message())
            for _ in range(2):
                await stream.send_message(answer)

        return {
            METHOD: Handler(unary, Cardinality.UNARY_UNARY, bytes, bytes),
            STREAM: Handler(twice, Cardinality.UNARY_STREAM, bytes, bytes),
        }


async def same(request: bytes) -> bytes:
    return request


@pytest.mark.parametrize("body", [b"", b"12345", b"x" * 100_000], ids=["empty", "as-long-as-a-prefix", "long"])
async def test_bytes_are_returned_as_they_are(body: bytes) -> None:
    """From a unary call and from a stream."""
    async with serving(Echo(same)) as path:
        channel = UnixChannel(path)
        assert await channel.unary(METHOD, body, bytes) == body
        assert [message async for message in channel.unary_stream(STREAM, body, bytes)] == [body, body]
        channel.close()


async def hang(request: bytes) -> bytes:
    await asyncio.Event().wait()
    return b""


async def failed(channel: UnixChannel) -> tuple[Status, bool]:
    """The status of a call, and whether it is the peer's."""
    with pytest.raises(RpcFailed) as caught:
        await channel.unary(METHOD, b"", bytes, timeout_s=0.2)
    return caught.value.status, caught.value.is_answer


async def test_a_status_of_the_peer_is_an_answer() -> None:
    """With its text; the connection is still good."""

    async def refuse(request: bytes) -> bytes:
        raise GRPCError(Status.NOT_FOUND, "no such thing")

    async with serving(Echo(refuse)) as path:
        channel = UnixChannel(path)
        with pytest.raises(RpcFailed, match="NOT_FOUND: no such thing"):
            await channel.unary(METHOD, b"", bytes)
        assert await failed(channel) == (Status.NOT_FOUND, True)
        channel.close()


async def test_an_absent_socket_and_a_deadline_are_no_answers(short_dir: Path) -> None:
    """UNAVAILABLE and DEADLINE_EXCEEDED, as gRPC implementations call them."""
    async with serving(Echo(hang)) as path:
        for channel, status in (
            (UnixChannel(short_dir / "none.sock"), Status.UNAVAILABLE),
            (UnixChannel(path), Status.DEADLINE_EXCEEDED),
        ):
            assert await failed(channel) == (status, False)
            channel.close()


async def test_a_call_that_is_interrupted_leaves_no_cancellation_in_its_task() -> None:
    """Neither by its deadline nor by a peer that closes the connection: the task's own timeouts would misread it."""

    async def close(request: bytes) -> bytes:
        channel.close()
        return await hang(request)

    task = asyncio.current_task()
    assert task is not None
    async with serving(Echo(close)) as path:
        channel = UnixChannel(path)
        for _attempt in range(2):
            await failed(channel)
            assert task.cancelling() == 0
        channel.close()


async def test_a_peer_that_ends_before_it_takes_the_connection_is_no_answer(short_dir: Path) -> None:
    """UNAVAILABLE: a kubelet that ends between our connect and our first byte, which then cannot be written."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_dir / "s"))
        listener.listen()
        channel = UnixChannel(short_dir / "s")
        async with asyncio.TaskGroup() as group:
            call = group.create_task(failed(channel))
            await asyncio.sleep(0)  # the call's first step connects; the bytes follow in the next turn
            listener.close()
        assert call.result() == (Status.UNAVAILABLE, False)
        channel.close()


async def test_an_answer_over_the_limit_is_refused_by_its_prefix() -> None:
    """Of a unary call and of a stream; the text is grpc-go's."""
    async with serving(Echo(same)) as path:
        channel = UnixChannel(path, max_answer_bytes=10)
        with pytest.raises(MessageTooLargeError, match=r"received message larger than max \(11 vs\. 10\)"):
            await channel.unary(METHOD, b"x" * 11, bytes)
        with pytest.raises(MessageTooLargeError):
            _ = [message async for message in channel.unary_stream(STREAM, b"x" * 11, bytes)]
        channel.close()
