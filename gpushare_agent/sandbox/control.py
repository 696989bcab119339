"""The way from another terminal to a running sandbox: one JSON line each way on a unix socket of mode 0600.

Request: {"command": "apply"|"delete"|"exec"|"restart-kubelet"|"kill-agent"|"fail-gpu"|"heal-gpu"|"status", …}, a `Request`;
answer: {"ok": bool, "lines": [what was done], "errors": [what was not], "is_rejected": the request itself is wrong,
"document": the report, for status; "env" and "notes", for exec}.
The kernel identifies the client (SO_PEERCRED), never the message. It also identifies the server, because `exec` runs its
command with the environment of the answer. No state.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog
from msgspec import Struct, field

from gpushare_agent.core.kit.peer_credentials import peer_credentials
from gpushare_agent.core.kit.sockets import bind_unix_socket
from gpushare_agent.core.model.errors import AgentError, Rejected, Unavailable
from gpushare_agent.sandbox.state_directory import why_not_private

log = structlog.get_logger(__name__)

Answer = dict[str, Any]


class Request(Struct, frozen=True, kw_only=True):
    command: str
    pods: list[dict[str, Any]] = field(default_factory=list)
    """Manifests for `apply`, also of other kinds."""
    names: list[str] = field(default_factory=list)
    namespace: str = "default"
    pod: str = ""
    container: str | None = None
    node: str | None = None
    gpu: int = -1
    xid: int | None = None
    lost: str = ""


Handler = Callable[[Request, int], Awaitable[Answer]]
"""Gets the request and the client's PID, 0 where that cannot be seen from here. May raise AgentError: its text is the
answer."""

_LINE_LIMIT = 8 * 2**20
_TIMEOUT_S = 60.0


@asynccontextmanager
async def open_control(path: Path, handle: Handler) -> AsyncIterator[None]:
    """Serves until the block ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                peer = peer_credentials(writer.transport)
                answer = await _answer(reader, handle, peer.pid if peer is not None else 0)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, OSError):
            return  # the other side has gone or is too slow
        finally:
            writer.close()

    # Mode 0600 from the first moment: anyone who may connect may run commands as this user.
    server = await asyncio.start_unix_server(serve, sock=bind_unix_socket(path, mode=0o600), limit=_LINE_LIMIT)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


async def _answer(reader: asyncio.StreamReader, handle: Handler, peer_pid: int) -> Answer:
    try:
        request = msgspec.json.decode(await reader.readline(), type=Request)
    except (ValueError, RecursionError) as error:  # of a line too long, too
        return _refused(f"the request, JSON on one line of at most {_LINE_LIMIT} bytes, cannot be read: {error}")
    try:
        return await handle(request, peer_pid)
    except AgentError as error:
        return _refused(str(error)) | {"is_rejected": isinstance(error, Rejected)}
    except Exception as error:  # the client gets an answer, and the sandbox goes on
        log.warning("control_request_failed", command=request.command, exc_info=error)
        return _refused(f"the sandbox has failed at the request: {error!r}; its terminal shows where")


def _refused(why: str) -> Answer:
    return {"ok": False, "lines": [], "errors": [why]}


async def ask(path: Path, request: Mapping[str, Any], *, program: str = "gpushare-agent") -> Answer:
    """Sends one request to the sandbox behind `path`. `program`: how the advice of an error names it.

    Raises Unavailable where no sandbox answers that is this user's.
    """
    advice = f"start one with `{program} sandbox`, or name its directory with --state-dir"
    if problem := why_not_private(path.parent):
        raise Unavailable(
            f"nothing was asked of a sandbox in {path.parent}, which cannot be trusted: {problem}; {advice}"
        )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=_LINE_LIMIT)
            try:
                _check_is_ours(writer, path)
                writer.write(json.dumps(request).encode() + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise Unavailable(f"no sandbox runs in {path.parent}: {advice}") from error
    except (OSError, TimeoutError) as error:
        raise Unavailable(f"the sandbox in {path.parent} cannot be asked: {error!r}; {advice}") from error
    if not line:
        raise Unavailable(f"the sandbox in {path.parent} ended during the request")
    answer: Answer = json.loads(line)
    return answer


def _check_is_ours(writer: asyncio.StreamWriter, path: Path) -> None:
    peer = peer_credentials(writer.transport)
    if peer is None or peer.uid != os.geteuid():
        who = "is unknown" if peer is None else f"is user {peer.uid}, and you are user {os.geteuid()}"
        raise Unavailable(
            f"nothing was asked of the sandbox in {path.parent}: who runs it {who}; name the directory of your own with "
            "--state-dir"
        )
