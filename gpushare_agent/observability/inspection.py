"""Adds up what is allocated on the GPUs of a node, from what the API server knows: its pods and their annotations.

Pure sums for `inspect --all-nodes`; for one node its agent's ledger is read instead. Any tenant can write a pod's
annotations: an index that the node has no GPU for, or that does not fit what the container asks for, is shown and charged to
no GPU. Format: docs/reference/formats.md, section 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpushare_agent.model.names import (
    CORES_PER_GPU,
    GPU_ASSIGNED_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    MIB,
    PREDICATE_GPU_INDEX_PREFIX,
)
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.observability.gpu_summaries import GpuSummaries, GpuSummary

MAX_INDEXES = 64
_INDEXES = re.compile(r"[0-9]{1,4}(,[0-9]{1,4})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSums:
    """One GPU and what of it is allocated. `health_reason` is what is wrong with the GPU itself, None where that is not
    known."""

    gpu: GpuSummary
    cores_allocated: int
    memory_allocated_bytes: int
    health_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSums:
    """One container's part. `gpus` are those that it is charged to, none where it is unplaced; `remark` says why, or what
    a reader should know."""

    namespace: str
    pod: str
    container: str
    gpus: tuple[int, ...]
    cores: int
    memory_bytes: int
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSums:
    """One node. What unplaced containers ask for is in no GPU's sum."""

    node: str
    gpus: tuple[GpuSums, ...]
    containers: tuple[ContainerSums, ...]
    remark: str = ""

    @property
    def unplaced(self) -> tuple[ContainerSums, ...]:
        return tuple(container for container in self.containers if not container.gpus)


def node_sums(node: str, gpus: GpuSummaries, pods: Sequence[Pod], names: ResourceNames) -> NodeSums:
    """Pods that have ended have no allocation. The request of an init container is not counted: the main containers take it
    over."""
    by_index = {gpu.index: gpu for gpu in gpus.gpus}
    containers = tuple(
        _container_sums(pod, container, by_index, gpus.memory_block_mib, names)
        for pod in sorted(pods, key=lambda pod: (pod.namespace, pod.name, pod.uid))
        if not pod.is_terminal
        for container in pod.containers
        if container.kind is not ContainerKind.INIT and any(names.wanted(container, kind) for kind in names.kinds)
    )
    return NodeSums(
        node=node,
        gpus=tuple(_gpu_sums(by_index[index], containers) for index in sorted(by_index)),
        containers=containers,
        remark=gpus.remark,
    )


def _gpu_sums(gpu: GpuSummary, containers: Sequence[ContainerSums]) -> GpuSums:
    here = [container for container in containers if gpu.index in container.gpus]
    return GpuSums(
        gpu=gpu,
        cores_allocated=sum(c.cores // len(c.gpus) for c in here),
        memory_allocated_bytes=sum(gpu.memory_bytes if c.cores >= CORES_PER_GPU else c.memory_bytes for c in here),
        health_reason="" if gpu.is_healthy else None,  # not in the annotation
    )


def _container_sums(
    pod: Pod, container: ContainerSpec, gpus: Mapping[int, GpuSummary], block_mib: int, names: ResourceNames
) -> ContainerSums:
    cores = names.wanted(container, ResourceKind.VCORE)
    blocks = names.wanted(container, ResourceKind.VMEMORY)
    units = names.wanted(container, ResourceKind.GPU_MEM)
    reported = _reported_indexes(pod, container, is_gpu_mem=cores == 0 and units > 0)
    wanted = max(1, cores // CORES_PER_GPU)
    placed, remark = _placed(
        reported, wanted, gpus, is_assigned=pod.annotations.get(GPU_ASSIGNED_ANNOTATION) != "false"
    )
    memory_bytes = (blocks * block_mib + units * names.gpu_mem_unit_mib) * MIB
    if cores >= CORES_PER_GPU and placed:
        memory_bytes = sum(gpus[index].memory_bytes for index in placed)
    return ContainerSums(
        namespace=pod.namespace,
        pod=pod.name,
        container=container.name,
        gpus=placed,
        cores=cores,
        memory_bytes=memory_bytes,
        remark=remark,
    )


def _reported_indexes(pod: Pod, container: ContainerSpec, *, is_gpu_mem: bool) -> str | None:
    """The annotation about this container: by its position, else for memory alone GPUShare's, which is about the pod."""
    group = "" if container.kind is ContainerKind.MAIN else "init-"
    reported = pod.annotations.get(f"{PREDICATE_GPU_INDEX_PREFIX}{group}{container.position}")
    return pod.annotations.get(GPUSHARE_INDEX_ANNOTATION) if reported is None and is_gpu_mem else reported


def _placed(
    reported: str | None, wanted: int, gpus: Mapping[int, GpuSummary], *, is_assigned: bool
) -> tuple[tuple[int, ...], str]:
    """The GPUs that it is charged to, and a remark."""
    if reported is None:
        return (), "no GPU is known yet"
    if not _INDEXES.fullmatch(reported) or reported.count(",") >= MAX_INDEXES:
        return (), f"its annotation {reported[:40]!r} is no list of GPU indexes"
    indexes = tuple(sorted({int(word) for word in reported.split(",")}))
    missing = [index for index in indexes if index not in gpus]
    if missing:
        return (), f"its annotation names GPU {missing[0]}, which the node does not have"
    if len(indexes) != wanted:
        return (), f"its annotation names {len(indexes)} GPUs where it asks for {wanted}"
    return indexes, "" if is_assigned else "chosen by the scheduler, not yet allocated by the agent"
