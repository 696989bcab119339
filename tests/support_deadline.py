"""The deadline of every wait in the tests: generous, because a wait that succeeds costs nothing by it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

DEADLINE_S = 60.0


class Changes(asyncio.Event):
    """Set at each change of what a fake records."""

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until it holds after some change, under the deadline."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.clear()
                await self.wait()
                await asyncio.sleep(0)  # whoever made the change has its turn


async def poll_until(
    condition: Callable[[], Any], what: str, *, deadline_s: float = DEADLINE_S, period_s: float = 0.005
) -> Any:
    """For what tells nobody of its change, such as another process. Returns what the condition gave, which may be
    asynchronous. Raises TimeoutError with `what` did not come about."""
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                found = condition()
                if found := await found if inspect.isawaitable(found) else found:
                    return found
                await asyncio.sleep(period_s)
    except TimeoutError as error:
        raise TimeoutError(f"after {deadline_s:g} s: {what} did not come about") from error
