"""The annotations that a pod should have for its GPUs, by the ledger. Pure. Format: docs/reference/formats.md, section 1."""

from __future__ import annotations

import json
from collections.abc import Mapping

from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import (
    GPU_ASSIGNED_ANNOTATION,
    GPUSHARE_ALLOCATION_ANNOTATION,
    GPUSHARE_ASSIGNED_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    MAX_ANNOTATION_CHARS,
    PREDICATE_GPU_INDEX_PREFIX,
    GpuUuid,
)
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.model.requests import request_of
from gpushare_agent.model.resources import ResourceKind, ResourceNames


def pod_annotations(
    pod: Pod, allocations: Mapping[ContainerKey, Allocation], inventory: GpuInventory, names: ResourceNames
) -> dict[str, str]:
    """gpu-manager's annotations once every main container that asks for cores or for GPUShare's memory has them, and
    GPUShare's besides for its memory; empty where the pod has neither. A container whose GPU is lost keeps the annotation
    that it has."""
    index = {gpu.uuid: gpu.index for gpu in inventory.gpus}
    wanting = [
        container
        for container in pod.containers
        if container.kind is ContainerKind.MAIN and ((asked := request_of(container, names)).cores or asked.units)
    ]
    found = {c.position: a for c in wanting if (a := allocations.get(ContainerKey(pod.uid, c.name))) is not None}
    if not wanting or len(found) < len(wanting) or not all(a.bound_ids for a in found.values()):
        return {}
    wanted = {GPU_ASSIGNED_ANNOTATION: "true"}
    for position, allocation in found.items():
        if all(gpu in index for gpu in allocation.gpus):
            numbers = sorted(index[gpu] for gpu in allocation.gpus)
            wanted[f"{PREDICATE_GPU_INDEX_PREFIX}{position}"] = ",".join(map(str, numbers))
    return wanted | _gpushare_annotations({n: a for n, a in found.items() if ResourceKind.GPU_MEM in a.ids}, index)


def _gpushare_annotations(found: Mapping[int, Allocation], index: Mapping[GpuUuid, int]) -> dict[str, str]:
    """GPUShare's index is of one GPU for the whole pod. Where the pod's memory is on several, it is left as it is, and the
    form by container says where, which GPUShare's inspection tool reads first."""
    if not found:
        return {}
    wanted = {GPUSHARE_ASSIGNED_ANNOTATION: "true"}
    gpus = {allocation.gpus[0] for allocation in found.values()}
    if not gpus <= index.keys():
        return wanted
    if len(gpus) == 1:
        return wanted | {GPUSHARE_INDEX_ANNOTATION: str(index[gpus.pop()])}
    units = {str(n): {str(index[a.gpus[0]]): len(a.ids_of(ResourceKind.GPU_MEM))} for n, a in sorted(found.items())}
    text = json.dumps(units, separators=(",", ":"))
    return wanted | ({GPUSHARE_ALLOCATION_ANNOTATION: text} if len(text) <= MAX_ANNOTATION_CHARS else {})
