"""The taint that keeps pods without GPUs away while GPUs of the node are free: what the node should have. Pure.

kube-scheduler puts a pod that asks for no GPU where most CPU is free, which is where most GPUs are free, and once the CPU is
used up nobody can use those. PreferNoSchedule only makes a node less liked: a pod that fits nowhere else still comes, and a
pod with GPUs goes to fuller nodes first. `python -m bench.packing
--rules` measures how many GPUs are lost without it.
"""

from __future__ import annotations

from gpushare_agent.agent.cluster.node_facts import NodePatch
from gpushare_agent.core.kube.objects import NodeJson
from gpushare_agent.core.node_report.annotations import OWN_PREFIX
from gpushare_agent.core.placement.free_gpus import FreeGpus, has_taint

KEY = f"{OWN_PREFIX}/free-gpus"
EFFECT = "PreferNoSchedule"


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
