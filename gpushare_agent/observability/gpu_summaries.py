"""The GPUs of a node by its object, for `inspect`: from the annotation, which cluster/node_annotations.py parses.

The agent writes it (docs/reference/node-facts.md). A node without one, of an older agent or of gpu-manager, still has its
capacity: GPUs of equal size are derived from that. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpushare_agent.cluster.decisions.node_annotations import GPUS_ANNOTATION, ReportedGpu, even_gpus, parse_gpus
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.names import CORES_PER_GPU, MIB
from gpushare_agent.model.resources import ResourceNames


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSummary:
    """One GPU, for display."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    is_healthy: bool = True
    cores: int = CORES_PER_GPU
    """None of a MIG instance that takes no shares."""
    label: str = ""
    """Of a MIG instance: NVIDIA's name, such as `0:1`."""
    cordoned: str = ""
    """The reason for the cordon; empty for a GPU that is not cordoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSummaries:
    """The GPUs of one node by index, the size of its memory blocks, and a note on where this is from."""

    gpus: tuple[GpuSummary, ...]
    memory_block_mib: int
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
    gpus = tuple(_gpu(gpu) for gpu in sorted(reported.gpus, key=lambda gpu: gpu.index))
    return GpuSummaries(gpus=gpus, memory_block_mib=reported.memory_block_mib or names.memory_block_mib)


def _gpu(reported: ReportedGpu) -> GpuSummary:
    return GpuSummary(
        index=reported.index,
        uuid=reported.uuid,
        name=reported.name,
        memory_bytes=reported.memory_mib * MIB,
        is_healthy=reported.is_healthy,
        cores=CORES_PER_GPU if reported.mig is None or reported.mig.takes_shares else 0,
        label=reported.mig.label if reported.mig is not None else "",
        cordoned=reported.cordoned,
    )


def _by_capacity(capacity: Mapping[str, int], names: ResourceNames, problem: str) -> GpuSummaries | None:
    """Equal GPUs: their number is the cores' hundreds, their memory an equal part of the blocks or units."""
    number, memory_mib = even_gpus(capacity, names)
    if not number:
        return None
    gpus = tuple(GpuSummary(index=index, uuid="", name="", memory_bytes=memory_mib * MIB) for index in range(number))
    remark = f"{problem}: GPUs of equal size are assumed from the node's capacity, and their health is not known"
    return GpuSummaries(gpus=gpus, memory_block_mib=names.memory_block_mib, remark=remark)
