"""Measures a replay: what is in use over time, how fragmented the rest is, and samples of both for the chart.

The mutable state is: what every GPU has left, sums over the cluster, integrals over the time of arrivals, the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpushare_agent.extender.values import Charge
from gpushare_agent.model.names import CORES_PER_GPU
from gpushare_agent.simulation.fragmentation import FreeGpu, unusable_cores
from gpushare_agent.simulation.workload import Cluster, Shape

_KNOWN_NODE_STATES = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The cluster at one moment. The parts are 0 to 1; `waiting` counts pods that have no
    node, and Jobs that make another pod soon."""

    at_s: float
    cores_part: float
    memory_part: float
    fragmentation: float
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Means over the time in which pods arrive."""

    cores_part: float
    memory_part: float
    fragmentation: float
    highest_cores_part: float
    samples: tuple[Sample, ...]


class Meter:
    """`window` is the time of arrivals; `step_s` lies between two samples."""

    def __init__(
        self,
        cluster: Cluster,
        shapes: Sequence[tuple[Shape, int]],
        *,
        block_mib: int,
        window: tuple[float, float],
        step_s: float,
    ) -> None:
        self._shapes = tuple(shapes)
        self._weight = sum(count for _, count in shapes)
        self._block_mib = block_mib
        self._gpus = {
            node.name: [
                FreeGpu(CORES_PER_GPU, gpu.memory_mib // block_mib, gpu.memory_mib // block_mib) for gpu in node.gpus
            ]
            for node in cluster.nodes
        }
        self._all_cores = CORES_PER_GPU * cluster.number_of_gpus
        self._all_blocks = sum(gpu.all_blocks for gpus in self._gpus.values() for gpu in gpus)
        self._cores = self._blocks = 0
        self._window, self._step_s = window, step_s
        self._now = self._next_sample = window[0]
        self._core_seconds = self._block_seconds = 0.0
        self._highest_cores = 0
        self._samples: list[Sample] = []
        self._known: dict[tuple[FreeGpu, ...], int] = {}
        self._unusable = {name: self._unusable_of(name) for name in self._gpus}
        self._all_unusable = sum(self._unusable.values())
        self._changed: set[str] = set()

    def advance(self, now: float, waiting: int) -> None:
        """Time goes on to `now` with nothing changed since the last call."""
        while self._next_sample <= now:
            self._take_sample(self._next_sample, waiting)
            self._next_sample += self._step_s
        inside = min(now, self._window[1]) - max(self._now, self._window[0])
        if inside > 0:
            self._core_seconds += self._cores * inside
            self._block_seconds += self._blocks * inside
        self._now = now

    def take(self, node: str, charges: Sequence[Charge]) -> None:
        self._book(node, charges, 1)
        self._highest_cores = max(self._highest_cores, self._cores)

    def give_back(self, node: str, charges: Sequence[Charge]) -> None:
        self._book(node, charges, -1)

    def measured(self) -> Measured:
        """After the last event."""
        seconds = self._window[1] - self._window[0] or 1.0
        inside = [one.fragmentation for one in self._samples if one.at_s <= self._window[1]]
        return Measured(
            cores_part=self._core_seconds / seconds / self._all_cores,
            memory_part=self._block_seconds / seconds / self._all_blocks,
            fragmentation=sum(inside) / len(inside) if inside else 0.0,
            highest_cores_part=self._highest_cores / self._all_cores,
            samples=tuple(self._samples),
        )

    def _book(self, node: str, charges: Sequence[Charge], sign: int) -> None:
        gpus = self._gpus[node]
        for charge in charges:
            gpu = gpus[charge.index]
            blocks = sign * (gpu.all_blocks if charge.is_whole else charge.blocks)
            cores = sign * charge.cores
            gpus[charge.index] = FreeGpu(gpu.cores - cores, gpu.blocks - blocks, gpu.all_blocks)
            self._cores += cores
            self._blocks += blocks
        self._changed.add(node)

    def _take_sample(self, at_s: float, waiting: int) -> None:
        for name in self._changed:
            now_unusable = self._unusable_of(name)
            self._all_unusable += now_unusable - self._unusable[name]
            self._unusable[name] = now_unusable
        self._changed.clear()
        self._samples.append(
            Sample(
                at_s=at_s,
                cores_part=self._cores / self._all_cores,
                memory_part=self._blocks / self._all_blocks,
                fragmentation=self._all_unusable / (self._weight * self._all_cores) if self._weight else 0.0,
                waiting=waiting,
            )
        )

    def _unusable_of(self, node: str) -> int:
        """Cores times pods: whole numbers, so that sums do not depend on their order."""
        gpus = tuple(sorted(self._gpus[node]))
        known = self._known.get(gpus)
        if known is None:
            if len(self._known) >= _KNOWN_NODE_STATES:
                self._known.clear()
            known = self._known[gpus] = sum(unusable_cores(gpus, shape) * count for shape, count in self._shapes)
        return known
