"""Every test leaves the machine as it found it: no task, no socket file, no child process."""

from __future__ import annotations

import asyncio
import inspect
import resource
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

settings.register_profile("busy", deadline=None)
settings.load_profile("busy")  # a busy machine takes longer for an example than hypothesis allows

OPEN_FILES = 4096
"""What the floods of the tests need at most, with room to spare. Many systems start a user's programs with 1,024."""


def pytest_configure() -> None:
    """Raises the soft limit of open files as far as the hard one allows: one test that runs out of them fails others.

    A job in a shell's background has SIGINT ignored, and so have its children: Ctrl-C would not end those of the tests.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def pytest_report_header() -> str:
    return f"open files: at most {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"


@pytest.fixture
def many_open_files() -> None:
    """For a test that opens more than a thousand files at once: skipped where the hard limit does not allow it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        pytest.skip(f"this user may open {soft} files, and the test needs {OPEN_FILES} (ulimit -Hn)")


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
