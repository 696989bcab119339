"""gRPC calls over a unix socket, bounded in time and size, with the errors of grpclib, h2 and the socket renamed once.

| what happens | what the caller gets |
|---|---|
| the peer answers with a status other than OK | RpcFailed with that status and text, `is_answer` |
| the socket is absent, the connection breaks, the peer violates HTTP/2 | RpcFailed, UNAVAILABLE |
| no answer within `timeout_s`, connecting included | RpcFailed, DEADLINE_EXCEEDED |
| the answer is over the limit, compressed, or no such message | MalformedMessageError |

The limit is compared with the answer's length prefix, before any of it is kept. This module uses private names of
grpclib, as kit/grpc_server.py does. State owned: the connection of one channel, which is opened at the first call; after
a failure without an answer the owner closes the channel and opens another.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from grpclib import GRPCError, Status
from grpclib.client import Channel, Stream
from grpclib.const import Cardinality
from grpclib.exceptions import ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from h2.exceptions import ProtocolError as H2ProtocolError

from gpushare_agent.core.kit.grpc_codec import StrictCodec
from gpushare_agent.core.kit.protobuf import MalformedMessageError
from gpushare_agent.core.kit.sockets import connectable_path

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""The most that the kubelet, too, takes from a container runtime. A List answer of a kubelet has about 95 bytes per device
ID: this is room for 170,000 of them."""

_LOST = ("", "Connection lost", "Connection closed")
"""grpclib's texts for the end of a connection; the last one where this side closes it at the same moment."""

Message = TypeVar("Message")


class RpcFailed(Exception):  # noqa: N818 - as the errors of model/errors.py, into which callers turn it
    """A call without a usable answer. `is_answer`: the peer itself sent the status."""

    def __init__(self, status: Status, text: str, *, is_answer: bool = False) -> None:
        super().__init__(f"{status.name}: {text or 'no reason given'}" if is_answer else text)
        self.status = status
        self.text = text
        self.is_answer = is_answer


class MessageTooLargeError(MalformedMessageError):
    """The text is that of grpc-go."""


class UnixChannel(Channel):
    """One connection to the socket at `path`, which may be longer than a socket address. Messages are generated classes, or
    bytes, which are sent and returned as they are. Close it with `close`."""

    def __init__(self, path: Path, *, max_answer_bytes: int = MAX_ANSWER_BYTES) -> None:
        # grpclib connects to `_path`, which is set again for each connection below: a long path needs a descriptor that is
        # open then.
        super().__init__(path=str(path), codec=StrictCodec())
        self.socket_path = path
        self._max_answer_bytes = max_answer_bytes

    async def _create_connection(self) -> H2Protocol:
        with connectable_path(self.socket_path) as address:
            self._path = address
            return await super()._create_connection()

    async def __connect__(self) -> H2Protocol:
        protocol = await super().__connect__()
        if protocol.connection.is_closing():  # its first write failed: grpclib would go on to an AttributeError
            raise ConnectionResetError("connection reset by peer")
        return protocol

    async def connect(self, *, timeout_s: float) -> None:
        """Raises RpcFailed. Calls connect by themselves."""
        with _errors_renamed():
            async with asyncio.timeout(timeout_s):
                await self.__connect__()

    async def unary(
        self, method: str, request: Any, answer_type: type[Message], *, timeout_s: float | None = None
    ) -> Message:
        """`method` is `/package.Service/Method`. `timeout_s` is sent to the peer; without it the caller limits the time.

        Raises RpcFailed, MalformedMessageError.
        """
        with _errors_renamed():
            async with self.request(
                method, Cardinality.UNARY_UNARY, type(request), answer_type, timeout=timeout_s
            ) as stream:
                await stream.send_message(request, end=True)
                self._bound_messages(stream)
                # After the request: only then the stream has the buffer of its answer.
                answer = await stream.recv_message()
        if answer is None:
            raise MalformedMessageError("no message")
        return answer

    async def unary_stream(
        self, method: str, request: Any, answer_type: type[Message]
    ) -> AsyncGenerator[Message, None]:
        """The messages of a server-streaming call, until the peer ends it. Raises as `unary`."""
        with _errors_renamed():
            async with self.request(method, Cardinality.UNARY_STREAM, type(request), answer_type) as stream:
                await stream.send_message(request, end=True)
                self._bound_messages(stream)
                async for message in stream:
                    yield message

    def _bound_messages(self, stream: Stream[Any, Any]) -> None:
        """grpclib has no limit: it would keep whatever a length prefix announces."""
        buffer, limit = stream._stream.buffer, self._max_answer_bytes
        read, is_prefix = buffer.read, False

        async def read_bounded(size: int) -> bytes:
            nonlocal is_prefix
            is_prefix = not is_prefix  # grpclib reads prefix and message in turn
            content = await read(size)
            if is_prefix and content:
                is_compressed, length = struct.unpack(">BI", content)
                if is_compressed:
                    raise MalformedMessageError("it is compressed")
                if length > limit:
                    raise MessageTooLargeError(f"received message larger than max ({length} vs. {limit})")
            return content

        # Replaced on this one buffer: grpclib takes no class of its own for it.
        buffer.read = read_bounded  # type: ignore[method-assign]


@contextmanager
def _cancellations_undone() -> Iterator[None]:
    """grpclib interrupts a call by a cancellation of the caller's task, and does not take it back when it raises its error
    instead. A timeout of that task that expires later would then end the task as cancelled, in silence (Python 3.11.2)."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    # The caller's own cancellation is not taken back.
    except asyncio.CancelledError:
        raise
    except BaseException:
        while task is not None and task.cancelling() > before:
            task.uncancel()
        raise


@contextmanager
def _errors_renamed() -> Iterator[None]:
    try:
        with _cancellations_undone():
            yield
    # A status that the peer has sent, in distinction to the ones below, which are this side's words.
    except GRPCError as e:
        raise RpcFailed(e.status, e.message or "", is_answer=True) from e
    except TimeoutError as e:
        raise RpcFailed(Status.DEADLINE_EXCEEDED, "context deadline exceeded") from e
    except StreamTerminatedError as e:
        reason = "EOF" if str(e) in _LOST else str(e)  # grpc-go's word, which the kubelet shows
        raise RpcFailed(Status.UNAVAILABLE, f"error reading from server: {reason}") from e
    except (OSError, ProtocolError, H2ProtocolError, AssertionError) as e:  # the last: an answer that ends early
        raise RpcFailed(Status.UNAVAILABLE, f"connection error: {e or type(e).__name__}") from e
