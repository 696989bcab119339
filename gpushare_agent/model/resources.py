"""The extended resources, and how their names (a setting) map to them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import CORES_PER_GPU, MEMORY_BLOCK_MIB, VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.model.pods import ContainerSpec, Pod


class ResourceKind(StrEnum):
    """What one device ID counts: 1/100 of a GPU's compute, one block of its memory, or one unit of GPUShare's memory."""

    VCORE = "vcore"
    VMEMORY = "vmemory"
    GPU_MEM = "gpu-mem"

    @property
    def binds_gpu(self) -> bool:
        """The ID says which GPU the container is on. vmemory IDs are counters, charged to the GPU of the vcore IDs."""
        return self is not ResourceKind.VMEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceNames:
    """The names under which the kubelet knows the resources, and the sizes of their units. `gpu_mem` is empty where
    GPUShare's resource is not offered."""

    vcore: str = VCORE_RESOURCE
    vmemory: str = VMEMORY_RESOURCE
    gpu_mem: str = ""
    memory_block_mib: int = MEMORY_BLOCK_MIB
    gpu_mem_unit_mib: int = 1024

    @property
    def kinds(self) -> tuple[ResourceKind, ...]:
        """The resources that the node offers."""
        return tuple(kind for kind in ResourceKind if self.name(kind))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.name(kind) for kind in self.kinds)

    def name(self, kind: ResourceKind) -> str:
        match kind:
            case ResourceKind.VCORE:
                return self.vcore
            case ResourceKind.VMEMORY:
                return self.vmemory
            case ResourceKind.GPU_MEM:
                return self.gpu_mem

    def kind(self, name: str) -> ResourceKind | None:
        return next((kind for kind in self.kinds if self.name(kind) == name), None)

    def kind_of(self, resource: str) -> ResourceKind:
        """Of a resource that a device plugin of this node serves."""
        kind = self.kind(resource)
        if kind is None:
            raise AssertionError(f"a plugin serves {resource!r}, which is no resource of the settings")
        return kind

    def wanted(self, container: ContainerSpec, kind: ResourceKind) -> int:
        """Units of the resource that the container asks for."""
        return container.requests.get(self.name(kind), 0)

    def wants_any(self, pod: Pod) -> bool:
        return any(pod.wants(name) for name in self.names)

    def units(self, gpu: Gpu, kind: ResourceKind) -> int:
        """Whole units of a GPU."""
        match kind:
            case ResourceKind.VCORE:
                return CORES_PER_GPU
            case ResourceKind.VMEMORY:
                return gpu.memory_mib // self.memory_block_mib
            case ResourceKind.GPU_MEM:
                return gpu.memory_mib // self.gpu_mem_unit_mib

    def unit_mib(self, kind: ResourceKind) -> int:
        """Of a unit of memory."""
        return self.gpu_mem_unit_mib if kind is ResourceKind.GPU_MEM else self.memory_block_mib

    def memory_mib(self, container: ContainerSpec) -> int:
        """The memory that the container asks for, by whichever resource."""
        blocks = self.wanted(container, ResourceKind.VMEMORY) * self.memory_block_mib
        return blocks + self.wanted(container, ResourceKind.GPU_MEM) * self.gpu_mem_unit_mib
