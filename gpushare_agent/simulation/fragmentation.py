"""The part of the free capacity that no pod can use. Pure.

A node's free cores are unusable for a shape where they are on GPUs that cannot serve it: too few free cores or too little
free memory for a share, not wholly free (or too few such GPUs) for whole GPUs. The fragmentation of a cluster is the mean
of that over the workload's shapes, weighted by their number of pods, as a part of all cores of the cluster: what an average
pod sees free and cannot have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpushare_agent.model.names import CORES_PER_GPU
from gpushare_agent.placement import GpuAccount
from gpushare_agent.simulation.workload import Shape

TYPICAL_SHAPES = 32
"""The most frequent ones stand for the workload."""


def unusable_cores(gpus: Sequence[GpuAccount], shape: Shape) -> int:
    """Of one node, for one shape, whatever models it may run on."""
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
