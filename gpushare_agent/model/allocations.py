"""The devices allocated to a container, and the edits that an Allocate answer makes in it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from gpushare_agent.model.names import DeviceId, GpuUuid, PodUid
from gpushare_agent.model.pods import ContainerKind
from gpushare_agent.model.resources import ResourceKind


class ContainerKey(NamedTuple):
    """Names one container for the agent's whole life: a pod recreated under the same name has another UID."""

    pod_uid: PodUid
    container: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The devices of one container.

    The IDs of a resource are empty until the kubelet has allocated it. `gpus` are the GPUs that the vcore or gpu-mem IDs
    name, else the planned ones, in order of index; the memory is charged to them. `is_whole` means whole GPUs: their
    whole memory is the container's. `allocated_at` is seconds on the monotonic clock.
    """

    key: ContainerKey
    namespace: str
    pod_name: str
    kind: ContainerKind
    gpus: tuple[GpuUuid, ...]
    vcore_ids: frozenset[DeviceId] = frozenset()
    vmemory_ids: frozenset[DeviceId] = frozenset()
    gpu_mem_ids: frozenset[DeviceId] = frozenset()
    is_whole: bool = False
    allocated_at: float = 0.0

    def ids(self, kind: ResourceKind) -> frozenset[DeviceId]:
        """Of one resource."""
        match kind:
            case ResourceKind.VCORE:
                return self.vcore_ids
            case ResourceKind.VMEMORY:
                return self.vmemory_ids
            case ResourceKind.GPU_MEM:
                return self.gpu_mem_ids

    def with_ids(self, kind: ResourceKind, ids: frozenset[DeviceId]) -> Allocation:
        match kind:
            case ResourceKind.VCORE:
                return replace(self, vcore_ids=ids)
            case ResourceKind.VMEMORY:
                return replace(self, vmemory_ids=ids)
            case ResourceKind.GPU_MEM:
                return replace(self, gpu_mem_ids=ids)

    @property
    def cores(self) -> int:
        return len(self.vcore_ids)

    @property
    def memory_blocks(self) -> int:
        return len(self.vmemory_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerMount:
    host_path: str
    container_path: str
    read_only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNode:
    host_path: str
    container_path: str
    permissions: str = "rwm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEdits:
    """What an Allocate answer changes in a container. Isolations and device-list strategies return these, merged."""

    env: tuple[tuple[str, str], ...] = ()
    mounts: tuple[ContainerMount, ...] = ()
    devices: tuple[DeviceNode, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    cdi_devices: tuple[str, ...] = ()


def merged(*parts: ContainerEdits) -> ContainerEdits:
    """All of them together; of one variable or annotation the last counts."""
    return ContainerEdits(
        env=tuple(sorted({name: value for part in parts for name, value in part.env}.items())),
        mounts=tuple(dict.fromkeys(mount for part in parts for mount in part.mounts)),
        devices=tuple(dict.fromkeys(device for part in parts for device in part.devices)),
        annotations=tuple(sorted({name: value for part in parts for name, value in part.annotations}.items())),
        cdi_devices=tuple(dict.fromkeys(device for part in parts for device in part.cdi_devices)),
    )
