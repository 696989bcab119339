"""Looks again and again that a CDI spec names every GPU (isolation/devices/cdi_specs.py does the work, in a thread).

State owned: the last trouble, for the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, Protocol

import structlog

from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.errors import AgentError
from gpushare_agent.model.gpus import Gpu

log = structlog.get_logger(__name__)

PERIOD_S = 10.0
LOOK_TIMEOUT_S = 5.0


class KeepsSpecs(Protocol):
    def ensure(self, gpus: Sequence[Gpu]) -> object:
        """Raises AgentError."""


class CdiWatch:
    """`look` before the node registers, `run` once, `gpus_changed` at any time."""

    def __init__(self, specs: KeepsSpecs, gpus: Callable[[], Sequence[Gpu]], *, period_s: float = PERIOD_S) -> None:
        self._specs = specs
        self._gpus = gpus
        self._period_s = period_s
        self._thread = DaemonThread("cdi-specs", advice="Check the disks of the setting cdi.spec_directories.")
        self._has_changed = asyncio.Event()
        self._trouble = ""

    def gpus_changed(self) -> None:
        self._has_changed.set()

    async def look(self) -> None:
        """One look; what fails is logged once, and the next look tries again."""
        gpus = tuple(self._gpus())
        try:
            await self._thread.call(partial(self._specs.ensure, gpus), "looking at the CDI specs", LOOK_TIMEOUT_S)
        except AgentError as e:
            self._tell(str(e))
        except Exception as e:  # noqa: BLE001 - one cycle: a file that somebody put there must not end the agent
            self._tell(repr(e))
        else:
            self._trouble = ""

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.error("cdi_specs_not_kept", error=trouble, then="containers of new pods may not start")
        self._trouble = trouble

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._period_s):
                    await self._has_changed.wait()
            except TimeoutError:
                pass
            self._has_changed.clear()
            await self.look()
