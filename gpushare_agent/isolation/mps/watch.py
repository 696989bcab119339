"""Polls the MPS control daemon, for those that must not allocate shares while it does not answer.

The daemon belongs to the deployer, or to `gpushare-agent mps`. It is only polled, and may start and end without the agent.
State owned: why it is unavailable, empty while it answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

import structlog

from gpushare_agent.isolation.mps.control import MpsControl
from gpushare_agent.model.errors import Unavailable

log = structlog.get_logger(__name__)

NOT_POLLED = "the MPS control daemon has not been polled yet"


class MpsWatch:
    """`period_s` between the end of one poll and the next; polls never overlap."""

    def __init__(self, control: MpsControl, *, period_s: float) -> None:
        self._control = control
        self._period_s = period_s
        self._unavailable_reason = NOT_POLLED
        self._callbacks: list[Callable[[], None]] = []

    @property
    def unavailable_reason(self) -> str:
        """Why no share can be allocated now, empty when it can."""
        return self._unavailable_reason

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
            await self._control.check()
        except Unavailable as error:
            reason = str(error)
        before, self._unavailable_reason = self._unavailable_reason, reason
        if reason == before:
            return
        if not reason:
            log.info("mps_available", then="shares are allocated")
        else:
            log.error(
                "mps_unavailable", reason=reason, then="no share is allocated; polled again", period_s=self._period_s
            )
        for callback in self._callbacks:
            callback()
