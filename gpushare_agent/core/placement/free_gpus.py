"""The free part of a node's GPUs, and whether it keeps pods without GPUs away. Pure.

agent/cluster/free_gpus_taint.py puts the taint on the node; `simulate --protocol inflation` counts what it is worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from gpushare_agent.core.model.allocations import NO_CHARGE, Charge
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.placement.gpu_account import account_of

HYSTERESIS = 0.1
"""A part of the node's GPUs. A pod that ends and the next one must not write to the Node each time."""


class FreeGpus(Struct, frozen=True, kw_only=True):
    """`part` of the GPUs is free, from 0 to 1; the taint is for more than `taint_above`, never where that is 1."""

    part: float
    taint_above: float


def free_gpus(
    gpus: Iterable[Gpu], charges: Mapping[GpuUuid, Charge], names: ResourceNames, taint_above: float
) -> FreeGpus:
    """For each healthy GPU the smaller of its free cores and its free memory, because a pod needs both."""
    healthy = [gpu for gpu in gpus if gpu.is_healthy]
    free = sum(account_of(gpu, names, charges.get(gpu.uuid, NO_CHARGE)).free_part for gpu in healthy)
    return FreeGpus(part=float(free / len(healthy)) if healthy else 0.0, taint_above=taint_above)


def has_taint(desired: FreeGpus, *, is_there: bool) -> bool:
    """Whether the node should have the taint. One that is there stays until the free part is `HYSTERESIS` below the
    threshold."""
    # When the setting is off, a taint that an earlier setting left is removed in any case.
    if is_there and desired.taint_above < 1:
        return desired.part > max(0.0, desired.taint_above - HYSTERESIS)
    return desired.part > desired.taint_above
