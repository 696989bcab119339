"""Where do all containers of a pod go on one node? As its agent would place them, on counts instead of device IDs. Pure.

The agent and the scheduler extender must agree, so both use decisions/placement. Containers follow one another in the
kubelet's order, and what an init container holds is handed on to those after it (measured, docs/architecture.md): it
counts as free for them, and its GPUs bind them. admission/decisions/ledger.py does the same on IDs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpushare_agent.admission.decisions import memory_share
from gpushare_agent.admission.decisions.reuse import effective_request
from gpushare_agent.extender.values import Charge, ClusterPolicy, PlannedContainer, PodPlan
from gpushare_agent.model.errors import Refused
from gpushare_agent.model.gpus import Gpu, GpuInventory
from gpushare_agent.model.names import CORES_PER_GPU, GpuUuid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.model.topology import Topology
from gpushare_agent.placement import GpuRequest, GpuState, place, validate_request
from gpushare_agent.placement.link import set_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRoom:
    """A GPU and what is taken of it, by everybody. Whole: somebody holds all of it, memory too."""

    index: int
    uuid: GpuUuid
    memory_mib: int
    is_healthy: bool
    cores: int = 0
    blocks: int = 0
    units: int = 0
    is_whole: bool = False


@dataclass(slots=True, kw_only=True)
class _Taken:
    """Of one GPU by the pod so far. `pool_…` is the part that its init containers hand on."""

    cores: int = 0
    blocks: int = 0
    units: int = 0
    is_whole: bool = False
    pool_cores: int = 0
    pool_blocks: int = 0
    pool_units: int = 0


@dataclass(slots=True, kw_only=True)
class _Planning:
    """One planning: its state lives as long as the call."""

    rooms: Sequence[GpuRoom]
    topology: Topology
    policy: ClusterPolicy
    taken: dict[int, _Taken] = field(default_factory=dict)
    link_cost: int = 0

    def of(self, index: int) -> _Taken:
        return self.taken.setdefault(index, _Taken())


def plan_pod(pod: Pod, rooms: Sequence[GpuRoom], topology: Topology, policy: ClusterPolicy) -> PodPlan | Refused:
    """The whole pod's placement, or the refusal of the first container that has no room. `rooms` are in order of index."""
    planning = _Planning(rooms=rooms, topology=topology, policy=policy)
    planned = []
    for container in pod.containers:
        one = _plan_container(pod, container, planning)
        if isinstance(one, Refused):
            return one
        planned.append(one)
    return PodPlan(
        containers=tuple(planned),
        charges=_charges(planning.taken),
        link_cost=planning.link_cost,
    )


def charges_of(pod: Pod, gpus: Mapping[str, Sequence[int]], names: ResourceNames) -> tuple[Charge, ...]:
    """What a pod takes of each GPU whose containers are known to be on `cards` (indexes by container name)."""
    taken: dict[int, _Taken] = {}
    for container in pod.containers:
        for index in gpus.get(container.name, ()):
            _book(taken.setdefault(index, _Taken()), container, names)
    return _charges(taken)


def charges_anywhere(pod: Pod, indexes: Sequence[int], names: ResourceNames) -> tuple[Charge, ...]:
    """What a pod whose GPUs nobody tells may have taken of each GPU: all that it asks of one GPU, on every one."""
    return charges_of(pod, {container.name: indexes for container in pod.containers}, names)


def _charges(taken: Mapping[int, _Taken]) -> tuple[Charge, ...]:
    return tuple(
        Charge(index=index, cores=one.cores, blocks=one.blocks, units=one.units, is_whole=one.is_whole)
        for index, one in sorted(taken.items())
    )


def _book(taken: _Taken, container: ContainerSpec, names: ResourceNames) -> None:
    """A container gets its part of one GPU."""
    cores, blocks = names.wanted(container, ResourceKind.VCORE), names.wanted(container, ResourceKind.VMEMORY)
    units = names.wanted(container, ResourceKind.GPU_MEM)
    is_handed_on = container.kind is ContainerKind.INIT
    is_whole = cores >= CORES_PER_GPU
    taken.is_whole = taken.is_whole or is_whole
    taken.cores, taken.pool_cores = _take(taken.cores, taken.pool_cores, min(cores, CORES_PER_GPU), is_handed_on)
    taken.units, taken.pool_units = _take(taken.units, taken.pool_units, units, is_handed_on)
    if not is_whole:
        taken.blocks, taken.pool_blocks = _take(taken.blocks, taken.pool_blocks, blocks, is_handed_on)


def _plan_container(pod: Pod, container: ContainerSpec, planning: _Planning) -> PlannedContainer | Refused:
    names = planning.policy.names
    blank = PlannedContainer(name=container.name, kind=container.kind, position=container.position, gpus=())
    units = names.wanted(container, ResourceKind.GPU_MEM)
    if units:
        return _plan_units(pod, container, units, blank, planning)
    cores, blocks = names.wanted(container, ResourceKind.VCORE), names.wanted(container, ResourceKind.VMEMORY)
    if not cores and not blocks:
        return blank
    refused = validate_request(cores, blocks, share_mode=True, memory_block_mib=names.memory_block_mib)
    effective = refused or effective_request(pod, container, names)
    if isinstance(effective, Refused):
        return _named(pod, container, effective)
    placed = place(
        GpuRequest(cores=effective.cores, blocks=effective.blocks, must_gpus=_must(planning)),
        _gpu_states(planning),
        planning.topology,
        share_policy=planning.policy.share_policy,
        memory_block_mib=names.memory_block_mib,
    )
    if isinstance(placed, Refused):
        return _named(pod, container, placed)
    gpus = tuple(sorted(room.index for room in planning.rooms if room.uuid in placed.gpus))
    for index in gpus:
        _book(planning.of(index), container, names)
    if len(gpus) > 1:
        planning.link_cost += set_cost(planning.topology.links, gpus)
    return replace(blank, gpus=gpus, cores=cores, blocks=blocks)


def _take(held: int, pool: int, asked: int, is_handed_on: bool) -> tuple[int, int]:
    """What the pod holds of something, and what of it is handed on, once a container has got `asked`."""
    more = max(0, asked - pool)
    return held + more, max(pool, asked) if is_handed_on else max(0, pool - asked)


def _must(planning: _Planning) -> tuple[GpuUuid, ...]:
    """The GPUs whose IDs the kubelet hands on: a container cannot avoid them."""
    return tuple(
        room.uuid
        for room in planning.rooms
        if (taken := planning.taken.get(room.index)) is not None and (taken.pool_cores or taken.pool_units)
    )


def _gpu_states(planning: _Planning) -> list[GpuState]:
    names = planning.policy.names
    states = []
    for room in planning.rooms:
        taken = planning.taken.get(room.index) or _Taken()
        total = room.memory_mib // names.memory_block_mib
        units = memory_share.blocks_taken(room.units + taken.units, names)
        free_cores = CORES_PER_GPU - room.cores - taken.cores + taken.pool_cores
        free_blocks = total - room.blocks - taken.blocks + taken.pool_blocks - units
        states.append(
            GpuState(
                index=room.index,
                uuid=room.uuid,
                healthy=room.is_healthy,
                free_cores=max(0, free_cores),
                free_blocks=0 if room.is_whole else max(0, min(total, free_blocks)),
                total_blocks=total,
            )
        )
    return states


def _plan_units(
    pod: Pod, container: ContainerSpec, units: int, blank: PlannedContainer, planning: _Planning
) -> PlannedContainer | Refused:
    """GPUShare's resource: memory of one GPU, and nothing else."""
    names = planning.policy.names
    refused = memory_share.validate(container, names, _inventory(planning), share_mode=True)
    if refused is not None:
        return _named(pod, container, refused)
    placed = memory_share.place_memory(
        memory_share.effective_request(pod, container, names),
        _memory_states(planning, names),
        names,
        share_policy=planning.policy.share_policy,
        hint=(),
        must_gpus=_must(planning),
    )
    if isinstance(placed, Refused):
        return _named(pod, container, placed)
    index = next(room.index for room in planning.rooms if room.uuid == placed[0])
    _book(planning.of(index), container, names)
    return replace(blank, gpus=(index,), units=units)


def _memory_states(planning: _Planning, names: ResourceNames) -> list[memory_share.MemoryState]:
    states = []
    for room in planning.rooms:
        taken = planning.taken.get(room.index) or _Taken()
        total = room.memory_mib // names.gpu_mem_unit_mib
        use = memory_share.MemoryUse(
            blocks={room.uuid: room.blocks + taken.blocks},
            gpu_mem={room.uuid: room.units + taken.units},
            whole=frozenset({room.uuid}) if room.is_whole or taken.is_whole else frozenset(),
        )
        free = memory_share.free_gpu_mem(_gpu(room), use, names) + taken.pool_units
        states.append(
            memory_share.MemoryState(
                index=room.index,
                uuid=room.uuid,
                is_healthy=room.is_healthy,
                free_units=min(total, free),
                total_units=total,
            )
        )
    return states


def _inventory(planning: _Planning) -> GpuInventory:
    return GpuInventory(gpus=tuple(_gpu(room) for room in planning.rooms), topology=planning.topology)


def _gpu(room: GpuRoom) -> Gpu:
    return Gpu(index=room.index, minor=room.index, uuid=room.uuid, bus_id="", name="", memory_mib=room.memory_mib)


def _named(pod: Pod, container: ContainerSpec, refused: Refused) -> Refused:
    return Refused(reason=refused.reason, detail=f"container {container.name}: {refused.detail}")


def plan_annotations(plan: PodPlan, prefix: str) -> Mapping[str, str]:
    """The predicate annotations that tell the agent the plan: one for each container with GPUs. Init containers and
    sidecars too: an agent that chose their GPUs by itself would take others while pods before it are on their way."""
    return {
        f"{prefix}{'' if container.kind is ContainerKind.MAIN else 'init-'}{container.position}": ",".join(
            map(str, container.gpus)
        )
        for container in plan.containers
        if container.gpus
    }
