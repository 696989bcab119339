"""Keeps every resource's device list up to date: the GPUs' health at once, the memory account a moment after a change.

State owned: the tables (kubelet/device_table.py), whether they are behind the allocation cache, and whether
IDs in them are withheld for shares that have grown. A table that is behind
does no harm: the admission decides by the cache itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NoReturn

from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.decisions.ledger import Policy, gpu_accounts
from gpushare_agent.admission.decisions.offered_devices import withheld
from gpushare_agent.kubelet.device_table import DeviceTable, device_rows
from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.resources import ResourceKind, ResourceNames

PAUSE_S = 0.2
"""Many allocations in a row make one ListAndWatch message."""


class DeviceTables:
    """One table for each resource that the node offers. `no_shares` is whether no share can be allocated at all now."""

    def __init__(
        self,
        *,
        names: ResourceNames,
        inventory: Callable[[], GpuInventory],
        cache: AllocationCache,
        no_shares: Callable[[], bool],
    ) -> None:
        self.tables: Mapping[ResourceKind, DeviceTable] = {kind: DeviceTable() for kind in names.kinds}
        self._names = names
        self._inventory = inventory
        self._cache = cache
        self._no_shares = no_shares
        self._is_behind = asyncio.Event()
        self._has_lent = False

    def allocation_changed(self, old: Allocation | None, new: Allocation | None) -> None:
        """For AllocationCache.subscribe. Only GPUShare's resource, and shares that have grown, make the lists depend on what
        is allocated."""
        if self._names.gpu_mem or self._cache.resized or self._has_lent:
            self._is_behind.set()

    def request_refresh(self) -> None:
        """`no_shares` may have changed."""
        self._is_behind.set()

    def refresh(self) -> None:
        """Bring every table up to date now."""
        inventory = self._inventory()
        ledger = self._cache.ledger(inventory)
        gpus = gpu_accounts(None, ledger, Policy(names=self._names))
        no_shares = self._no_shares()
        self._has_lent = False
        for kind, table in self.tables.items():
            lent = self._cache.lent(kind)
            kept_back = withheld(kind, gpus, ledger.holders, self._names, no_shares=no_shares, lent=lent)
            self._has_lent = self._has_lent or bool(lent)
            table.set_devices(device_rows(inventory, kind, self._names, kept_back))

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            await self._is_behind.wait()
            self._is_behind.clear()
            self.refresh()
            await asyncio.sleep(PAUSE_S)
