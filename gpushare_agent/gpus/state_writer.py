"""Writes cordons and waits for a reset to health.state_file as soon as they change, and restores them at the start.

State owned: what is in the file, and why the last write failed.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

import structlog

from gpushare_agent.gpus.decisions.values import NOTHING_SAVED
from gpushare_agent.gpus.inventory import GpuInventoryState
from gpushare_agent.gpus.state_file import HealthStateFile
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.kit.report_once import ReportOnce
from gpushare_agent.kit.supervision import Reconciler
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.gpus import GpuInventory

log = structlog.get_logger(__name__)

NO_FILE = "health.state_file is empty"
RETRY = Backoff(base_s=5.0, cap_s=300.0)


class HealthStateWriter:
    """`restore` once, before the GPUs are read; then `run` once. Subscribe `inventory_changed` to the inventory. Without a
    `file` nothing is saved."""

    def __init__(self, inventory: GpuInventoryState, file: HealthStateFile | None, *, backoff: Backoff = RETRY) -> None:
        self._inventory = inventory
        self._file = file
        self._backoff = backoff
        self._written = NOTHING_SAVED
        self._failure = ReportOnce()
        self._lock = asyncio.Lock()
        self._reconciler = Reconciler()
        self._failures = 0

    async def restore(self) -> None:
        if self._file is None:
            return
        try:
            saved = await self._file.load()
        except Unavailable as e:
            log.warning(
                "health_state_not_read",
                error=str(e),
                then="cordons and waits for a reset of an earlier run are unknown; cordon these GPUs again",
            )
            return
        self._written = saved
        self._inventory.restore(saved)
        if saved != NOTHING_SAVED:
            log.info("health_restored", cordoned=sorted(saved.cordons), wait_for_reset=sorted(saved.waits))

    async def save_now(self) -> str:
        """Writes the state if it differs from the file; the error where that failed, else empty."""
        if self._file is None:
            return NO_FILE
        async with self._lock:
            saved = self._inventory.saved
            if saved == self._written:
                return ""
            try:
                await self._file.save(saved)
            except Unavailable as e:
                self._report_failure(str(e))
                return str(e)
            self._written = saved
            if self._failure.is_over():
                log.info("health_state_saved_again")
            return ""

    async def run(self) -> NoReturn:
        """Until cancelled."""
        await self._reconciler.run(self._save, lambda: None)

    async def _save(self) -> None:
        self._failures = self._failures + 1 if await self.save_now() and self._file is not None else 0
        if self._failures:
            await asyncio.sleep(self._backoff.delay_s(self._failures))
            self._reconciler.request()

    def inventory_changed(self, inventory: GpuInventory) -> None:
        if self._inventory.saved != self._written:
            self._reconciler.request()

    def _report_failure(self, error: str) -> None:
        if self._failure.is_new("cannot be written"):
            log.warning(
                "health_state_not_saved",
                error=error,
                then="cordons and waits for a reset last until the agent ends; the write is retried",
            )
