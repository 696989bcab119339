"""Samples the use of the GPUs by containers: each period while somebody reads it, otherwise rarely.

A round of a full node costs tens of milliseconds of processor time, so one that nobody reads is for the history alone.
Whoever reads `current` is a reader; one that comes after a pause waits in `refresh` for a round of its own. Who needs a
further round and no more of them asks for it with `request_round`.

Not for keeping the past (observability/usage_history.py) or for showing it. Rounds never overlap: a slow driver
delays the next one, which then begins at the next full period. A round counts for three periods: numbers that are no
longer true are worse than none. It stands for the time since the round before (`covered_s`), also for a pause; after a
longer time, in which rounds failed, for one period.

State owned: the last round, when it was read, the container IDs as the runtime last reported them, and which problem is
in the log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.cluster.pod_store import PodStore
from gpushare_agent.agent.gpus.watch import GpuDriver
from gpushare_agent.agent.isolation.container_ids import ContainerIds, in_statuses
from gpushare_agent.agent.observability.attribution import (
    AllocatedContainers,
    PaidRatio,
    has_handed_over,
    join_usage,
    unknown_ids,
)
from gpushare_agent.agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.agent.runtime.cgroups import ProcessOwners
from gpushare_agent.core.kit.rate import TokenBucket, lines_by_event
from gpushare_agent.core.kit.supervision import ChangeSignal, bounded, wait_for
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.model.usage import UsageRound

log = structlog.get_logger(__name__)

MISSED_ROUNDS = 3
"""Periods without a round until the current one counts no more."""
READ_FOR_S = 5.0
"""So long after it was last read the use is sampled each period. A scrape each 15 s is served by a third of the rounds."""
REFRESH_TIMEOUT_S = 1.0
"""Most that a reader waits for its round."""
MIN_SAMPLE_TIMEOUT_S = 2.0
MAX_SAMPLE_TIMEOUT_S = 10.0
IDS_TIMEOUT_S = 0.5
IDS_AGAIN_S = 2.0
"""Least time between two calls of the runtime for IDs that the pods' statuses do not have yet."""

Observer = Callable[[UsageRound | None], None]


class UsageSampling(Struct, kw_only=True, eq=False):
    """`run` samples each `period_s` while `current` is read, else each `idle_period_s`, if that is longer, and once where a
    round is requested."""

    driver: GpuDriver
    owners: ProcessOwners
    pods: PodStore
    ids: ContainerIds
    allocations: Callable[[], Mapping[ContainerKey, Allocation]]
    metrics: AgentMetrics
    period_s: float
    idle_period_s: float = 0.0
    claims: Callable[[], Mapping[ContainerKey, tuple[ContainerKey, ...]]] = dict
    paid: PaidRatio = lambda key, uuid: None
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    boot_clock: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    _observers: list[Observer] = field(default_factory=list)
    _reported: Mapping[str, ContainerKey] = field(default_factory=dict)
    _ids_asked_at: float = float("-inf")
    _round_at: float = float("-inf")
    _covered_at: float = float("-inf")
    """Until when rounds stand for the time."""
    _tried_at: float = float("-inf")
    _read_at: float = float("-inf")
    _is_requested: asyncio.Event = field(default_factory=asyncio.Event)
    _rounds: ChangeSignal = field(default_factory=ChangeSignal)
    _is_failing: bool = False
    _is_slow: bool = False
    _is_reported: bool = False
    _lines: Mapping[str, TokenBucket] = field(default_factory=dict)
    _last: UsageRound | None = None
    is_idle: bool = False
    """True if nobody reads, and there was a pause since the last round."""

    def __post_init__(self) -> None:
        # A driver may fail, or be late, in every other round.
        self._lines = lines_by_event(self.clock)

    @property
    def current(self) -> UsageRound | None:
        """The last round, unless it is from before a pause. Reading it is also a request."""
        self._note_reader()
        # While rounds go on `_failed` withdraws an old one; in a pause nothing runs that could.
        return None if self.is_idle and self._is_try_old else self._last

    @property
    def _is_try_old(self) -> bool:
        """By its end: a reader gets the numbers of a slow round, or waits for another."""
        return self.clock() - self._tried_at >= MISSED_ROUNDS * self.period_s

    def request_round(self) -> None:
        """A round begins within a period from now, also in a pause, which goes on after it."""
        self._is_requested.set()

    def _note_reader(self) -> None:
        """The use is sampled each period from now on, for READ_FOR_S."""
        self._read_at = self.clock()
        self._is_requested.set()

    async def refresh(self) -> None:
        """If the last round is from a pause, waits for a new one before `current` is read; REFRESH_TIMEOUT_S at most."""
        self._note_reader()
        # By the last try, not the last success: while the driver is away each scrape would wait for a round that
        # fails.
        if self._is_try_old:
            await self._rounds.wait_next(REFRESH_TIMEOUT_S)

    def subscribe(self, observer: Observer) -> None:
        """`observer` is called after each round, and with None when the current one counts no more. It must not raise."""
        self._observers.append(observer)

    def take_over(self, previous: UsageSampling) -> None:
        """The first round stands for the time of a reload, too."""
        self._covered_at = previous._covered_at

    async def run(self) -> NoReturn:
        """Samples until cancelled."""
        due_at = self.clock()
        while True:
            self._is_requested.clear()  # before the round: what it shows must be at least as new as a request
            await self.sample_once()
            now = self.clock()
            due_at += self.period_s
            if now > due_at:
                self._note_slow(now - due_at + self.period_s)
                # The periods that the round took are left out and the rhythm stays: one more addition would begin it
                # at once, and a slow driver would be asked without a pause.
                due_at += self.period_s * ((now - due_at) // self.period_s + 1)
            else:
                self._is_slow = False
            await asyncio.sleep(due_at - now)
            # With a long period READ_FOR_S ends within one: one read each round would look like no reader.
            if self.clock() - self._read_at >= max(READ_FOR_S, MISSED_ROUNDS * self.period_s):
                self.is_idle = self.idle_period_s > self.period_s
                # One period of the pause has been slept above.
                await wait_for(self._is_requested, max(0.0, self.idle_period_s - self.period_s))
                # The rhythm begins again with the reader: the periods of the pause were not missed.
                due_at = max(due_at, self.clock())

    async def sample_once(self) -> None:
        """One round. What goes wrong is logged once and counted; it costs this round."""
        try:
            await self._sample_once()
        finally:
            self._tried_at = self.clock()
            # Wakes the readers that wait for this round; those that come from now on wait for another.
            self._rounds.notify()

    async def _sample_once(self) -> None:
        started_at = self.clock()
        try:
            found = await self._sample()
        except Exception as e:  # noqa: BLE001 - one cycle: shares are given whether or not their use can be shown
            self._failed(e)
            return
        if self._is_reported:
            log.info("usage_sampled_again")
        self._is_failing = self._is_reported = False
        self._round_at = started_at
        self.metrics.sampled(self.clock() - started_at)
        now = self.clock()
        since_s, self._covered_at = now - self._covered_at, now
        longest_s = self.idle_period_s + MISSED_ROUNDS * self.period_s
        self._publish(replace(found, covered_s=since_s if since_s <= longest_s else self.period_s))

    async def _sample(self) -> UsageRound:
        """Raises Unavailable."""
        timeout_s = min(MAX_SAMPLE_TIMEOUT_S, max(MIN_SAMPLE_TIMEOUT_S, MISSED_ROUNDS * self.period_s))
        late = (
            f"sampling the GPUs' use got no answer within {timeout_s:g} s; it is tried again each {self.period_s:g} s. Check"
            " nvidia-smi and the kernel log on this node"
        )
        async with bounded(timeout_s, late):
            # Before the driver is asked: what it reports is at least as new as the time shown with it.
            sampled_at, sampled_boot_s = self.wall_clock(), self.boot_clock()
            sample = await self.driver.sample()
            # A GPU that fails only costs its own values: its errors are counted, and the round is shown.
            for error, count in sorted(sample.errors.items()):
                self.metrics.driver_error(error, count)
            pids = {process.pid for gpu in sample.gpus for process in gpu.processes or ()}
            # After the sample, because the driver names the PIDs. A process that has ended in between has no owner and
            # is unattributed for this round.
            owners = await self.owners.identify(pids)
            allocated = self._allocated()
            # The kubelet writes a container's ID into the status a second or two after its start; the runtime has
            # it at once. The second look costs a call, so only where an ID is unknown.
            if unknown_ids(sample, owners, allocated) and await self._refresh_ids():
                allocated = self._allocated()
        return join_usage(
            sample, owners, allocated, sampled_at=sampled_at, sampled_boot_s=sampled_boot_s, paid=self.paid
        )

    def _allocated(self) -> AllocatedContainers:
        return AllocatedContainers(
            gpus={
                key: allocation.gpus
                for key, allocation in self.allocations().items()
                if not has_handed_over(allocation, self.pods.get(key.pod_uid))
            },
            # The statuses win: the runtime's answer may be old, because it is asked only about IDs that no status has.
            by_id={**self._reported, **in_statuses(self.pods.pods())},
            claims=self.claims(),
        )

    async def _refresh_ids(self) -> bool:
        """True if the runtime reported anything new. It may be unavailable: the pods' statuses have the IDs a second
        later."""
        # A process in a container that the runtime does not know either would have it asked in each round.
        if self.clock() - self._ids_asked_at < IDS_AGAIN_S:
            return False
        self._ids_asked_at = self.clock()
        try:
            async with asyncio.timeout(IDS_TIMEOUT_S):
                reported = await self.ids.running()
        except (AgentError, TimeoutError):
            return False
        before, self._reported = self._reported, {container_id: key for key, container_id in reported.items()}
        return self._reported != before

    def _failed(self, error: Exception) -> None:
        self.metrics.sampling_failed()
        # Once more before a pause: whoever requested it would wait for the next one for a minute.
        if not self._is_failing:
            self._is_requested.set()
        self._is_failing = True
        # Not only where the failures begin: the last of many beginnings may be the one that lasts.
        if not self._is_reported and self._lines["usage_not_sampled"].take():
            self._is_reported, fields = True, {"error": str(error), "next_in_s": self.period_s}
            if isinstance(error, AgentError):
                log.warning("usage_not_sampled", **fields)
            else:
                log.error("usage_not_sampled", **fields, exc_info=error)
        # Only now: one missed round must not make the dashboard and the metrics blink.
        if self._last is not None and self.clock() - self._round_at >= MISSED_ROUNDS * self.period_s:
            if self._lines["usage_unknown"].take():
                log.warning("usage_unknown", missed_rounds=MISSED_ROUNDS)
            self._covered_at = float("-inf")
            self._publish(None)

    def _note_slow(self, took_s: float) -> None:
        self.metrics.sampling_overran()
        if not self._is_slow and self._lines["usage_sampling_slow"].take():
            self._is_slow = True
            log.warning("usage_sampling_slow", took_s=round(took_s, 3), period_s=self.period_s)

    def _publish(self, found: UsageRound | None) -> None:
        self._last, self.is_idle = found, False
        for observer in self._observers:
            observer(found)
