"""Small rules for tasks in a TaskGroup: bodies that must not end, stopping one task, waiting for an event. No state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn, Protocol

Tasks = Mapping[str, Callable[[], Awaitable[object]]]
"""Bodies that run for the life of the process, by name."""


class EndedUnexpectedlyError(Exception):
    """A body that runs for the life of the process has returned. A TaskGroup alone would not notice."""


async def forever(name: str, body: Callable[[], Awaitable[object]]) -> NoReturn:
    """Runs `body`, which is expected to run until it is cancelled.

    `body` is a function, not a coroutine: one that is cancelled before it starts would never be awaited.
    Raises EndedUnexpectedlyError: it returned."""
    await body()
    raise EndedUnexpectedlyError(
        f"{name} ended although it runs for the life of the process; this is a bug, please report it"
    )


class Runs(Protocol):
    async def run(self) -> object: ...


def bodies(services: Mapping[str, Runs | None]) -> Tasks:
    """The `run` of every service that there is."""
    return {name: service.run for name, service in services.items() if service is not None}


def start_tasks(group: asyncio.TaskGroup, tasks: Tasks) -> None:
    """Each body `forever`, as a task of that name."""
    for name, body in tasks.items():
        group.create_task(forever(name, body), name=name)


async def stop_task(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits until it has ended. Its result or error stays with its TaskGroup.

    Unlike `suppress(CancelledError)` around `await task`, this does not swallow a cancellation of the caller.
    """
    task.cancel()
    await asyncio.wait({task})


async def wait_for(event: asyncio.Event, at_most_s: float | None) -> bool:
    """Waits until `event` is set, at most so long (None: without a limit); False when the time ran out first.

    Clearing the event is the caller's. A caller that is cancelled stays cancelled.
    """
    try:
        async with asyncio.timeout(at_most_s):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True
