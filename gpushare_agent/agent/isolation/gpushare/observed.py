"""Tells libgpushare what the driver shows of each container: its memory, and how long it and others kept the GPU busy; and
what the other containers on its GPU pay.

Each second, and four times while any does, the `usage` of each container says whether its processes launch anything, take
memory or give it back. For those that do

    whose process is it   a round of usage sampling says; it is requested while a process is in no round yet
    who was busy          the driver is read ten times a second, only for their GPUs: busy time is added up for all
                          containers of a GPU in one reading, so a container that begins is counted from then on
    what others pay       by their `usage`, in each reading; how much of it is believed: claims.py
    what is written       all of it, into the gpushare.config of each

A process that no round has shown yet keeps its busy time until one does. Meanwhile the memory in the files is that of the
last round. Costly readings come less often: they have a twentieth of a processor. The same loop corrects limits that an
elastic ceiling, or another agent, has changed.

State owned: the owners of processes by the last round, those that the last reading showed, whether a round is missing and
when one was requested, what was counted and claimed on each GPU, of each container its count of launches, when its memory
changed and when either last did, its limits, what was published to it, and whose failure was logged. The event loop alone
changes it; the thread reads and writes files.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NoReturn, TypeVar

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.isolation.gpushare.claims import Claims
from gpushare_agent.agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.agent.isolation.gpushare.format import GpuLimits, Observed, Paid, read_paid
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.kit.supervision import forever
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import AgentError, NotFound
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.usage import ContainerUse, GpuBusy, ProcessSample, SamplesBusy, UsageRound

T = TypeVar("T")
U = TypeVar("U")

log = structlog.get_logger(__name__)

TIMEOUT_S = 5.0
PERIOD_S = 0.25
IDLE_PERIOD_S = 1.0
"""The period while nobody computes: a container that begins has no neighbour to hear of."""
REST_S = 10.0
"""So long the thread looks alone then, until somebody begins: to wake the loop for each look costs more than the look."""
ROUND_PERIOD_S = 30.0
"""The period of rounds when all processes are known: a claim's processes may change owners while they run."""
RUNS_FOR_S = 5.0
"""For so long after its last launch, or change of memory, the agent publishes to a container what the driver shows and what
others pay."""
READING_PERIOD_S = 0.1
LONGEST_PAUSE_S = 1.0
"""libgpushare believes what was published for 3 s (limit.c, PUBLISHED_MS), so a reading a second is enough."""
PART_OF_PROCESSOR = 20
"""Readings get a twentieth of a processor, and half of the time, because the driver serves the programs too."""

Owners = Mapping[int, ContainerKey | None]
"""The owners of the known processes on a GPU, by PID. None: in no container with a share of that GPU."""
_OwnersOfGpus = dict[GpuUuid, dict[int, ContainerKey | None]]


class BusyCount(Struct):
    """The counts of one GPU, since `since_ns`. Times are of CLOCK_MONOTONIC, all in nanoseconds; 0: not known."""

    since_ns: int = 0
    until_ns: int = 0
    total_ns: int = 0
    by_container: dict[ContainerKey, int] = field(default_factory=dict)
    unknown: dict[int, int] = field(default_factory=dict)
    """By PID, not yet in the sums."""
    known: frozenset[ContainerKey] = frozenset()
    """Those with a process in the last reading."""
    busy: float | None = None
    """Part of the time, a mean over about a second; None: the driver does not say."""

    def add(self, read: GpuBusy, owners: Owners) -> None:
        """One reading. One that does not continue the last starts over."""
        begins = not (read.is_continued and read.busy_until_ns and self.until_ns)
        if begins:
            self.since_ns, self.total_ns = read.busy_until_ns, 0
            self.by_container.clear()
            self.unknown.clear()
            self.busy = None
        passed_ns, self.until_ns = read.busy_until_ns - self.until_ns, read.busy_until_ns
        if not begins and passed_ns > 0:
            busy = min(1.0, sum(process.busy_ns for process in read.processes) / passed_ns)
            self.busy = busy if self.busy is None else self.busy + (busy - self.busy) * min(1.0, 2e-9 * passed_ns)
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
        self.total_ns += sum(unknown.values())  # of processes that ended before a round showed their owners

    def observed(self, key: ContainerKey, before: Observed, at_ns: int, used: int | None) -> Observed:
        """`before` with what is counted of the container, and what it used at that time, if that is known.

        If no process of a container is known, as always without the host's PID namespace, its busy time is not known. If 0
        were written, its payments would seem far too high, and it would be given ever more.
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


def used_bytes(read: GpuBusy, owners: Owners) -> dict[ContainerKey, int]:
    """The memory of each container, if known. Empty while the owner of a process is unknown: without one of its processes a
    container would seem to have less, and its library would give it more."""
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
    """The owners by the round that has these."""
    found: _OwnersOfGpus = {}
    for uuid, processes in unattributed.items():
        found.setdefault(uuid, {}).update(dict.fromkeys((process.pid for process in processes), None))
    for one in uses:
        found.setdefault(one.uuid, {}).update(dict.fromkeys(one.pids, one.key))
    return found


def memory_of(uses: Iterable[ContainerUse]) -> dict[tuple[ContainerKey, GpuUuid], int]:
    """The memory of the containers with a process in the round, and of all together."""
    found: dict[tuple[ContainerKey, GpuUuid], int] = {}
    unknown = set()
    for one in uses:
        if one.memory_bytes is None:
            unknown.add((one.key, one.uuid))
        elif one.pids:
            found[one.key, one.uuid] = found.get((one.key, one.uuid), 0) + one.memory_bytes
    return {place: size for place, size in found.items() if place not in unknown}


def pause_s(took_s: float, used_s: float) -> float:
    """The wait for the next reading, after one that took so long and so much processor time of the agent. Not by the former
    alone: while programs keep the processors busy, a reading takes longer and is as cheap."""
    return min(LONGEST_PAUSE_S, max(READING_PERIOD_S - took_s, used_s * PART_OF_PROCESSOR - took_s, took_s))


class _Container(Struct):
    head: bytes = b""
    """Of its `usage`, as last read; empty where it could not be read."""
    paid: Sequence[Paid] = ()
    """By that."""
    has_files: bool = False
    launches: int = 0
    changed_at_ns: int = 0
    """The sum over its GPUs."""
    ran_at: float = float("-inf")
    limits: tuple[GpuLimits, ...] = ()
    """What was written; empty: nothing yet."""
    gpus: tuple[GpuUuid, ...] = ()
    """In the order of its files; so is the next."""
    limits_of_gpus: tuple[GpuLimits | None, ...] = ()
    seen: dict[GpuUuid, Observed] = field(default_factory=dict)


_Answers = dict[ContainerKey, T | AgentError]
"""The result for one of several containers: a failure does not affect the others."""


def _for_each(work: Callable[[ContainerKey, U], T], given: Mapping[ContainerKey, U]) -> _Answers[T]:
    found: _Answers[T] = {}
    for key, one in given.items():
        try:
            found[key] = work(key, one)
        except AgentError as e:
            found[key] = e
    return found


class ObservedContainers(Struct, kw_only=True, eq=False):
    """Call `run` once. `shares` are the containers and claims under this isolation, each with the intended limits of its
    GPUs."""

    files: GpushareFiles
    shares: Callable[[], Mapping[ContainerKey, tuple[GpuLimits, ...]]]
    driver: SamplesBusy
    share_of: Callable[[ContainerKey], ContainerKey] = lambda key: key
    """The share that an allocation is part of: a container may use several of a claim together."""
    request_usage: Callable[[], None] = lambda: None
    """Requests a further round of usage sampling."""
    clock: Callable[[], float] = time.monotonic
    _thread: DaemonThread = field(
        default_factory=lambda: DaemonThread(
            "gpushare-configs", advice="Check the disk of the setting libgpushare.directory."
        )
    )
    _owners: _OwnersOfGpus = field(default_factory=dict)
    _listed: dict[GpuUuid, set[int]] = field(default_factory=dict)
    _is_round_missing: bool = True
    _ran: Collection[ContainerKey] = ()
    _shares: Mapping[ContainerKey, tuple[GpuLimits, ...]] | None = None
    _resting: dict[ContainerKey, tuple[int, bytes]] | None = None
    """Each with its number of GPUs and its head, while nobody computes and nothing is to be written."""
    _looked_at_ns: int = 0
    _is_awaited: threading.Event = field(default_factory=threading.Event)
    """Ends a rest."""
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
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - usage.sampled_boot_s  # what was allocated since is not in it
        at_ns = time.monotonic_ns() - int(age_s * 1e9)
        for (key, uuid), size in memory_of(uses).items():
            if (one := self._containers.get(key)) is not None and uuid in one.gpus:
                seen = one.seen.get(uuid, Observed())
                if at_ns > seen.at_ns:
                    one.seen[uuid] = replace(seen, at_ns=at_ns, used_bytes=size)

    def paid(self, key: ContainerKey, uuid: GpuUuid) -> float | None:
        """The part of the GPU's time that an allocation's share pays there; None if it has launched nothing lately."""
        claims = self._claims.get(uuid)
        return claims.ratio(self.share_of(key), self._now_ns()) if claims is not None else None

    async def run(self) -> NoReturn:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(forever("gpushare readings", self._read), name="gpushare readings")
                while True:
                    await self.look(REST_S)
                    await asyncio.sleep(PERIOD_S if self._has_running.is_set() else IDLE_PERIOD_S)
        finally:
            # After a reload this may long be referred to, and a tenant's removed file stays on the disk while it is open.
            await self._call(partial(self.files.release, (), ()), "closing the files of containers")

    async def _read(self) -> NoReturn:
        while True:
            await self._has_running.wait()
            began, used = time.monotonic(), time.process_time()
            await self.read()
            await asyncio.sleep(pause_s(time.monotonic() - began, time.process_time() - used))

    def changed(self) -> None:
        """The shares, or their limits, may be others."""
        self._is_awaited.set()

    async def look(self, rest_s: float = 0.0) -> None:
        """Finds the containers that compute, and corrects their limits. While none does it goes on for up to `rest_s`."""
        shares = self.shares()
        if self._ran or shares is not self._shares:  # while nothing runs, nothing comes that is to be forgotten
            self._keep(shares)
            self._shares, self._resting = shares, None
        known, is_new = set[ContainerKey](), self._resting is None
        if self._resting is None:
            known = {key for key, one in self._running().items() if one.gpus}  # `read` reads those
            self._resting = {
                key: (len(limits), self._containers[key].head) for key, limits in shares.items() if key not in known
            }
        resting = self._resting
        self._looked_at_ns = await self._note_paid(
            resting, self._looked_at_ns, rest_s if self._looked_at_ns and not is_new else 0.0
        )
        if not is_new and self._resting is resting:
            return
        wrong = {
            key: limits
            for key, limits in shares.items()
            if (one := self._containers[key]).has_files and one.limits != limits
        }
        if wrong:
            await self._write_limits(wrong)
            for key in wrong.keys() & self._containers.keys():  # what changes from now on is counted from here
                self._note_claims(key, self._looked_at_ns)
        running = self._running()
        if self.files.keeps_others(running, shares):
            await self._call(partial(self.files.release, tuple(running), shares), "releasing the files of containers")
        if running:
            # A round costs as much as several readings, and is useless while these show known processes only.
            is_old = self.clock() - self._requested_at >= ROUND_PERIOD_S
            if is_old or self._is_round_missing or running.keys() != self._ran:
                self.request_usage()
                self._requested_at = self.clock()
            self._has_running.set()
        else:
            self._has_running.clear()
        self._ran = running.keys()
        if known or wrong or self.files.keeps_others(running, shares):  # the disk may hang
            self._resting = None

    def _keep(self, shares: Mapping[ContainerKey, tuple[GpuLimits, ...]]) -> None:
        """Forgets ended containers, and GPUs without a share."""
        self._containers = {key: self._containers.get(key) or _Container() for key in shares}
        self._logged &= shares.keys()
        gpus = {GpuUuid(one.uuid) for limits in shares.values() for one in limits}
        self._counts = {uuid: count for uuid, count in self._counts.items() if uuid in gpus}
        self._claims = {uuid: claims for uuid, claims in self._claims.items() if uuid in gpus}
        self._listed = {uuid: pids for uuid, pids in self._listed.items() if uuid in gpus}
        for count in self._counts.values():
            count.by_container = {key: ns for key, ns in count.by_container.items() if key in shares}
        for claims in self._claims.values():
            claims.keep(shares)

    async def read(self) -> None:
        """Reads the driver and the claims once, and writes what they show to the containers that compute."""
        running = self._running()
        on_gpu: dict[GpuUuid, dict[ContainerKey, _Container]] = {}
        for key, one in running.items():
            for uuid in one.gpus:
                on_gpu.setdefault(uuid, {})[key] = one
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
            for key, one in on_gpu.get(uuid, {}).items():
                one.seen[uuid] = count.observed(key, one.seen.get(uuid, Observed()), busy.at_ns, used.get(key))
        await self._note_paid({key: (len(one.gpus), one.head) for key, one in running.items() if one.gpus})
        # Without containers that have ended meanwhile, or have other files now.
        running = {key: one for key, one in running.items() if self._containers.get(key) is one}
        at_ns = self._now_ns()
        for uuid, on_it in on_gpu.items():
            seen = {key: one.seen.get(uuid, Observed()) for key, one in on_it.items()}
            busy_part = self._counts[uuid].busy if uuid in self._counts else None
            for key, published in self._claims.setdefault(uuid, Claims()).publish(seen, at_ns, busy_part).items():
                on_it[key].seen[uuid] = published
        await self._write({key: dict(one.seen) for key, one in running.items() if one.seen})

    async def _note_paid(
        self, heads: Mapping[ContainerKey, tuple[int, bytes]], since_ns: int = 0, rest_s: float = 0.0
    ) -> int:
        """Reads the `usage` of these containers, each with its number of GPUs and its last head, and answers when;
        `since_ns` where it was not read. Of those that rest since the reading at `since_ns` nothing is noted until they
        change: for that it waits up to `rest_s`, or until the thread is needed for something else."""

        def read() -> tuple[int, int, _Answers[tuple[bytes, list[Paid]]]]:
            before_ns, until = since_ns, time.monotonic() + rest_s
            while True:
                at_ns = self._now_ns()
                changed = self.files.changed_heads(heads)
                if changed or time.monotonic() >= until or self._is_awaited.wait(IDLE_PERIOD_S):
                    break
                before_ns = at_ns
            return before_ns, at_ns, {
                key: one if isinstance(one, AgentError) else (one, read_paid(one)) for key, one in changed.items()
            }  # fmt: skip

        found = await self._call(read, "reading the use of containers", rest_s) if heads else None
        if found is None:
            return since_ns
        since_ns, at_ns, answers = found
        for key in answers if since_ns else heads:
            if (one := self._containers.get(key)) is None:  # it has ended meanwhile
                continue
            answer = answers.get(key)
            if isinstance(answer, AgentError):
                has_files = not isinstance(answer, NotFound)
                if one.head or one.has_files != has_files:
                    self._resting = None
                one.head, one.has_files = b"", has_files
                self._failed(key, answer)
            elif answer is not None:
                self._resting = None
                self._note_changed(key, *answer)
            if (one := self._containers[key]).head:
                self._note_claims(key, at_ns, since_ns)
        return at_ns

    def _note_changed(self, key: ContainerKey, head: bytes, paid: Sequence[Paid]) -> None:
        one, launches = self._containers[key], sum(each.launches for each in paid)
        changed_at_ns = sum(each.changed_at_ns for each in paid)
        if launches < one.launches:  # its files were made again
            self._containers[key] = one = _Container()
            for claims in self._claims.values():
                claims.of.pop(key, None)
        one.head, one.paid, one.has_files = head, paid, True
        if (launches, changed_at_ns) != (one.launches, one.changed_at_ns):
            one.launches, one.changed_at_ns, one.ran_at = launches, changed_at_ns, self.clock()

    def _note_claims(self, key: ContainerKey, at_ns: int, since_ns: int = 0) -> None:
        one = self._containers[key]
        for uuid, limits, each in zip(one.gpus, one.limits_of_gpus, one.paid, strict=False):
            if limits is not None:
                self._claims.setdefault(uuid, Claims()).note(key, limits, at_ns, each, since_ns)

    def _owners_of(self, uuid: GpuUuid, busy: GpuBusy) -> Owners:
        """The owners by the last round, without ended processes, because their PIDs may be others' by the next one."""
        owners = self._owners.setdefault(uuid, {})
        pids = {process.pid for process in busy.processes}
        for pid in self._listed.get(uuid, set()) - pids:
            owners.pop(pid, None)
        # A process without memory is in no list of the driver, but was busy: it may come and go in readings without ending.
        self._listed[uuid] = {process.pid for process in busy.processes if process.memory_bytes != 0}
        if any(owners.get(pid) is None for pid in pids):
            self._is_round_missing = True  # a process in no container with a share may be in one that has just started
        return owners

    def _now_ns(self) -> int:
        return int(self.clock() * 1e9)

    def _running(self) -> dict[ContainerKey, _Container]:
        now = self.clock()
        return {key: one for key, one in self._containers.items() if now - one.ran_at < RUNS_FOR_S}

    async def _write_limits(self, limits: Mapping[ContainerKey, tuple[GpuLimits, ...]]) -> None:
        work = partial(_for_each, self.files.write_limits, limits)
        for key, gpus in (await self._call(work, "writing the limits of containers") or {}).items():
            if isinstance(gpus, AgentError):
                self._failed(key, gpus)
            elif (one := self._containers.get(key)) is not None:
                one.limits, one.gpus = limits[key], gpus
                by_uuid = {each.uuid: each for each in one.limits}
                one.limits_of_gpus = tuple(map(by_uuid.get, gpus))

    async def _write(self, seen: Mapping[ContainerKey, Mapping[GpuUuid, Observed]]) -> None:
        work = partial(_for_each, self.files.write_observed, seen)
        for key, error in (await self._call(work, "writing what containers use") or {}).items():
            if error is not None:
                self._failed(key, error)

    def _failed(self, key: ContainerKey, error: AgentError) -> None:
        if not isinstance(error, NotFound) and key not in self._logged:  # once: the tenant can make it come and go
            self._logged.add(key)
            log.warning(
                "gpushare_files_not_used", pod_uid=key.pod_uid, container=key.container, error=str(error),
                then="it is tried again, and not logged again for it",
            )  # fmt: skip

    async def _call(self, work: Callable[[], T], what: str, rest_s: float = 0.0) -> T | None:
        """Runs in the thread, up to `rest_s` longer than a reading may; None if there is no answer in time."""
        if rest_s:
            self._is_awaited.clear()
        else:
            self._is_awaited.set()  # the thread may rest
        try:
            return await self._thread.call(work, what, rest_s + TIMEOUT_S)
        except AgentError as e:
            log.debug("gpushare_files_late", what=what, error=str(e))
            return None
