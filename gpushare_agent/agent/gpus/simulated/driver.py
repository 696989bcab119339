"""The driver of simulated GPUs, for machines without GPUs and for the sandbox.

It answers as the NVML driver does, from settings and files instead of hardware. GPUs keep their UUIDs over restarts: these
are made from the seed (the node's name) and the index. Usage and faults come from two files that are written while the
agent runs: their formats are in core/formats/simulated_gpus.py.

State owned: which events and resets of the faults file were reported, and the memory limits of cgroups. MIG instances are
those that the faults file names, and those that were made here (instances.py); as with NVML, one that is gone stays while
a container has it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from gpushare_agent.agent.gpus.simulated.instances import SimulatedHardware, SimulatedInstances, layout_of, unhealthy
from gpushare_agent.core.formats.simulated_gpus import (
    Faults,
    SimulatedInput,
    Usage,
    gpu_samples,
    parse_faults,
    parse_usage,
)
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.model.errors import StartupError, Unavailable
from gpushare_agent.core.model.gpu_health import GpuEvent, GpuEventKind
from gpushare_agent.core.model.gpus import Gpu, GpuInventory, Link, LinkKind, NvLink
from gpushare_agent.core.model.isolation import LimitOutcome, MemoryLimit
from gpushare_agent.core.model.mig import MigGpuInstance, MigPlacement
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.usage import DriverSample, GpuBusy
from gpushare_agent.core.placement.topology import MAX_GPUS, ParsedTopology, build_topology, parse_topology

DRIVER_VERSION = "535.0-simulated"
CUDA_VERSION = "12.2"
"""The one that a driver 535 has."""
COMPUTE_CAPABILITY = (8, 6)
"""Of the GPUs with 24 GiB that data centers have most, A10: architecture Ampere."""
BRAND = "Nvidia"
GPUS_PER_NUMA_NODE = 4
_UUID_SPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "simulated-cards.gpushare-agent")
_NVSWITCH_BUS_ID = "00000000:FE:00.0"
_MAX_NVLINKS_OF_A_GPU = 36
_MAX_EVENTS_AT_ONCE = 1024
_MIG_REASON = "MIG mode is enabled: set nvidia.mig_strategy, dra.gpus or mig.on_demand (simulated)"
_RESET_REASON = "being reset (simulated)"
_MIG_TIMEOUT_S = 30.0

T = TypeVar("T")


class SimulatedDriver:
    """Simulated GPUs. With a topology text its GPUs are those of the text, else `gpus` GPUs in a default layout.

    `gpu_memory_mib` has one value per GPU; a shorter list repeats its last value.
    """

    def __init__(  # noqa: PLR0913 - the settings of simulated GPUs, each by keyword
        self,
        *,
        gpus: int,
        gpu_memory_mib: Sequence[int],
        topology_text: str | None,
        gpu_name: str,
        seed: str,
        faults_file: Path | None = None,
        usage_file: Path | None = None,
        with_instances: bool = False,
        on_demand: Collection[str] = (),
    ) -> None:
        """MIG instances are listed where `with_instances`, and made on GPUs in MIG mode that `on_demand` selects.

        Raises StartupError for sizes that do not fit together, Corrupt for a topology text that is none."""
        # The text names the GPUs: a count next to it could contradict.
        parsed = parse_topology(topology_text) if topology_text is not None else default_topology(gpus)
        memory = _spread_memory(gpu_memory_mib, len(parsed.links))
        self._inventory = GpuInventory(
            gpus=tuple(
                Gpu(
                    index=index,
                    minor=index,
                    uuid=simulated_uuid(seed, index),
                    bus_id=_bus_id(index),
                    name=gpu_name or _name_by_size(memory_mib),
                    memory_mib=memory_mib,
                    numa_node=parsed.numa[index],
                    pcie_root=_pcie_root(parsed.numa[index]),
                    compute_capability=COMPUTE_CAPABILITY,
                    brand=BRAND,
                    nvlinks=_nvlinks(parsed.links[index]),
                    mig_mode=False,
                )
                for index, memory_mib in enumerate(memory)
            ),
            topology=build_topology(parsed.links, parsed.numa),
            driver_version=DRIVER_VERSION,
            cuda_version=CUDA_VERSION,
        )
        self._faults_file = faults_file
        self._faults = SimulatedInput(faults_file, name="faults", parse=parse_faults, default=Faults())
        self._usage: SimulatedInput[Usage] = SimulatedInput(usage_file, name="usage", parse=parse_usage, default=())
        self._limits: dict[tuple[GpuUuid, Path], int] = {}
        self.in_use: Callable[[], Collection[GpuUuid]] = tuple
        self._with_instances = with_instances
        self._on_demand = on_demand
        self._hardware = SimulatedHardware(faults_file)
        self._threads: dict[GpuUuid | None, DaemonThread] = {}
        self._instances = SimulatedInstances()
        self._last = self._inventory
        self._reported_event: int | None = None
        self._reported_reset: int | None = None

    async def read(self) -> GpuInventory:
        """The GPUs, lost ones Unhealthy, and so those that were reset since the last poll.

        Raises:
            Unavailable: the faults file makes the whole driver fail, or cannot be read in time.
        """
        faults = await self._read_faults("reading the simulated GPUs")
        if not self._with_instances:
            # As NVML's reader says of a GPU in MIG mode where instances are not offered.
            out = dict.fromkeys(faults.mig, _MIG_REASON)
            return _with_faults(self._inventory, {**out, **self._new_resets(faults), **faults.lost})
        look = partial(self._hardware.instances, self._inventory.gpus, faults)
        found = await self._blocking(None, look, "reading the simulated MIG instances")
        on_demand = [gpu for gpu in self._inventory.gpus if gpu.index in found and gpu.is_selected(self._on_demand)]
        last = self._instances.partition(self._inventory, found, [gpu.index for gpu in on_demand], self.in_use())
        lost = {**self._new_resets(faults), **faults.lost}
        why = {index: fault.refused for index, fault in faults.mig_faults.items()} | lost
        layouts = tuple(layout_of(gpu, found[gpu.index], why.get(gpu.index, "")) for gpu in on_demand)
        self._last = replace(last, mig_layouts=layouts) if layouts else last
        return _with_faults(self._last, lost)

    async def events(self, wait_s: float = 0.0) -> list[GpuEvent]:
        """The events of the faults file that were not reported yet, at once. Raises Unavailable, as read does."""
        faults = await self._read_faults("reading the simulated GPUs' events")
        known = self._reported_event or 0
        # As many at once as of NVML; the rest comes with the next call.
        new = [event for event in faults.events if event.id > known][:_MAX_EVENTS_AT_ONCE]
        if new:
            self._reported_event = new[-1].id
        uuids = {gpu.index: gpu.uuid for gpu in self._inventory.gpus}
        return [
            GpuEvent(
                kind=event.kind,
                uuid=None if event.gpu is None else uuids[event.gpu],
                xid=event.xid if event.kind is GpuEventKind.XID else 0,
            )
            for event in new
            # A file for another number of GPUs: what is not there has no events.
            if event.gpu is None or event.gpu in uuids
        ]

    async def sample(self) -> DriverSample:
        """The usage file's content, for all GPUs that are not lost. Raises Unavailable, as read does."""
        faults = await self._read_faults("reading the simulated GPUs' use")
        usage, _ = await self._usage.read()
        there = [gpu for gpu in self._last.gpus if _physical(gpu) not in faults.lost]
        lost = len(self._last.gpus) - len(there)
        return DriverSample(gpus=gpu_samples(there, usage), errors={"gpu_is_lost": lost} if lost else {})

    async def sample_busy(self, gpus: Collection[GpuUuid]) -> Mapping[GpuUuid, GpuBusy]:
        """Nothing: no program computes on simulated GPUs, so no library in one asks. Usage is shown as `sample` has it."""
        return {}

    async def check_memory_limits(self, cgroup: Path, *, may_set: bool) -> None:
        """Simulated GPUs take limits, and no program has memory of them."""

    async def keep_memory_limits(self, desired: Sequence[MemoryLimit], *, may_set: bool) -> list[LimitOutcome]:
        """Keeps limits as the NVML driver does; nobody else sets limits here."""
        # A limit goes with its cgroup, as the kernel's does.
        self._limits = {place: found for place, found in self._limits.items() if place[1].is_dir()}
        if may_set:
            self._limits |= {(one.gpu, one.cgroup): one.limit_bytes for one in desired if one.cgroup.is_dir()}
        return [
            LimitOutcome(
                problem="" if self._limits.get((one.gpu, one.cgroup)) == one.limit_bytes else "no limit is set",
                is_gone=not one.cgroup.is_dir(),
            )
            for one in desired
        ]

    async def create_instance(self, place: MigPlacement, *, is_new: bool = False) -> MigGpuInstance:
        """As NodeDriver has it."""
        faults = await self._read_faults("making a MIG instance")
        make = partial(self._hardware.create, self._inventory.gpus, faults, place, is_new=is_new)
        return await self._blocking(place.parent, make, "making a simulated MIG instance")

    async def destroy_instance(self, parent: GpuUuid, instance: MigGpuInstance) -> None:
        """As NodeDriver has it."""
        faults = await self._read_faults("removing a MIG instance")
        remove = partial(self._hardware.destroy, self._inventory.gpus, faults, parent, instance)
        await self._blocking(parent, remove, "removing a simulated MIG instance")

    async def _blocking(self, gpu: GpuUuid | None, call: Callable[[], T], what: str) -> T:
        """In the GPU's own thread: a slow call delays no other GPU."""
        thread = self._threads.setdefault(gpu, DaemonThread("simulated MIG", advice="Look at its faults file."))
        return await thread.call(call, what, _MIG_TIMEOUT_S)

    async def close(self) -> None:
        """Nothing is open."""

    async def _read_faults(self, what: str) -> Faults:
        """The faults of now. Events from before the first poll are not reported."""
        faults, is_known = await self._faults.read()
        # A file that could not be read must not make all of its events history later.
        if is_known and self._reported_event is None:
            self._reported_event = self._reported_reset = faults.last_id
        if faults.all_lost:
            raise Unavailable(f"{what} failed: {faults.all_lost} (from {self._faults_file})")
        return faults

    def _new_resets(self, faults: Faults) -> dict[int, str]:
        known = self._reported_reset or 0
        # Lost for this poll alone: the next one finds the GPU back.
        self._reported_reset = max((known, *(reset.id for reset in faults.resets)))
        return {reset.gpu: _RESET_REASON for reset in faults.resets if reset.id > known}


def simulated_uuid(seed: str, index: int) -> GpuUuid:
    """The UUID of a simulated GPU: the same for the same seed and index."""
    return GpuUuid(f"GPU-{uuid.uuid5(_UUID_SPACE, f'{seed}/{index}')}")


def default_topology(gpus: int) -> ParsedTopology:
    """A plausible server: pairs behind a PCIe switch, two pairs a NUMA node."""
    if not 1 <= gpus <= MAX_GPUS:
        raise StartupError(f"simulating {gpus} GPUs is not possible: choose 1 to {MAX_GPUS} (simulated.gpus)")
    rows = tuple(tuple(_default_link(a, b) for b in range(gpus)) for a in range(gpus))
    return ParsedTopology(links=rows, numa=tuple(index // GPUS_PER_NUMA_NODE for index in range(gpus)))


def _default_link(a: int, b: int) -> Link:
    if a == b:
        return Link(kind=LinkKind.SELF)
    if a // GPUS_PER_NUMA_NODE != b // GPUS_PER_NUMA_NODE:
        return Link(kind=LinkKind.SYS)
    return Link(kind=LinkKind.PIX if a // 2 == b // 2 else LinkKind.PHB)


def _spread_memory(gpu_memory_mib: Sequence[int], gpus: int) -> list[int]:
    if not gpu_memory_mib or any(memory <= 0 for memory in gpu_memory_mib):
        raise StartupError(f"GPU memory must be one or more sizes above 0 MiB, not {list(gpu_memory_mib)}")
    if len(gpu_memory_mib) > gpus:
        raise StartupError(
            f"{len(gpu_memory_mib)} GPU memory sizes were given for {gpus} GPUs: name at most one size per GPU"
        )
    return [gpu_memory_mib[min(index, len(gpu_memory_mib) - 1)] for index in range(gpus)]


def _name_by_size(memory_mib: int) -> str:
    size = f"{round(memory_mib / 1024)}GB" if memory_mib >= 1024 else f"{memory_mib}MB"
    return f"NVIDIA Simulated {size}"


def _bus_id(index: int) -> str:
    """The bus ID as NVML writes it; every third bus, as behind switches that have buses of their own."""
    return f"00000000:{4 + 3 * index:02X}:00.0"


def _pcie_root(numa: int | None) -> str:
    """A PCI domain for each NUMA node."""
    return f"pci{numa or 0:04x}:00"


def _nvlinks(row: Sequence[Link]) -> tuple[NvLink, ...]:
    """A matrix row as links of the GPU. More links than a GPU can have means that they all go through an NVSwitch."""
    counts = [(peer, link.nvlinks) for peer, link in enumerate(row) if link.kind is LinkKind.NVLINK]
    remotes = [_bus_id(peer) for peer, nvlinks in counts for _ in range(nvlinks)]
    # `nvidia-smi topo -m` shows NV18 to each of seven peers: 126 links that no GPU has.
    if len(remotes) > _MAX_NVLINKS_OF_A_GPU:
        remotes = [_NVSWITCH_BUS_ID] * max(nvlinks for _, nvlinks in counts)
    return tuple(NvLink(number=number, remote_bus_id=remote) for number, remote in enumerate(remotes))


def _physical(gpu: Gpu) -> int:
    return gpu.index if gpu.mig is None else gpu.mig.parent_index


def _with_faults(inventory: GpuInventory, lost: dict[int, str]) -> GpuInventory:
    gpus = tuple(
        unhealthy(gpu, lost[_physical(gpu)] or "lost, no reason given") if _physical(gpu) in lost else gpu
        for gpu in inventory.gpus
    )
    return replace(inventory, gpus=gpus)
