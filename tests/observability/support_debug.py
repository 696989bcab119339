"""A web port whose /debug has fake sources, and raw requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, TCPConnector
from yarl import URL

from gpushare_agent.agent.observability.http.debug_pages import DebugSources
from gpushare_agent.agent.observability.http.server import WebServer
from gpushare_agent.agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.core.settings.settings import load_settings
from tests.cluster.support_kube import running
from tests.observability.support_display import snapshot, train_allocation, train_pod, usage_round, whole_allocation

TOKEN = "0123456789abcdef-the-token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    text: str
    headers: Mapping[str, str]


def sources(*flags: str) -> DebugSources:
    return DebugSources(
        settings=load_settings(["--node-name=n1", *flags], {}).settings,
        snapshot=lambda: snapshot(usage=usage_round()),
        allocations=lambda: [whole_allocation(), train_allocation()],
        pods=lambda: [train_pod()],
        now=lambda: 12.5,
    )


@asynccontextmanager
async def serving(
    *, addr: str = "127.0.0.1", token_file: Path | None = None, debug: DebugSources | None = None, **others: Any
) -> AsyncIterator[int]:
    """A running web server's port."""
    debug = debug or sources(f"--web.debug-token-file={token_file or ''}")
    server = WebServer(addr, 0, metrics=AgentMetrics(), ready=list, debug=debug, **others)
    async with running(server.run):
        port = await server.wait_listening()
        yield port


async def ask(
    port: int, path: str, *, method: str = "GET", at: str = "127.0.0.1", source: str = "", **headers: str
) -> Answer:
    """One request with a connection of its own; `_` in a header's name is `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"http://{at}:{port}{path}"
    async with (
        ClientSession(connector=TCPConnector(local_addr=(source, 0) if source else None)) as session,
        session.request(method, URL(url, encoded=True), headers=named) as answer,
    ):
        return Answer(status=answer.status, text=await answer.text(), headers=dict(answer.headers))


async def send_raw(port: int, *pieces: bytes) -> bytes:
    """What comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            pass
