"""Asks the driver again and again how the cards are, and keeps the inventory and the device tables true.

One card that fails turns Unhealthy with its reason and the others work on; a driver that cannot be read turns all cards
Unhealthy; both come back by themselves. Owns no state (state/gpu_inventory.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NoReturn, Protocol

import structlog

from gpushare_agent.model.errors import AgentError
from gpushare_agent.model.gpus import Card, GpuInventory
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.state.gpu_inventory import GpuInventoryState

log = structlog.get_logger(__name__)

NO_CARDS_PERIOD_S = 30.0
"""How often a node without a readable driver is looked at again."""


class GpuDriver(Protocol):
    async def read(self) -> GpuInventory:
        """Every card. Raises Unavailable where the driver cannot be read."""

    async def close(self) -> None: ...


class GpuWatch:
    """`period_s` between two looks."""

    def __init__(self, driver: GpuDriver, inventory: GpuInventoryState, *, period_s: float) -> None:
        self._driver = driver
        self._inventory = inventory
        self._period_s = period_s

    async def run(self) -> NoReturn:
        """Until cancelled. A look that fails is the news of that look."""
        while True:
            await asyncio.sleep(self._period_s if self._inventory.current.cards else NO_CARDS_PERIOD_S)
            await self.look()

    async def look(self) -> None:
        before = self._inventory.current.by_uuid()
        try:
            found = await self._driver.read()
        except AgentError as e:
            if self._inventory.lost(str(e)) or not before:
                log.error("gpus_lost", error=str(e), retried_in_s=self._period_s if before else NO_CARDS_PERIOD_S)
            return
        if self._inventory.read(found):
            self._report(before)

    def _report(self, before: Mapping[GpuUuid, Card]) -> None:
        for card in self._inventory.current.cards:
            old = before.get(card.uuid)
            if old is None:
                log.info("card_found", index=card.index, uuid=card.uuid, name=card.name, memory_mib=card.memory_mib)
            elif old.is_healthy and not card.is_healthy:
                log.error("card_unhealthy", index=card.index, uuid=card.uuid, reason=card.unhealthy_reason)
            elif card.is_healthy and not old.is_healthy:
                log.info("card_recovered", index=card.index, uuid=card.uuid)
        for index, reason in self._inventory.current.unreadable:
            log.error("card_unreadable", index=index, reason=reason)
