"""Blocking calls in a daemon thread: bounded, one at a time, refused while one is overdue."""

from __future__ import annotations

import asyncio
import errno
import threading
import weakref
from collections.abc import Iterator
from functools import partial

import pytest

from gpushare_agent.core.kit import daemon_thread
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.model.errors import Unavailable
from tests.support_deadline import DEADLINE_S


@pytest.fixture(autouse=True)
def no_thread_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """But where a test says so: `gate` waits for their end."""
    monkeypatch.setattr(daemon_thread, "KEEP_S", 0.0)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What the blocking function waits for; opened at the end, so that no thread is left."""
    event, before = threading.Event(), set(threading.enumerate())
    yield event
    event.set()
    for thread in set(threading.enumerate()) - before:  # another test's may be kept for a minute
        thread.join(DEADLINE_S)


async def test_results_and_errors_come_through() -> None:
    """What the system refuses, also by a TimeoutError of its own, may be had later; any other error is as it was raised."""
    worker = DaemonThread("worker", advice="Check it.")
    assert await worker.call(lambda: 5, "counting", DEADLINE_S) == 5

    def fails(error: Exception) -> None:
        raise error

    for error, text in (
        (TimeoutError("of the file system"), "of the file system. Check it."),
        (OSError(errno.EMFILE, "too many"), "too many. The agent's open files are used up"),
    ):
        with pytest.raises(Unavailable, match=f"counting failed: {text}"):
            await worker.call(partial(fails, error), "counting", DEADLINE_S)
    with pytest.raises(ValueError, match="a bug"):
        await worker.call(partial(fails, ValueError("a bug")), "counting", DEADLINE_S)


async def test_a_result_is_its_callers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the worker nor its thread, which waits for the next call, keeps it."""
    monkeypatch.setattr(daemon_thread, "KEEP_S", DEADLINE_S)
    worker = DaemonThread("keeper", advice="Check it.")
    result = weakref.ref(await worker.call(threading.Event, "making", DEADLINE_S))
    await worker.call(lambda: None, "ending", DEADLINE_S)
    assert result() is None
    last = weakref.ref(await worker.call(threading.Event, "making", DEADLINE_S))
    async with asyncio.timeout(DEADLINE_S):
        while last() is not None:
            await asyncio.sleep(0)


async def test_calls_that_follow_each_other_share_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that calls each second does not start a thread each second."""
    monkeypatch.setattr(daemon_thread, "KEEP_S", DEADLINE_S)  # not ended between two calls on a busy machine
    worker = DaemonThread("shared", advice="Check it.")
    assert len({await worker.call(threading.current_thread, "asking", DEADLINE_S) for _ in range(3)}) == 1


async def test_while_a_call_hangs_further_ones_are_refused_without_a_thread(gate: threading.Event) -> None:
    """The first is given up after its time; when it returns at last, calls are made again."""
    worker = DaemonThread("worker-hangs", advice="Check it.")
    with pytest.raises(Unavailable, match=r"waiting got no answer within 0\.01 s\. Check it\."):
        await worker.call(gate.wait, "waiting", 0.01)
    with pytest.raises(Unavailable, match=r"again was not tried: an earlier call still hangs\. Check it\."):
        await worker.call(lambda: 5, "again", DEADLINE_S)
    assert sum(thread.name == "worker-hangs" for thread in threading.enumerate()) == 1
    gate.set()
    while True:
        try:
            assert await worker.call(lambda: 5, "again", DEADLINE_S) == 5
            break
        except Unavailable:
            await asyncio.sleep(0)


async def test_a_call_that_was_cancelled_is_waited_for_by_the_next(gate: threading.Event) -> None:
    """Nobody listens to it any more, but it is not overdue: the next call has its turn after it."""
    worker = DaemonThread("worker", advice="Check it.")
    started = threading.Event()

    def slow() -> None:
        started.set()
        gate.wait()

    async with asyncio.TaskGroup() as group:
        first = group.create_task(worker.call(slow, "first", DEADLINE_S))
        while not started.is_set():
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        second = group.create_task(worker.call(lambda: 5, "second", DEADLINE_S))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not second.done()
        gate.set()
        assert await second == 5
