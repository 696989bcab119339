"""Decides whether a pod fits a node: exactly, container by container, and in short, for all nodes at once. Pure.

`plan_pod` places all containers of a pod as the node's agent would, with counts instead of device IDs. Both use placement/
and its GpuAccount, so they agree. Containers follow one another in the kubelet's order; what an init container has is handed
on to those after it (measured, docs/explanation/architecture.md): it counts as free for them, and its GPUs bind them.
agent/admission/decisions/ledger.py does the same on IDs.

A cluster has thousands of nodes and the scheduler waits for every answer, so the exact plan is made only where the summary
(core/placement/gpu_account.py) cannot: never for a pod with one container that asks for GPUs, which is nearly every pod.
`signature_of`, `lack_together` and `fullness_cost` go by the summary.

`scores_of` turns the nodes' costs into kube-scheduler's scores.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.gpus import Topology
from gpushare_agent.core.model.names import CORES_PER_GPU, GpuUuid
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, HostRequest, Pod
from gpushare_agent.core.model.resources import NOTHING, Request, ResourceNames, request_of
from gpushare_agent.core.placement import GpuAccount, Placed, place, validate_request
from gpushare_agent.core.placement.fragmentation import PodKind
from gpushare_agent.core.placement.gpu_account import Capacity, describe_request
from gpushare_agent.core.placement.gpu_choice import accepting, choice_of
from gpushare_agent.core.placement.place import SharePolicy, effective_request
from gpushare_agent.extender.values import ClusterPolicy, PlannedContainer, PodPlan

MAX_SCORE = 10
"""MaxExtenderPriority of kube-scheduler."""
SCORE_OF_NEXT = 3
NODES_OF_A_SCORE = 4
_TIGHT_WEIGHT = 0.5
_DIGITS = 3

Signature = tuple[tuple[ContainerKind, Request], ...]
"""The containers of a pod that ask for GPUs: pods of one signature fit the same nodes."""


def plan_pod(pod: Pod, gpus: Sequence[GpuAccount], topology: Topology, policy: ClusterPolicy) -> PodPlan | Refused:
    """The whole pod's placement, or the refusal of the first container that fits nowhere. `gpus` are in order of index."""
    gpus = accepting(choice_of(pod.annotations), gpus)
    names, accounts = policy.names, {gpu.index: gpu for gpu in gpus}
    planned = []
    # In the order in which the kubelet asks for their devices: init containers first.
    for container in pod.containers:
        own = request_of(container, names)
        chosen: tuple[int, ...] = ()
        if own != NOTHING:
            placed = _place(pod, container, own, list(accounts.values()), topology, policy)
            if isinstance(placed, Refused):
                return Refused(reason=placed.reason, detail=f"container {container.name}: {placed.detail}")
            # By index in our plans, by UUID in placement: an index is what annotations carry.
            chosen = tuple(sorted(index for index, gpu in accounts.items() if gpu.uuid in placed.gpus))
        for index in chosen:
            # What an init container has becomes reusable; its own request is charged, because the rest comes with the
            # containers after it.
            accounts[index] = accounts[index].allocate(own, is_reusable=container.kind is ContainerKind.INIT)
        planned.append(
            PlannedContainer(
                name=container.name, kind=container.kind, position=container.position, request=own, gpus=chosen
            )
        )
    afters = ((before, accounts[before.index]) for before in gpus)
    charges = {after.index: after.used.plus(before.used, -1) for before, after in afters if after is not before}
    return PodPlan(containers=tuple(planned), charges=charges)


def _place(
    pod: Pod,
    container: ContainerSpec,
    own: Request,
    gpus: Sequence[GpuAccount],
    topology: Topology,
    policy: ClusterPolicy,
) -> Placed | Refused:
    names = policy.names
    # share_mode: whether the node shares its GPUs is its agent's setting, which no annotation has.
    effective = validate_request(own, names, share_mode=True) or effective_request(pod, container, names)
    if isinstance(effective, Refused):
        return effective
    # The kubelet hands on their IDs: the container cannot avoid their GPUs.
    must = tuple(gpu.uuid for gpu in gpus if (gpu.reusable.units if effective.units else gpu.reusable.cores))
    request = effective._replace(must_gpus=must)
    return place(request, gpus, topology, share_policy=policy.share_policy, names=names)


def charges_anywhere(pod: Pod, indexes: Sequence[int], names: ResourceNames) -> dict[int, Charge]:
    """The charge of a pod with unknown GPUs: all that it asks of one GPU, on every GPU."""
    before = after = GpuAccount(index=0, uuid=GpuUuid(""), memory_mib=0)
    for container in pod.containers:
        # On one imaginary GPU, as if all were there: more than the pod can have of any.
        after = after.allocate(request_of(container, names), is_reusable=container.kind is ContainerKind.INIT)
    return {} if after is before else dict.fromkeys(indexes, after.used.plus(before.used, -1))


def plan_annotations(plan: PodPlan, prefix: str) -> Mapping[str, str]:
    """The predicate annotations that carry the plan to the agent: one for each container with GPUs. Init containers and
    sidecars too: an agent that chose their GPUs by itself would take others while pods before it are on their way."""
    return {
        f"{prefix}{'' if container.kind is ContainerKind.MAIN else 'init-'}{container.position}": ",".join(
            map(str, container.gpus)
        )
        for container in plan.containers
        if container.gpus
    }


# --- by the summary ---


def signature_of(pod: Pod, names: ResourceNames) -> Signature:
    """The pod's requests in the kubelet's order; empty where none asks for something of ours."""
    asked = ((container.kind, request_of(container, names)) for container in pod.containers)
    return tuple((kind, request) for kind, request in asked if request != NOTHING)


def lack_together(node: Capacity, requests: Signature, names: ResourceNames) -> str:
    """Why the containers cannot all fit wherever they go, because their sum is more than what is free; empty where they may.
    Init containers hand on what they have, so only the others are added up."""
    # An init container that asks for more than all after it is found by the plan.
    lasting = [request for kind, request in requests if kind is not ContainerKind.INIT]
    cores = sum(request.cores for request in lasting)
    blocks = sum(request.blocks for request in lasting)
    units = sum(request.units for request in lasting)
    left = [sum(gpu[n] for gpu in node.free) for n in range(3)]
    if cores <= left[0] and blocks <= left[1] and units <= left[2]:
        return ""
    asked = [describe_request(Request(cores=cores, blocks=blocks), names)] if cores or blocks else []
    asked += [describe_request(Request(units=units), names)] if units else []
    free = describe_request(Request(cores=left[0], blocks=left[1]), names)
    return f"the pod's containers ask for {' and '.join(asked)} together, the node has {free} free"


def fullness_cost(node: Capacity, requests: Signature, policy: SharePolicy) -> float:
    """The cost of a node where the pod fits; the least is best. The pod's part is the same on every node, but not what the
    node has left.

    binpack: full nodes first, and for a share nodes where a used GPU takes it, so that no free GPU is broken up; for
    whole GPUs nodes whose free GPUs are exactly used up. spread: the other way round.
    """
    # A node without a healthy GPU has no capacity, and no pod fits it.
    capacity = CORES_PER_GPU * len(node.free) or 1
    # Cores and memory weigh alike: either may be the one that runs out.
    fullness = (node.used_cores / capacity + node.used_memory_mib / (node.memory_mib or 1)) / 2
    # Emptiest first needs no second measure: an empty node has free GPUs to spare.
    if policy == "spread":
        return fullness
    tight = 0.0
    for _, request in requests:
        tight += _tightness(node, request)
    return -((1 - _TIGHT_WEIGHT) * fullness + _TIGHT_WEIGHT * tight / len(requests))


def scores_of(costs: Sequence[float | None]) -> list[int]:
    """The score of each node from its cost, 0 where it has none: ranks, because kube-scheduler has eleven scores, and adds
    to them those of its own criteria.

    The cheapest get MAX_SCORE and all others at most SCORE_OF_NEXT, so that the difference, seven times the extender's
    weight times 10, is more than NodeResourcesFit, NodeResourcesBalancedAllocation and ImageLocality can give together
    (3 times 100) with a weight of 5. Those count where the costs are equal. The others, of use only where a pod prefers
    nodes by itself, lose one for each NODES_OF_A_SCORE times as many that are cheaper.
    """
    known = sorted(cost for cost in costs if cost is not None)
    if not known:
        return [0] * len(costs)
    bounds, cheaper = [known[0]], 1
    for _ in range(SCORE_OF_NEXT):
        cheaper *= NODES_OF_A_SCORE
        bounds.append(known[min(cheaper, len(known)) - 1])
    scores = (MAX_SCORE, *range(SCORE_OF_NEXT, -1, -1))
    return [0 if cost is None else scores[bisect_left(bounds, cost)] for cost in costs]


def kind_of(signature: Signature, host: HostRequest, names: ResourceNames) -> PodKind:
    """The pod's kind for policy fgd. Where several containers ask for GPUs, the one that asks for most counts."""
    request = max((asked for _, asked in signature), key=lambda one: (one.whole_gpus, one.cores, one.blocks, one.units))
    gpu_memory_mib = request.units * names.gpu_mem_unit_mib + request.blocks * names.memory_block_mib
    return PodKind(
        cpu_milli=_rounded(host.cpu_milli),
        memory_mib=_rounded(host.memory_mib),
        gpus=request.whole_gpus or 1,
        parts=min(request.cores, CORES_PER_GPU),
        models=host.models,
        gpu_memory_mib=0 if request.whole_gpus else gpu_memory_mib,
    )


def _rounded(amount: int) -> int:
    """Up to three binary digits, so that pods of about the same size are of one kind (on the public trace as good as exact
    amounts, and half as many kinds)."""
    shift = max(0, amount.bit_length() - _DIGITS)
    return -(-amount >> shift) << shift


def _tightness(node: Capacity, request: Request) -> float:
    """1 where it breaks nothing up, 0 where it takes a part of a node's only free GPUs."""
    # Best where exactly so many are free: more would be broken into.
    if count := request.whole_gpus:
        return count / max(count, len(node.whole_blocks))
    least, asked, asked_blocks, asked_units = CORES_PER_GPU, request.cores, request.blocks, request.units
    for cores, blocks, units in node.free:
        if asked <= cores < least and blocks >= asked_blocks and units >= asked_units:
            least = cores
    # Halved, so that a GPU in use, however full, is always better than a free one.
    return 1 - (least - asked) / (2 * CORES_PER_GPU) if least < CORES_PER_GPU else 0.0
