"""Asks the MPS control daemon again and again whether it serves, for those who must not give shares while it does not.

The daemon is somebody else's: the deployer's, or the one that `gpushare-agent mps` keeps. It is only looked at, and comes
and goes without the agent. State owned: why it does not serve, empty while it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn, Protocol

import structlog

from gpushare_agent.model.errors import Unavailable

log = structlog.get_logger(__name__)

NOT_ASKED = "the MPS control daemon has not been asked yet"


class MpsDaemon(Protocol):
    async def check(self) -> None:
        """Bounded. Raises Unavailable with the reason why no client can be served."""


class MpsWatch:
    """`period_s` between the end of one look and the next; looks never overlap."""

    def __init__(self, control: MpsDaemon, *, period_s: float) -> None:
        self._control = control
        self._period_s = period_s
        self._trouble = NOT_ASKED
        self._callbacks: list[Callable[[], None]] = []
        self._looked = asyncio.Event()

    @property
    def trouble(self) -> str:
        """Why no share can be served now, empty when it can."""
        return self._trouble

    def subscribe(self, callback: Callable[[], None]) -> None:
        """`callback` is called after each change of `trouble`."""
        self._callbacks.append(callback)

    async def wait_looked(self) -> None:
        """Until the first look has ended, whatever it found."""
        await self._looked.wait()

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._period_s)

    async def look(self) -> None:
        trouble = ""
        try:
            await self._control.check()
        except Unavailable as error:
            trouble = str(error)
        before, self._trouble = self._trouble, trouble
        self._looked.set()
        if trouble == before:
            return
        if not trouble:
            log.info("mps_serves", then="shares are given")
        else:
            log.error(
                "mps_does_not_serve", reason=trouble, then="no share is given; asked again", period_s=self._period_s
            )
        for callback in self._callbacks:
            callback()
