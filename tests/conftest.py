"""Every test leaves the machine as it found it: no task, no socket file, no child process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings

from gpushare_agent.core.kit.logs import LIBRARY_LEVELS, WRITER, QueuedHandler
from tests.support_deadline import DEADLINE_S
from tests.support_start import BY_FORK, SERVER, StartedByFork
from tests.support_threads import remove_directory

# The same examples in each run: one that fails rarely would stop somebody else's change. Another profile tries others.
settings.register_profile("busy", deadline=None, derandomize=True)
settings.load_profile("busy")  # a busy machine takes longer for an example than hypothesis allows

# A test reads what a command in this process wrote last, however busy the machine is.
WRITER.flush_timeout_s = DEADLINE_S

TEST_S, LONG_TEST_S = 5 * DEADLINE_S, 30 * DEADLINE_S
"""How long an asynchronous test may take. A test bounds a wait of its own where it says what did not come about."""
OPEN_FILES = 4096
"""What the floods of the tests need at most, with room to spare. Many systems start a user's programs with 1,024."""


def pytest_configure() -> None:
    """Raises the soft limit of open files as far as the hard one allows: one test that runs out of them fails others.

    A job in a shell's background has SIGINT ignored, and so have its children: Ctrl-C would not end those of the tests.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if BY_FORK in os.environ:
        subprocess.Popen = StartedByFork  # type: ignore[misc]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def pytest_unconfigure() -> None:
    SERVER.stop()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under `-m a` or `-m "not a and not b"`, a file that has no such test is not imported: each worker would."""
    terms = config.option.markexpr.split(" and ")
    if collection_path.suffix != ".py" or not all(re.fullmatch(r"(not )?\w+", term) for term in terms):
        return None
    text = collection_path.read_text(encoding="utf-8")
    of_file = re.search(r"^pytestmark = \[?pytest\.mark\.(\w+)", text, re.MULTILINE)
    is_excluded = of_file is not None and f"not {of_file[1]}" in terms
    lacks = any(f"pytest.mark.{term}" not in text for term in terms if not term.startswith("not "))
    return True if is_excluded or lacks else None


def pytest_collection(session: pytest.Session) -> None:
    """Each worker begins to import at another file, and finds compiled what the others began with: else all compile all."""
    worker: dict[str, Any] | None = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    folder = Path(__file__).parent
    files = [path for path in sorted(folder.rglob("test_*.py")) if not pytest_ignore_collect(path, session.config)]
    begin = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for path in files[begin:] + files[:begin]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection meets it too, and reports it
            importlib.import_module(".".join(path.relative_to(folder.parent).with_suffix("").parts))


def pytest_report_header() -> str:
    return f"open files: at most {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"


def pytest_itemcollected(item: pytest.Item) -> None:
    """An asynchronous test that hangs fails, at the line where it waits."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = _bounded(item.obj, LONG_TEST_S if item.get_closest_marker("slow") else TEST_S)


def _bounded(test: Callable[..., Awaitable[None]], limit_s: float) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def bounded(**arguments: Any) -> None:
        async with asyncio.timeout(limit_s):
            await test(**arguments)

    return bounded


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
    remove_directory(path)


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
def leaves_no_task(request: pytest.FixtureRequest) -> Iterator[None]:
    """Applies the check to every asynchronous test. And no test leaves a signal blocked: programs of later ones would not
    get it."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("no_task_is_left")
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """What a test set up of this process's log ends with it, and so do the names that it bound to log lines.

    A command that a test runs in this process logs to the standard error of that test, which `capsys` closes, hence before
    the fixtures end: a later test's line would be lost there, and `log_lines_dropped` be among the lines of a third test.
    """
    structlog.contextvars.clear_contextvars()
    root = logging.getLogger()
    queued = [handler for handler in root.handlers if isinstance(handler, QueuedHandler)]
    if not queued:
        return
    assert WRITER.flush(), "the log's thread hangs"
    WRITER.on_turn = lambda: None
    for handler in queued:
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)
    for name in LIBRARY_LEVELS:
        library = logging.getLogger(name)
        library.setLevel(logging.NOTSET)
        library.filters.clear()
    logging.captureWarnings(False)
    sys.excepthook = sys.__excepthook__
    structlog.reset_defaults()
