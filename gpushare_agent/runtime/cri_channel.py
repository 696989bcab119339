"""One call to the container runtime: connecting, limits, and its errors renamed.

Not for what is asked: runtime/cri.py does that. State owned: none but the connection that a channel is.
"""

from __future__ import annotations

import re
import ssl
import struct
from pathlib import Path
from typing import Any, TypeVar, cast

import betterproto2
from grpclib import GRPCError, Status
from grpclib.client import Channel
from grpclib.const import Cardinality
from grpclib.exceptions import ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from h2.exceptions import ProtocolError as H2ProtocolError

from gpushare_agent.kit.grpc_codec import StrictCodec
from gpushare_agent.kit.sockets import connectable_path
from gpushare_agent.kit.wire_scan import MalformedMessageError
from gpushare_agent.model.errors import Corrupt, NotFound, Rejected, Unavailable

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""What the kubelet, too, takes from a runtime at most."""

_NO_SUCH = re.compile(r"no such container", re.IGNORECASE)
"""cri-dockerd passes docker's message on without the status."""
_PREFIX_BYTES = 5

Message = TypeVar("Message", bound=betterproto2.Message)


class UnixChannel(Channel):
    """Connects to a socket whose path may be longer than an address."""

    def __init__(self, path: Path) -> None:
        super().__init__(path=str(path), codec=StrictCodec())
        self.socket_path = path

    async def _create_connection(self) -> H2Protocol:
        with connectable_path(self.socket_path) as address:
            self._path = address
            return await super()._create_connection()


async def call_unary(
    channel: UnixChannel, method: str, request: betterproto2.Message, answer_type: type[Message]
) -> Message:
    """
    Raises:
        Unavailable: the runtime is away, or failed. Time is the caller's to limit.
        NotFound: it does not know the named thing.
        Rejected: it does not know the method.
        Corrupt: what came is no such message, or too large.
    """
    what = f"{method.rpartition('/')[2]} of the container runtime at {channel.socket_path}"
    try:
        return await _exchange(channel, method, request, answer_type)
    except GRPCError as e:
        raise _renamed(e, what) from e
    except MalformedMessageError as e:
        raise Corrupt(f"{what} answered no valid message: {e}") from e
    except (OSError, StreamTerminatedError, ProtocolError, H2ProtocolError, ssl.SSLError, AssertionError) as e:
        # grpclib raises AssertionError for an answer that ends early
        raise Unavailable(f"{what} failed: {e or type(e).__name__}; it is asked again later") from e


async def _exchange(channel: Channel, path: str, request: betterproto2.Message, answer_type: type[Message]) -> Message:
    stream = channel.request(path, Cardinality.UNARY_UNARY, type(request), answer_type)
    async with stream:
        await stream.send_message(request, end=True)
        _bound_answer(stream)
        answer = await stream.recv_message()
    if answer is None:
        raise MalformedMessageError("no message")
    return answer


def _bound_answer(stream: Any) -> None:
    """Refuses a message over the limit by its length prefix, before any of it is kept. grpclib has no such limit."""
    buffer = stream._stream.buffer
    read = buffer.read

    async def read_bounded(size: int) -> bytes:
        content = cast(bytes, await read(size))
        if size == _PREFIX_BYTES and len(content) == _PREFIX_BYTES:
            is_compressed, length = struct.unpack(">BI", content)
            if is_compressed:
                raise MalformedMessageError("it is compressed")
            if length > MAX_ANSWER_BYTES:
                raise MalformedMessageError(f"{length} bytes are over the limit of {MAX_ANSWER_BYTES}")
        return content

    buffer.read = read_bounded


def _renamed(error: GRPCError, what: str) -> Exception:
    text = f"{what} answered {error.status.name}: {error.message or 'no reason given'}"
    if error.status is Status.NOT_FOUND or _NO_SUCH.search(error.message or ""):
        return NotFound(text)
    if error.status is Status.UNIMPLEMENTED:
        return Rejected(f"{text}. It has no CRI v1: containerd needs its cri plugin enabled and version 1.6 or later")
    return Unavailable(f"{text}; it is asked again later")
