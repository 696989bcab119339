"""Tells libgpushare what the driver shows of each container: its memory, and how busy it and others keep the GPU.

Written after each round of usage sampling, for the containers whose processes have launched something of late; while there
are any, the rounds are requested. Where none runs nothing is read but a counter of each container, once a second. The same
loop puts limits right that an elastic ceiling, or another agent, has changed.

State owned: the last round, of each container its count of launches and when it last grew, the samples and the limits that
were written, and those whose failure was logged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn

import structlog
from msgspec import Struct, field

from gpushare_agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.isolation.gpushare.format import GpuLimits, Observed
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.kit.supervision import forever
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.errors import AgentError, NotFound
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.usage import UsageRound

log = structlog.get_logger(__name__)

TIMEOUT_S = 5.0
PERIOD_S = 1.0
RUNS_FOR_S = 5.0
"""So long after its last launch a container is told what the driver shows."""
PER_MILLE = 1000


class _Container(Struct):
    launches: int = 0
    launched_at: float = float("-inf")
    samples: int = 0
    written: tuple[GpuLimits, ...] | None = None


def observed(usage: UsageRound, key: ContainerKey, uuid: GpuUuid, at_ns: int, samples: int) -> Observed | None:
    """None where the driver does not say what the container has. Of others no more than one number."""
    own = usage.containers.get((key, uuid))
    # Without a process that is known to be its own it would seem to have nothing, and the library would give it more.
    if own is None or own.memory_bytes is None or not own.pids:
        return None
    busy = [one.sm_ratio for (other, on), one in usage.containers.items() if on == uuid and other != key]
    busy += [process.sm_ratio for process in usage.unattributed.get(uuid, ())]
    return Observed(
        at_ns=at_ns,
        used_bytes=own.memory_bytes,
        busy=_per_mille(own.sm_ratio),
        busy_others=_per_mille(sum(ratio or 0.0 for ratio in busy)),
        samples=samples,
    )


def _per_mille(ratio: float | None) -> int:
    return min(PER_MILLE, max(0, round((ratio or 0.0) * PER_MILLE)))


class ObservedContainers(Struct, kw_only=True, eq=False):
    """`run` once. `shares` are the containers and claims under this isolation, each with the limits that it is to have of
    its GPUs."""

    files: GpushareFiles
    shares: Callable[[], Mapping[ContainerKey, tuple[GpuLimits, ...]]]
    clock: Callable[[], float] = time.monotonic
    period_s: float = PERIOD_S
    _request: Callable[[], None] = lambda: None
    _thread: DaemonThread = field(
        default_factory=lambda: DaemonThread(
            "gpushare-configs", advice="Check the disk of the setting libgpushare.directory."
        )
    )
    _round: tuple[UsageRound, int] | None = None
    _is_sampled: asyncio.Event = field(default_factory=asyncio.Event)
    _containers: dict[ContainerKey, _Container] = field(default_factory=dict)
    _logged: set[ContainerKey] = field(default_factory=set)

    def usage_sampled(self, usage: UsageRound | None) -> None:
        """For UsageSampling.subscribe."""
        if usage is not None:
            age_ns = max(0, int((time.time() - usage.sampled_at) * 1e9))  # what was allocated since is not in it
            self._round = (usage, time.monotonic_ns() - age_ns)
            self._is_sampled.set()

    def request_usage_by(self, request: Callable[[], None]) -> None:
        self._request = request

    async def run(self) -> NoReturn:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(forever("gpushare observed", self._follow_rounds), name="gpushare observed")
            while True:
                await self.look()
                await asyncio.sleep(self.period_s)

    async def _follow_rounds(self) -> NoReturn:
        while True:
            await self._is_sampled.wait()
            self._is_sampled.clear()
            await self.write_round()

    async def look(self) -> None:
        """Which containers compute, and whether their limits are right."""
        shares = self.shares()
        self._containers = {key: self._containers.get(key) or _Container() for key in shares}
        self._logged &= shares.keys()
        if shares:
            await self._call(partial(self._look, dict(shares)), "reading the use of containers")
        if self._running():
            self._request()

    async def write_round(self) -> None:
        """What the last round shows, to those that compute."""
        if self._round is not None and (keys := self._running()):
            await self._call(partial(self._write_round, *self._round, keys), "writing what containers use")

    def _running(self) -> list[ContainerKey]:
        now = self.clock()
        return [key for key, one in self._containers.items() if now - one.launched_at < RUNS_FOR_S]

    def _look(self, shares: Mapping[ContainerKey, tuple[GpuLimits, ...]]) -> None:
        for key, limits in shares.items():
            one = self._containers[key]
            try:
                launches = self.files.launches(key)
                if limits != one.written or launches < one.launches:  # fewer: its files are new
                    self.files.write_limits(key, limits)
                    one.written = limits
            except AgentError as e:
                self._failed(key, e)
                continue
            if launches != one.launches:
                one.launches, one.launched_at = launches, self.clock()

    def _write_round(self, usage: UsageRound, at_ns: int, keys: list[ContainerKey]) -> None:
        for key in keys:
            one = self._containers.get(key)
            if one is None or one.written is None:
                continue
            try:
                for limits in one.written:
                    seen = observed(usage, key, GpuUuid(limits.uuid), at_ns, one.samples + 1)
                    if seen is not None:
                        self.files.write_observed(key, limits.uuid, seen)
            except AgentError as e:
                self._failed(key, e)
            else:
                one.samples += 1

    def _failed(self, key: ContainerKey, error: AgentError) -> None:
        if not isinstance(error, NotFound) and key not in self._logged:  # once: the tenant can make it come and go
            self._logged.add(key)
            log.warning(
                "gpushare_files_not_used", pod_uid=key.pod_uid, container=key.container, error=str(error),
                then="it is tried again, and not logged again for it",
            )  # fmt: skip

    async def _call(self, work: Callable[[], None], what: str) -> None:
        try:
            await self._thread.call(work, what, TIMEOUT_S)
        except AgentError as e:
            log.debug("gpushare_files_late", what=what, error=str(e))
