"""Small rules for tasks in a TaskGroup: bodies that must not end, stopping one task, waiting for an event or for a change,
a bound on time; the loop of a service that reconciles, or tries again; and a repeated condition that is reported once.

State owned: how often something has changed (`ChangeSignal`); whether a step of that loop is requested (`Reconciler`); what
was last reported about each subject (`ReportOnce`).
"""

from __future__ import annotations

import asyncio
import signal
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn, Protocol, TypeVar

import structlog

from gpushare_agent.core.model.errors import Unavailable, file_remedy, may_pass

log = structlog.get_logger(__name__)

T = TypeVar("T")

Tasks = Mapping[str, Callable[[], Awaitable[object]]]
"""Bodies that run for the life of the process, by name."""


class EndedUnexpectedlyError(Exception):
    """A body that runs for the life of the process has ended. A TaskGroup alone would not notice."""


async def forever(name: str, body: Callable[[], Awaitable[object]]) -> NoReturn:
    """Runs `body`, which is expected to run until the caller is cancelled, in a task of its own: what interrupts that task
    from within, such as a library that leaves a cancellation in it, is not the caller's end.

    `body` is a function, not a coroutine: one that is cancelled before it starts would never be awaited.
    Raises EndedUnexpectedlyError: it returned, or ended as cancelled. The body's own errors, not in a group."""
    task: asyncio.Task[Exception | None] | None = None
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(_error_of(body), name=f"{name}, body")
    finally:  # also where the caller is cancelled: the body may fail while it ends
        # `task.result()` raises for a task that was cancelled: there the caller's own cancellation goes on.
        error = task.result() if task is not None and task.done() and not task.cancelled() else None
        if error is not None:
            raise error
    how = (
        "as cancelled, although nobody cancelled it"
        if task.cancelled()
        else "although it runs for the life of the process"
    )
    raise EndedUnexpectedlyError(f"{name} ended {how}; this is a bug, please report it")


async def _error_of(body: Callable[[], Awaitable[object]]) -> Exception | None:
    try:
        await body()
    # Returned as a value: raised in the task it would reach the caller in an exception group.
    except Exception as e:  # noqa: BLE001 - raised again by `forever`
        return e
    return None


class Runs(Protocol):
    async def run(self) -> object: ...


def bodies(services: Mapping[str, Runs | None]) -> Tasks:
    """The `run` of every service that there is."""
    return {name: service.run for name, service in services.items() if service is not None}


def start_tasks(group: asyncio.TaskGroup, tasks: Tasks) -> None:
    """Each body `forever`, as a task of that name."""
    for name, body in tasks.items():
        group.create_task(forever(name, body), name=name)


async def run_together(tasks: Tasks) -> NoReturn:
    """Starts these tasks, and waits until the caller is cancelled or one fails (then with an exception group)."""
    async with asyncio.TaskGroup() as group:
        start_tasks(group, tasks)
    raise AssertionError("unreachable: the tasks do not end")


async def stop_task(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits until it has ended. Its result or error stays with its TaskGroup.

    Unlike `suppress(CancelledError)` around `await task`, this does not swallow a cancellation of the caller.
    """
    task.cancel()
    # wait() raises nothing of the task, and is itself cancelled with the caller.
    await asyncio.wait({task})


def set_by_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set, in a turn of the loop: neither interrupts what is under way."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def wait_for(event: asyncio.Event, at_most_s: float | None) -> bool:
    """Waits until `event` is set, at most so long (None: without a limit); False when the time ran out first.

    Clearing the event is the caller's. A caller that is cancelled stays cancelled.
    """
    # It may have been set in the moment in which the time ran out.
    return await at_most(at_most_s, event.wait()) or event.is_set()


async def at_most(time_s: float | None, waited: Awaitable[object]) -> bool:
    """Waits for it, at most so long (None: without a limit); False when the time ran out first: it is cancelled then.

    A caller that is cancelled stays cancelled.
    """
    try:
        async with asyncio.timeout(time_s):
            await waited
    except TimeoutError:
        return False
    return True


async def wait_while(condition: Callable[[], object], at_most_s: float, *, poll_s: float) -> None:
    """Waits until it is false, at most so long: for what tells nobody of its change, and changes soon."""
    ends_at = asyncio.get_running_loop().time() + at_most_s
    while condition() and asyncio.get_running_loop().time() < ends_at:  # noqa: ASYNC110 - nobody sets an event
        await asyncio.sleep(poll_s)


class ChangeSignal:
    """Wakes all who wait for something to change, each once. A writer calls `notify`, a waiter looks again: the signal
    itself carries nothing. `count` grows with every change."""

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def notify(self) -> None:
        self.count += 1
        # Those who wait hold the old event; those who come from now on wait for the next change.
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, seen: int, at_most_s: float | None = None) -> bool:
        """Returns when the count is no longer the one seen; False when the time ran out first (None: without a limit)."""
        return self.count != seen or await wait_for(self._event, at_most_s)

    async def wait_next(self, at_most_s: float | None = None) -> bool:
        """As `wait`, for the next change from now on."""
        return await self.wait(self.count, at_most_s)

    async def wait_until(self, found: Callable[[], T], deadline_s: float | None = None, what: str = "") -> T:
        """The first true value of `found`, which is asked again after every change.

        Raises TimeoutError, naming `what`, after `deadline_s` seconds (None: without a limit).
        """
        try:
            async with asyncio.timeout(deadline_s):
                while not (value := found()):
                    await self.wait_next()
                return value
        except TimeoutError as error:
            raise TimeoutError(f"after {deadline_s:g} s: {what or 'the awaited state'} did not come about") from error


@asynccontextmanager
async def bounded(timeout_s: float | None, why: str) -> AsyncIterator[None]:
    """Raises Unavailable with the text `why` instead of TimeoutError, so that callers have one error to handle."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as e:
        raise Unavailable(why) from e


class Reconciler:
    """The loop of a service that compares what is with what should be: `request` a step at any time, `run` once."""

    def __init__(self) -> None:
        self._is_requested = asyncio.Event()

    def request(self) -> None:
        self._is_requested.set()

    async def run(
        self, step: Callable[[], Awaitable[object]], due_s: Callable[[], float | None], *, pause_s: float = 0.0
    ) -> NoReturn:
        """A step for each request, or burst of them, and one where none came for `due_s()` (None: none without a request),
        until cancelled. `pause_s` is between two steps at least."""
        while True:
            await wait_for(self._is_requested, due_s())
            self._is_requested.clear()  # before the step: what changes during it is seen by the next
            await step()
            # Also with no pause: a step that never waits would keep the loop, as requests can come without end.
            await asyncio.sleep(pause_s)


class ReportOnce:
    """Keeps a repeated condition from filling the log: it is reported when it begins, when its reason changes, and when it
    ends. One instance per kind of condition; `subject` names what it is about (a pod, a file), "" where there is only one.
    It keeps at most `capacity` subjects and forgets the oldest first.
    """

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def is_new(self, reason: str, subject: str = "") -> bool:
        """Whether to report `reason` now: it differs from what was last reported of the subject. It then counts as such."""
        if self._reasons.get(subject) == reason:
            return False
        self._reasons[subject] = reason
        self._reasons.move_to_end(subject)
        if len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)
        return True

    def is_over(self, subject: str = "") -> bool:
        """Whether to report that the condition has ended: something was reported of the subject. It is then forgotten."""
        return self._reasons.pop(subject, None) is not None


async def retried(
    step: Callable[[], Awaitable[T]], pause_s: float, event: str, reported: ReportOnce | None = None
) -> T:
    """Returns the result of `step`. While it raises Unavailable it is tried again after `pause_s`, each new reason logged
    once, as `event`. A `step` that goes on once it has what it needs says in `reported` that the condition is over."""
    reported = reported or ReportOnce()
    while True:
        try:
            return await step()
        except Unavailable as e:
            if reported.is_new(str(e)):
                log.warning(event, error=str(e), retried_in_s=pause_s)
        await asyncio.sleep(pause_s)


POOL_RETRY_S = 1.0


async def in_pool(blocking: Callable[[], object], event: str) -> None:
    """Calls it, such as an import, in a thread of the loop's pool; again while the system refuses a thread or a
    file, logged as `event`."""

    async def once() -> None:
        try:
            await asyncio.to_thread(blocking)
        except OSError as e:
            if not may_pass(e):  # a file of the agent's own that is missing is not there later
                raise
            raise Unavailable(f"{e}; {file_remedy(e, '')}") from e

    await retried(once, POOL_RETRY_S, event)
