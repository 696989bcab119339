"""The effective request of a container: its own, and what the containers after it in its pod take over from it. Pure.

The kubelet passes an ordinary init container's device IDs on to its successor containers before it asks for new ones
(measured). A share must stay on one GPU, so an init container is placed where its successors fit too. When an init
container has more whole GPUs than a successor requests, the kubelet picks among their IDs at random, over all the GPUs,
which no placement can prevent: such a pod is refused before it starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.names import CORES_PER_GPU
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveRequest:
    """The cores and blocks that must be free where the container is placed."""

    cores: int
    blocks: int


def effective_request(pod: Pod, container: ContainerSpec, names: ResourceNames) -> EffectiveRequest | Refused:
    """The container's own request, enlarged for an init container by what its successors need on the same GPU."""
    cores = names.wanted(container, ResourceKind.VCORE)
    blocks = names.wanted(container, ResourceKind.VMEMORY)
    if container.kind is not ContainerKind.INIT:
        return EffectiveRequest(cores=cores, blocks=blocks)
    pool_cores, pool_blocks = cores, blocks
    need_cores, need_blocks = cores, blocks
    for successor in pod.containers[pod.containers.index(container) + 1 :]:
        successor_cores = names.wanted(successor, ResourceKind.VCORE)
        successor_blocks = names.wanted(successor, ResourceKind.VMEMORY)
        if not successor_cores or not pool_cores:
            continue
        if cores > CORES_PER_GPU and successor_cores < cores:
            return _scattered(pod, container, successor, cores, successor_cores)
        need_cores += max(0, successor_cores - pool_cores)
        need_blocks += max(0, successor_blocks - pool_blocks)
        if successor.kind is ContainerKind.INIT:
            pool_cores, pool_blocks = max(pool_cores, successor_cores), max(pool_blocks, successor_blocks)
        else:
            pool_cores, pool_blocks = max(0, pool_cores - successor_cores), max(0, pool_blocks - successor_blocks)
    if need_cores > CORES_PER_GPU:
        # The successor requests whole GPUs: this container's GPU becomes one of them; its own call checks the others.
        need_cores = max(cores, CORES_PER_GPU)
        need_blocks = blocks
    return EffectiveRequest(cores=need_cores, blocks=need_blocks)


def _scattered(
    pod: Pod, container: ContainerSpec, successor: ContainerSpec, cores: int, successor_cores: int
) -> Refused:
    return Refused(
        reason=RefusalReason.INVALID_REQUEST,
        detail=f"pod {pod.namespace}/{pod.name}: init container {container.name} asks for {cores} cores and container "
        f"{successor.name} after it for {successor_cores}. The kubelet would hand on devices from several of the init "
        f"container's GPUs at random. Give the init container at most {CORES_PER_GPU} cores, or as many as "
        f"{successor.name}.",
    )
