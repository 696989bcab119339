"""Tells libgpushare what the driver shows of each container, its memory and how long it and others kept the GPU busy, and
what the other containers on its GPU pay.

Once a second a counter of each container says whether its processes launch anything. For those that do

    whose process is it   a round of usage sampling says; it is requested while a process is there of which none has
    who was busy          the driver is read ten times a second, for their GPUs alone: busy time is added up for all
                          containers of a GPU in one reading, so a container that begins is counted from then on
    what others pay       by their `usage`, in each reading. A container may write there whatever it likes: more than its
                          share, or its ceiling, is not believed
    what is written       all of it, into the gpushare.config of each

A process that no round has shown yet keeps what it was busy until one does. While one is there the memory in the files is
that of the last round. Where readings are costly there are fewer: they have a twentieth of a processor. The same loop puts
limits right that an elastic ceiling, or another agent, has changed.

State owned: the owners of processes by the last round, those that the last reading showed, whether a round is missing and
when one was requested, what was counted of each GPU, of each container its count of launches and when it last grew, what
was written, and those whose failure was logged.
"""

from __future__ import annotations

import asyncio
import math
import time
import os,sys
DBG=os.environ.get('DBGA')
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.isolation.gpushare.format import CORES_OF_GPU, GpuLimits, Observed
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.kit.supervision import forever
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.errors import AgentError, NotFound
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.usage import ContainerUse, GpuBusy, ProcessSample, SamplesBusy, UsageRound

log = structlog.get_logger(__name__)

TIMEOUT_S = 5.0
PERIOD_S = 0.25
ROUND_PERIOD_S = 30.0
"""So often a round is requested although all processes are known: whose a claim's are may change while they run."""
RUNS_FOR_S = 5.0
"""So long after its last launch a container is told what the driver shows."""
READING_PERIOD_S = 0.1
LONGEST_PAUSE_S = 1.0
"""libgpushare's limit is right with a reading a second, too: it notices a wrong cost later."""
PART_OF_PROCESSOR = 20
"""Readings have a twentieth of a processor, and half of the time, for the driver serves the programs too."""

Owners = Mapping[int, ContainerKey | None]
"""Of the processes on a GPU that are known, by PID: None, where it is in no container with a share of that GPU."""
_OwnersOfGpus = dict[GpuUuid, dict[int, ContainerKey | None]]
_NS = 1_000_000_000
CLAIMED_OVER_NS = 1_000_000_000
TURN_NS = 2_000_000
CHANGE_S = 130e-6
HIDDEN = 0.15


class BusyCount(Struct):
    """Of one GPU, since `since_ns`. Times are of CLOCK_MONOTONIC, all in nanoseconds; 0: not known."""

    since_ns: int = 0
    until_ns: int = 0
    total_ns: int = 0
    by_container: dict[ContainerKey, int] = field(default_factory=dict)
    unknown: dict[int, int] = field(default_factory=dict)
    """By PID, not yet in the sums."""
    known: frozenset[ContainerKey] = frozenset()
    """Those with a process in the last reading."""

    def add(self, read: GpuBusy, owners: Owners) -> None:
        """One reading. One that does not continue the last begins anew."""
        begins = not (read.is_continued and read.busy_until_ns and self.until_ns)
        if begins:
            self.since_ns, self.total_ns = read.busy_until_ns, 0
            self.by_container.clear()
            self.unknown.clear()
        self.until_ns = read.busy_until_ns
        self.known = frozenset(key for process in read.processes if (key := owners.get(process.pid)) is not None)
        unknown, self.unknown = self.unknown, {}
        for process in read.processes:
            busy_ns = 0 if begins else process.busy_ns + unknown.pop(process.pid, 0)
            if process.pid not in owners:
                self.unknown[process.pid] = busy_ns
                continue
            self.total_ns += busy_ns
            if (key := owners[process.pid]) is not None:
                self.by_container[key] = self.by_container.get(key, 0) + busy_ns
        self.total_ns += sum(unknown.values())  # of who has ended before a round showed whose it was

    def observed(self, key: ContainerKey, before: Observed, at_ns: int, used: int | None) -> Observed:
        """`before` with what is counted of the container, and what it used at that time where that is known.

        Of a container of which no process is known, as of all without the host's PID namespace, it is not known how busy it
        is. Said as 0, it would be as idle as one whose costs are far too high, and be given more and more.
        """
        own_ns = self.by_container.get(key, 0)
        return replace(
            before,
            at_ns=before.at_ns if used is None else at_ns,
            used_bytes=before.used_bytes if used is None else used,
            busy_since_ns=self.since_ns,
            busy_until_ns=self.until_ns if key in self.known else 0,
            busy_ns=own_ns,
            others_ns=self.total_ns - own_ns,
        )


class Claim(Struct):
    """What one container says that it pays on one GPU. Times are of CLOCK_MONOTONIC."""

    at_ns: int = 0
    paid_ns: int = 0
    launches: int = 0
    long_ns: int = 0
    turns: int = 0
    present_ns: int = 0
    launched_at_ns: int = -_NS
    most: float = 0.0
    mean: float = 0.0
    mean_of_long: float = 0.0
    mean_present: float = 0.0
    turn_ns: float = TURN_NS
    turns_rate: float = 0.0
    passed_ns: int = 0

    def note(self, at_ns: int, most: float, paid_ns: int, launches: int, long_ns: int, turns: int, present_ns: int) -> None:
        passed = at_ns - self.at_ns
        if self.at_ns and passed > 0:
            # It may become less: what was paid too much is given back. And the tenant may write any number.
            self.passed_ns = min(self.passed_ns + passed, CLAIMED_OVER_NS)
            weight = min(1.0, passed / self.passed_ns)
            self.mean += (min(max(0, paid_ns - self.paid_ns) / passed, 8.0) - self.mean) * weight
            self.mean_of_long += (min(max(0, long_ns - self.long_ns) / passed, 8.0) - self.mean_of_long) * weight
            self.mean_present += (min(max(0, present_ns - self.present_ns) / passed, 8.0) - self.mean_present) * weight
            new = turns - self.turns
            self.turns_rate += (min(max(0, new) * _NS / passed, 5000.0) - self.turns_rate) * weight
            if new > 0:
                turn_ns = min(max(0, paid_ns - self.paid_ns) / new, TURN_NS)
                self.turn_ns += (turn_ns - self.turn_ns) / 4
        self.most = most
        if launches != self.launches and self.at_ns:
            self.launched_at_ns = at_ns
        self.at_ns, self.paid_ns, self.launches, self.long_ns = at_ns, paid_ns, launches, long_ns
        self.turns, self.present_ns = turns, present_ns

    @property
    def ratio(self) -> float:
        """Of the GPU's time, about a second's mean."""
        return min(self.mean, self.most)

    @property
    def ratio_of_long(self) -> float:
        return min(self.mean_of_long, self.ratio)

    def is_active(self, at_ns: int) -> bool:
        return at_ns - self.launched_at_ns < _NS


def between_ns(own: Claim, others: list[Claim], busy: float | None) -> float:
    """How long the others compute between two turns of a container that computes without a pause."""
    everybody = [own, *others]
    there = [min(1.0, one.mean_present) for one in others]
    together = 1.0
    if busy is not None:
        hidden = busy - sum(one.ratio + one.turns_rate * CHANGE_S for one in everybody)
        if hidden > HIDDEN:
            there.append(min(1.0, 1.5 * hidden))
        of_long = busy - max(0.0, sum(one.mean - one.mean_of_long for one in everybody))
        present = [min(1.0, own.mean_present), *there]
        by_chance = sum(present) - (1 - math.prod(1 - one for one in present))
        if by_chance > 0.05:
            together = min(2.0, max(0.5, (sum(present) - of_long) / by_chance))
    counts = [1.0]
    for one in (min(1.0, together * part) for part in there):
        counts = [
            (counts[k] if k < len(counts) else 0) * (1 - one) + (counts[k - 1] if k else 0) * one
            for k in range(len(counts) + 1)
        ]
    part = sum(chance / (k + 1) for k, chance in enumerate(counts))
    of_short = min(max(0.0, sum(one.mean - one.mean_of_long for one in others)), 0.9)
    most = sum(one.turn_ns for one in others)
    DBG and print(f'DBG own {own.mean:.3f} long {own.mean_of_long:.3f} pres {own.mean_present:.3f} others {[(round(o.mean,3),round(o.mean_of_long,3),round(o.mean_present,3),round(o.turn_ns)) for o in others]} busy {busy} tog {together:.2f} part {part:.2f}',file=sys.stderr)
    return TURN_NS * (1 / part - 1) + min(TURN_NS * of_short / (1 - of_short), most)


class Claims(Struct):
    """Of the containers on one GPU."""

    of: dict[ContainerKey, Claim] = field(default_factory=dict)

    def note(self, key: ContainerKey, limits: GpuLimits, at_ns: int, paid: tuple[int, ...]) -> None:
        most = CORES_OF_GPU if limits.cores is None else max(limits.cores, limits.ceiling or 0)
        self.of.setdefault(key, Claim()).note(at_ns, most / CORES_OF_GPU, *paid)

    def others(self, key: ContainerKey, seen: Observed, at_ns: int, busy: float | None = None) -> Observed:
        """`seen` with what the others pay."""
        active = [one for other, one in self.of.items() if other != key and one.is_active(at_ns)]
        return replace(
            seen,
            told_at_ms=at_ns // 1_000_000 % (1 << 32) or 1,
            companions=len(active),
            claimed=min(CORES_OF_GPU, round(CORES_OF_GPU * sum(one.ratio for one in active))),
            between_us=min(65535, round(between_ns(self.of[key], active, busy) / 1000)),
        )


def used_bytes(read: GpuBusy, owners: Owners) -> dict[ContainerKey, int]:
    """What each container has, of those of which that is known; none while a process is anybody's, for without one of its
    processes a container would seem to have less, and its library would give it more."""
    if any(process.pid not in owners for process in read.processes):
        return {}
    found: dict[ContainerKey, int] = {}
    unknown = set()
    for process in read.processes:
        if (key := owners[process.pid]) is None:
            continue
        if process.memory_bytes is None:
            unknown.add(key)
        found[key] = found.get(key, 0) + (process.memory_bytes or 0)
    return {key: size for key, size in found.items() if key not in unknown}


def owners_of(uses: Iterable[ContainerUse], unattributed: Mapping[GpuUuid, Sequence[ProcessSample]]) -> _OwnersOfGpus:
    """By the round that has these."""
    found: _OwnersOfGpus = {}
    for uuid, processes in unattributed.items():
        found.setdefault(uuid, {}).update(dict.fromkeys((process.pid for process in processes), None))
    for one in uses:
        found.setdefault(one.uuid, {}).update(dict.fromkeys(one.pids, one.key))
    return found


def memory_of(uses: Iterable[ContainerUse]) -> dict[tuple[ContainerKey, GpuUuid], int]:
    """Of the containers of which the round knows a process, and what all have."""
    found: dict[tuple[ContainerKey, GpuUuid], int] = {}
    unknown = set()
    for one in uses:
        if one.memory_bytes is None:
            unknown.add((one.key, one.uuid))
        elif one.pids:
            found[one.key, one.uuid] = found.get((one.key, one.uuid), 0) + one.memory_bytes
    return {place: size for place, size in found.items() if place not in unknown}


def pause_s(took_s: float, used_s: float) -> float:
    """Until the next reading, after one that took so long, and so much processor time of the agent. Not by the former alone:
    where programs keep the processors busy a reading takes longer, and is as cheap."""
    return min(LONGEST_PAUSE_S, max(READING_PERIOD_S - took_s, used_s * PART_OF_PROCESSOR - took_s, took_s))


class _Container(Struct):
    launches: int = 0
    launched_at: float = float("-inf")
    limits: tuple[GpuLimits, ...] = ()
    gpus: tuple[GpuUuid, ...] = ()
    """Those of the limits."""
    seen: dict[GpuUuid, Observed] = field(default_factory=dict)
    written: dict[GpuUuid, Observed] = field(default_factory=dict)


class ObservedContainers(Struct, kw_only=True, eq=False):
    """`run` once. `shares` are the containers and claims under this isolation, each with the limits that it is to have of
    its GPUs."""

    files: GpushareFiles
    shares: Callable[[], Mapping[ContainerKey, tuple[GpuLimits, ...]]]
    driver: SamplesBusy
    share_of: Callable[[ContainerKey], ContainerKey] = lambda key: key
    """Whose part an allocation is: of a claim a container may use several together."""
    clock: Callable[[], float] = time.monotonic
    period_s: float = PERIOD_S
    _request: Callable[[], None] = lambda: None
    _thread: DaemonThread = field(
        default_factory=lambda: DaemonThread(
            "gpushare-configs", advice="Check the disk of the setting libgpushare.directory."
        )
    )
    _owners: _OwnersOfGpus = field(default_factory=dict)
    _listed: dict[GpuUuid, set[int]] = field(default_factory=dict)
    _is_round_missing: bool = True
    _ran: Collection[ContainerKey] = ()
    _requested_at: float = float("-inf")
    _counts: dict[GpuUuid, BusyCount] = field(default_factory=dict)
    _claims: dict[GpuUuid, Claims] = field(default_factory=dict)
    _has_running: asyncio.Event = field(default_factory=asyncio.Event)
    _containers: dict[ContainerKey, _Container] = field(default_factory=dict)
    _logged: set[ContainerKey] = field(default_factory=set)

    def usage_sampled(self, usage: UsageRound | None) -> None:
        """For UsageSampling.subscribe."""
        if usage is None:
            return
        uses = [replace(one, key=self.share_of(one.key)) for one in usage.containers.values()]
        self._owners = owners_of(uses, usage.unattributed)
        age_ns = max(0, int((time.time() - usage.sampled_at) * 1e9))  # what was allocated since is not in it
        at_ns = time.monotonic_ns() - age_ns
        for (key, uuid), size in memory_of(uses).items():
            if (one := self._containers.get(key)) is not None and uuid in one.gpus:
                seen = one.seen.get(uuid, Observed())
                if at_ns > seen.at_ns:
                    one.seen[uuid] = replace(seen, at_ns=at_ns, used_bytes=size)

    def request_usage_by(self, request: Callable[[], None]) -> None:
        self._request = request

    async def run(self) -> NoReturn:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(forever("gpushare readings", self._read), name="gpushare readings")
            while True:
                await self.look()
                await asyncio.sleep(self.period_s)

    async def _read(self) -> NoReturn:
        while True:
            await self._has_running.wait()
            began, used = time.monotonic(), time.process_time()
            await self.read()
            await asyncio.sleep(pause_s(time.monotonic() - began, time.process_time() - used))

    async def look(self) -> None:
        """Which containers compute, and whether their limits are right."""
        shares = self.shares()
        self._containers = {key: self._containers.get(key) or _Container() for key in shares}
        self._logged &= shares.keys()
        for count in self._counts.values():
            count.by_container = {key: ns for key, ns in count.by_container.items() if key in shares}
        if shares:
            await self._call(partial(self._look, dict(shares)), "reading the use of containers")
        running = self._running()
        self.files.release(running)
        if running:
            if self._is_round_due(running):
                self._request()
                self._requested_at = self.clock()
            self._has_running.set()
        else:
            self._has_running.clear()
        self._ran = running.keys()

    def _is_round_due(self, running: Mapping[ContainerKey, _Container]) -> bool:
        """A round costs as much as several readings, and is of no use while the readings show known processes alone."""
        is_old = self.clock() - self._requested_at >= ROUND_PERIOD_S
        return is_old or self._is_round_missing or running.keys() != self._ran

    async def read(self) -> None:
        """The driver, once, and what it shows is written to those that compute."""
        running = self._running()
        on_gpu: dict[GpuUuid, list[tuple[ContainerKey, _Container]]] = {}
        for key, one in running.items():
            for uuid in one.gpus:
                on_gpu.setdefault(uuid, []).append((key, one))
        try:
            found = await self.driver.sample_busy(on_gpu.keys()) if on_gpu else {}
        except AgentError as e:
            log.debug("gpus_not_read", error=str(e))
            found = {}
        self._is_round_missing = found.keys() != on_gpu.keys()
        for uuid, busy in found.items():
            owners, count = self._owners_of(uuid, busy), self._counts.setdefault(uuid, BusyCount())
            count.add(busy, owners)
            used = used_bytes(busy, owners)
            for key, one in on_gpu.get(uuid, ()):
                one.seen[uuid] = count.observed(key, one.seen.get(uuid, Observed()), busy.at_ns, used.get(key))
        if running:
            await self._call(partial(self._write, tuple(running)), "writing what containers use")

    def _note_claims(self, keys: Collection[ContainerKey]) -> None:
        """What each of them pays, and what it is told of the others."""
        at_ns = time.monotonic_ns()
        on_gpu: dict[GpuUuid, list[tuple[ContainerKey, _Container]]] = {}
        for key in keys:
            if (one := self._containers.get(key)) is None:
                continue
            try:
                paid = self.files.paid(key)
            except AgentError as e:
                self._failed(key, e)
                continue
            for limits, uuid, of_gpu in zip(one.limits, one.gpus, paid, strict=False):
                self._claims.setdefault(uuid, Claims()).note(key, limits, at_ns, of_gpu)
                on_gpu.setdefault(uuid, []).append((key, one))
        for uuid, claims in self._claims.items():
            claims.of = {key: claim for key, claim in claims.of.items() if key in self._containers}
            for key, one in on_gpu.get(uuid, ()):
                one.seen[uuid] = claims.others(key, one.seen.get(uuid, Observed()), at_ns)

    def _owners_of(self, uuid: GpuUuid, busy: GpuBusy) -> Owners:
        """By the last round; without processes that have ended since, for their PIDs may be others' by the next one."""
        owners = self._owners.setdefault(uuid, {})
        pids = {process.pid for process in busy.processes}
        for pid in self._listed.get(uuid, set()) - pids:
            owners.pop(pid, None)
        # One without memory is in no list of the driver, but was busy: it may come and go in readings, and has not ended.
        self._listed[uuid] = {process.pid for process in busy.processes if process.memory_bytes != 0}
        if any(owners.get(pid) is None for pid in pids):
            self._is_round_missing = True  # a process in no container with a share may be in one that has just started
        return owners

    def _running(self) -> dict[ContainerKey, _Container]:
        now = self.clock()
        return {key: one for key, one in self._containers.items() if now - one.launched_at < RUNS_FOR_S}

    def _look(self, shares: Mapping[ContainerKey, tuple[GpuLimits, ...]]) -> None:
        for key, limits in shares.items():
            one = self._containers[key]
            try:
                launches = self.files.launches(key)
                is_new = launches < one.launches
                if is_new:
                    one.seen, one.written = {}, {}
                if is_new or limits != one.limits:
                    self.files.write_limits(key, limits)
                    one.limits, one.gpus = limits, tuple(GpuUuid(each.uuid) for each in limits)
            except AgentError as e:
                self._failed(key, e)
                continue
            if launches != one.launches:
                one.launches, one.launched_at = launches, self.clock()

    def _write(self, keys: Collection[ContainerKey]) -> None:
        self._note_claims(keys)
        for key in keys:
            one = self._containers.get(key)
            if one is None:
                continue
            seen = {uuid: now for uuid, now in dict(one.seen).items() if now != one.written.get(uuid)}
            try:
                if seen:
                    self.files.write_observed(key, seen)
            except AgentError as e:
                self._failed(key, e)
            else:
                one.written |= seen

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
