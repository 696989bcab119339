"""How much of what is free can nobody use? Pure.

A node's free cores are unusable for a shape where they are on GPUs that cannot serve it: too few cores or too little
memory left for a share, not wholly free (or too few such GPUs) for whole GPUs. The fragmentation of a cluster is the
mean of that over the workload's shapes, each counted as often as pods ask so, as a part of all cores of the cluster: what
an average pod sees free and cannot have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpushare_agent.model.names import CORES_PER_GPU
from gpushare_agent.simulation.workload import Shape

TYPICAL_SHAPES = 32
"""The most frequent ones stand for the workload."""


class FreeGpu(NamedTuple):
    """What a GPU has left. `blocks` is of `all_blocks`."""

    cores: int
    blocks: int
    all_blocks: int

    @property
    def is_whole(self) -> bool:
        return self.cores == CORES_PER_GPU and self.blocks == self.all_blocks


def unusable_cores(gpus: Sequence[FreeGpu], shape: Shape) -> int:
    """Of one node, for one shape, whatever models it may run on."""
    if not shape.whole_gpus:
        return sum(gpu.cores for gpu in gpus if gpu.cores < shape.cores or gpu.blocks < shape.blocks)
    whole = sorted((gpu.blocks for gpu in gpus if gpu.is_whole), reverse=True)
    free = sum(gpu.cores for gpu in gpus)
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
