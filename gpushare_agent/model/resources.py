"""The kinds of extended resources, a row of a table each, and how their names (a setting) map to them.

To add a kind, write its row (`ResourceKind`) into `KINDS`: its names, which may be a field of `ResourceNames` that a setting
fills, its socket, and what of a GPU one device is, its `Measure`. A kind whose devices are parts of GPUs has a rule
too, its `UnitLayout` (model/units.py): which GPU serves how many. Device lists, planning, the ledger, recovery, garbage
collection and the annotations follow from the row; tests/admission/test_new_kind.py adds one.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import ClassVar

from msgspec import Struct, field
from msgspec.structs import force_setattr

from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import CORES_PER_GPU, MEMORY_BLOCK_MIB, VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.model.pods import ContainerSpec, Pod
from gpushare_agent.model.units import NvidiaNames, UnitLayout

NO_NVIDIA_NAMES = NvidiaNames()
NO_LAYOUT = UnitLayout()


class Measure(StrEnum):
    """What of a GPU a device is: the field of a Request, and of a Charge, that counts it."""

    CORES = "cores"
    """1/100 of the GPU's compute."""
    BLOCKS = "blocks"
    """A block of memory. Its IDs are counters: the GPU is that of the container's other IDs."""
    UNITS = "units"
    """A unit of memory, and as large a part of the compute."""
    PART = "part"
    """A part of memory and compute alike. It is in the ID, for a container keeps the layout under which it was admitted."""


class ResourceKind(Struct, frozen=True, kw_only=True, eq=False):
    """A row: what there is to know of one kind. `value` names it in files and pages. A kind whose names are several has the
    number of the name in its `socket`, as `{}`. `layout` is the rule of a kind whose devices are parts of GPUs."""

    value: str
    socket: str
    measure: Measure
    names: Callable[[ResourceNames], tuple[str, ...]]
    layout: Callable[[ResourceNames], UnitLayout] = lambda _: NO_LAYOUT
    is_part: bool = False
    binds_gpu: bool = True
    """The ID says which GPU the container is on. Others are charged to the GPU of the IDs that do. Both follow from
    `measure`, and are fields because every admission call asks them of every allocation."""

    VCORE: ClassVar[ResourceKind]
    VMEMORY: ClassVar[ResourceKind]
    GPU_MEM: ClassVar[ResourceKind]
    GPU: ClassVar[ResourceKind]

    def __post_init__(self) -> None:
        force_setattr(self, "is_part", self.measure is Measure.PART)
        force_setattr(self, "binds_gpu", self.measure is not Measure.BLOCKS)

    def __str__(self) -> str:
        return self.value


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
    table: tuple[ResourceKind, ...] = field(default_factory=lambda: KINDS)

    @property
    def kinds(self) -> tuple[ResourceKind, ...]:
        """Of the resources that the node offers."""
        return tuple(kind for kind in self.table if kind.names(self))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for kind in self.table for name in kind.names(self))

    @property
    def binding_names(self) -> tuple[str, ...]:
        """Of the resources whose IDs say which GPU a container is on."""
        return tuple(name for kind in self.table if kind.binds_gpu for name in kind.names(self))

    def name(self, kind: ResourceKind) -> str:
        """Of several the first; empty where the node does not offer it."""
        return next(iter(kind.names(self)), "")

    def name_in(self, container: ContainerSpec, kind: ResourceKind) -> str:
        """The name by which the container asks for it."""
        names = kind.names(self)
        return names[0] if len(names) == 1 else next((name for name in names if container.requests.get(name)), "")

    def kind(self, name: str) -> ResourceKind | None:
        return next((kind for kind in self.table if name in kind.names(self)), None)

    def kind_of(self, resource: str) -> ResourceKind:
        """Of a resource that a device plugin of this node serves."""
        kind = self.kind(resource)
        if kind is None:
            raise AssertionError(f"a plugin serves {resource!r}, which is no resource of the settings")
        return kind

    def socket(self, resource: str) -> str:
        """Each name has its own: two may differ in their prefixes alone."""
        kind = self.kind_of(resource)
        return kind.socket.format(kind.names(self).index(resource))

    def wanted(self, container: ContainerSpec, kind: ResourceKind) -> int:
        """Units of the resource that the container asks for."""
        count, requests = 0, container.requests
        for name in kind.names(self):
            count += requests.get(name, 0)
        return count

    def wants_any(self, pod: Pod) -> bool:
        return any(pod.wants(name) for name in self.names)

    def asked(self, container: ContainerSpec) -> dict[ResourceKind, int]:
        """Units of each resource of the node's that the container asks for, in the order of the table."""
        return {kind: count for kind in self.table if (count := self.wanted(container, kind))}

    def binding(self, container: ContainerSpec) -> ResourceKind:
        """The resource whose IDs bind the container's GPU."""
        return next((kind for kind in self.asked(container) if kind.binds_gpu), ResourceKind.VCORE)

    def part_kind(self, container: ContainerSpec) -> ResourceKind | None:
        """The resource of parts of GPUs that the container asks for."""
        return next((kind for kind in self.asked(container) if kind.is_part), None)

    def units(self, gpu: Gpu, kind: ResourceKind) -> int:
        """Whole units of a GPU; of a resource with several names of the one that it serves."""
        if kind.is_part:
            served = kind.layout(self).served(gpu) if kind.names(self) else None
            return served.terms.of if served is not None else 0
        if gpu.mig is not None and not self.shares_in_mig:
            return 0
        return CORES_PER_GPU if kind.measure is Measure.CORES else gpu.memory_mib // self.unit_mib(kind)

    def unit_mib(self, kind: ResourceKind) -> int:
        """Of a unit of memory."""
        return self.gpu_mem_unit_mib if kind.measure is Measure.UNITS else self.memory_block_mib

    def memory_mib(self, container: ContainerSpec) -> int:
        """The memory that the container asks for, by whichever resource."""
        blocks = self.wanted(container, ResourceKind.VMEMORY) * self.memory_block_mib
        return blocks + self.wanted(container, ResourceKind.GPU_MEM) * self.gpu_mem_unit_mib


ResourceKind.VCORE = ResourceKind(
    value="vcore", socket="vcore", measure=Measure.CORES, names=lambda names: (names.vcore,)
)
ResourceKind.VMEMORY = ResourceKind(
    value="vmemory", socket="vmemory", measure=Measure.BLOCKS, names=lambda names: (names.vmemory,)
)
ResourceKind.GPU_MEM = ResourceKind(
    value="gpu-mem",
    socket="gpumem",
    measure=Measure.UNITS,
    names=lambda names: (names.gpu_mem,) if names.gpu_mem else (),
)
ResourceKind.GPU = ResourceKind(
    value="gpu",
    socket="gpu{}",
    measure=Measure.PART,
    names=lambda names: names.gpu,
    layout=lambda names: names.nvidia,
)

KINDS: tuple[ResourceKind, ...] = (ResourceKind.VCORE, ResourceKind.VMEMORY, ResourceKind.GPU_MEM, ResourceKind.GPU)
"""The table, in the order in which the kubelet learns of the resources."""
