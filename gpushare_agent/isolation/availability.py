"""Checks again and again whether shares of one isolation can be had on this node, for those who must not give one that
nothing would keep.

What an isolation needs belongs to the deployer (a library, a daemon, a driver): it may go and come while the agent runs, and
the agent then refuses the shares that need it and nothing else. State owned: why the isolation is unavailable, empty while
it is available.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

import structlog

from gpushare_agent.model.errors import AgentError

log = structlog.get_logger(__name__)

PERIOD_S = 5.0


class AvailabilityWatch:
    """`check` is bounded, and raises AgentError with what is missing and the cure. `period_s` is between the end of one and
    the beginning of the next; they never overlap. `look` does the same without putting anything in its place on the node,
    for an agent beside the one that serves; None where `check` does not either."""

    def __init__(
        self,
        isolation: str,
        check: Callable[[], Awaitable[object]],
        *,
        look: Callable[[], Awaitable[object]] | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        self._isolation = isolation
        self._check = check
        self.look = look or check
        self._period_s = period_s
        self.is_checked = False
        self._unavailable_reason = f"isolation {isolation} has not been checked yet"
        self._callbacks: list[Callable[[], None]] = []

    @property
    def unavailable_reason(self) -> str:
        """Why no share can be had now, and the cure; empty when it can."""
        return self._unavailable_reason

    def is_available(self) -> bool:
        return not self._unavailable_reason

    def subscribe(self, callback: Callable[[], None]) -> None:
        """`callback` is called after each change of `unavailable_reason`."""
        self._callbacks.append(callback)

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._period_s)

    async def poll(self) -> None:
        reason = ""
        try:
            await self._check()
        except AgentError as error:
            reason = str(error)
        self.is_checked = True
        before, self._unavailable_reason = self._unavailable_reason, reason
        if reason == before:
            return
        if not reason:
            log.info("isolation_available", isolation=self._isolation, then="its shares are allocated")
        else:
            log.error(
                "isolation_unavailable",
                isolation=self._isolation,
                reason=reason,
                then="no share of it is allocated; checked again",
                period_s=self._period_s,
            )
        for callback in self._callbacks:
            callback()
