"""What a node's object says of its GPUs, for `inspect`: by the annotation, which cluster/node_annotations.py reads.

The agent writes it (node_facts.py, docs/node-facts.md). A node without one, of an older agent or of gpu-manager, still has
its capacity: GPUs of equal size are taken from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpushare_agent.cluster.decisions.node_annotations import GPUS_ANNOTATION, ReportedGpu, even_gpus, parse_gpus
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.resources import ResourceNames

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGpu:
    """One GPU as the node's object tells it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    is_healthy: bool = True
    cordoned: str = ""
    """Why an operator took it out of service; empty where nobody did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGpus:
    """The GPUs of one node by index, the size of its memory blocks, and what a reader should know of where this is from."""

    gpus: tuple[NodeGpu, ...]
    memory_block_mib: int
    remark: str = ""


def gpus_of_node(annotations: Mapping[str, Any], capacity: Mapping[str, int], names: ResourceNames) -> NodeGpus | None:
    """By the annotation, else by the capacity of the resources; None for a node that offers none of them."""
    text = annotations.get(GPUS_ANNOTATION)
    if text is None:
        return _by_capacity(capacity, names, f"no {GPUS_ANNOTATION}")
    try:
        reported = parse_gpus(text)
    except Corrupt as error:
        return _by_capacity(capacity, names, f"the annotation {GPUS_ANNOTATION} cannot be read ({error})")
    gpus = tuple(_gpu(gpu) for gpu in sorted(reported.gpus, key=lambda gpu: gpu.index))
    return NodeGpus(gpus=gpus, memory_block_mib=reported.memory_block_mib or names.memory_block_mib)


def _gpu(reported: ReportedGpu) -> NodeGpu:
    return NodeGpu(
        index=reported.index,
        uuid=reported.uuid,
        name=reported.name,
        memory_bytes=reported.memory_mib * MIB,
        is_healthy=reported.is_healthy,
        cordoned=reported.cordoned,
    )


def _by_capacity(capacity: Mapping[str, int], names: ResourceNames, trouble: str) -> NodeGpus | None:
    """Equal GPUs: their number is the cores' hundreds, their memory an equal part of the blocks or units."""
    number, memory_mib = even_gpus(capacity, names)
    if not number:
        return None
    gpus = tuple(NodeGpu(index=index, uuid="", name="", memory_bytes=memory_mib * MIB) for index in range(number))
    remark = f"{trouble}: GPUs of equal size are assumed from the node's capacity, and their health is not known"
    return NodeGpus(gpus=gpus, memory_block_mib=names.memory_block_mib, remark=remark)
