"""The deadline of every wait in the tests: generous, because a wait that succeeds costs nothing by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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
