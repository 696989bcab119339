"""Pods that have no node yet, as kube-scheduler keeps them: by the time of their arrival, each with a back-off.

Where a pod of a shape has no node, none of that shape has one; so only the first of each shape is asked for.
State owned: the waiting pods by shape.
"""

from __future__ import annotations

from bisect import insort

from msgspec import Struct

from gpushare_agent.simulation.workload import Arrival, Shape

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
