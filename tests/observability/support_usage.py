"""GPUs, containers and samples for tests of usage and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.gpus.simulated.driver import default_topology
from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.agent.isolation.kept import WHOLE_GPU
from gpushare_agent.agent.observability.node_snapshot import AgentFacts, ContainerFacts, NodeSnapshot
from gpushare_agent.agent.runtime.cgroup_paths import PeerIdentity
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.gpu_health import GpuHealth, HealthPolicy, why_not_offered
from gpushare_agent.core.model.gpus import Gpu, GpuInventory, Health
from gpushare_agent.core.model.mig import (
    MigAttributes,
    MigComputeInstance,
    MigGpuInstance,
    MigLayout,
    MigPlace,
    MigPlacement,
    MigProfile,
)
from gpushare_agent.core.model.names import MIB, GpuUuid, PodUid, device_id
from gpushare_agent.core.model.pods import ContainerKind, Pod
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames
from gpushare_agent.core.model.usage import DriverSample, GpuSample, ProcessSample, UsageRound
from gpushare_agent.core.placement.topology import build_topology

GPU_MIB = 24576
UUIDS = tuple(GpuUuid(f"GPU-{index}") for index in range(8))


def key_of(number: int, container: str = "main") -> ContainerKey:
    return ContainerKey(PodUid(f"00000000-0000-4000-8000-{number:012d}"), container)


def id_of(number: int) -> str:
    """A container's ID."""
    return f"{number:064x}"


def owner(number: int, container_id: str | None = None) -> PeerIdentity:
    """Of a process in the pod of this number, by default in the container with the pod's number as its ID."""
    return PeerIdentity(pod_uid=key_of(number).pod_uid, container_id=container_id or id_of(number))


def allocation(
    key: ContainerKey,
    gpus: Sequence[int] = (0,),
    *,
    cores: int = 40,
    blocks: int = 8,
    pod: str = "p",
    kind: ContainerKind = ContainerKind.MAIN,
) -> Allocation:
    """Shares of one GPU, or with 100 cores a GPU whole ones."""
    uuids = tuple(UUIDS[index] for index in gpus)
    return Allocation(
        key=key,
        namespace="default",
        pod_name=pod,
        kind=kind,
        gpus=uuids,
        ids={
            ResourceKind.VCORE: frozenset(device_id(uuid, n) for uuid in uuids for n in range(cores // len(uuids))),
            ResourceKind.VMEMORY: frozenset(device_id(uuids[0], n) for n in range(blocks)),
        },
        is_whole=cores >= 100,
    )


def process(pid: int, *, memory: int | None = 1024 * MIB, sm: float | None = 0.25) -> ProcessSample:
    return ProcessSample(
        pid=pid, memory_bytes=memory, sm_ratio=sm, memory_ratio=sm, encoder_ratio=None, decoder_ratio=None
    )


def gpu_sample(index: int, *processes: ProcessSample, lists: bool = True, **others: object) -> GpuSample:
    """`lists` false: the GPU cannot list its processes."""
    return GpuSample(uuid=UUIDS[index], processes=processes if lists else None, **others)  # type: ignore[arg-type]


def driver_sample(*gpus: GpuSample, errors: Mapping[str, int] | None = None) -> DriverSample:
    return DriverSample(gpus=gpus, errors=errors or {})


def inventory(gpus: int = 2, *, sick: Mapping[int, str] | None = None) -> GpuInventory:
    parsed = default_topology(gpus)
    return GpuInventory(
        gpus=tuple(
            Gpu(
                index=index,
                minor=index,
                uuid=UUIDS[index],
                bus_id=f"00000000:0{index}:00.0",
                name="NVIDIA H100 80GB HBM3",
                memory_mib=GPU_MIB,
                numa_node=0,
                health=Health.UNHEALTHY if sick and index in sick else Health.HEALTHY,
                unhealthy_reason=(sick or {}).get(index, ""),
            )
            for index in range(gpus)
        ),
        topology=build_topology(parsed.links, parsed.numa),
        driver_version="550.54.14",
    )


def _as_offered(gpu: Gpu, cordoned: Mapping[GpuUuid, str]) -> Gpu:
    if gpu.uuid not in cordoned:
        return gpu
    reason = why_not_offered(GpuHealth(cordon=cordoned[gpu.uuid]), HealthPolicy())
    besides = f"; also, {gpu.unhealthy_reason}" if gpu.unhealthy_reason else ""
    return replace(gpu, health=Health.UNHEALTHY, unhealthy_reason=reason + besides)


def facts(allocated: Allocation, *, core_limit: int = 0, pod: Pod | None = None) -> ContainerFacts:
    memory_mib = GPU_MIB * len(allocated.gpus) if allocated.is_whole else allocated.memory_blocks * 256
    return ContainerFacts(
        allocation=allocated,
        pod=pod,
        cores=allocated.cores,
        memory_bytes=memory_mib * MIB,
        core_limit=core_limit,
        allocated_cores=allocated.cores,
        allocated_memory_bytes=memory_mib * MIB,
        isolation="vcuda",
        kept=WHOLE_GPU if allocated.is_whole else ISOLATIONS["vcuda"].keeps,
    )


def snapshot(
    *containers: ContainerFacts,
    usage: UsageRound | None = None,
    gpus: GpuInventory | None = None,
    cordoned: Mapping[GpuUuid, str] | None = None,
) -> NodeSnapshot:
    """`gpus` are as the driver shows them; a cordoned one is Unhealthy for the kubelet, as with the agent."""
    known = gpus or inventory()
    cores: dict[GpuUuid, int] = {}
    memory: dict[GpuUuid, int] = {}
    for one in containers:
        for uuid in one.allocation.gpus:
            cores[uuid] = cores.get(uuid, 0) + one.cores // len(one.allocation.gpus)
            memory[uuid] = memory.get(uuid, 0) + one.memory_bytes // len(one.allocation.gpus)
    return NodeSnapshot(
        node="n1",
        at=1000.0,
        agent=AgentFacts(
            version="1",
            started_at=1.0,
            not_ready=(),
            isolation="vcuda",
            driver="simulated",
            sample_period_s=1.0,
        ),
        names=ResourceNames(),
        inventory=replace(known, gpus=tuple(_as_offered(gpu, cordoned or {}) for gpu in known.gpus)),
        cordoned=cordoned or {},
        unhealthy_reasons={gpu.uuid: gpu.unhealthy_reason for gpu in known.gpus if not gpu.is_healthy},
        excluded=frozenset(),
        cores_allocated=cores,
        memory_allocated_bytes=memory,
        containers=containers,
        usage=usage,
    )


FIRST_INSTANCE = GpuUuid("MIG-0")


def _instance(gpu: Gpu, *, index: int, number: int) -> Gpu:
    place_of = MigPlace(profile="3g.40gb", number=number, parent=gpu.uuid, parent_index=gpu.index, gi=number, ci=0)
    return replace(gpu, index=index, uuid=GpuUuid(f"MIG-{number}"), name=f"{gpu.name} MIG 3g.40gb", mig=place_of)


def divided_node(*, shares_in_mig: bool) -> NodeSnapshot:
    """GPU 0, and GPU 1, which MIG divides into two instances, the GPUs 2 and 3 of the agent's own count. A container has
    the first of them whole."""
    found = inventory(4)
    divided = found.gpus[1]
    instances = (_instance(divided, index=2, number=0), _instance(divided, index=3, number=1))
    return replace(
        snapshot(),
        inventory=replace(found, gpus=(found.gpus[0], *instances), mig_partitioned=(divided,)),
        names=ResourceNames(shares_in_mig=shares_in_mig),
        cores_allocated={UUIDS[0]: 30, FIRST_INSTANCE: 100},
        memory_allocated_bytes={UUIDS[0]: 1024 * MIB, FIRST_INSTANCE: divided.memory_mib * MIB},
    )


def on_demand_node() -> NodeSnapshot:
    """GPU 0, and GPU 1 of eight slices, on which MIG instances are made on demand: one in use, one idle, one by hand, and
    half of one."""
    found = inventory(4)
    divided = found.gpus[1]
    profiles = tuple(
        MigProfile(
            id=number,
            name=name,
            size=size,
            starts=starts,
            most=len(starts),
            attributes=MigAttributes(memory_mib=size * 10 * 1024, gi_slices=slices, ci_slices=slices),
        )
        for number, name, slices, size, starts in (
            (19, "1g.10gb", 1, 1, (0, 1, 2, 3, 4, 5, 6)),
            (14, "2g.20gb", 2, 2, (0, 2, 4)),
            (9, "3g.40gb", 3, 4, (0, 4)),
            (0, "7g.80gb", 7, 8, (0,)),
        )
    )
    instances = tuple(
        MigGpuInstance(gi=start, profile=19, start=start, size=1, compute=compute)
        for start, compute in (
            (6, (MigComputeInstance(ci=0, uuid="MIG-6", slices=1),)),
            (5, (MigComputeInstance(ci=0, uuid="MIG-5", slices=1),)),
            (4, (MigComputeInstance(ci=0, uuid="MIG-4", slices=1),)),
            (2, ()),
        )
    )
    layout = MigLayout(parent=divided.uuid, slices=8, profiles=profiles, instances=instances)
    return replace(
        snapshot(),
        inventory=replace(found, gpus=(found.gpus[0],), mig_partitioned=(divided,), mig_layouts=(layout,)),
        memory_allocated_bytes={GpuUuid("MIG-6"): 10 * 1024 * MIB},
        mig_made=(GpuUuid("MIG-6"), GpuUuid("MIG-5")),
        mig_blocked={MigPlacement(divided.uuid, 19, 2): "instance 2 is half destroyed"},
    )


def counting_node(cache: AllocationCache, gpus: GpuInventory) -> Any:
    """What Consumption reads of a node. A test may set the inventory."""
    settings = SimpleNamespace(node_name="n1")
    inventory = SimpleNamespace(current=gpus)
    return SimpleNamespace(settings=settings, names=ResourceNames(), inventory=inventory, cache=cache)
