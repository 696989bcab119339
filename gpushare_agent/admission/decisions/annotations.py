"""The annotations that a pod should have for its GPUs, by the ledger. Pure. Format: docs/reference/formats.md, section 1."""

from __future__ import annotations

from collections.abc import Mapping

from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import (
    GPU_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSIGNED_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    PREDICATE_GPU_INDEX_PREFIX,
)
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames


def pod_annotations(
    pod: Pod, allocations: Mapping[ContainerKey, Allocation], inventory: GpuInventory, names: ResourceNames
) -> dict[str, str]:
    """gpu-manager's annotations once every main container that asks for cores has them, and GPUShare's for its memory;
    empty where the pod has neither. A container whose GPU is lost keeps the annotation that it has."""
    index = {gpu.uuid: gpu.index for gpu in inventory.gpus}
    mains = [c for c in pod.containers if c.kind is ContainerKind.MAIN]
    wanted: dict[str, str] = {}
    given = {c.position: allocations.get(ContainerKey(pod.uid, c.name)) for c in mains}
    with_cores = [c.position for c in mains if names.wanted(c, ResourceKind.VCORE)]
    if with_cores and all((a := given[position]) is not None and a.vcore_ids for position in with_cores):
        wanted[GPU_ASSIGNED_ANNOTATION] = "true"
        for position in with_cores:
            allocation = given[position]
            if allocation is not None and all(gpu in index for gpu in allocation.gpus):
                numbers = sorted(index[gpu] for gpu in allocation.gpus)
                wanted[f"{PREDICATE_GPU_INDEX_PREFIX}{position}"] = ",".join(map(str, numbers))
    for allocation in given.values():
        if allocation is not None and allocation.gpu_mem_ids and allocation.gpus[0] in index:
            wanted |= {
                GPUSHARE_ASSIGNED_ANNOTATION: "true",
                GPUSHARE_INDEX_ANNOTATION: str(index[allocation.gpus[0]]),
            }
    return wanted
