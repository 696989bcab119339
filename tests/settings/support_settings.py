"""Runs the command line as a user does, and a node directory with listening sockets."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support_process import output_of

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without what would set anything of the agent."""
    names = ("GPUSHARE_", "NODE_NAME", "KUBE", "NOTIFY_SOCKET")
    return {k: v for k, v in os.environ.items() if not k.startswith(names)} | {"PYTHONPATH": str(ROOT)} | more


async def run_program(
    *argv: str, environ: dict[str, str] | None = None, stdout: int = asyncio.subprocess.PIPE
) -> Ended:
    """`python -m gpushare_agent ARGV`, waited for."""
    code, out, err = await output_of(
        *(sys.executable, "-m", "gpushare_agent", *argv),
        env=environ if environ is not None else clean_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
    )
    encoding = (environ or {}).get("PYTHONIOENCODING", "utf-8")
    return Ended(code, out.decode(encoding), err.decode(encoding))


@dataclass
class ListeningSocket:
    """A unix server that counts connections and records what they send, and never answers."""

    path: Path
    connections: int = 0
    received: bytearray = field(default_factory=bytearray)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while content := await reader.read(1024):
            self.received += content
        writer.close()


@asynccontextmanager
async def listening(path: Path) -> AsyncIterator[ListeningSocket]:
    found = ListeningSocket(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    server = await asyncio.start_unix_server(found._serve, path)
    try:
        yield found
    finally:
        server.close()
        await server.wait_closed()
        path.unlink(missing_ok=True)
