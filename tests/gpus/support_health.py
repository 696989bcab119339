"""A driver that is reported what to show, and the parts that watch it, for the tests of health."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gpushare_agent.agent.gpus.simulated.driver import SimulatedDriver
from gpushare_agent.core.model.gpu_health import GpuEvent, GpuEventKind, HealthPolicy
from gpushare_agent.core.model.gpus import GpuInventory, Health
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.usage import DriverSample
from tests.support_core import inventory
from tests.support_deadline import Changes

IMMEDIATE = HealthPolicy(reset_xids=frozenset({79}), ignored_xids=frozenset({13}))
"""One poll that finds the GPU usable is enough, at any time."""


class ShownDriver:
    """Shows `shown` (an exception is raised) and hands out `pending`, one entry a fetch; counts what it was asked."""

    def __init__(self, shown: GpuInventory | Exception | None = None) -> None:
        self.shown: GpuInventory | Exception = shown or inventory()
        self.pending: deque[list[GpuEvent] | Exception] = deque()
        self.events_fail: Exception | None = None
        self.polls = 0
        self.fetches = 0
        self._changed = Changes()

    async def read(self) -> GpuInventory:
        self.polls += 1
        self._changed.set()
        if isinstance(self.shown, Exception):
            raise self.shown
        return self.shown

    async def events(self, wait_s: float = 0.0) -> list[GpuEvent]:
        self.fetches += 1
        self._changed.set()
        if self.events_fail is not None:
            raise self.events_fail
        entry = self.pending.popleft() if self.pending else []
        if isinstance(entry, Exception):
            raise entry
        return entry

    async def sample(self) -> DriverSample:
        return DriverSample(gpus=())

    async def close(self) -> None:
        pass

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds; polled at after each question to this driver."""
        await self._changed.until(condition)


def xid(number: int, gpu: int | None = 0) -> GpuEvent:
    return GpuEvent(kind=GpuEventKind.XID, uuid=None if gpu is None else GpuUuid(f"GPU-{gpu}"), xid=number)


def unhealthy(found: GpuInventory, index: int, reason: str = "fell off the bus") -> GpuInventory:
    gpus = list(found.gpus)
    gpus[index] = replace(gpus[index], health=Health.UNHEALTHY, unhealthy_reason=reason)
    return replace(found, gpus=tuple(gpus))


def simulated(**settings: Any) -> SimulatedDriver:
    """As SimulatedDriver takes them; by default two GPUs of 24 GiB."""
    given = {"gpus": 2, "gpu_memory_mib": (24576,), "topology_text": None, "gpu_name": "", "seed": "n1"}
    return SimulatedDriver(**given | settings)


def write_rehearsal(path: Path, **faults: object) -> None:
    """The simulated driver's faults, replaced in one step: `lost`, `xids`, `resets`."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(faults))
    new.replace(path)
