"""`gpushare-agent sandbox` as a child process: started as a person would, ended, and waited for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpushare_agent.sandbox.control import ask

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    code: int
    out: str
    err: str


async def start(
    *arguments: str | Path, cwd: Path = ROOT, variables: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-P", "-m", "gpushare_agent", "sandbox", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(variables or {})}
    return await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=cwd, env=environment
    )


async def ended(process: asyncio.subprocess.Process, text: str = "") -> Ended:
    out, err = await process.communicate(text.encode())
    assert process.returncode is not None
    return Ended(code=process.returncode, out=out.decode(), err=err.decode())


async def sandbox(*arguments: str | Path, cwd: Path = ROOT, text: str = "") -> Ended:
    return await ended(await start(*arguments, cwd=cwd), text)


async def once(state: Path, *flags: str) -> dict[str, Any]:
    """The report of a sandbox whose pods run, and which then ends."""
    done = await sandbox("--state-dir", state, "--port", "0", "--once", "-o", "json", *flags)
    assert done.code == 0, done.err
    document: dict[str, Any] = json.loads(done.out)
    return document


@asynccontextmanager
async def live(
    state: Path, *arguments: str | Path, variables: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await start("--state-dir", state, "--port", "0", *arguments, variables=variables)
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await ended(process)


async def read_until(process: asyncio.subprocess.Process, words: str) -> None:
    assert process.stdout is not None
    while words not in (line := (await process.stdout.readline()).decode()):
        if not line:
            assert process.stderr is not None
            last = (await process.stderr.read()).decode()[-2000:]
            raise AssertionError(f"the sandbox ended before it printed {words!r}: {last}")


async def document_of(state: Path) -> dict[str, Any]:
    """What `status -o json` would print."""
    document: dict[str, Any] = (await ask(state / "control.sock", {"command": "status"}))["document"]
    return document


async def registered(state: Path) -> dict[str, Any]:
    """The report once both resources are healthy again."""
    while True:
        document = await document_of(state)
        node = document["node"]
        if node["is_offered"] and {gpu["is_healthy"] for gpu in node["gpus"]} == {True}:
            return document
        await asyncio.sleep(0.05)  # another process: it can only be asked again
