"""One question to the container runtime: the errors of its answer in this project's words.

Not for what is asked: runtime/cri.py does that. No state.
"""

from __future__ import annotations

import re
from typing import TypeVar

import betterproto2
from grpclib import Status

from gpushare_agent.kit.grpc_client import RpcFailed, UnixChannel
from gpushare_agent.kit.wire_scan import MalformedMessageError
from gpushare_agent.model.errors import Corrupt, NotFound, Rejected, Unavailable

_NO_SUCH = re.compile(r"no such container", re.IGNORECASE)
"""cri-dockerd passes docker's words on without the status."""

Message = TypeVar("Message", bound=betterproto2.Message)


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
        return await channel.unary(method, request, answer_type)
    except RpcFailed as e:
        raise _renamed(e, what) from e
    except MalformedMessageError as e:
        raise Corrupt(f"{what} answered no valid message: {e}") from e


def _renamed(error: RpcFailed, what: str) -> Exception:
    text = f"{what} {'answered' if error.is_answer else 'failed:'} {error}"
    if error.status is Status.NOT_FOUND or _NO_SUCH.search(error.text):
        return NotFound(text)
    if error.status is Status.UNIMPLEMENTED:
        return Rejected(f"{text}. It has no CRI v1: containerd needs its cri plugin enabled and version 1.6 or later")
    return Unavailable(f"{text}; it is asked again later")
