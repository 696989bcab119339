"""GPUs as the driver reports them, how they are linked, and their health."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import IntEnum, StrEnum
from fnmatch import fnmatchcase

from msgspec import Struct, field

from gpushare_agent.core.model.mig import MigLayout, MigPlace
from gpushare_agent.core.model.names import CORES_PER_GPU, MIB, GpuUuid


class LinkKind(IntEnum):
    """The worst element on the way between two GPUs, cheapest first (named as in `nvidia-smi topo -m`)."""

    SELF = 0
    NVLINK = 1
    PIX = 2
    PXB = 3
    PHB = 4
    NODE = 5
    SYS = 6


class Link(Struct, frozen=True, kw_only=True):
    """The connection of two GPUs. `nvlinks` counts bonded NVLinks, 0 unless kind is NVLINK."""

    kind: LinkKind
    nvlinks: int = 0


class Branch(Struct, frozen=True, kw_only=True):
    """A node of the topology tree: the GPUs below it (sorted indexes) and its sub-branches (none: a leaf group)."""

    kind: LinkKind
    gpus: tuple[int, ...]
    children: tuple[Branch, ...] = ()

    def of(self, gpus: Collection[int]) -> Branch:
        """The tree with these GPUs only; an empty branch is gone."""
        children = [child.of(gpus) for child in self.children]
        return Branch(
            kind=self.kind,
            gpus=tuple(index for index in self.gpus if index in gpus),
            children=tuple(child for child in children if child.gpus),
        )


class Topology(Struct, frozen=True, kw_only=True):
    """A symmetric matrix of links, `links[a][b]`, and the tree over GPUs 0..n-1."""

    links: tuple[tuple[Link, ...], ...]
    root: Branch

    def link(self, a: int, b: int) -> Link:
        return self.links[a][b]


class Health(StrEnum):
    """The two values of the device-plugin API."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"


class HostMemory(StrEnum):
    """How the memory of a GPU and the host's are one. The values are JSON: stable."""

    NUMA_NODE = "numa-node"
    """It is a NUMA node of the host (GH200, GB200 in NUMA mode)."""
    UNIFIED = "unified"
    """The GPU has none of its own (GB10)."""


HOST_MEMORY_TEXTS: Mapping[str, tuple[str, str]] = {
    HostMemory.NUMA_NODE: (
        "its memory is a NUMA node of the host: malloc, mmap and page migration take it past the limit of a share",
        "load the driver with NVreg_CoherentGPUMemoryMode=driver (CDMM mode; from 580 on, the default of 615), or set"
        " the pods' memory limits",
    ),
    HostMemory.UNIFIED: (
        "its memory is the host's: malloc takes of the same memory, and no limit of a share counts that",
        "set the pods' memory limits, and have the kubelet reserve (systemReserved) what shares may take",
    ),
}
"""Of each: what of a share is not kept, and the remedy."""


class NvLink(Struct, frozen=True, kw_only=True):
    """One NVLink of a GPU. `remote_bus_id` is the PCI bus ID of the other end: a GPU's or an NVSwitch's."""

    number: int
    remote_bus_id: str


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU, or one instance of a GPU that MIG divides: `mig` is None unless it is one. An instance has its parent's
    minor, bus ID and NUMA node, and memory and a UUID of its own.

    `index` is the driver's (NVML) index when the GPU was first seen, an instance's the next free one; it is the row in the
    topology and does not change while the agent runs. `driver_index` is the driver's now, an instance's that of its GPU;
    None where it is `index`. `minor` is the n of `/dev/nvidia<n>` and need not equal either. It is -1 where the driver has
    none, and both are of a GPU that does not answer where another one has the number now. `bus_id` may be empty.
    `memory_mib` is the whole GPU's memory; where it has none of its own what the operator set, or 0. `host_memory` is None
    where the memory is the GPU's alone. `numa_node` is None where the host reports none, `pcie_root` (such as `pci0000:00`)
    is empty there, `compute_capability` (major, minor) where the driver does not.
    `brand` is the product line as NVIDIA's programs write it, empty where the driver does not report it.
    `is_exclusive_process` is the compute mode in which one process alone may open the GPU. `mig_mode` says whether MIG
    mode is on, None where the GPU has none. `fabric` is the cluster and the clique of the NVLink fabric that it is on,
    `<UUID>.<number>`, empty where it is on none or has not joined yet; `has_joined` says which, None of a GPU that is on
    none. `unhealthy_reason` is empty while the GPU is healthy.
    `is_withheld`: it is unhealthy and answers, so that this is no reset of it.
    An unhealthy GPU has minor -1 and 0 MiB where the driver reported its UUID alone.
    """

    index: int
    driver_index: int | None = None
    minor: int
    uuid: GpuUuid
    bus_id: str
    name: str
    memory_mib: int
    host_memory: HostMemory | None = None
    numa_node: int | None = None
    pcie_root: str = ""
    nvlinks: tuple[NvLink, ...] = ()
    compute_capability: tuple[int, int] | None = None
    brand: str = ""
    is_exclusive_process: bool = False
    mig_mode: bool | None = None
    fabric: str = ""
    has_joined: bool | None = None
    health: Health = Health.HEALTHY
    unhealthy_reason: str = ""
    is_withheld: bool = False
    mig: MigPlace | None = None

    @property
    def label(self) -> str:
        """The name for people and NVIDIA's tools: the index, of an instance `0:1`."""
        return str(self.index) if self.mig is None else f"{self.mig.parent_index}:{self.mig.number}"

    @property
    def number(self) -> int:
        """The index by which other programs know it now, NVIDIA's container runtime too."""
        return self.index if self.driver_index is None else self.driver_index

    @property
    def number_label(self) -> str:
        """`label` by the driver's index of now."""
        if self.driver_index is None:
            return self.label
        return str(self.number) if self.mig is None else f"{self.number}:{self.mig.number}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """The device nodes that a container needs for it, without the control nodes."""
        own = (f"/dev/nvidia{self.minor}",) if self.minor >= 0 else ()
        return (*own, *self.cap_nodes)

    @property
    def cap_nodes(self) -> dict[str, tuple[int, int]]:
        """Those of an instance alone, with major and minor number; the major is 0 where it is not known."""
        if self.mig is None:
            return {}
        # The driver lets a process open an instance only with both capability devices, of GPU instance and compute
        # instance.
        caps = [cap for cap in (self.mig.gi_cap, self.mig.ci_cap) if cap is not None]
        return {f"/dev/nvidia-caps/nvidia-cap{cap}": (self.mig.caps_major, cap) for cap in caps}

    @property
    def is_healthy(self) -> bool:
        return self.health is Health.HEALTHY

    @property
    def is_gone(self) -> bool:
        """It is an instance that no longer exists: another one may have its nodes."""
        return self.mig is not None and self.mig.is_gone

    def is_selected(self, selectors: Iterable[str]) -> bool:
        """Whether a setting names it: by `all`, its index (of an instance `0:1`), its UUID, or its model, which may be a
        glob pattern. An instance is named by its GPU's index and UUID too."""
        parent = (str(self.mig.parent_index), self.mig.parent) if self.mig is not None else ()
        own = ("all", self.label, self.uuid, *parent)
        # Patterns match models only: an index or a UUID must be given whole, or `1*` would name GPU 10 as well.
        return any(selector in own or fnmatchcase(self.name, selector) for selector in selectors)


class KernelModule(Struct, frozen=True, kw_only=True):
    """NVIDIA's kernel module: its version, such as 570.86.15, and whether it is the open one.

    The proprietary module reports the host's PIDs to every process. The open one reports PIDs of the asking process's PID
    namespace, and only processes in it: in process lists from 515, in utilisation samples from 570. Source: its
    os_find_ns_pid.
    """

    version: str
    is_open: bool

    @property
    def major(self) -> int:
        return int(self.version.split(".", 1)[0])

    @property
    def lists_namespace_pids(self) -> bool:
        return self.is_open and self.major >= 515

    @property
    def samples_namespace_pids(self) -> bool:
        return self.is_open and self.major >= 570


class MigReport(Struct, frozen=True, kw_only=True):
    """A MIG instance in a report: NVIDIA's name of it, such as `0:1`, and whether it takes shares by vcuda's names."""

    label: str
    profile: str
    takes_shares: bool


class GpuReport(Struct, frozen=True, kw_only=True):
    """One GPU, or one MIG instance, as its node reports it. `mig` is None unless it is an instance. `cordoned` is why an
    operator took it out of service, empty where nobody did, and `would_be_healthy` that nothing else is wrong with it.
    `unhealthy_reason` is what is wrong with the GPU itself, empty where nothing is or that is not known.
    `serves_parts` as ResourceNames has it. `links` has nvidia-smi's abbreviation for each GPU of the list, and is empty
    where that is not known."""

    index: int
    uuid: GpuUuid
    memory_mib: int
    name: str = ""
    is_healthy: bool = True
    cordoned: str = ""
    would_be_healthy: bool = False
    unhealthy_reason: str = ""
    serves_parts: bool = False
    numa: int | None = None
    host_memory: HostMemory | None = None
    links: tuple[str, ...] = ()
    mig: MigReport | None = None

    @property
    def label(self) -> str:
        """The same as `Gpu.label`."""
        return str(self.index) if self.mig is None else self.mig.label

    @property
    def cores(self) -> int:
        """The cores that can be allocated; 0 of an instance that takes no shares."""
        return CORES_PER_GPU if self.mig is None or self.mig.takes_shares else 0

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * MIB


class GpuInventory(Struct, frozen=True, kw_only=True):
    """The result of one poll of the driver: the GPUs by index and how they are connected.

    A GPU whose details could not be read is left in the list, Unhealthy, where its UUID is known; otherwise it is only
    in `unreadable` (index and reason), because it cannot be offered without a name.
    """

    gpus: tuple[Gpu, ...]
    topology: Topology
    driver_version: str = ""
    cuda_version: str = ""
    """The newest that the driver supports, such as 12.8; empty where it does not report it."""
    unreadable: tuple[tuple[int, str], ...] = field(default=())
    is_refused: bool = False
    """The driver refuses this process every GPU."""
    mig_partitioned: tuple[Gpu, ...] = ()
    """GPUs that MIG divides. They are not offered; their instances are, in `gpus`. Their indexes are taken."""
    mig_layouts: tuple[MigLayout, ...] = ()
    """Of the GPUs of the setting mig.on_demand that are in MIG mode; these are in `mig_partitioned`, with or without
    instances."""

    def by_uuid(self) -> dict[GpuUuid, Gpu]:
        return {gpu.uuid: gpu for gpu in self.gpus}

    @property
    def on_demand(self) -> tuple[Gpu, ...]:
        """The GPUs of `mig_layouts`."""
        parents = {layout.parent for layout in self.mig_layouts}
        return tuple(gpu for gpu in self.mig_partitioned if gpu.uuid in parents)

    @property
    def known(self) -> tuple[Gpu, ...]:
        """What is offered, and the GPUs that MIG divides."""
        return (*self.gpus, *self.mig_partitioned)

    @property
    def tree(self) -> Branch:
        """The topology's GPUs; those that MIG divides are replaced by their instances."""
        divided = {gpu.index for gpu in self.mig_partitioned}
        return self.topology.root.of({*self.topology.root.gpus} - divided) if divided else self.topology.root

    @property
    def mig_profiles(self) -> frozenset[str]:
        """The profiles of its instances that device plugins may offer: those of GPUs of mig.on_demand are claims'."""
        of_claims = {layout.parent for layout in self.mig_layouts}
        instances = (gpu.mig for gpu in self.gpus if gpu.mig is not None)
        return frozenset(one.profile for one in instances if one.parent not in of_claims)
