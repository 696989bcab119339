"""What one pod counts against its namespace's quota. Pure. docs/reference/quota.md has the reasons; quota_state.py keeps
the sums.

GPUs are counted in 1/100, as vcore is.
"""

from __future__ import annotations

from msgspec import Struct

from gpushare_agent.model.names import CORES_PER_GPU
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceNames, request_of
from gpushare_agent.placement.gpu_account import blocks_of_units


class QuotaUse(Struct, frozen=True):
    """What a pod takes of its namespace's quota, or all its pods together: 1/100 GPUs, vcore, blocks of memory."""

    gpus: int = 0
    vcore: int = 0
    vmemory: int = 0

    def plus(self, other: QuotaUse) -> QuotaUse:
        return QuotaUse(self.gpus + other.gpus, self.vcore + other.vcore, self.vmemory + other.vmemory)

    def at_least(self, other: QuotaUse) -> QuotaUse:
        """The greater of each."""
        return QuotaUse(max(self.gpus, other.gpus), max(self.vcore, other.vcore), max(self.vmemory, other.vmemory))


def use_of(pod: Pod, names: ResourceNames, *, gpu_memory_mib: int) -> QuotaUse:
    """What a pod counts on a node whose GPUs have so much memory.

    As Kubernetes counts a pod's requests: main containers and sidecars together, or an init container with the sidecars
    started before it where that is more. Whole GPUs count with all their memory, for no other pod can use it; GPUShare's
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
    asked = request_of(container, names)
    cores, blocks, units = asked.cores, asked.blocks, asked.units
    if cores >= CORES_PER_GPU:
        whole = cores // CORES_PER_GPU * (gpu_memory_mib // names.memory_block_mib)
        blocks = max(blocks, whole)
    part = -(-units * names.gpu_mem_unit_mib * CORES_PER_GPU // max(1, gpu_memory_mib))
    return QuotaUse(
        cores + part, cores, blocks + blocks_of_units(units, names.memory_block_mib, names.gpu_mem_unit_mib)
    )
