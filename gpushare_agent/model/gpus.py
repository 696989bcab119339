"""GPUs as the driver reports them, and their health."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase

from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.topology import Topology


class Health(StrEnum):
    """The two values of the device-plugin API."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One NVLink of a GPU. `remote_bus_id` is the PCI bus ID of the other end: a GPU's or an NVSwitch's."""

    number: int
    remote_bus_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU.

    `index` is the driver's (NVML) index when the GPU was first seen, and the row in the topology; it does not change
    while the agent runs. `minor` is the n of `/dev/nvidia<n>` and need not equal it. `memory_mib` is the whole GPU's
    memory. `numa_node` is None where the host reports none, `pcie_root` (such as `pci0000:00`) is
    empty there, `compute_capability` (major, minor) where the driver does not.
    `is_exclusive_process` is the compute mode in which one process alone may open the GPU. `unhealthy_reason` is empty while
    the GPU is healthy.
    An unhealthy GPU of which the driver reported the UUID alone has minor -1 and 0 MiB.
    """

    index: int
    minor: int
    uuid: GpuUuid
    bus_id: str
    name: str
    memory_mib: int
    numa_node: int | None = None
    pcie_root: str = ""
    nvlinks: tuple[NvLink, ...] = ()
    compute_capability: tuple[int, int] | None = None
    is_exclusive_process: bool = False
    health: Health = Health.HEALTHY
    unhealthy_reason: str = ""

    @property
    def is_healthy(self) -> bool:
        return self.health is Health.HEALTHY

    def is_selected(self, selectors: Iterable[str]) -> bool:
        """Whether a setting names it: by `all`, its index, its UUID, or its model, which may be a glob pattern."""
        own = ("all", str(self.index), self.uuid)
        return any(selector in own or fnmatchcase(self.name, selector) for selector in selectors)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModule:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInventory:
    """What one poll of the driver found: the GPUs by index and how they are connected.

    A GPU whose details could not be read is left in the list, Unhealthy, where its UUID is known; otherwise it is only
    in `unreadable` (index and reason), for it cannot be offered without a name.
    """

    gpus: tuple[Gpu, ...]
    topology: Topology
    driver_version: str = ""
    cuda_version: str = ""
    """The newest that the driver supports, such as 12.8; empty where it does not report it."""
    unreadable: tuple[tuple[int, str], ...] = field(default=())

    def by_uuid(self) -> dict[GpuUuid, Gpu]:
        return {gpu.uuid: gpu for gpu in self.gpus}
