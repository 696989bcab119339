"""Programs that a test starts: no test waits for one for ever, and none outlives its test."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support_deadline import DEADLINE_S


@asynccontextmanager
async def running_process(*command: str | Path, **options: Any) -> AsyncIterator[Process]:
    """With the options of `create_subprocess_exec`; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(*command, **options)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        async with asyncio.timeout(DEADLINE_S):
            await process.wait()


async def output_of(*command: str | Path, given: bytes | None = None, **options: Any) -> tuple[int, bytes, bytes]:
    """Exit code, output and errors of a program that ends by itself; `given` is written to its standard input."""
    async with running_process(*command, **{"stdout": PIPE, "stderr": PIPE, **options}) as process:
        async with asyncio.timeout(DEADLINE_S):
            out, err = await process.communicate(given)
    assert process.returncode is not None
    return process.returncode, out or b"", err or b""


@contextmanager
def refused_opening(monkeypatch: pytest.MonkeyPatch, is_refused: Callable[[Path], bool]) -> Iterator[None]:
    """These files cannot be opened, as in a process that has its most open files."""
    opened = os.open

    def refuse(path: str | Path, *args: Any, **more: Any) -> int:
        if is_refused(Path(path)):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        yield


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """This process may open no more files, inotify instances among them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
