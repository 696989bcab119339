"""GPUs as a node's object tells of them, and the object before and after a patch."""

from __future__ import annotations

from typing import Any

from gpushare_agent.agent.cluster.node_facts import NodeFacts, NodePatch, plan_facts_patch
from gpushare_agent.core.kube.objects import read_node_json
from gpushare_agent.core.model.gpus import Gpu, GpuInventory
from gpushare_agent.core.placement.topology import build_topology
from gpushare_agent.sandbox.api.patch import MERGE, patched
from tests.gpus.support_gpus import uuid_of
from tests.support_json import undecoded


def gpu(index: int, name: str = "NVIDIA H100 80GB HBM3", memory_mib: int = 81559, **fields: Any) -> Gpu:
    known = {"minor": index, "uuid": uuid_of(index), "bus_id": "", "numa_node": 0, **fields}
    return Gpu(index=index, name=name, memory_mib=memory_mib, **known)


def inventory(*gpus: Gpu, version: str = "", cuda: str = "") -> GpuInventory:
    return GpuInventory(gpus=gpus, topology=build_topology((), ()), driver_version=version, cuda_version=cuda)


def patch_of(raw_node: dict[str, Any], facts: NodeFacts) -> NodePatch:
    return plan_facts_patch(read_node_json(undecoded(raw_node)), facts)


def after(raw_node: dict[str, Any], facts: NodeFacts) -> dict[str, Any]:
    """The node once the patch was applied."""
    return patched(raw_node, patch_of(raw_node, facts).body, MERGE)
