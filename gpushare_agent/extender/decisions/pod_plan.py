"""Plans all containers of a pod on one node as its agent would place them, with counts in place of device IDs. Pure.

Both use placement/ and its GpuAccount, so they agree. Containers follow one another in the kubelet's order; what an init
container has is handed on to those after it (measured, docs/explanation/architecture.md): it counts as free for them, and
its GPUs bind them. admission/decisions/ledger.py does the same on IDs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpushare_agent.admission.decisions.reuse import effective_request
from gpushare_agent.cluster.decisions.node_annotations import Charge
from gpushare_agent.extender.values import ClusterPolicy, PlannedContainer, PodPlan
from gpushare_agent.model.errors import Refused
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.model.topology import Topology
from gpushare_agent.placement import GpuAccount, GpuRequest, memory_share, place, validate_request


@dataclass(slots=True, kw_only=True)
class _Planning:
    """One planning: its state lives as long as the call. `gpus` changes with each container, by index."""

    gpus: dict[int, GpuAccount]
    topology: Topology
    policy: ClusterPolicy

    def allocate(self, container: ContainerSpec, gpus: Sequence[int]) -> None:
        for index in gpus:
            self.gpus[index] = _allocate(self.gpus[index], container, self.policy.names)

    def must_gpus(self, kind: ResourceKind) -> tuple[GpuUuid, ...]:
        """The GPUs of which the kubelet hands on IDs of this resource: a container that asks for it cannot avoid them."""
        is_units = kind is ResourceKind.GPU_MEM
        return tuple(g.uuid for g in self.gpus.values() if (g.reusable_units if is_units else g.reusable_cores))

    def indexes(self, uuids: Sequence[GpuUuid]) -> tuple[int, ...]:
        return tuple(sorted(gpu.index for gpu in self.gpus.values() if gpu.uuid in uuids))


def plan_pod(pod: Pod, gpus: Sequence[GpuAccount], topology: Topology, policy: ClusterPolicy) -> PodPlan | Refused:
    """The whole pod's placement, or the refusal of the first container that fits nowhere. `gpus` are in order of index."""
    planning = _Planning(gpus={gpu.index: gpu for gpu in gpus}, topology=topology, policy=policy)
    planned = []
    for container in pod.containers:
        one = _plan_container(pod, container, planning)
        if isinstance(one, Refused):
            return Refused(reason=one.reason, detail=f"container {container.name}: {one.detail}")
        planning.allocate(container, one.gpus)
        planned.append(one)
    charges = (_charge(before, planning.gpus[before.index]) for before in gpus)
    return PodPlan(
        containers=tuple(planned),
        charges=tuple(charge for charge in charges if charge is not None),
    )


def charges_anywhere(pod: Pod, indexes: Sequence[int], names: ResourceNames) -> tuple[Charge, ...]:
    """What a pod whose GPUs are not known may have of each GPU: all that it asks of one GPU, on every one."""
    before = after = GpuAccount(index=0, uuid=GpuUuid(""), memory_mib=0)
    for container in pod.containers:
        after = _allocate(after, container, names)
    charge = _charge(before, after)
    return tuple(replace(charge, index=index) for index in indexes) if charge is not None else ()


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
    names, policy = planning.policy.names, planning.policy
    blank = PlannedContainer(name=container.name, kind=container.kind, position=container.position, gpus=())
    if names.wanted(container, ResourceKind.GPU_MEM):
        return _plan_units(pod, container, blank, planning)
    cores, blocks = names.wanted(container, ResourceKind.VCORE), names.wanted(container, ResourceKind.VMEMORY)
    if not cores and not blocks:
        return blank
    refused = validate_request(cores, blocks, share_mode=True, memory_block_mib=names.memory_block_mib)
    effective = refused or effective_request(pod, container, names)
    if isinstance(effective, Refused):
        return effective
    placed = place(
        GpuRequest(cores=effective.cores, blocks=effective.blocks, must_gpus=planning.must_gpus(ResourceKind.VCORE)),
        list(planning.gpus.values()),
        planning.topology,
        share_policy=policy.share_policy,
        memory_block_mib=names.memory_block_mib,
    )
    if isinstance(placed, Refused):
        return placed
    return replace(blank, gpus=planning.indexes(placed.gpus), cores=cores, blocks=blocks)


def _plan_units(
    pod: Pod, container: ContainerSpec, blank: PlannedContainer, planning: _Planning
) -> PlannedContainer | Refused:
    """GPUShare's resource: memory of one GPU, and nothing else."""
    names, gpus = planning.policy.names, list(planning.gpus.values())
    refused = memory_share.validate(container, names, gpus, share_mode=True)
    if refused is not None:
        return refused
    placed = memory_share.place_memory(
        memory_share.effective_request(pod, container, names),
        gpus,
        names,
        share_policy=planning.policy.share_policy,
        hint=(),
        must_gpus=planning.must_gpus(ResourceKind.GPU_MEM),
    )
    if isinstance(placed, Refused):
        return placed
    return replace(blank, gpus=planning.indexes(placed[:1]), units=names.wanted(container, ResourceKind.GPU_MEM))


def _allocate(gpu: GpuAccount, container: ContainerSpec, names: ResourceNames) -> GpuAccount:
    return gpu.allocate(
        cores=names.wanted(container, ResourceKind.VCORE),
        blocks=names.wanted(container, ResourceKind.VMEMORY),
        units=names.wanted(container, ResourceKind.GPU_MEM),
        is_reusable=container.kind is ContainerKind.INIT,
    )


def _charge(before: GpuAccount, after: GpuAccount) -> Charge | None:
    """What was allocated between the two; None for nothing."""
    if after is before:
        return None
    return Charge(
        index=before.index,
        cores=after.used_cores - before.used_cores,
        blocks=after.used_blocks - before.used_blocks,
        units=after.used_units - before.used_units,
        is_whole=after.is_whole and not before.is_whole,
    )
