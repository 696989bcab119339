"""Polls the driver for the GPUs, waits for its events, and applies both to the inventory.

One GPU that fails becomes Unhealthy with its reason and the others stay; a driver that cannot be read makes all GPUs
Unhealthy; both recover without an operator (core/model/gpu_health.py). A serious event counts before the next poll: a GPU
that hangs may block the driver for seconds. The GPUs' state is in gpus/inventory.py; this module owns only the request for
an early poll and the number of consecutive failures to fetch events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NoReturn, Protocol

import structlog
from msgspec import Struct, field

from gpushare_agent.agent.node import Node
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.supervision import Reconciler, ReportOnce, run_together
from gpushare_agent.core.model.errors import AgentError, DriverLost
from gpushare_agent.core.model.gpu_health import EventMeaning, GpuEvent, describe_event
from gpushare_agent.core.model.gpus import Gpu, GpuInventory
from gpushare_agent.core.model.usage import DriverSample

log = structlog.get_logger(__name__)

NO_GPUS_PERIOD_S = 30.0
"""Between two polls of a node without a readable driver."""
EVENT_PERIOD_S = 1.0
"""Of reading simulated events, half the first pause after a failure. NVML's (Xid errors, ECC) are waited for."""
EVENT_BACKOFF_MAX_S = 30.0
RESTART_AFTER_POLLS = 6
"""A driver that is only loaded again, or busy, answers before; the kubelet waits for 80 s more."""
MIN_PAUSE_S = 0.01
EVENT_PAUSE_S = 0.05
"""After events: a program can cause Xids without end."""


class GpuDriver(Protocol):
    async def read(self) -> GpuInventory:
        """Every GPU. Raises Unavailable where the driver cannot be read."""

    async def events(self, wait_s: float) -> list[GpuEvent]:
        """Events since the last call, oldest first, at most 1,024. Without any it waits up to `wait_s` for the first one,
        where the driver can wait. Raises Unavailable."""

    async def sample(self) -> DriverSample:
        """What the GPUs and the processes on them use. Raises Unavailable."""

    async def close(self) -> None: ...


class GpuWatch(Struct, eq=False):
    """Polls never overlap."""

    node: Node
    driver: GpuDriver
    event_period_s: float = EVENT_PERIOD_S
    _poll_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _polls: Reconciler = field(default_factory=Reconciler)
    _event_failures: int = 0
    _restart: ReportOnce = field(default_factory=ReportOnce)

    async def run(self) -> NoReturn:
        """Polls and fetches events until cancelled. A poll that fails makes the GPUs Unhealthy."""
        polls = partial(self._polls.run, self.poll, self._pause_s)
        # Two tasks: a poll of a GPU that hangs takes seconds, and an Xid must count before it ends.
        await run_together({"gpu events": self._run_events, "gpu polls": polls})

    def poll_soon(self) -> None:
        """Starts the next poll without waiting for the period."""
        self._polls.request()

    async def poll(self) -> bool:
        """One poll of all GPUs; a failure is applied to the inventory, not raised: False."""
        # Polls on request and in the loop: two at once would count twice for a probe.
        async with self._poll_lock:
            before = {gpu.uuid for gpu in self.node.inventory.current.known}
            try:
                found = await self.driver.read()
            except AgentError as e:
                self.node.metrics.driver_error("look_failed")
                # Once for each change; a node without GPUs has no change, and its line each half minute is the only sign.
                if self.node.inventory.lost(str(e), is_refused=isinstance(e, DriverLost)) or not before:
                    log.error(
                        "gpus_lost",
                        error=str(e),
                        retried_in_s=self.node.settings.health.check_period_s if before else NO_GPUS_PERIOD_S,
                    )
                is_read = False
            else:
                if self.node.inventory.read(found):
                    current = self.node.inventory.current
                    log_found([gpu for gpu in current.known if gpu.uuid not in before], current.unreadable)
                is_read = True
            self._report_restart()
            return is_read

    def needs_restart(self) -> list[str]:
        """Why the kubelet has to start this container again, nothing where it has not: a new container alone reaches a
        driver that was upgraded, or device nodes to which systemd took this one's right. The next process does not ask for
        that before it has read a usable GPU, so one that does not help is not repeated."""
        after_s = RESTART_AFTER_POLLS * self.node.settings.health.check_period_s
        if self.node.inventory.refused_for_s < after_s:
            return []
        return [
            f"the driver has refused this container for more than {after_s:g} s, and all GPUs are Unhealthy. A new"
            " container may reach it: /healthz fails, so that the kubelet starts one. If that does not help, see"
            " nvidia-smi on the node"
        ]

    async def fetch_events(self) -> float:
        """Applies the events since the last fetch; returns the time from its start to the next one, seconds."""
        try:
            # As long as between two polls: nothing else needs this thread.
            events = await self.driver.events(self.node.settings.health.check_period_s)
        except AgentError as e:
            self.node.metrics.driver_error("events_failed")
            self._event_failures += 1
            backoff = Backoff(base_s=2 * self.event_period_s, cap_s=EVENT_BACKOFF_MAX_S)
            delay_s = backoff.delay_s(self._event_failures)
            if self._event_failures == 1:
                log.warning("gpu_events_lost", error=str(e), then="polls go on; fetching is retried with backoff")
                self.poll_soon()
            return delay_s
        if self._event_failures:
            log.info("gpu_events_back", failures=self._event_failures)
            self._event_failures = 0
        if not events:
            return self.event_period_s
        self._note(events)
        return EVENT_PAUSE_S

    async def _run_events(self) -> NoReturn:
        while True:
            started_at = time.monotonic()
            delay_s = await self.fetch_events()
            # NVML has waited for them; what cannot wait answers at once.
            await asyncio.sleep(max(started_at + delay_s - time.monotonic(), MIN_PAUSE_S))

    def _pause_s(self) -> float:
        # Seldom: a node without a driver may wait for one for days.
        if not self.node.inventory.current.known:
            return NO_GPUS_PERIOD_S
        probe_at = self.node.inventory.next_probe_at()
        if probe_at is None:
            return self.node.settings.health.check_period_s
        # A probe that is due already: at once, but not in a loop without a pause.
        return min(self.node.settings.health.check_period_s, max(probe_at - time.monotonic(), MIN_PAUSE_S))

    def _note(self, events: list[GpuEvent]) -> None:
        noted = self.node.inventory.note_events(events)
        for (event, meaning), count in noted.items():
            # Counted one by one: the metric is of events, and the log has one line for all of a kind.
            for _ in range(count):
                self.node.metrics.gpu_event(event.kind.value, event.xid, meaning is EventMeaning.IGNORED, event.uuid)
            level, name, more = _LINES[meaning]
            log.log(level, name, what=describe_event(event), uuid=event.uuid, count=count, **more)
        if any(meaning in _POLL_AT_ONCE for _, meaning in noted):
            # Events may have been lost with the set: the GPUs' state is looked at instead.
            self.poll_soon()

    def _report_restart(self) -> None:
        if not (why := self.needs_restart()):
            self._restart.is_over()
        elif self._restart.is_new(why[0]):
            log.error("restart_needed", why=why[0])


def log_found(gpus: Iterable[Gpu], unreadable: Iterable[tuple[int, str]]) -> None:
    for gpu in gpus:
        log.info(
            "gpu_found",
            index=gpu.index,
            minor=gpu.minor,
            uuid=gpu.uuid,
            name=gpu.name,
            memory_mib=gpu.memory_mib,
            numa=gpu.numa_node,
            health=gpu.health.value,
            reason=gpu.unhealthy_reason,
        )
    for index, reason in unreadable:
        log.error("gpu_unreadable", index=index, reason=reason)


_LINES: Mapping[EventMeaning, tuple[int, str, Mapping[str, str]]] = {
    EventMeaning.IGNORED: (logging.INFO, "gpu_event_ignored", {}),
    EventMeaning.FOREIGN: (logging.WARNING, "gpu_event_of_unknown_gpu", {}),
    EventMeaning.UNATTRIBUTED: (
        logging.ERROR,
        "gpu_event_of_no_gpu",
        {"then": "no GPU becomes Unhealthy by it; all are polled now"},
    ),
    EventMeaning.UNHEALTHY: (logging.WARNING, "gpu_event", {}),
    EventMeaning.NEEDS_RESET: (logging.WARNING, "gpu_event", {}),
}
_POLL_AT_ONCE = frozenset({EventMeaning.UNATTRIBUTED, EventMeaning.UNHEALTHY, EventMeaning.NEEDS_RESET})
