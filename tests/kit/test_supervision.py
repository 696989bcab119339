"""Bodies that must not end, stopping a task; delays; the service manager; logs."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gpushare_agent.core.kit import supervision
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.logs import WRITER, setup_logging
from gpushare_agent.core.kit.process import sd_notify
from gpushare_agent.core.kit.supervision import (
    ChangeSignal,
    EndedUnexpectedlyError,
    Reconciler,
    ReportOnce,
    bounded,
    forever,
    in_pool,
    retried,
    stop_task,
    wait_for,
    wait_while,
)
from gpushare_agent.core.model.errors import Unavailable
from tests.support_deadline import DEADLINE_S


async def _ends_as_cancelled() -> None:
    """As after a library that interrupts a call by cancelling the task and does not take it back."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("body", "says"), [(lambda: asyncio.sleep(0), "the informer"), (_ends_as_cancelled, "ended as cancelled")]
)
async def test_a_body_that_ends_is_an_error_that_names_it(body: Callable[[], Awaitable[None]], says: str) -> None:
    """A TaskGroup would not notice."""
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(forever("the informer", body))
            group.create_task(asyncio.Event().wait())
    (error,) = caught.value.exceptions
    assert isinstance(error, EndedUnexpectedlyError)
    assert "the informer" in str(error) and says in str(error)


async def test_a_body_that_is_cancelled_ends_without_an_error() -> None:
    """Cancellation is how it is meant to end."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(forever("waiting", asyncio.Event().wait))
        await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()


async def test_stopping_waits_until_the_task_has_cleaned_up() -> None:
    """After stop_task the task is done, also when its end took some steps."""
    started, cleaned = asyncio.Event(), False

    async def body() -> None:
        nonlocal cleaned
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            cleaned = True

    async with asyncio.TaskGroup() as group:
        task = group.create_task(body())
        await started.wait()
        await stop_task(task)
        assert cleaned
        assert task.cancelled()


async def test_stopping_does_not_swallow_the_callers_own_cancellation() -> None:
    """A caller that is cancelled while it waits for a slow task is cancelled."""
    release, waiting = asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            waiting.set()
            await release.wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(slow_to_end())
        await asyncio.sleep(0)
        caller = group.create_task(stop_task(task))
        await waiting.wait()
        caller.cancel()
        await asyncio.wait({caller})
        assert caller.cancelled()
        assert not task.done()
        release.set()


@given(st.integers(-5, 10_000), st.floats(0, 0.999), st.floats(0.001, 10), st.floats(1, 1000))
def test_a_delay_lies_between_half_and_all_of_the_doubled_base_and_below_the_cap(
    failures: int, random: float, base_s: float, factor: float
) -> None:
    """Also after ten thousand failures, and never longer than the cap."""
    cap_s = base_s * factor
    delay_s = Backoff(base_s=base_s, cap_s=cap_s, random=lambda: random).delay_s(failures)
    full = min(cap_s, base_s * 2 ** min(max(failures, 1) - 1, 40))
    assert full / 2 <= delay_s <= full


@pytest.mark.parametrize("is_abstract", [False, True])
def test_the_service_manager_is_reported(short_dir: Path, is_abstract: bool) -> None:
    """One datagram on the socket that NOTIFY_SOCKET names, as a path or an abstract name."""
    name = f"{short_dir}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if is_abstract else name)
        manager.settimeout(DEADLINE_S)
        assert sd_notify("READY=1", {"NOTIFY_SOCKET": "@" + name if is_abstract else name})
        assert manager.recv(100) == b"READY=1"


def test_no_service_manager_is_no_error(short_dir: Path) -> None:
    """Without one nothing is sent; with one that is gone it is logged."""
    assert sd_notify("READY=1", {}) is False
    with capture_logs() as logs:
        assert sd_notify("READY=1", {"NOTIFY_SOCKET": f"{short_dir}/none"}) is False
    assert [entry["event"] for entry in logs] == ["service_manager_not_notified"]


def test_json_logs_are_one_object_a_line_for_ours_and_for_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    """Event name, fields, level and logger are keys; a traceback is data."""
    setup_logging("info", "json")
    log = structlog.get_logger("gpushare_agent.x")
    log.info("allocated", pod="default/p", cores=30)
    log.debug("not_shown")
    logging.getLogger("some.library").warning("odd %s", "thing")
    logging.getLogger("aiohttp.access").info("not shown")
    try:
        raise ValueError("bad thing")
    except ValueError:
        log.exception("failed")
    assert WRITER.flush()
    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [entry["event"] for entry in entries] == ["allocated", "odd thing", "failed"]
    assert (entries[0]["cores"], entries[0]["level"], entries[0]["logger"]) == (30, "info", "gpushare_agent.x")
    assert entries[2]["exception"][0]["exc_type"] == "ValueError"


async def test_waiting_for_an_event_ends_with_it_or_with_the_time() -> None:
    """True where it was set; without a limit it is waited for as long as it takes."""
    event = asyncio.Event()
    assert not await wait_for(event, 0.001)
    asyncio.get_running_loop().call_soon(event.set)
    assert await wait_for(event, None)
    assert await wait_for(event, 0)


async def test_a_change_wakes_all_who_wait_and_one_that_was_missed_ends_the_wait_at_once() -> None:
    changes = ChangeSignal()
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(changes.wait_next()) for _ in range(3)]
        await asyncio.sleep(0)
        changes.notify()
    assert all(task.result() for task in waiting)
    assert await changes.wait(0)
    assert not await changes.wait(1, 0.001)


async def test_what_is_looked_at_again_and_again_ends_with_it_or_with_the_time() -> None:
    left = [1, 1, 0]
    await wait_while(lambda: left.pop(0), DEADLINE_S, poll_s=0)
    assert left == []
    await wait_while(lambda: True, 0.001, poll_s=0)


async def test_what_a_body_raises_is_raised_as_it_is_also_while_it_is_stopped() -> None:
    """Not in a group: callers look for its class."""
    started = asyncio.Event()

    async def body() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("not cleaned up")

    async def fail() -> None:
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        await forever("failing", fail)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(forever("stopping", body))
            await started.wait()
            await stop_task(task)
    assert [str(error) for error in caught.value.exceptions] == ["not cleaned up"]


async def test_a_step_follows_each_request_also_one_that_comes_during_a_step() -> None:
    """A burst of requests is one step; without a request the period decides."""
    reconciler, steps, was_last = Reconciler(), [], asyncio.Event()

    async def step() -> None:
        steps.append("begun")
        if len(steps) == 1:
            reconciler.request()
        elif len(steps) == 3:
            was_last.set()

    reconciler.request()
    reconciler.request()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(reconciler.run(step, lambda: None if len(steps) < 2 else 0.001))
        await was_last.wait()
        await stop_task(running)
    assert steps == ["begun"] * len(steps)


async def test_no_step_without_a_request_where_none_is_due() -> None:
    """Whatever was requested before."""
    reconciler, steps = Reconciler(), []

    async def step() -> None:
        steps.append(1)

    reconciler.request()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(reconciler.run(step, lambda: None))
        for _ in range(20):
            await asyncio.sleep(0)
        await stop_task(running)
    assert steps == [1]


def test_a_condition_is_reported_when_it_begins_changes_and_ends() -> None:
    """A repetition is not."""
    reports = ReportOnce()
    assert [reports.is_new(reason) for reason in ("away", "away", "denied", "denied")] == [True, False, True, False]
    assert (reports.is_over(), reports.is_over()) == (True, False)
    assert reports.is_new("denied")


def test_subjects_are_apart_and_the_oldest_is_forgotten() -> None:
    """Whoever invents subjects cannot make the memory grow."""
    reports = ReportOnce(capacity=2)
    assert [reports.is_new("away", pod) for pod in ("a", "b", "a", "c", "a")] == [True, True, False, True, True]
    assert not reports.is_over("b")


async def test_what_takes_too_long_is_unavailable_and_a_cancelled_caller_stays_cancelled() -> None:
    with pytest.raises(Unavailable, match="no answer within 1 ms"):
        async with bounded(0.001, "no answer within 1 ms"):
            await asyncio.Event().wait()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_wait_bounded())
        await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()


async def _wait_bounded() -> None:
    async with bounded(DEADLINE_S, "late"):
        await asyncio.Event().wait()


async def test_what_is_unavailable_is_tried_again_and_each_reason_logged_once() -> None:
    reasons = ["gone", "gone", "refused", "gone"]

    async def step() -> int:
        if reasons:
            raise Unavailable(reasons.pop(0))
        return 7

    with capture_logs() as logs:
        assert await retried(step, 0.0, "not_there") == 7
    assert {line["event"] for line in logs} == {"not_there"}
    assert [line["error"] for line in logs] == ["gone", "refused", "gone"]


async def test_what_the_system_refuses_the_pool_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import without a free descriptor, or on a node that has its most processes, would end the agent."""
    monkeypatch.setattr(supervision, "POOL_RETRY_S", 0.0)
    refused = OSError(errno.EMFILE, "too many files")
    errors = [refused, Unavailable("no thread"), Unavailable("no thread")]

    def load() -> None:
        if errors:
            raise errors.pop(0)

    with capture_logs() as logs:
        await in_pool(load, "not_loaded")
    assert [(line["event"], line["error"].partition(": /proc")[0]) for line in logs] == [
        ("not_loaded", "[Errno 24] too many files; the agent's open files are used up"),
        ("not_loaded", "no thread"),
    ]


async def test_what_the_pool_lacks_for_good_is_not_tried_for_ever() -> None:
    """A build without a file of its own ends, and says which."""
    with pytest.raises(FileNotFoundError, match="No such file"):
        async with asyncio.timeout(DEADLINE_S):
            await in_pool(Path("/nowhere/page.css").read_bytes, "not_loaded")
