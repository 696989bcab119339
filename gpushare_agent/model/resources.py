"""The extended resources, and how their names (a setting) map to them."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import CORES_PER_GPU, MEMORY_BLOCK_MIB, VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.model.pods import ContainerSpec, Pod
from gpushare_agent.model.units import NvidiaNames

NO_NVIDIA_NAMES = NvidiaNames()


class ResourceKind(StrEnum):
    """What one device ID counts: 1/100 of a GPU's compute, one block of its memory, one unit of GPUShare's memory; or a GPU
    or a replica of one under a name of NVIDIA's, of which a node may have several."""

    VCORE = "vcore"
    VMEMORY = "vmemory"
    GPU_MEM = "gpu-mem"
    GPU = "gpu"

    @property
    def binds_gpu(self) -> bool:
        """The ID says which GPU the container is on. vmemory IDs are counters, charged to the GPU of the vcore IDs."""
        return self is not ResourceKind.VMEMORY


class ResourceNames(Struct, frozen=True, kw_only=True):
    """The names under which the kubelet knows the resources, and the sizes of their units. `gpu_mem` is empty where
    GPUShare's resource is not offered, and `gpu` where NVIDIA's are not; `nvidia` says which GPU serves which of `gpu`."""

    vcore: str = VCORE_RESOURCE
    vmemory: str = VMEMORY_RESOURCE
    gpu_mem: str = ""
    memory_block_mib: int = MEMORY_BLOCK_MIB
    gpu_mem_unit_mib: int = 1024
    gpu: tuple[str, ...] = ()
    nvidia: NvidiaNames = NO_NVIDIA_NAMES
    shares_in_mig: bool = False
    """Whether the node's isolation keeps shares inside MIG instances: else these have no units but NVIDIA's."""

    @property
    def kinds(self) -> tuple[ResourceKind, ...]:
        """Of the resources that the node offers."""
        return tuple(kind for kind in ResourceKind if self.name(kind))

    @property
    def names(self) -> tuple[str, ...]:
        shares = (self.name(kind) for kind in self.kinds if kind is not ResourceKind.GPU)
        return (*shares, *self.gpu)

    def name(self, kind: ResourceKind) -> str:
        """Of NVIDIA's several the first."""
        match kind:
            case ResourceKind.VCORE:
                return self.vcore
            case ResourceKind.VMEMORY:
                return self.vmemory
            case ResourceKind.GPU_MEM:
                return self.gpu_mem
            case ResourceKind.GPU:
                return self.gpu[0] if self.gpu else ""

    def name_in(self, container: ContainerSpec, kind: ResourceKind) -> str:
        """The name by which the container asks for it."""
        return (
            next((name for name in self.gpu if container.requests.get(name)), "")
            if kind is ResourceKind.GPU
            else self.name(kind)
        )

    def kind(self, name: str) -> ResourceKind | None:
        if name in self.gpu:
            return ResourceKind.GPU
        return next((kind for kind in self.kinds if self.name(kind) == name), None)

    def kind_of(self, resource: str) -> ResourceKind:
        """Of a resource that a device plugin of this node serves."""
        kind = self.kind(resource)
        if kind is None:
            raise AssertionError(f"a plugin serves {resource!r}, which is no resource of the settings")
        return kind

    def wanted(self, container: ContainerSpec, kind: ResourceKind) -> int:
        """Units of the resource that the container asks for."""
        if kind is ResourceKind.GPU:
            return sum(container.requests.get(name, 0) for name in self.gpu)
        return container.requests.get(self.name(kind), 0)

    def wants_any(self, pod: Pod) -> bool:
        return any(pod.wants(name) for name in self.names)

    def units(self, gpu: Gpu, kind: ResourceKind) -> int:
        """Whole units of a GPU; of NVIDIA's resources of the one that it serves."""
        if gpu.mig is not None and not self.shares_in_mig and kind is not ResourceKind.GPU:
            return 0
        match kind:
            case ResourceKind.VCORE:
                return CORES_PER_GPU
            case ResourceKind.VMEMORY:
                return gpu.memory_mib // self.memory_block_mib
            case ResourceKind.GPU_MEM:
                return gpu.memory_mib // self.gpu_mem_unit_mib
            case ResourceKind.GPU:
                served = self.nvidia.served(gpu) if self.gpu else None
                return served.terms.of if served is not None else 0

    def unit_mib(self, kind: ResourceKind) -> int:
        """Of a unit of memory."""
        return self.gpu_mem_unit_mib if kind is ResourceKind.GPU_MEM else self.memory_block_mib

    def memory_mib(self, container: ContainerSpec) -> int:
        """The memory that the container asks for, by whichever resource."""
        blocks = self.wanted(container, ResourceKind.VMEMORY) * self.memory_block_mib
        return blocks + self.wanted(container, ResourceKind.GPU_MEM) * self.gpu_mem_unit_mib
