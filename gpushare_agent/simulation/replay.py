"""Plays a workload through one policy: arrivals, tries, ends, in the order of time.

Rules, as in a cluster with Jobs: a pod that finds no node waits, and is tried again once something has ended on a node that
could serve it, but not before its back-off is over. Where a pod of a shape has no node, none of that shape has one; so only
the first of each shape is asked for. A pod that an agent refuses has failed; its Job makes another after 10 s, doubled with
each failure up to 6 minutes, and gives up after 6. Binding and starting take no time.

State owned: the queue of events, the waiting pods by shape, the tallies. The same input gives the same result.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count

from msgspec import Struct, field

from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.simulation.meter import Meter
from gpushare_agent.simulation.schedulers import NoNode, Placed, Scheduler
from gpushare_agent.simulation.workload import Arrival, PodMaker, Shape, Size, Workload

FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 10.0
"""kube-scheduler's podInitialBackoffSeconds and podMaxBackoffSeconds; it doubles with each try that failed."""


class Job(Struct, kw_only=True):
    """A pod of the workload on its way, with all pods that its controller makes anew after the agent refused it."""

    arrival: Arrival
    number: int
    """Its place in the order of arrivals."""
    tries: int = 0
    """That found no node."""
    refusals: int = 0
    """By an agent, at admission."""
    ready_at: float = 0.0
    """Not tried before."""

    def __lt__(self, other: Job) -> bool:
        return self.number < other.number

    @property
    def pod_name(self) -> str:
        name = self.arrival.name
        return f"{name}-{self.refusals}" if self.refusals else name

    def found_no_node(self, now: float) -> None:
        self.ready_at = now + min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**self.tries)
        self.tries += 1


class WaitingPods:
    """Pods that have no node yet, as kube-scheduler keeps them: by the time of their arrival, each with a back-off."""

    def __init__(self) -> None:
        self._by_shape: dict[Shape, list[Job]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, job: Job) -> None:
        insort(self._by_shape.setdefault(job.arrival.shape, []), job)
        self._count += 1

    def first(self, shape: Shape) -> Job | None:
        jobs = self._by_shape.get(shape)
        return jobs[0] if jobs else None

    def remove_first(self, shape: Shape) -> None:
        jobs = self._by_shape[shape]
        del jobs[0]
        self._count -= 1
        if not jobs:
            del self._by_shape[shape]

    def firsts(self) -> list[Job]:
        """The first pod of each shape, by arrival."""
        return sorted(jobs[0] for jobs in self._by_shape.values())


FIRST_RETURN_S, MAX_RETURN_S = 10.0, 360.0
BACKOFF_LIMIT = 6
"""All of Kubernetes' Jobs."""
_PROGRESS_EVERY = 500


class _Kind(IntEnum):
    """Kinds of events. Of several at one time the lower comes first: a pod that ends frees capacity for one that arrives."""

    END = 0
    RETURN = 1
    WAKE = 2


class _Running(Struct, frozen=True, kw_only=True):
    job: Job
    placed: Placed


class Tally(Struct, kw_only=True):
    """What happened to the pods. `waited_s` is from a pod's arrival to its start."""

    waited_s: dict[Size, list[float]] = field(default_factory=lambda: {size: [] for size in Size})
    no_node: Counter[NoNode] = field(default_factory=Counter)
    """Pods that found no node at their first try, by why."""
    refusals: Counter[RefusalReason] = field(default_factory=Counter)
    """Of agents, at admission."""
    refused_pods: int = 0
    gave_up: int = 0
    ended_at: float = 0.0


class Replay(Struct, eq=False):
    """One run. `on_progress` is called with the number of pods that have arrived."""

    workload: Workload
    scheduler: Scheduler
    meter: Meter
    pods: PodMaker
    on_progress: Callable[[int], None]
    _events: list[tuple[float, _Kind, int, _Running | Job | Shape]] = field(default_factory=list)
    _order: count[int] = field(default_factory=count)
    _waiting: WaitingPods = field(default_factory=WaitingPods)
    _woken: set[Shape] = field(default_factory=set)
    """A wake is under way."""
    _pausing: int = 0
    """Jobs whose pod was refused, until they make the next."""
    _tally: Tally = field(default_factory=Tally)

    def run(self) -> Tally:
        impossible = self._impossible()
        for number, arrival in enumerate(self.workload.arrivals):
            self._play_until(arrival.at_s)
            self._pass_to(arrival.at_s)
            if arrival.shape in impossible:
                self._tally.no_node[NoNode.NEVER] += 1
            else:
                self._try(Job(arrival=arrival, number=number), arrival.at_s)
            if number % _PROGRESS_EVERY == 0:
                self.on_progress(number)
        self._play_until(None)
        return self._tally

    def _impossible(self) -> set[Shape]:
        shapes = dict.fromkeys(arrival.shape for arrival in self.workload.arrivals)
        return {shape for shape in shapes if not self.scheduler.can_ever(self.pods.pod("probe", shape), shape)}

    def _play_until(self, limit: float | None) -> None:
        """All events up to then; all there are where it is None."""
        while self._events and (limit is None or self._events[0][0] <= limit):
            at, _, _, what = heappop(self._events)
            self._pass_to(at)
            match what:
                case _Running():
                    self._end(what, at)
                case Job():
                    self._pausing -= 1
                    self._try(what, at)
                case Shape():
                    self._woken.discard(what)
                    self._retry(what, at)

    def _pass_to(self, now: float) -> None:
        self.meter.advance(now, len(self._waiting) + self._pausing)
        self._tally.ended_at = now

    def _later(self, at: float, kind: _Kind, what: _Running | Job | Shape) -> None:
        heappush(self._events, (at, kind, next(self._order), what))

    def _end(self, running: _Running, now: float) -> None:
        placed = running.placed
        self.scheduler.end(placed.pod_uid, running.job.arrival.shape, placed.node)
        self.meter.changed(placed.node)
        for job in self._waiting.firsts():
            self._retry(job.arrival.shape, now)

    def _retry(self, shape: Shape, now: float) -> None:
        """Starts as many waiting pods of the shape as find a node."""
        while (job := self._waiting.first(shape)) is not None:
            if job.ready_at > now:
                if shape not in self._woken:
                    self._woken.add(shape)
                    self._later(job.ready_at, _Kind.WAKE, shape)
                return
            placed = self.scheduler.place(self.pods.pod(job.pod_name, shape), shape, now)
            if isinstance(placed, NoNode):
                return
            self._waiting.remove_first(shape)
            self._start(job, placed, now)

    def _try(self, job: Job, now: float) -> None:
        shape = job.arrival.shape
        placed = self.scheduler.place(self.pods.pod(job.pod_name, shape), shape, now)
        if not isinstance(placed, NoNode):
            self._start(job, placed, now)
            return
        if job.tries == 0 and job.refusals == 0:
            self._tally.no_node[placed] += 1
        job.found_no_node(now)
        self._waiting.add(job)

    def _start(self, job: Job, placed: Placed | Refused, now: float) -> None:
        """The pod is on a node: it runs, or the agent has refused it."""
        if isinstance(placed, Placed):
            self.meter.changed(placed.node)
            self._tally.waited_s[job.arrival.shape.size].append(now - job.arrival.at_s)
            self._later(now + job.arrival.duration_s, _Kind.END, _Running(job=job, placed=placed))
            return
        self._tally.refusals[placed.reason] += 1
        self._tally.refused_pods += job.refusals == 0
        pause_s = min(MAX_RETURN_S, FIRST_RETURN_S * 2**job.refusals)
        job.refusals += 1
        if job.refusals > BACKOFF_LIMIT:
            self._tally.gave_up += 1
        else:
            self._pausing += 1
            self._later(now + pause_s, _Kind.RETURN, job)
