"""Plans all containers of a pod on one node as its agent would place them, with counts in place of device IDs. Pure.

Both use placement/ and its GpuAccount, so they agree. Containers follow one another in the kubelet's order; what an init
container has is handed on to those after it (measured, docs/explanation/architecture.md): it counts as free for them, and
its GPUs bind them. admission/decisions/ledger.py does the same on IDs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpushare_agent.extender.values import ClusterPolicy, PlannedContainer, PodPlan
from gpushare_agent.model.allocations import Charge
from gpushare_agent.model.errors import Refused
from gpushare_agent.model.gpus import Topology
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import NOTHING, Request, ResourceNames, request_of
from gpushare_agent.placement import GpuAccount, Placed, place, validate_request
from gpushare_agent.placement.place import effective_request


def plan_pod(pod: Pod, gpus: Sequence[GpuAccount], topology: Topology, policy: ClusterPolicy) -> PodPlan | Refused:
    """The whole pod's placement, or the refusal of the first container that fits nowhere. `gpus` are in order of index."""
    names, accounts = policy.names, {gpu.index: gpu for gpu in gpus}
    planned = []
    for container in pod.containers:
        own = request_of(container, names)
        chosen: tuple[int, ...] = ()
        if own != NOTHING:
            placed = _place(pod, container, own, list(accounts.values()), topology, policy)
            if isinstance(placed, Refused):
                return Refused(reason=placed.reason, detail=f"container {container.name}: {placed.detail}")
            chosen = tuple(sorted(index for index, gpu in accounts.items() if gpu.uuid in placed.gpus))
        for index in chosen:
            accounts[index] = accounts[index].allocate(own, is_reusable=container.kind is ContainerKind.INIT)
        planned.append(
            PlannedContainer(
                name=container.name, kind=container.kind, position=container.position, request=own, gpus=chosen
            )
        )
    afters = ((before, accounts[before.index]) for before in gpus)
    charges = {after.index: _charge(before, after) for before, after in afters if after is not before}
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
    effective = validate_request(own, names, share_mode=True) or effective_request(pod, container, names)
    if isinstance(effective, Refused):
        return effective
    # The kubelet hands on IDs of these: the container cannot avoid their GPUs.
    must = tuple(gpu.uuid for gpu in gpus if (gpu.reusable_units if effective.units else gpu.reusable_cores))
    request = effective._replace(must_gpus=must)
    return place(request, gpus, topology, share_policy=policy.share_policy, names=names)


def charges_anywhere(pod: Pod, indexes: Sequence[int], names: ResourceNames) -> dict[int, Charge]:
    """What a pod whose GPUs are not known may have of each GPU: all that it asks of one GPU, on every one."""
    before = after = GpuAccount(index=0, uuid=GpuUuid(""), memory_mib=0)
    for container in pod.containers:
        after = after.allocate(request_of(container, names), is_reusable=container.kind is ContainerKind.INIT)
    return {} if after is before else dict.fromkeys(indexes, _charge(before, after))


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


def _charge(before: GpuAccount, after: GpuAccount) -> Charge:
    """What was allocated between the two."""
    return Charge(
        cores=after.used_cores - before.used_cores,
        blocks=after.used_blocks - before.used_blocks,
        units=after.used_units - before.used_units,
        wholes=int(after.is_whole and not before.is_whole),
    )
