"""Plays a workload through one policy (arrivals, tries, ends) in the order of time, and measures what is in use meanwhile.

Rules, as in a cluster with Jobs: a pod that finds no node waits, and is tried again once something has ended on a node that
could serve it, but not before its back-off is over. If a pod of a shape has no node, no pod of that shape has one, so only
the first of each shape is tried. A pod that an agent refuses has failed; its Job makes another after 10 s, doubled with
each failure up to 6 minutes, and gives up after 6. Binding and starting take no time.

The pods of a gang compute together. With a gang scheduler they are one Job: once all have arrived, all of them start or
none. Without one each starts when it can, and keeps its GPUs without computing until the last has its own: two gangs that
have begun may wait for each other for ever.

A node's free cores are unusable for a shape where they are on GPUs that cannot serve it: too few free cores or too little
free memory for a share, partly used (or too few free GPUs) for whole GPUs. The fragmentation of a cluster is the mean of
that over the workload's shapes, weighted by their number of pods, as a part of all cores of the cluster: what an average
pod sees free and cannot have.

State owned: the queue of events, the waiting pods by shape, the tallies. `Meter` owns the use of each node, sums over the
cluster, integrals over the time of arrivals, the samples. The free capacity itself is in the scheduler's ledger. The same
input gives the same result.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from heapq import heappop, heappush

from msgspec import Struct, field

from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.names import CORES_PER_GPU
from gpushare_agent.core.placement import GpuAccount
from gpushare_agent.simulation.schedulers import NoNode, Placed, Scheduler
from gpushare_agent.simulation.workload import Arrival, Cluster, PodMaker, Shape, Size, Workload

Shapes = tuple[Shape, ...]
"""Of a Job's pods. Jobs of equal shapes are alike for every decision."""

FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 10.0
"""kube-scheduler's podInitialBackoffSeconds and podMaxBackoffSeconds; it doubles with each try that failed."""
FIRST_RETURN_S, MAX_RETURN_S = 10.0, 360.0
BACKOFF_LIMIT = 6
"""All of Kubernetes' Jobs."""
_PROGRESS_EVERY = 500
TYPICAL_SHAPES = 32
"""The most frequent ones stand for the workload."""
_KNOWN_NODE_STATES = 200_000


class Job(Struct, kw_only=True):
    """A pod of the workload or a gang, together with all pods that its controller makes after the agent refused one."""

    arrivals: tuple[Arrival, ...]
    number: int
    """Its place in the order of arrivals."""
    tries: int = 0
    """Tries that found no node."""
    refusals: int = 0
    """Refusals by an agent, at admission."""
    ready_at: float = 0.0
    """The time before which it is not tried."""

    def __lt__(self, other: Job) -> bool:
        return self.number < other.number

    @property
    def shapes(self) -> Shapes:
        return tuple(arrival.shape for arrival in self.arrivals)

    def found_no_node(self, now: float) -> None:
        self.ready_at = now + min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**self.tries)
        self.tries += 1


class _Kind(IntEnum):
    """Kinds of events. Of several at one time the lower comes first: a pod that ends frees capacity for one that arrives."""

    END = 0
    RETURN = 1
    WAKE = 2


class _Running(Struct, frozen=True):
    """Pods that end together: those of a gang with one duration."""

    pods: list[tuple[Arrival, Placed]]


class Gang(Struct, kw_only=True):
    """What became of a gang. `nodes` has the node of each pod that has its GPUs; `started_at` is None until all have."""

    pods: int
    complete_at: float
    nodes: list[str] = field(default_factory=list)
    started_at: float | None = None


class Tally(Struct, kw_only=True):
    """What happened to the pods. `waited_s` is from a pod's arrival to its start."""

    waited_s: dict[Size, list[float]] = field(default_factory=lambda: {size: [] for size in Size})
    no_node: Counter[NoNode] = field(default_factory=Counter)
    """Pods that found no node at their first try, by why."""
    refusals: Counter[RefusalReason] = field(default_factory=Counter)
    """Refusals by agents, at admission, by reason."""
    refused_pods: int = 0
    gave_up: int = 0
    ended_at: float = 0.0
    gangs: dict[str, Gang] = field(default_factory=dict)


class Replay(Struct, eq=False):
    """One run. `on_progress` is called with the number of pods that have arrived. `has_gang_scheduler`: of a gang all pods
    start or none."""

    workload: Workload
    scheduler: Scheduler
    meter: Meter
    pods: PodMaker
    on_progress: Callable[[int], None]
    has_gang_scheduler: bool = True
    _events: list[tuple[float, _Kind, int, _Running | Job | Shapes]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _waiting: dict[Shapes, list[Job]] = field(default_factory=dict)
    """Those that have no node yet, as kube-scheduler keeps them: by the time of their arrival, each with a back-off."""
    _waiting_pods: int = 0
    _woken: set[Shapes] = field(default_factory=set)
    """A wake is under way."""
    _pausing: int = 0
    """Pods of Jobs with a refused one, until they make the next."""
    _members: defaultdict[str, list[Arrival]] = field(default_factory=lambda: defaultdict(list))
    """Of each gang."""
    _held: defaultdict[str, list[tuple[Arrival, Placed]]] = field(default_factory=lambda: defaultdict(list))
    """Pods of gangs that have their GPUs and wait for the others."""
    _tally: Tally = field(default_factory=Tally)

    def run(self) -> Tally:
        for arrival in self.workload.arrivals:
            if arrival.gang:
                self._members[arrival.gang].append(arrival)
        for gang, pods in self._members.items():
            self._tally.gangs[gang] = Gang(pods=len(pods), complete_at=pods[-1].at_s)
        # Asked while the cluster is empty, and in the order of the workload, so that every run asks alike.
        jobs = filter(None, itertools.starmap(self._job, enumerate(self.workload.arrivals)))
        impossible = {one for one in dict.fromkeys(job.shapes for job in jobs) if not self._can_ever(one)}
        for number, arrival in enumerate(self.workload.arrivals):
            # Whatever ends up to this moment has ended before the pod comes.
            self._play_until(arrival.at_s)
            self._pass_to(arrival.at_s)
            job = self._job(number, arrival)
            # It would wait for ever: counted as such, and never tried.
            if job is not None and job.shapes in impossible:
                self._tally.no_node[NoNode.NEVER] += len(job.arrivals)
            elif job is not None:
                self._try(job, arrival.at_s)
            if number % _PROGRESS_EVERY == 0:
                self.on_progress(number)
        # The rest, until nothing runs and nothing can start: pods that wait then wait for ever.
        self._play_until(None)
        return self._tally

    def _job(self, number: int, arrival: Arrival) -> Job | None:
        """The Job of the pod; None while others of its gang are still to come."""
        pods = self._members[arrival.gang] if arrival.gang and self.has_gang_scheduler else [arrival]
        return Job(arrivals=tuple(pods), number=number) if pods[-1] is arrival else None

    def _can_ever(self, shapes: Shapes) -> bool:
        if not all(self.scheduler.can_ever(self.pods.pod("probe", one), one) for one in dict.fromkeys(shapes)):
            return False
        if len(shapes) == 1:
            return True
        pods = [(self.pods.pod(f"probe-{number}", shape), shape) for number, shape in enumerate(shapes)]
        placed = self.scheduler.place(pods, 0.0, is_probe=True)
        return not isinstance(placed, NoNode)

    def _play_until(self, limit: float | None) -> None:
        """All events up to then; all there are where it is None."""
        while self._events and (limit is None or self._events[0][0] <= limit):
            at, _, _, what = heappop(self._events)
            self._pass_to(at)
            match what:
                case _Running():
                    self._end(what, at)
                case Job():
                    self._pausing -= len(what.arrivals)
                    self._try(what, at)
                case tuple():
                    # Before the retry, which may find that the next of the kind has to be woken later.
                    self._woken.discard(what)
                    self._retry(what, at)

    def _pass_to(self, now: float) -> None:
        self.meter.advance(now, self._waiting_pods + self._pausing)
        self._tally.ended_at = now

    def _later(self, at: float, kind: _Kind, what: _Running | Job | Shapes) -> None:
        # The number decides between events of one time and kind: the last element has no order.
        heappush(self._events, (at, kind, next(self._order), what))

    def _end(self, running: _Running, now: float) -> None:
        # All of a gang before anybody is tried: what it leaves is free at once, and who came first gets it.
        for arrival, placed in running.pods:
            self.scheduler.end(placed.pod_uid, arrival.shape, placed.node)
            self.meter.changed(placed.node)
        # By arrival over all kinds: the first to arrive is tried first.
        for job in sorted(jobs[0] for jobs in self._waiting.values()):
            self._retry(job.shapes, now)

    def _retry(self, shapes: Shapes, now: float) -> None:
        """Starts as many waiting Jobs of the kind as find nodes."""
        while jobs := self._waiting.get(shapes):
            job = jobs[0]
            # The first of its kind pauses, and no later one may overtake it.
            if job.ready_at > now:
                # One event a kind: each end of a pod comes through here.
                if shapes not in self._woken:
                    self._woken.add(shapes)
                    self._later(job.ready_at, _Kind.WAKE, shapes)
                return
            placed = self._place(job, now)
            if isinstance(placed, NoNode):
                return
            del jobs[0]
            self._waiting_pods -= len(shapes)
            if not jobs:
                del self._waiting[shapes]
            self._start(job, placed, now)

    def _place(self, job: Job, now: float) -> list[Placed] | Refused | NoNode:
        # The Job's next pods have names of their own, which no pod of the file can have.
        suffix = f"\n{job.refusals}" if job.refusals else ""
        pods = [(self.pods.pod(one.name + suffix, one.shape), one.shape) for one in job.arrivals]
        return self.scheduler.place(pods, now)

    def _try(self, job: Job, now: float) -> None:
        placed = self._place(job, now)
        if not isinstance(placed, NoNode):
            self._start(job, placed, now)
            return
        # Counted at the first try alone: later ones depend on how often a pod was tried.
        if job.tries == 0 and job.refusals == 0:
            self._tally.no_node[placed] += len(job.arrivals)
        job.found_no_node(now)
        insort(self._waiting.setdefault(job.shapes, []), job)
        self._waiting_pods += len(job.arrivals)

    def _start(self, job: Job, placed: list[Placed] | Refused, now: float) -> None:
        """The pods are on nodes: they run, or an agent has refused one."""
        if not isinstance(placed, Refused):
            running = list(zip(job.arrivals, placed, strict=True))
            for its in placed:
                self.meter.changed(its.node)
            if name := job.arrivals[0].gang:
                gang, held = self._tally.gangs[name], self._held[name]
                held += running
                gang.nodes += [its.node for its in placed]
                # These keep their GPUs, and nothing computes: without a gang scheduler perhaps for ever.
                if len(held) < gang.pods:
                    return
                gang.started_at, running = now, held
            together: defaultdict[float, list[tuple[Arrival, Placed]]] = defaultdict(list)
            for arrival, its in running:
                self._tally.waited_s[arrival.shape.size].append(now - arrival.at_s)
                together[arrival.duration_s].append((arrival, its))
            for duration_s, pods in together.items():
                self._later(now + duration_s, _Kind.END, _Running(pods))
            return
        self._tally.refusals[placed.reason] += 1
        # A pod counts once, however many its Job makes after it.
        self._tally.refused_pods += job.refusals == 0
        pause_s = min(MAX_RETURN_S, FIRST_RETURN_S * 2**job.refusals)
        job.refusals += 1
        # Seven pods in all: Kubernetes counts the failures, not the tries.
        if job.refusals > BACKOFF_LIMIT:
            self._tally.gave_up += 1
        else:
            self._pausing += len(job.arrivals)
            self._later(now + pause_s, _Kind.RETURN, job)


# --- what is measured ---


class Sample(Struct, frozen=True, kw_only=True):
    """The cluster at one moment. The parts are 0 to 1; `waiting` counts pods that have no
    node, and Jobs that make another pod soon."""

    at_s: float
    cores: float
    memory: float
    fragmentation: float
    waiting: int


class Measured(Struct, frozen=True, kw_only=True):
    """Means over the time in which pods arrive."""

    cores_part: float
    memory_part: float
    fragmentation: float
    highest_cores_part: float
    samples: tuple[Sample, ...]


class Meter:
    """`gpus` returns the accounts of a node's GPUs, all free at first; `window` is the time of arrivals; `step_s` lies
    between two samples."""

    def __init__(
        self,
        cluster: Cluster,
        shapes: Sequence[tuple[Shape, int]],
        gpus: Callable[[str], Sequence[GpuAccount]],
        *,
        window: tuple[float, float],
        step_s: float,
    ) -> None:
        self._shapes = tuple(shapes)
        self._weight = sum(count for _, count in shapes)
        self._gpus = gpus
        self._used = {node.name: (0, 0) for node in cluster.nodes}
        """Cores and memory blocks."""
        self._all_cores = CORES_PER_GPU * cluster.number_of_gpus
        self._all_blocks = sum(gpu.total_blocks for name in self._used for gpu in gpus(name))
        self._cores = self._blocks = 0
        self._window, self._step_s = window, step_s
        self._now = self._next_sample = window[0]
        self._core_seconds = self._block_seconds = 0.0
        self._highest_cores = 0
        self._samples: list[Sample] = []
        self._known: dict[tuple[tuple[int, int, int], ...], int] = {}
        self._unusable = {name: self._unusable_of(name) for name in self._used}
        self._all_unusable = sum(self._unusable.values())
        self._changed: set[str] = set()

    def advance(self, now: float, waiting: int) -> None:
        """Time goes on to `now` with nothing changed since the last call."""
        # At fixed times, not at events: quiet hours count as much as busy ones.
        while self._next_sample <= now:
            self._take_sample(self._next_sample, waiting)
            self._next_sample += self._step_s
        # Only while pods arrive: afterwards the cluster empties whatever the policy is.
        inside = min(now, self._window[1]) - max(self._now, self._window[0])
        if inside > 0:
            self._core_seconds += self._cores * inside
            self._block_seconds += self._blocks * inside
        self._now = now

    def changed(self, node: str) -> None:
        """A pod was placed on the node, or ended there."""
        gpus = self._gpus(node)
        cores = sum(CORES_PER_GPU - gpu.free_cores for gpu in gpus)
        blocks = sum(gpu.total_blocks - gpu.free_blocks for gpu in gpus)
        former_cores, former_blocks = self._used[node]
        self._used[node] = cores, blocks
        self._cores += cores - former_cores
        self._blocks += blocks - former_blocks
        self._highest_cores = max(self._highest_cores, self._cores)
        # What is unusable is worked out at the next sample: a node changes many times between two.
        self._changed.add(node)

    def measured(self) -> Measured:
        """The means, to be read after the last event."""
        seconds = self._window[1] - self._window[0] or 1.0
        inside = [one.fragmentation for one in self._samples if one.at_s <= self._window[1]]
        return Measured(
            cores_part=self._core_seconds / seconds / self._all_cores,
            memory_part=self._block_seconds / seconds / self._all_blocks,
            fragmentation=sum(inside) / len(inside) if inside else 0.0,
            highest_cores_part=self._highest_cores / self._all_cores,
            samples=tuple(self._samples),
        )

    def _take_sample(self, at_s: float, waiting: int) -> None:
        for name in self._changed:
            now_unusable = self._unusable_of(name)
            self._all_unusable += now_unusable - self._unusable[name]
            self._unusable[name] = now_unusable
        self._changed.clear()
        self._samples.append(
            Sample(
                at_s=at_s,
                cores=self._cores / self._all_cores,
                memory=self._blocks / self._all_blocks,
                fragmentation=self._all_unusable / (self._weight * self._all_cores) if self._weight else 0.0,
                waiting=waiting,
            )
        )

    def _unusable_of(self, node: str) -> int:
        """Cores times pods: whole numbers, so that sums do not depend on their order."""
        gpus = self._gpus(node)
        key = tuple(sorted((gpu.free_cores, gpu.free_blocks, gpu.total_blocks) for gpu in gpus))
        known = self._known.get(key)
        if known is None:
            # Emptied completely: which of them come again is not known, and this is rare.
            if len(self._known) >= _KNOWN_NODE_STATES:
                self._known.clear()
            known = self._known[key] = sum(unusable_cores(gpus, shape) * count for shape, count in self._shapes)
        return known


def unusable_cores(gpus: Sequence[GpuAccount], shape: Shape) -> int:
    """The free cores of one node that a shape cannot use, whatever models it may run on."""
    if not shape.whole_gpus:
        return sum(g.free_cores for g in gpus if g.free_cores < shape.cores or g.free_blocks < shape.blocks)
    whole = sorted((gpu.total_blocks for gpu in gpus if gpu.is_free), reverse=True)
    free = sum(gpu.free_cores for gpu in gpus)
    # No such pod fits the node, so everything free there is of no use to it.
    if len(whole) < shape.whole_gpus or sum(whole[: shape.whole_gpus]) < shape.blocks:
        return free
    return free - CORES_PER_GPU * len(whole)


def typical_shapes(counts: Mapping[Shape, int]) -> tuple[tuple[Shape, int], ...]:
    """The most frequent shapes, with their counts; models do not matter here."""
    merged: dict[Shape, int] = {}
    for shape, count in counts.items():
        plain = Shape(shape.cores, shape.blocks)
        merged[plain] = merged.get(plain, 0) + count
    return tuple(sorted(merged.items(), key=lambda item: (-item[1], item[0]))[:TYPICAL_SHAPES])
