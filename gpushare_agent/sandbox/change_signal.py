"""One wake-up for everything that happens on the embedded node.

A writer calls `notify`; a waiter reads the state again. The signal itself carries nothing, so a lost or doubled wake-up
costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class ChangeSignal:
    """`count` grows with every change."""

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def notify(self) -> None:
        self.count += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, seen: int, at_most_s: float | None = None) -> None:
        """Returns when the count is no longer the one seen, or after that time (None: without a limit)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                while self.count == seen:
                    await self._event.wait()

    async def wait_until(self, found: Callable[[], T], deadline_s: float, what: str = "") -> T:
        """The first true value of `found`, which is asked again after every change.

        Raises TimeoutError, naming `what`, after `deadline_s` seconds.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    seen = self.count
                    if value := found():
                        return value
                    await self.wait(seen)
        except TimeoutError as error:
            raise TimeoutError(f"after {deadline_s:g} s: {what or 'the awaited state'} did not come about") from error
