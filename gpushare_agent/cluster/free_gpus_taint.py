"""The taint that keeps pods without GPUs away while GPUs of the node are free: what the node should have. Pure.

kube-scheduler puts a pod that asks for no GPU where most CPU is free, which is where most GPUs are free, and once the CPU is
used up nobody can use those. PreferNoSchedule only makes a node less liked: a pod that fits nowhere else still comes, and a
pod with GPUs goes to fuller nodes first. `python -m bench.packing
--rules` measures how many GPUs are lost without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from gpushare_agent.cluster.kube.objects import NodeJson
from gpushare_agent.cluster.node_annotations import OWN_PREFIX
from gpushare_agent.cluster.node_facts import NodePatch
from gpushare_agent.model.allocations import NO_CHARGE, Charge
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.placement.gpu_account import account_of

KEY = f"{OWN_PREFIX}/free-gpus"
EFFECT = "PreferNoSchedule"
HYSTERESIS = 0.1
"""Of the node's GPUs. A pod that ends and the next one must not write to the Node each time."""


class FreeGpus(Struct, frozen=True, kw_only=True):
    """`part` of the GPUs is free, from 0 to 1; the taint is for more than `taint_above`, never where that is 1."""

    part: float
    taint_above: float


def free_gpus(
    gpus: Iterable[Gpu], charges: Mapping[GpuUuid, Charge], names: ResourceNames, taint_above: float
) -> FreeGpus:
    """Of the healthy GPUs; of each the smaller of its free cores and its free memory, for a pod needs both."""
    healthy = [gpu for gpu in gpus if gpu.is_healthy]
    free = sum(account_of(gpu, names, charges.get(gpu.uuid, NO_CHARGE)).free_part for gpu in healthy)
    return FreeGpus(part=float(free / len(healthy)) if healthy else 0.0, taint_above=taint_above)


def has_taint(desired: FreeGpus, *, is_there: bool) -> bool:
    """Whether the node should have the taint. One that is there stays until the free part is `HYSTERESIS` below the
    threshold."""
    # Switched off, a taint that an earlier setting has left goes whatever is free.
    if is_there and desired.taint_above < 1:
        return desired.part > max(0.0, desired.taint_above - HYSTERESIS)
    return desired.part > desired.taint_above


def plan_taint_patch(node: NodeJson, desired: FreeGpus) -> NodePatch:
    """The taints that the node should have instead of those that it has."""
    present = node.taints or []
    others = [taint for taint in present if taint.get("key") != KEY]
    is_there = len(others) < len(present)
    # They are replaced as a whole: of taints that could not be read somebody else's would be lost.
    if node.taints is None or is_there == has_taint(desired, is_there=is_there):
        return NodePatch(what="taints")
    taints = others if is_there else [*others, {"key": KEY, "effect": EFFECT}]
    body = {"metadata": {"resourceVersion": node.meta.version}, "spec": {"taints": taints}}
    return NodePatch(what="taints", body=body, shown={"taints": taints})
