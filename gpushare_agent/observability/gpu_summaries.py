"""A node's GPUs and what pods have of them by its object, for `inspect`: from its annotations, parsed by
cluster/decisions/node_annotations.py.

The agent writes them (docs/reference/node-facts.md). A node without a list of GPUs, of an older agent or of gpu-manager,
still has its capacity: GPUs of equal size are derived from that. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct

from gpushare_agent.cluster.decisions.node_annotations import (
    ALLOCATIONS_ANNOTATION,
    GPUS_ANNOTATION,
    even_gpus,
    parse_allocations,
    parse_gpus,
)
from gpushare_agent.model.charges import Charge
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.gpus import GpuReport
from gpushare_agent.model.names import GpuUuid, PodUid
from gpushare_agent.model.resources import ResourceNames


class GpuSummaries(Struct, frozen=True, kw_only=True):
    """The GPUs of one node by index, the size of its memory blocks, what each pod has of them (None where that is not
    known), and a note on what is missing here."""

    gpus: tuple[GpuReport, ...]
    memory_block_mib: int
    allocated: Mapping[PodUid, Mapping[int, Charge]] | None = None
    remark: str = ""


def gpus_of_node(
    annotations: Mapping[str, Any], capacity: Mapping[str, int], names: ResourceNames
) -> GpuSummaries | None:
    """By the annotation, else by the capacity of the resources; None for a node that offers none of them."""
    text = annotations.get(GPUS_ANNOTATION)
    if text is None:
        return _by_capacity(capacity, names, f"no {GPUS_ANNOTATION}")
    try:
        reported = parse_gpus(text)
    except Corrupt as error:
        return _by_capacity(capacity, names, f"the annotation {GPUS_ANNOTATION} cannot be read ({error})")
    gpus = tuple(sorted(reported.gpus, key=lambda gpu: gpu.index))
    allocated, remark = _allocated(annotations.get(ALLOCATIONS_ANNOTATION), [gpu.index for gpu in gpus])
    block_mib = reported.memory_block_mib or names.memory_block_mib
    return GpuSummaries(gpus=gpus, memory_block_mib=block_mib, allocated=allocated, remark=remark)


def _allocated(text: object, indexes: Collection[int]) -> tuple[Mapping[PodUid, Mapping[int, Charge]] | None, str]:
    """What each pod has, and what is wrong with it. A pod's own annotations are no substitute: tenants write them."""
    if text is None:
        return None, f"no {ALLOCATIONS_ANNOTATION}: what is allocated is not known; see the agent's log there"
    try:
        reported = parse_allocations(text, indexes)
    except Corrupt as error:
        problem = f"the annotation {ALLOCATIONS_ANNOTATION} cannot be read ({error})"
        return None, f"{problem}: what is allocated is not known; see the agent's log there"
    full = f"the annotation {ALLOCATIONS_ANNOTATION} has no room for all pods: more is allocated than is shown"
    return reported.of_pod, full if reported.is_truncated else ""


def _by_capacity(capacity: Mapping[str, int], names: ResourceNames, problem: str) -> GpuSummaries | None:
    """Equal GPUs: their number is the cores' hundreds, their memory an equal part of the blocks or units."""
    number, memory_mib = even_gpus(capacity, names)
    if not number:
        return None
    gpus = tuple(GpuReport(index=index, uuid=GpuUuid(""), memory_mib=memory_mib) for index in range(number))
    remark = (
        f"{problem}: GPUs of equal size are assumed from the node's capacity; their health, and what is allocated of them, "
        "are not known"
    )
    return GpuSummaries(gpus=gpus, memory_block_mib=names.memory_block_mib, remark=remark)
