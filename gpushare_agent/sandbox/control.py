"""The way from another terminal to a running sandbox: one JSON line each way on a unix socket of mode 0600.

Request: {"command": "apply"|"delete"|"exec"|"restart-kubelet"|"kill-agent"|"status", …}; answer: {"ok": bool,
"lines": [what was done], "errors": [what was not], "document": the report, for status; "env" and "notes", for exec}.
Who asks is known by the kernel's word (SO_PEERCRED), never by the message. No state.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gpushare_agent.adapters.peer_credentials import peer_credentials
from gpushare_agent.kit.sockets import bind_unix_socket
from gpushare_agent.model.errors import AgentError, Unavailable

Request = dict[str, Any]
Answer = dict[str, Any]
Handler = Callable[[Request, int], Awaitable[Answer]]
"""Gets the request and the asker's PID, 0 where that cannot be seen from here. May raise AgentError: its text is the
answer."""

_LINE_LIMIT = 8 * 2**20
_TIMEOUT_S = 60.0


@asynccontextmanager
async def open_control(path: Path, handle: Handler) -> AsyncIterator[None]:
    """Serves until the block ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                asker = peer_credentials(writer.transport)
                answer = await _answer(await reader.readline(), handle, asker.pid if asker is not None else 0)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, OSError, ValueError):
            return  # the other side has gone, is too slow, or sent a line too long
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, sock=bind_unix_socket(path, mode=0o600), limit=_LINE_LIMIT)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


async def _answer(line: bytes, handle: Handler, asker_pid: int) -> Answer:
    try:
        request = json.loads(line)
    except ValueError as error:
        return {"ok": False, "lines": [], "errors": [f"the request is not JSON: {error}"]}
    try:
        return await handle(request, asker_pid)
    except AgentError as error:
        return {"ok": False, "lines": [], "errors": [str(error)]}


async def ask(path: Path, request: Request) -> Answer:
    """Sends one request to the sandbox behind `path`. Raises Unavailable where none answers."""
    advice = "start one with `gpushare-agent sandbox`, or name its directory with --state-dir"
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=_LINE_LIMIT)
            try:
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
