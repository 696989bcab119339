"""What counts against a namespace's quota: of one pod, and of all its pods together. Pure. docs/quota.md says why so.

GPUs are counted in 1/100, as vcore is.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpushare_agent.admission.decisions.memory_share import blocks_taken
from gpushare_agent.model.names import CORES_PER_GPU, PodUid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """What a pod takes of its namespace's quota, or all its pods together: 1/100 GPUs, vcore, blocks of memory."""

    gpus: int = 0
    vcore: int = 0
    vmemory: int = 0

    def plus(self, other: QuotaUse) -> QuotaUse:
        return QuotaUse(self.gpus + other.gpus, self.vcore + other.vcore, self.vmemory + other.vmemory)

    def at_least(self, other: QuotaUse) -> QuotaUse:
        """The greater of each."""
        return QuotaUse(max(self.gpus, other.gpus), max(self.vcore, other.vcore), max(self.vmemory, other.vmemory))


class Usage:
    """What is used, kept by pod so that telling of one twice counts once. It belongs to one owner, who feeds it."""

    def __init__(self) -> None:
        self._pods: dict[PodUid, tuple[str, str, QuotaUse]] = {}
        self._gpus: dict[tuple[str, str], int] = {}
        self._totals: dict[str, QuotaUse] = {}

    def put(self, uid: PodUid, namespace: str, model: str, use: QuotaUse) -> None:
        """The pod is on a node with GPUs of this model, or will be."""
        self.remove(uid)
        self._pods[uid] = namespace, model, use
        self._count(namespace, model, use, 1)

    def remove(self, uid: PodUid) -> None:
        """The pod has ended, or is not bound after all."""
        old = self._pods.pop(uid, None)
        if old is not None:
            self._count(*old, -1)

    def of(self, namespace: str, model: str, *, without: PodUid | None = None) -> QuotaUse:
        """The namespace's GPUs of the model, and its totals over all models; as if `without` were not there."""
        total = self._totals.get(namespace, QuotaUse())
        gpus = self._gpus.get((namespace, model), 0)
        left_out = self._pods.get(without) if without is not None else None
        if left_out is None or left_out[0] != namespace:
            return QuotaUse(gpus, total.vcore, total.vmemory)
        _, its_model, use = left_out
        return QuotaUse(
            gpus - (use.gpus if its_model == model else 0), total.vcore - use.vcore, total.vmemory - use.vmemory
        )

    def by_model(self) -> dict[tuple[str, str], int]:
        """1/100 GPUs by namespace and model, sorted; for metrics."""
        return dict(sorted(self._gpus.items()))

    def _count(self, namespace: str, model: str, use: QuotaUse, sign: int) -> None:
        key = namespace, model
        gpus = self._gpus.get(key, 0) + sign * use.gpus
        self._gpus[key] = gpus
        if not gpus:
            del self._gpus[key]
        total = self._totals.get(namespace, QuotaUse())
        total = total.plus(QuotaUse(sign * use.gpus, sign * use.vcore, sign * use.vmemory))
        self._totals[namespace] = total
        if total == QuotaUse():
            del self._totals[namespace]


def use_of(pod: Pod, names: ResourceNames, *, gpu_memory_mib: int) -> QuotaUse:
    """What a pod counts on a node whose GPUs have so much memory.

    As Kubernetes counts a pod's requests: main containers and sidecars together, or an init container with the sidecars
    started before it where that is more. Whole GPUs count with all their memory, for nobody else can use it; GPUShare's
    memory as that part of a GPU, rounded up.
    """
    peak = sidecars = mains = QuotaUse()
    for container in pod.containers:
        use = _use_of_container(container, names, gpu_memory_mib)
        match container.kind:
            case ContainerKind.INIT:
                peak = peak.at_least(sidecars.plus(use))
            case ContainerKind.SIDECAR:
                sidecars = sidecars.plus(use)
                peak = peak.at_least(sidecars)
            case ContainerKind.MAIN:
                mains = mains.plus(use)
    return peak.at_least(sidecars.plus(mains))


def _use_of_container(container: ContainerSpec, names: ResourceNames, gpu_memory_mib: int) -> QuotaUse:
    cores, blocks = names.wanted(container, ResourceKind.VCORE), names.wanted(container, ResourceKind.VMEMORY)
    units = names.wanted(container, ResourceKind.GPU_MEM)
    if cores >= CORES_PER_GPU:
        whole = cores // CORES_PER_GPU * (gpu_memory_mib // names.memory_block_mib)
        blocks = max(blocks, whole)
    part = -(-units * names.gpu_mem_unit_mib * CORES_PER_GPU // max(1, gpu_memory_mib))
    return QuotaUse(cores + part, cores, blocks + blocks_taken(units, names))
