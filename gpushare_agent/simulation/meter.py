"""Measures a replay: what is in use over time, how fragmented the rest is, and samples of both for the chart.

A node's free cores are unusable for a shape where they are on GPUs that cannot serve it: too few free cores or too little
free memory for a share, not wholly free (or too few such GPUs) for whole GPUs. The fragmentation of a cluster is the mean
of that over the workload's shapes, weighted by their number of pods, as a part of all cores of the cluster: what an average
pod sees free and cannot have.

State owned: what is used on each node, sums over the cluster, integrals over the time of arrivals, the samples. The free
capacity itself is in the scheduler's ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from gpushare_agent.model.names import CORES_PER_GPU
from gpushare_agent.placement import GpuAccount
from gpushare_agent.simulation.workload import Cluster, Shape

TYPICAL_SHAPES = 32
"""The most frequent ones stand for the workload."""
_KNOWN_NODE_STATES = 200_000


class Sample(Struct, frozen=True, kw_only=True):
    """The cluster at one moment. The parts are 0 to 1; `waiting` counts pods that have no
    node, and Jobs that make another pod soon."""

    at_s: float
    cores_part: float
    memory_part: float
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
        while self._next_sample <= now:
            self._take_sample(self._next_sample, waiting)
            self._next_sample += self._step_s
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
        self._changed.add(node)

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
        gpus = self._gpus(node)
        key = tuple(sorted((gpu.free_cores, gpu.free_blocks, gpu.total_blocks) for gpu in gpus))
        known = self._known.get(key)
        if known is None:
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
