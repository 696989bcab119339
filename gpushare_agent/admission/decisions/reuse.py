"""The effective request of a container: its own, and what the containers after it in its pod take over from it. Pure.

The kubelet passes an ordinary init container's device IDs on to its successor containers before it asks for new ones
(measured). A share must stay on one GPU, so an init container is placed where its successors fit too. When an init
container has more whole GPUs than a successor requests, the kubelet picks among their IDs at random, over all the GPUs,
which no placement can prevent: such a pod is refused before it starts.
"""

from __future__ import annotations

from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.names import CORES_PER_GPU
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.requests import Request, request_of
from gpushare_agent.model.resources import ResourceNames


def effective_request(pod: Pod, container: ContainerSpec, names: ResourceNames) -> Request | Refused:
    """The container's own request, enlarged for an init container by what its successors need on the same GPU."""
    own = request_of(container, names)
    if container.kind is not ContainerKind.INIT:
        return own
    pool = need = _amounts(own, own)
    for successor in pod.containers[pod.containers.index(container) + 1 :]:
        wanted = _amounts(request_of(successor, names), own)
        if not wanted[0] or not pool[0]:
            continue
        if own.cores > CORES_PER_GPU and wanted[0] < own.cores:
            return _scattered(pod, container, successor, own.cores, wanted[0])
        need = tuple(sum_ + max(0, more - had) for sum_, more, had in zip(need, wanted, pool, strict=True))
        is_init = successor.kind is ContainerKind.INIT
        pool = tuple(max(had, more) if is_init else max(0, had - more) for had, more in zip(pool, wanted, strict=True))
    if own.units:
        return own._replace(units=need[0])
    if need[0] > CORES_PER_GPU:
        # The successor requests whole GPUs: this container's GPU becomes one of them; its own call checks the others.
        return own._replace(cores=max(own.cores, CORES_PER_GPU))
    return own._replace(cores=need[0], blocks=need[1])


def _amounts(request: Request, of: Request) -> tuple[int, ...]:
    """What is handed on where a container asks by the resources of `of`: the one that binds the GPU, then its memory."""
    return (request.units,) if of.units else (request.cores, request.blocks)


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
