"""Builders for the tests of the admission core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.admission.decisions.identity import Known
from gpushare_agent.agent.isolation import IsolationConfig
from gpushare_agent.agent.kubelet.records import CheckpointEntry, ListedContainer, ListedPod
from gpushare_agent.core.model.allocations import Allocation, ContainerEdits, ContainerKey
from gpushare_agent.core.model.gpus import Gpu, GpuInventory, Link, LinkKind
from gpushare_agent.core.model.mig import MigPlace
from gpushare_agent.core.model.names import VCORE_RESOURCE, VMEMORY_RESOURCE, DeviceId, GpuUuid, PodUid, device_id
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod, PodPhase
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames
from gpushare_agent.core.placement.topology import build_topology
from gpushare_agent.core.settings.sections import DriverLimitsSettings, VirtualManagerSettings
from gpushare_agent.core.settings.settings import Settings
from gpushare_agent.core.settings.values import Section

NAMES = ResourceNames()
GPU_MEM_NAMES = ResourceNames(gpu_mem="aliyun.com/gpu-mem")
"""With GPUShare's resource."""


def container(
    name: str = "main",
    cores: int = 0,
    blocks: int = 0,
    kind: ContainerKind = ContainerKind.MAIN,
    position: int = 0,
    *,
    units: int = 0,
) -> ContainerSpec:
    """A container that asks for cores and memory blocks, or for units of GPUShare's resource."""
    asked = {VCORE_RESOURCE: cores, VMEMORY_RESOURCE: blocks, GPU_MEM_NAMES.gpu_mem: units}
    return ContainerSpec(name=name, kind=kind, position=position, requests={k: v for k, v in asked.items() if v})


def pod(name: str, *containers: ContainerSpec, uid: str = "", **changes: object) -> Pod:
    """A pending pod of namespace default."""
    made = Pod(
        uid=PodUid(uid or f"uid-{name}"),
        namespace="default",
        name=name,
        phase=PodPhase.PENDING,
        containers=containers,
        node_name="node",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def used_cores(cache: AllocationCache, *, without: ContainerKey | None = None) -> dict[GpuUuid, int]:
    """By GPU; those without are left out."""
    return {gpu: charge.cores for gpu, charge in cache.charges(without=without).items() if charge.cores}


def used_blocks(cache: AllocationCache, *, without: ContainerKey | None = None) -> dict[GpuUuid, int]:
    """As `used_cores`."""
    return {gpu: charge.blocks for gpu, charge in cache.charges(without=without).items() if charge.blocks}


def inventory(gpus: int = 2, memory_mib: int = 24 * 1024) -> GpuInventory:
    """Healthy GPUs named GPU-0, GPU-1, … all PIX apart."""
    links = [[Link(kind=LinkKind.SELF if a == b else LinkKind.PIX) for b in range(gpus)] for a in range(gpus)]
    return GpuInventory(
        gpus=tuple(
            Gpu(
                index=i, minor=i, uuid=GpuUuid(f"GPU-{i}"), bus_id=f"0000:0{i}:00.0", name="Test", memory_mib=memory_mib
            )
            for i in range(gpus)
        ),
        topology=build_topology(links, [None] * gpus),
    )


def mig_instance(index: int, parent: int, number: int, *, profile: str = "1g.10gb") -> Gpu:
    """MIG-<index> of GPU-<parent>, whose capability nodes are 19 and 20 for number 0, 21 and 22 for number 1."""
    place = MigPlace(
        profile=profile,
        number=number,
        parent=GpuUuid(f"GPU-{parent}"),
        parent_index=parent,
        gi=number,
        ci=0,
        gi_cap=19 + 2 * number,
        ci_cap=20 + 2 * number,
    )
    [gpu] = (gpu for gpu in inventory(parent + 1).gpus if gpu.index == parent)
    return replace(gpu, index=index, uuid=GpuUuid(f"MIG-{index}"), memory_mib=9856, mig=place)


def ids(gpu: int, numbers: range) -> list[str]:
    return [device_id(GpuUuid(f"GPU-{gpu}"), n) for n in numbers]


def allocation(
    owner: Pod,
    name: str,
    cores: Sequence[str],
    memory: Sequence[str],
    kind: ContainerKind = ContainerKind.MAIN,
    *,
    units: Sequence[str] = (),
) -> Allocation:
    """A container's allocation; its GPUs are those of its IDs of cores, or of units of GPUShare's resource."""
    given = {ResourceKind.VCORE: cores, ResourceKind.VMEMORY: memory} | ({ResourceKind.GPU_MEM: units} if units else {})
    return Allocation(
        key=ContainerKey(owner.uid, name),
        namespace=owner.namespace,
        pod_name=owner.name,
        kind=kind,
        gpus=tuple(sorted({GpuUuid(i.split("::")[0]) for i in (*cores, *units)})),
        ids={kind: frozenset(map(DeviceId, found)) for kind, found in given.items()},
        is_whole=len(cores) >= 100,
    )


def listed(name: str, **containers: tuple[list[str], list[str]]) -> ListedPod:
    """A pod of a PodResources answer: vcore and vmemory IDs by container."""
    return ListedPod(
        namespace="default",
        name=name,
        containers=tuple(
            ListedContainer(name=inner, devices={VCORE_RESOURCE: frozenset(cores), VMEMORY_RESOURCE: frozenset(memory)})
            for inner, (cores, memory) in containers.items()
        ),
    )


def written(uid: str, inner: str, cores: list[str], memory: list[str]) -> list[CheckpointEntry]:
    """A container's entries in the kubelet's checkpoint."""
    return [
        CheckpointEntry(pod_uid=PodUid(uid), container=inner, resource=resource, device_ids=frozenset(given))
        for resource, given in ((VCORE_RESOURCE, cores), (VMEMORY_RESOURCE, memory))
        if given
    ]


class Listing:
    """A pod of a PodResources answer, given as counts by container and resource."""

    def __init__(self, name: str, counts: Mapping[str, Mapping[str, int]], namespace: str = "default") -> None:
        self.namespace = namespace
        self.name = name
        self._counts = counts

    def count_ids(self, resource: str) -> int:
        return sum(by_resource.get(resource, 0) for by_resource in self._counts.values())

    def count_by_container(self, resource: str) -> Mapping[str, int]:
        return {name: found[resource] for name, found in self._counts.items() if found.get(resource)}


def known(*pods: Pod, allocations: tuple[Allocation, ...] = (), refused: frozenset[PodUid] = frozenset()) -> Known:
    return Known(
        pods={(p.namespace, p.name): p for p in pods},
        allocations={a.key: a for a in allocations},
        refused=refused,
        names=NAMES,
    )


def raw_edits(edits: ContainerEdits) -> dict[str, Any]:
    """As files of expected edits have them."""
    return {
        "annotations": dict(edits.annotations),
        "cdi_devices": list(edits.cdi_devices),
        "devices": [f"{d.host_path} -> {d.container_path} ({d.permissions})" for d in edits.devices],
        "env": dict(edits.env),
        "mounts": [f"{m.host_path} -> {m.container_path} ({'ro' if m.read_only else 'rw'})" for m in edits.mounts],
    }


def isolation_config(
    virtual_manager: Path = Path("/vm"),
    *,
    shared_driver: Path | None = None,
    whole_driver: Path | None = None,
    is_memory_limited_by_agent: bool = False,
    **sections: Section,
) -> IsolationConfig:
    """`sections` are those of settings/sections.py that differ from the defaults."""
    settings = Settings(
        virtual_manager=VirtualManagerSettings(path=virtual_manager),
        driver_limits=DriverLimitsSettings(set_by_agent=is_memory_limited_by_agent),
        **sections,  # type: ignore[arg-type]
    )
    return IsolationConfig(settings=settings, shared_driver=shared_driver, whole_driver=whole_driver)
