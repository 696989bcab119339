"""What the extender needs of pods and of a node's free capacity beside its exact planning: a pod's signature, whether its
containers may fit together, the node's score. Pure.

A cluster has thousands of nodes and the scheduler waits for every answer, so the exact planning (pod_plan.py) runs only
where the summary (placement/gpu_account.py) cannot decide: never for a pod of which one container asks for GPUs, which is
nearly every pod.
"""

from __future__ import annotations

from gpushare_agent.model.names import CORES_PER_GPU
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.model.resources import NOTHING, Request, ResourceNames, request_of
from gpushare_agent.placement.gpu_account import Capacity, describe_request
from gpushare_agent.placement.place import SharePolicy

MAX_SCORE = 10
"""MaxExtenderPriority of kube-scheduler."""
_TIGHT_WEIGHT = 0.5

Signature = tuple[tuple[ContainerKind, Request], ...]
"""Of a pod, the containers that ask for GPUs: pods of one signature fit the same nodes."""


def signature_of(pod: Pod, names: ResourceNames) -> Signature:
    """In the kubelet's order; empty where none asks for something of ours."""
    asked = ((container.kind, request_of(container, names)) for container in pod.containers)
    return tuple((kind, request) for kind, request in asked if request != NOTHING)


def lack_together(node: Capacity, requests: Signature, names: ResourceNames) -> str:
    """Why the containers cannot all fit whatever goes where, for they ask for more in sum than is free; empty where they
    may. Init containers hand on what they have, so only the others are added up."""
    lasting = [request for kind, request in requests if kind is not ContainerKind.INIT]
    cores = sum(request.cores for request in lasting)
    blocks = sum(request.blocks for request in lasting if not request.whole_gpus)
    units = sum(request.units for request in lasting)
    left = [sum(gpu[n] for gpu in node.free) for n in range(3)]
    if cores <= left[0] and blocks <= left[1] and units <= left[2]:
        return ""
    asked = [describe_request(Request(cores=cores, blocks=blocks), names)] if cores or blocks else []
    asked += [describe_request(Request(units=units), names)] if units else []
    free = describe_request(Request(cores=left[0], blocks=left[1]), names)
    return f"the pod's containers ask for {' and '.join(asked)} together, the node has {free} free"


def score(node: Capacity, requests: Signature, node_policy: SharePolicy) -> int:
    """0..10, of a node where the pod fits. The part is the same for every node; what differs is what the node has left.

    binpack: full nodes first, and for a share nodes where a used GPU takes it, so that no free GPU is broken up; for
    whole GPUs nodes whose free GPUs are exactly used up. spread: the other way round.
    """
    capacity = CORES_PER_GPU * len(node.free) or 1
    fullness = (node.used_cores / capacity + node.used_memory_mib / (node.memory_mib or 1)) / 2
    if node_policy == "spread":
        return round(MAX_SCORE * (1 - fullness))
    tight = 0.0
    for _, request in requests:
        tight += _tightness(node, request)
    return round(MAX_SCORE * ((1 - _TIGHT_WEIGHT) * fullness + _TIGHT_WEIGHT * tight / len(requests)))


def _tightness(node: Capacity, request: Request) -> float:
    """1 where nothing is broken up by it, 0 where it takes a part of a node's only free GPUs."""
    if count := request.whole_gpus:
        return count / max(count, len(node.whole_blocks))
    least, asked, asked_blocks, asked_units = CORES_PER_GPU, request.cores, request.blocks, request.units
    for cores, blocks, units in node.free:
        if asked <= cores < least and blocks >= asked_blocks and units >= asked_units:
            least = cores
    return 1 - (least - asked) / (2 * CORES_PER_GPU) if least < CORES_PER_GPU else 0.0
