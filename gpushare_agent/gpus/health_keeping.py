"""Writes what must outlive the agent of the GPUs' health (cordons, waits for a reset) as soon as it changes.

State owned: what is in the file, and why the last try to write it failed.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn, Protocol

import structlog

from gpushare_agent.gpus.health_values import NOTHING_KEPT, KeptHealth
from gpushare_agent.gpus.inventory import GpuInventoryState
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.gpus import GpuInventory

log = structlog.get_logger(__name__)

NO_FILE = "health.state_file is empty"
RETRY = Backoff(base_s=5.0, cap_s=300.0)


class KeepsHealth(Protocol):
    async def load(self) -> KeptHealth:
        """Raises Unavailable."""

    async def save(self, kept: KeptHealth) -> None:
        """Raises Unavailable."""


class HealthKeeping:
    """`restore` once, before the GPUs are read; then `run` once. Without a `file` nothing is remembered."""

    def __init__(self, inventory: GpuInventoryState, file: KeepsHealth | None, *, backoff: Backoff = RETRY) -> None:
        self._inventory = inventory
        self._file = file
        self._backoff = backoff
        self._written = NOTHING_KEPT
        self._trouble = ""
        self._turn = asyncio.Lock()
        self._is_wanted = asyncio.Event()
        inventory.subscribe(self._changed)

    async def restore(self) -> None:
        if self._file is None:
            return
        try:
            kept = await self._file.load()
        except Unavailable as e:
            log.warning(
                "health_state_not_read",
                error=str(e),
                then="cordons and waits for a reset of an earlier run are not known; cordon the GPUs again that need it",
            )
            return
        self._written = kept
        self._inventory.restore(kept)
        if kept != NOTHING_KEPT:
            log.info("health_restored", cordoned=sorted(kept.cordons), wait_for_reset=sorted(kept.waits))

    async def keep(self) -> str:
        """Write what is to be remembered now; why that was not possible, empty where it was."""
        if self._file is None:
            return NO_FILE
        async with self._turn:
            kept = self._inventory.kept
            if kept == self._written:
                return ""
            try:
                await self._file.save(kept)
            except Unavailable as e:
                self._reported(str(e))
            else:
                self._written = kept
                self._reported("")
            return self._trouble

    async def run(self) -> NoReturn:
        """Until cancelled."""
        failures = 0
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            failures = failures + 1 if await self.keep() and self._file is not None else 0
            if failures:
                await asyncio.sleep(self._backoff.delay_s(failures))
                self._is_wanted.set()

    def _changed(self, inventory: GpuInventory) -> None:
        if self._inventory.kept != self._written:
            self._is_wanted.set()

    def _reported(self, trouble: str) -> None:
        """One line when it begins to fail and one when it works again."""
        if trouble and not self._trouble:
            log.warning(
                "health_state_not_kept",
                error=trouble,
                then="cordons and waits for a reset hold until the agent ends; tried again",
            )
        elif self._trouble and not trouble:
            log.info("health_state_kept_again")
        self._trouble = trouble
