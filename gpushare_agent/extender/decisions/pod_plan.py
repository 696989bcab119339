"""Plans all containers of a pod on one node as its agent would place them, with counts in place of device IDs. Pure.

Both use placement/ and its GpuAccount, so they agree. Containers follow one another in the kubelet's order; what an init
container has is handed on to those after it (measured, docs/explanation/architecture.md): it counts as free for them, and
its GPUs bind them. admission/decisions/ledger.py does the same on IDs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from gpushare_agent.admission.decisions.reuse import effective_request
from gpushare_agent.extender.values import ClusterPolicy, PlannedContainer, PodPlan
from gpushare_agent.model.charges import Charge
from gpushare_agent.model.errors import Refused
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.requests import NOTHING, Request, request_of
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.model.topology import Topology
from gpushare_agent.placement import GpuAccount, place, validate_request


class _Planning(Struct, kw_only=True):
    """One planning: its state lives as long as the call. `gpus` changes with each container, by index."""

    gpus: dict[int, GpuAccount]
    topology: Topology
    policy: ClusterPolicy

    def must_gpus(self, request: Request) -> tuple[GpuUuid, ...]:
        """The GPUs of which the kubelet hands on IDs of the same resource: the container cannot avoid them."""
        return tuple(g.uuid for g in self.gpus.values() if (g.reusable_units if request.units else g.reusable_cores))


def plan_pod(pod: Pod, gpus: Sequence[GpuAccount], topology: Topology, policy: ClusterPolicy) -> PodPlan | Refused:
    """The whole pod's placement, or the refusal of the first container that fits nowhere. `gpus` are in order of index."""
    planning = _Planning(gpus={gpu.index: gpu for gpu in gpus}, topology=topology, policy=policy)
    planned = []
    for container in pod.containers:
        one = _plan_container(pod, container, planning)
        if isinstance(one, Refused):
            return Refused(reason=one.reason, detail=f"container {container.name}: {one.detail}")
        for index in one.gpus:
            planning.gpus[index] = _allocate(planning.gpus[index], container.kind, one.request)
        planned.append(one)
    afters = ((before, planning.gpus[before.index]) for before in gpus)
    charges = {after.index: _charge(before, after) for before, after in afters if after is not before}
    return PodPlan(containers=tuple(planned), charges=charges)


def charges_anywhere(pod: Pod, indexes: Sequence[int], names: ResourceNames) -> dict[int, Charge]:
    """What a pod whose GPUs are not known may have of each GPU: all that it asks of one GPU, on every one."""
    before = after = GpuAccount(index=0, uuid=GpuUuid(""), memory_mib=0)
    for container in pod.containers:
        after = _allocate(after, container.kind, request_of(container, names))
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


def _plan_container(pod: Pod, container: ContainerSpec, planning: _Planning) -> PlannedContainer | Refused:
    names = planning.policy.names
    own, gpus = request_of(container, names), list(planning.gpus.values())
    if own == NOTHING:
        return _planned(container, own)
    effective = validate_request(own, names, share_mode=True) or effective_request(pod, container, names)
    if isinstance(effective, Refused):
        return effective
    placed = place(
        effective._replace(must_gpus=planning.must_gpus(effective)),
        gpus,
        planning.topology,
        share_policy=planning.policy.share_policy,
        names=names,
    )
    if isinstance(placed, Refused):
        return placed
    return _planned(container, own, tuple(sorted(gpu.index for gpu in gpus if gpu.uuid in placed.gpus)))


def _planned(container: ContainerSpec, request: Request, gpus: tuple[int, ...] = ()) -> PlannedContainer:
    return PlannedContainer(
        name=container.name, kind=container.kind, position=container.position, request=request, gpus=gpus
    )


def _allocate(gpu: GpuAccount, kind: ContainerKind, request: Request) -> GpuAccount:
    return gpu.allocate(request, is_reusable=kind is ContainerKind.INIT)


def _charge(before: GpuAccount, after: GpuAccount) -> Charge:
    """What was allocated between the two."""
    return Charge(
        cores=after.used_cores - before.used_cores,
        blocks=after.used_blocks - before.used_blocks,
        units=after.used_units - before.used_units,
        wholes=int(after.is_whole and not before.is_whole),
    )
