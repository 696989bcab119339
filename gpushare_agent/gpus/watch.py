"""Asks the driver again and again how the GPUs are and what happened to them, and keeps the inventory true.

One GPU that fails turns Unhealthy with its reason and the others work on; a driver that cannot be read turns all GPUs
Unhealthy; both come back by themselves (gpus/health.py). An event is only a hint to look, but a serious one counts
before the look: a GPU that hangs may keep the driver busy for seconds. The state is in gpus/inventory.py; here are
only the wish for a look and the number of failures in a row.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NoReturn, Protocol, assert_never

import structlog

from gpushare_agent.gpus.events import GpuEvent
from gpushare_agent.gpus.health import EventMeaning, describe_event
from gpushare_agent.gpus.inventory import GpuInventoryState
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.kit.rate import TokenBucket
from gpushare_agent.kit.supervision import forever
from gpushare_agent.model.errors import AgentError
from gpushare_agent.model.gpus import Gpu, GpuInventory
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.usage import DriverSample

log = structlog.get_logger(__name__)

NO_GPUS_PERIOD_S = 30.0
"""How often a node without a readable driver is looked at again."""
EVENT_BACKOFF_MAX_S = 30.0
MIN_PAUSE_S = 0.01
LOG_LINES_PER_S = 0.2
LOG_BURST = 20.0


class GpuDriver(Protocol):
    async def read(self) -> GpuInventory:
        """Every GPU. Raises Unavailable where the driver cannot be read."""

    async def events(self) -> list[GpuEvent]:
        """What happened since the last call, oldest first, at most 1,024; empty where nothing did. Does not wait for news.
        Raises Unavailable."""

    async def sample(self) -> DriverSample:
        """What the GPUs and the processes on them use. Raises Unavailable."""

    async def close(self) -> None: ...


class CountsGpuChanges(Protocol):
    def gpu_event(self, kind: str, xid: int, is_ignored: bool) -> None: ...

    def driver_error(self, word: str) -> None:
        """`word` is what failed: look_failed, events_failed."""


class CountsNothing:
    def gpu_event(self, kind: str, xid: int, is_ignored: bool) -> None: ...

    def driver_error(self, word: str) -> None: ...


class GpuWatch:
    """`period_s` between two looks, `event_period_s` between two fetches of events. Looks never overlap."""

    def __init__(
        self,
        driver: GpuDriver,
        inventory: GpuInventoryState,
        *,
        period_s: float,
        event_period_s: float = 0.5,
        metrics: CountsGpuChanges | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._inventory = inventory
        self._period_s = period_s
        self._event_period_s = event_period_s
        self._metrics = metrics or CountsNothing()
        self._clock = clock
        self._turn = asyncio.Lock()
        self._look_wanted = asyncio.Event()
        self._event_failures = 0
        self._event_backoff = Backoff(base_s=2 * event_period_s, cap_s=max(EVENT_BACKOFF_MAX_S, event_period_s))
        self._log_tokens = TokenBucket(rate=LOG_LINES_PER_S, burst=LOG_BURST, clock=clock)
        self._unlogged = 0

    async def run(self) -> NoReturn:
        """Until cancelled. A look that fails is the news of that look."""
        async with asyncio.TaskGroup() as group:
            group.create_task(forever("gpu events", self._run_events), name="gpu events")
            group.create_task(forever("gpu looks", self._run_looks), name="gpu looks")
        raise AssertionError("unreachable: neither task returns")

    def look_soon(self) -> None:
        """Let the next look not wait for its time."""
        self._look_wanted.set()

    async def look(self) -> None:
        async with self._turn:
            before = self._inventory.current.by_uuid()
            try:
                found = await self._driver.read()
            except AgentError as e:
                self._metrics.driver_error("look_failed")
                if self._inventory.lost(str(e)) or not before:
                    log.error("gpus_lost", error=str(e), retried_in_s=self._period_s if before else NO_GPUS_PERIOD_S)
                return
            if self._inventory.read(found):
                self._report(before)

    async def fetch_events(self) -> float:
        """Take over what happened; the time to wait before the next fetch, seconds."""
        try:
            events = await self._driver.events()
        except AgentError as e:
            self._metrics.driver_error("events_failed")
            self._event_failures += 1
            delay_s = self._event_backoff.delay_s(self._event_failures)
            if self._event_failures == 1:
                log.warning("gpu_events_lost", error=str(e), then="looks go on; events are asked for again, ever later")
                self.look_soon()
            return delay_s
        if self._event_failures:
            log.info("gpu_events_back", failures=self._event_failures)
            self._event_failures = 0
        if events:
            self._note(events)
        return self._event_period_s

    async def _run_events(self) -> NoReturn:
        while True:
            delay_s = await self.fetch_events()
            await asyncio.sleep(delay_s)

    async def _run_looks(self) -> NoReturn:
        while True:
            try:
                async with asyncio.timeout(self._pause_s()):
                    await self._look_wanted.wait()
            except TimeoutError:
                pass  # nothing happened: the usual look
            self._look_wanted.clear()
            await self.look()

    def _pause_s(self) -> float:
        if not self._inventory.current.gpus:
            return NO_GPUS_PERIOD_S
        probe_at = self._inventory.next_probe_at()
        if probe_at is None:
            return self._period_s
        return min(self._period_s, max(probe_at - self._clock(), MIN_PAUSE_S))

    def _note(self, events: list[GpuEvent]) -> None:
        noted = self._inventory.note_events(events)
        for (event, meaning), count in noted.items():
            for _ in range(count):
                self._metrics.gpu_event(event.kind.value, event.xid, meaning is EventMeaning.IGNORED)
        if any(meaning in _CALLS_FOR_A_LOOK for _, meaning in noted):
            self.look_soon()
        self._tell(noted)

    def _tell(self, noted: Counter[tuple[GpuEvent, EventMeaning]]) -> None:
        """One line for all events of a kind; in a storm fewer."""
        for (event, meaning), count in noted.items():
            if not self._log_tokens.take():
                self._unlogged += count
                continue
            fields = {"what": describe_event(event), "uuid": event.uuid, "count": count, "unlogged": self._unlogged}
            self._unlogged = 0
            match meaning:
                case EventMeaning.IGNORED:
                    log.info("gpu_event_ignored", **fields)
                case EventMeaning.FOREIGN:
                    log.warning("gpu_event_of_unknown_gpu", **fields)
                case EventMeaning.UNATTRIBUTED:
                    log.error("gpu_event_of_no_gpu", **fields, then="no GPU is blamed; all are looked at now")
                case EventMeaning.ILL | EventMeaning.NEEDS_RESET:
                    log.warning("gpu_event", **fields)
                case _:
                    assert_never(meaning)

    def _report(self, before: Mapping[GpuUuid, Gpu]) -> None:
        for gpu in self._inventory.current.gpus:
            if gpu.uuid not in before:
                log.info("gpu_found", index=gpu.index, uuid=gpu.uuid, name=gpu.name, memory_mib=gpu.memory_mib)
        for index, reason in self._inventory.current.unreadable:
            log.error("gpu_unreadable", index=index, reason=reason)


_CALLS_FOR_A_LOOK = frozenset({EventMeaning.UNATTRIBUTED, EventMeaning.ILL, EventMeaning.NEEDS_RESET})
