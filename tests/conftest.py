"""Every test leaves the machine as it found it: no task, no socket file, no child process."""

from __future__ import annotations

import asyncio
import inspect
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory with a short path: a unix address has room for 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def no_task_is_left() -> AsyncIterator[None]:
    """A task that a test started and did not end fails that test."""
    yield
    # What was cancelled or closed at the very end gets a few turns to finish.
    for _ in range(5):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left behind: {sorted(str(task) for task in left)}"


@pytest.fixture(autouse=True)
def leaves_no_task(request: pytest.FixtureRequest) -> None:
    """Applies the check to every asynchronous test."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("no_task_is_left")


@pytest.fixture(autouse=True)
def log_is_reset() -> Iterator[None]:
    """Names bound to one test's log lines do not show in the next one's."""
    yield
    structlog.contextvars.clear_contextvars()
