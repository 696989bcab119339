"""Reads the GPUs through NVML: what each is, whether one needs a repair, and how they are connected (common ancestors on
PCIe, and NVLinks). Blocking; driver.py calls it from one thread at a time.

State owned: the GPUs seen so far. A GPU keeps the index under which it was first seen, also when the driver loses another
one and renumbers the rest; a GPU that is missing stays in the answer, Unhealthy. A MIG instance that is missing stays
only while a container has it, or its GPU does not answer: a node that is repartitioned again and again does not gather
them, and the index is free again. Of the topology what was read once: PCIe does not change while a node runs, so each
device and each pair is read once; NVLinks are read again whenever NVML was opened again. A lost GPU thereby keeps its place
in the topology.

Source: NVML API reference (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION of newer drivers, nvmlDeviceGetRemappedRows of GPUs from
Ampere on); `nvidia-smi -q`, "GPU Recovery Action", shows the same to an operator.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from ctypes import byref
from pathlib import Path
from typing import Any
from uuid import UUID

import pynvml
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.gpus.nvml.mig import (
    CapMinors,
    FoundInstance,
    find_instances,
    mig_mode,
    read_cap_minors,
    read_caps_major,
    read_place,
)
from gpushare_agent.agent.gpus.nvml.mig_instances import MigLayouts
from gpushare_agent.agent.gpus.nvml.session import (
    CHECKLIST,
    UNSUPPORTED,
    UNUSABLE,
    CallError,
    DriverLostError,
    FoundGpu,
    NvmlSession,
    ask,
    call,
    renamed,
    unusable,
)
from gpushare_agent.agent.runtime.machine import kernel_bus_id, read_gpu_fields
from gpushare_agent.core.model.errors import DriverLost
from gpushare_agent.core.model.gpus import Gpu, GpuInventory, Health, HostMemory, Link, LinkKind, NvLink, Topology
from gpushare_agent.core.model.names import MIB, GpuUuid
from gpushare_agent.core.placement.topology import build_topology, kind_by_numa

# --- how they are connected ---

_ANCESTORS = {
    0: LinkKind.PIX,  # NVML_TOPOLOGY_INTERNAL: two GPUs on one board, behind the board's own switch
    10: LinkKind.PIX,  # NVML_TOPOLOGY_SINGLE
    20: LinkKind.PXB,  # NVML_TOPOLOGY_MULTIPLE
    30: LinkKind.PHB,  # NVML_TOPOLOGY_HOSTBRIDGE
    40: LinkKind.NODE,  # NVML_TOPOLOGY_NODE
    50: LinkKind.SYS,  # NVML_TOPOLOGY_SYSTEM
}


_NO_LINK = ("INVALID_ARGUMENT", "NOT_SUPPORTED", "FUNCTION_NOT_FOUND", UNUSABLE)
"""A GPU without this link, without any, a driver without the call, or a far end that no GPU has."""


def canonical_bus_id(bus_id: str) -> str:
    """NVML's newer form, `00000000:3B:00.0`, also for its older and the kernel's `0000:3b:00.0`."""
    domain, _, rest = bus_id.strip().upper().partition(":")
    return f"{domain:0>8}:{rest}"


class _GpuLinks(Struct, frozen=True, kw_only=True):
    """Active NVLinks of a GPU: to known ends by bus ID, and how many of them go into an NVSwitch."""

    links: tuple[NvLink, ...] = ()
    switch_links: int = 0

    def count_to(self, bus_id: str) -> int:
        return sum(link.remote_bus_id == bus_id for link in self.links)


_NO_LINKS = _GpuLinks()


class NvmlTopology:
    """Reads the topology once and completes it when new GPUs appear."""

    def __init__(self) -> None:
        self._ancestors: dict[frozenset[GpuUuid], LinkKind] = {}
        self._links: dict[GpuUuid, _GpuLinks] = {}
        self._up_to_date: set[GpuUuid] = set()
        self._opening = 0
        self._built: tuple[object, Topology] | None = None

    def read(self, gpus: Sequence[Gpu], handles: Mapping[GpuUuid, Any], opening: int) -> tuple[list[Gpu], Topology]:
        """The GPUs with their NVLinks, and the topology with a row per index (unnamed GPUs: far from all).

        `handles` has the GPUs that answer; the others keep what was read of them before.
        """
        # A driver that was reloaded may have trained NVLinks otherwise: they are read again of GPUs that answer.
        if opening != self._opening:
            self._opening = opening
            self._up_to_date.clear()
        for uuid, handle in handles.items():
            # Kept where a GPU does not answer: its place in the topology must not change by a fault.
            if uuid not in self._up_to_date and (links := _read_links(handle)) is not None:
                self._links[uuid] = links
                self._up_to_date.add(uuid)
        linked = [replace(gpu, nvlinks=self._links_of(gpu).links) for gpu in gpus]
        rows: list[Gpu | None] = [None] * (max((gpu.index for gpu in gpus), default=-1) + 1)
        for gpu in linked:
            rows[gpu.index] = gpu
        pcie = [
            [LinkKind.SELF if row == column else self._pcie_kind(a, b, handles) for column, b in enumerate(rows)]
            for row, a in enumerate(rows)
        ]
        # Built again where something differs: it is half of a poll's work, and at most polls nothing does.
        inputs = rows, pcie, dict(self._links)
        if self._built is None or self._built[0] != inputs:
            matrix = [
                [self._link(a, b, kind) for b, kind in zip(rows, kinds, strict=True)]
                for a, kinds in zip(rows, pcie, strict=True)
            ]
            numa = [gpu.numa_node if gpu else None for gpu in rows]
            self._built = inputs, build_topology(matrix, numa, pcie=pcie)
        return linked, self._built[1]

    def _links_of(self, gpu: Gpu) -> _GpuLinks:
        return self._links.get(gpu.uuid, _NO_LINKS)

    def _pcie_kind(self, a: Gpu | None, b: Gpu | None, handles: Mapping[GpuUuid, Any]) -> LinkKind:
        # An index without a GPU: far from all, so that no placement counts on it.
        if a is None or b is None:
            return LinkKind.SYS
        first, second = _physical(a), _physical(b)
        if first == second:
            return LinkKind.PIX  # two instances of one GPU
        # The same in both directions: half as many calls.
        pair = frozenset({first, second})
        if pair not in self._ancestors and first in handles and second in handles:
            ancestor = ask("nvmlDeviceGetTopologyCommonAncestor", handles[first], handles[second])
            if ancestor is not None:  # virtual machines often have none; read again at the next poll
                self._ancestors[pair] = _ANCESTORS.get(ancestor, LinkKind.SYS)
        return self._ancestors.get(pair, kind_by_numa(a.numa_node, b.numa_node))

    def _link(self, a: Gpu | None, b: Gpu | None, pcie: LinkKind) -> Link:
        if a is None or b is None or a is b or a.mig is not None or b.mig is not None:
            return Link(kind=pcie)  # MIG instances have no NVLinks
        first, second = self._links_of(a), self._links_of(b)
        direct = max(first.count_to(b.bus_id), second.count_to(a.bus_id))
        # Through NVSwitch each GPU reaches every other with all of its links, and NVML names the switch as the far end.
        nvlinks = direct or min(first.switch_links, second.switch_links)
        return Link(kind=LinkKind.NVLINK, nvlinks=nvlinks) if nvlinks else Link(kind=pcie)


def _physical(gpu: Gpu) -> GpuUuid:
    return gpu.uuid if gpu.mig is None else gpu.mig.parent


def _read_links(handle: Any) -> _GpuLinks | None:
    """The GPU's active NVLinks, None where the GPU stopped answering half-way."""
    links: list[NvLink] = []
    switch_links = 0
    # Up to the most that any GPU has: a link that this one lacks is an error of the call.
    for number in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not call("nvmlDeviceGetNvLinkState", handle, number):
                continue
            remote = canonical_bus_id(call("nvmlDeviceGetNvLinkRemotePciInfo", handle, number, field="busId"))
        except CallError as error:
            # The GPU is lost in the middle: half of its links would look like a slower machine.
            if error.name not in _NO_LINK:
                return None
            continue
        links.append(NvLink(number=number, remote_bus_id=remote))
        # Drivers without the call are older than the machines with switches.
        remote_type = ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
        switch_links += remote_type == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    return _GpuLinks(links=tuple(links), switch_links=switch_links)


# --- what they are ---

_PCIE_ROOT = re.compile(r"pci[0-9a-f]{4}:[0-9a-f]{2}")
_MIG_REASON = (
    "MIG mode is enabled, and no setting offers its instances. Name it in mig.on_demand or dra.gpus for claims, set"
    " nvidia.mig_strategy to single or mixed, or disable MIG."
)
_NO_INSTANCES = (
    "MIG mode is enabled and the GPU has no instances. Make some, such as `nvidia-smi mig -i {bus_id} -cgi 19,19 -C`"
    " (`nvidia-smi mig -lgip` lists the profiles), name it in mig.on_demand, or disable MIG: `nvidia-smi -i {bus_id} -mig 0`"
)
_INSTANCE_GONE = "the MIG instance does not exist any more: its GPU was repartitioned while a container had it"
_OLD_UUID = "the driver names its instances by their place (MIG-GPU-…/1/0): upgrade it to 470 or later"
_NO_CAPS = "the host names no device nodes for this MIG instance in {path}: containers could not open it"
_NOT_JOINED = (
    "the GPU has not joined its NVLink fabric: {why}. CUDA would fail with error 802. Look at the service"
    " nvidia-fabricmanager, at nvidia-imex, and at Fabric in `nvidia-smi -q`"
)
_MISSING = frozenset({*UNSUPPORTED} - {"NO_PERMISSION"})
"""Of a value that this GPU or this driver does not have, which is no fault: integrated GPUs and WSL2 lack many."""
_ANSWERS = _MISSING | {UNUSABLE}
_REFUSALS = frozenset({"UNKNOWN", "NO_PERMISSION", "OPERATING_SYSTEM"})
"""Of every GPU, just after NVML was opened: as when systemctl daemon-reload took the container's right to the nodes."""
POLLS_OF_KIND = 12
"""What a GPU is and where is read at one poll in so many: half of a poll's calls. Each poll asks for what fails when the GPU
is lost, and for what may change."""
_BUS_ID = re.compile(r"[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-9A-F]")
_MAX_MEMORY_MIB = 1 << 22
_UNKNOWN_MINOR = -1
_UNNAMED = "NVIDIA GPU"
_MAX_MINOR = (1 << 20) - 1
"""The kernel's own limit."""
_BRANDS = {
    1: "Quadro",
    2: "Tesla",
    3: "NVS",
    4: "Grid",
    5: "GeForce",
    6: "Titan",
    7: "NvidiaVApps",
    8: "NvidiaVPC",
    9: "NvidiaVCS",
    10: "NvidiaVWS",
    11: "NvidiaCloudGaming",
    12: "QuadroRTX",
    13: "NvidiaRTX",
    14: "Nvidia",
    15: "GeForceRTX",
    16: "TitanRTX",
}
"""By NVML's number, as NVIDIA's DRA driver publishes them."""

_RESET = "stop its pods, then `nvidia-smi --gpu-reset -i <its bus ID>`"
_REBOOT = "drain the node, then reboot it"
_ACTIONS = {
    "GPU_RESET": f"a reset of the GPU: {_RESET}",
    "NODE_REBOOT": f"a reboot of the node: {_REBOOT}",
    "DRAIN_P2P": "the end of all programs that use several GPUs together, to see what else is needed",
    "DRAIN_AND_RESET": f"a reset once the GPU is idle, it runs with less than its capacity: {_RESET}",
    "BUS_RESET": "a reset of the GPU's PCIe bus: drain the node, then reset or reboot it",
    "SYSTEM_REBOOT": f"a reboot of the whole system: {_REBOOT}",
}
"""RECOVER_IMEX_DOMAIN is left out: it concerns memory shared between nodes, and the GPU works."""

_REMAPPING_FAILED = "row remapping failed: the GPU's memory needs replacement. Take the GPU out of service."


class _Kind(Struct, kw_only=True):
    """A GPU with what does not change of it in the `opening` of NVML in which it was read; and how many polls went by it."""

    opening: int
    polls: int = 0
    gpu: Gpu


class NvmlReader(Struct, eq=False):
    """`mig_minors` is the host's file of capability nodes, None where MIG instances are not to be offered. `on_demand`
    selects the GPUs on which instances are made here. `unified_memory_mib` is the memory of a GPU that has none of its
    own."""

    session: NvmlSession
    pci_devices: Path
    proc: Path
    layouts: MigLayouts
    mig_minors: Path | None = None
    on_demand: Sequence[str] = ()
    unified_memory_mib: int = 0
    _in_use: Collection[GpuUuid] = ()
    _caps_major: int = 0
    _topology: NvmlTopology = field(default_factory=NvmlTopology)
    _known: dict[GpuUuid, Gpu] = field(default_factory=dict)
    _places: dict[str, tuple[int | None, str]] = field(default_factory=dict)
    _last_nvml_index: dict[GpuUuid, int] = field(default_factory=dict)
    _kinds: dict[GpuUuid, _Kind] = field(default_factory=dict)
    _answering: Set[GpuUuid] = frozenset()
    _errors: Set[str] = frozenset()
    """NVML's names of the errors of the last poll, one of each GPU that did not answer."""
    _losses: Counter[GpuUuid] = field(default_factory=Counter)

    def read(self, in_use: Collection[GpuUuid] = ()) -> GpuInventory:
        """One poll. Where NVML is lost, as a whole or with all its GPUs, it is opened again at once and read once more.
        `in_use` are GPUs that containers have.

        Raises:
            DriverLost: NVML cannot be opened, or is lost again straight after.
        """
        self._in_use = in_use
        for _ in range(2):
            inventory, lost, opening = None, None, self.session.openings
            with self.session.used("reading the GPUs through NVML"):
                try:
                    inventory = self._read_once()
                except DriverLostError as error:
                    lost = error
            if inventory is not None and not self._is_lost(inventory):
                return inventory
            # Opened for this poll: another time would find the same.
            if self.session.openings != opening:
                break
            # NVML brings back a GPU that was reset only after a complete shutdown.
            self.session.close()
        if inventory is None:
            # So the next poll, or who else uses NVML before it, begins with an opening.
            self.session.close()
            raise DriverLost(f"NVML opens, but does not answer: {lost}. {CHECKLIST}") from lost
        is_new = self.session.openings != opening
        return replace(inventory, is_refused=is_new and bool(self._errors) and self._errors <= _REFUSALS)

    def _is_lost(self, inventory: GpuInventory) -> bool:
        """NVML may be lost with all of its GPUs. One that answers but must not be used, as with MIG enabled, shows that NVML
        works; so does a call that a GPU does not know, however often it is opened."""
        is_empty = not (inventory.known or inventory.unreadable)
        return not (self._answering or is_empty or self._errors & _ANSWERS)

    def _read_once(self) -> GpuInventory:
        # Enumerated at each poll: the handles of before would hide a GPU that is new or missing.
        found, unnamed = self.session.find_gpus()
        seen: dict[GpuUuid, Gpu] = {}
        answering: set[GpuUuid] = set()
        errors = {error.name for error in unnamed.values()}
        for gpu in found:
            self._last_nvml_index[gpu.uuid] = gpu.nvml_index
            known = self._known.get(gpu.uuid)
            # Device IDs name GPUs by UUID, people by index: it must not change when the driver renumbers them.
            index = known.index if known else self._new_index(gpu.nvml_index, seen)
            try:
                seen[gpu.uuid] = self._read_gpu(gpu, index)
            except CallError as error:
                blank = Gpu(index=index, minor=_UNKNOWN_MINOR, uuid=gpu.uuid, bus_id="", name="", memory_mib=0)
                as_seen = _withheld if error.name in _ANSWERS else _unhealthy
                seen[gpu.uuid] = as_seen(known or blank, f"NVML: {error}")
                errors.add(error.name)
            else:
                # It answers, though it may need a repair: events of it can be registered.
                answering.add(gpu.uuid)
        self._losses.update((self._answering | seen.keys()) - answering)
        # Only now: a poll that fails half-way is compared with by nobody.
        self._answering = answering
        self._errors = errors
        partitioned = self._read_partitioned(found, seen) if self.mig_minors is not None else frozenset()
        self.session.answering = frozenset((uuid, self._losses[uuid]) for uuid in answering)
        return self._inventory(seen, found, unnamed, partitioned)

    def _read_gpu(self, found: FoundGpu, index: int) -> Gpu:
        """Raises CallError, DriverLostError: a GPU that fails at any of these calls is Unhealthy as a whole. It may lack
        every value but its UUID."""
        handle = found.handle
        kind, memory_mib = self._kind_of(found), _memory_mib(handle)
        fabric, has_joined, not_joined = _fabric(handle)
        # A GPU that has MIG goes on having it, also where one call fails: its instances are not given with it as a whole.
        mode, known = mig_mode(handle), self._known.get(found.uuid)
        gpu = replace(
            kind,
            index=index,
            driver_index=found.nvml_index,
            memory_mib=self.unified_memory_mib if memory_mib is None else memory_mib,
            host_memory=HostMemory.UNIFIED if memory_mib is None else kind.host_memory,
            is_exclusive_process=ask("nvmlDeviceGetComputeMode", handle) == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
            mig_mode=mode if mode is not None or known is None else known.mig_mode,
            fabric=fabric,
            has_joined=has_joined,
        )
        if self.mig_minors is None and gpu.mig_mode:
            return _withheld(gpu, _MIG_REASON)
        if reason := _repair_reason(handle):
            return _unhealthy(gpu, reason)
        return _withheld(gpu, not_joined) if not_joined else gpu

    def _kind_of(self, found: FoundGpu) -> Gpu:
        """What does not change of it, as last read, if the GPU has answered since. Raises CallError, DriverLostError."""
        kind, opening = self._kinds.get(found.uuid), self.session.openings
        is_known = found.uuid in self._answering and kind is not None and kind.opening == opening
        if kind is None or not is_known or kind.polls >= POLLS_OF_KIND:
            capability = ask("nvmlDeviceGetCudaComputeCapability", found.handle)
            brand = ask("nvmlDeviceGetBrand", found.handle)
            bus_id, minor = self._names(found)
            numa_node, pcie_root = self._place(bus_id)
            is_whole = capability is not None and brand is not None and bus_id and minor != _UNKNOWN_MINOR
            kind = self._kinds[found.uuid] = _Kind(
                opening=opening,
                polls=0 if is_whole else POLLS_OF_KIND,  # it may be readable a moment later
                gpu=Gpu(
                    index=found.nvml_index,
                    minor=minor,
                    uuid=found.uuid,
                    bus_id=bus_id,
                    name=_optional("nvmlDeviceGetName", found.handle) or _UNNAMED,
                    memory_mib=0,
                    numa_node=numa_node,
                    pcie_root=pcie_root,
                    host_memory=_host_memory(found.handle),
                    compute_capability=(capability[0], capability[1]) if capability is not None else None,
                    brand=_BRANDS.get(brand or 0, ""),
                ),
            )
        kind.polls += 1
        return kind.gpu

    def _names(self, found: FoundGpu) -> tuple[str, int]:
        """The bus ID and the minor number, else those that the kernel module says; empty and -1 where there are none. Raises
        CallError, DriverLostError."""
        bus_id = _optional("nvmlDeviceGetPciInfo", found.handle, field="busId") or ""
        minor = _optional("nvmlDeviceGetMinorNumber", found.handle)
        # It becomes a part of paths.
        if bus_id and _BUS_ID.fullmatch(bus_id := canonical_bus_id(bus_id)) is None:
            raise unusable("nvmlDeviceGetPciInfo", f"{bus_id!r} is no bus ID")
        if minor is not None and minor > _MAX_MINOR:
            raise unusable("nvmlDeviceGetMinorNumber", f"{minor} is no device's minor number")
        if not bus_id or minor is None:
            fields = read_gpu_fields(found.uuid, self.proc)
            place, number = canonical_bus_id(fields.get("Bus Location", "")), fields.get("Device Minor", "")
            bus_id = bus_id or (place if _BUS_ID.fullmatch(place) else "")
            if minor is None:
                minor = int(number) if number.isdecimal() and int(number) <= _MAX_MINOR else _UNKNOWN_MINOR
        return bus_id, minor

    def _is_on_demand(self, gpu: Gpu) -> bool:
        return gpu.mig is None and bool(gpu.mig_mode) and gpu.is_selected(self.on_demand)

    def _read_partitioned(self, found: list[FoundGpu], seen: dict[GpuUuid, Gpu]) -> frozenset[GpuUuid]:
        """Adds the MIG instances to `seen`; the GPUs that they are of, and those on demand. Another one without instances is
        Unhealthy."""
        caps = read_cap_minors(self.mig_minors) if self.mig_minors is not None else {}
        self._caps_major = read_caps_major(self.proc / "devices") if caps else 0
        partitioned = {gpu.mig.parent for gpu in self._known.values() if gpu.mig is not None}
        partitioned |= {gpu.uuid for gpu in self._known.values() if self._is_on_demand(gpu)}
        for gpu in found:
            parent = seen[gpu.uuid]
            # Its instances cannot be listed: those known before stay.
            if gpu.uuid not in self._answering:
                continue
            partitioned.discard(gpu.uuid)
            # MIG was switched off: the GPU is offered whole again.
            if not parent.mig_mode:
                continue
            instances = find_instances(gpu.handle)
            for instance in instances:
                seen[instance.uuid] = self._read_instance(instance, parent, gpu.handle, caps, seen)
            if self._is_on_demand(parent):
                devices = {(mig.gi, mig.ci): one.uuid for one in instances if (mig := seen[one.uuid].mig) is not None}
                self.layouts.read(parent, gpu.handle, devices)
                partitioned.add(gpu.uuid)
            elif instances or any(
                known.mig.parent == gpu.uuid for known in self._retained(seen) if known.mig is not None
            ):
                partitioned.add(gpu.uuid)
            # Unhealthy for another reason: that one is shown.
            elif parent.is_healthy:
                seen[gpu.uuid] = _withheld(parent, _NO_INSTANCES.format(bus_id=parent.bus_id))
        return frozenset(partitioned & {*seen, *self._known})

    def _read_instance(
        self, found: FoundInstance, parent: Gpu, handle: Any, caps: CapMinors, seen: dict[GpuUuid, Gpu]
    ) -> Gpu:
        known = self._known.get(found.uuid)
        index = known.index if known else self._new_index(len(self._last_nvml_index), seen)
        gpu = replace(parent, index=index, uuid=found.uuid, nvlinks=())
        try:
            profiles = self.layouts.profiles(parent.uuid, handle)
            place = read_place(found, parent=parent, parent_handle=handle, profiles=profiles, caps=caps)
            memory_mib = _memory_mib(found.handle) or (place.attributes.memory_mib if place.attributes else 0)
        except CallError as error:
            return _unhealthy(known or replace(gpu, memory_mib=0), f"NVML: {error}")
        place = replace(place, caps_major=self._caps_major)
        gpu = replace(gpu, name=f"{parent.name} MIG {place.profile}", memory_mib=memory_mib, mig=place)
        if not parent.is_healthy:
            return replace(gpu, unhealthy_reason=f"its GPU {parent.index}: {parent.unhealthy_reason}")
        # Drivers before 470: the name says a place, which is another instance after the next partitioning.
        if "/" in found.uuid:
            return _unhealthy(gpu, _OLD_UUID)
        if place.gi_cap is None or place.ci_cap is None:
            return _unhealthy(gpu, _NO_CAPS.format(path=self.mig_minors))
        return gpu

    def _retained(self, seen: dict[GpuUuid, Gpu]) -> list[Gpu]:
        """What was seen before and is not now, and stays in the answer."""
        return [
            gpu
            for gpu in self._known.values()
            if gpu.uuid not in seen
            and (gpu.mig is None or gpu.uuid in self._in_use or gpu.mig.parent not in self._answering)
        ]

    def _new_index(self, nvml_index: int, seen: Mapping[GpuUuid, Gpu]) -> int:
        """The NVML index, unless a GPU seen before has it."""
        used = {gpu.index for gpu in (*self._known.values(), *seen.values())}
        while nvml_index in used:
            nvml_index += 1
        return nvml_index

    def _place(self, bus_id: str) -> tuple[int | None, str]:
        """The NUMA node and the root: a device keeps them while the node runs, so they are read once."""
        place = self._places.get(bus_id) or (self._numa_node(bus_id), self._pcie_root(bus_id))
        if place != (None, ""):  # else it could not be read
            self._places[bus_id] = place
        return place

    def _numa_node(self, bus_id: str) -> int | None:
        try:
            directory = self.pci_devices / kernel_bus_id(bus_id)
            node = int((directory / "numa_node").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def _pcie_root(self, bus_id: str) -> str:
        """The entry links to the device's place below its root: /sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0."""
        place = (self.pci_devices / kernel_bus_id(bus_id)).resolve()
        return next((part for part in place.parts if _PCIE_ROOT.fullmatch(part)), "")

    def _inventory(
        self,
        seen: dict[GpuUuid, Gpu],
        found: list[FoundGpu],
        unnamed: dict[int, CallError],
        partitioned: frozenset[GpuUuid],
    ) -> GpuInventory:
        # A GPU that its MIG mode keeps from being offered is not asked; where its instances are, their place is its own.
        handles = {
            gpu.uuid: gpu.handle
            for gpu in found
            if gpu.uuid in self._answering and (self.mig_minors is not None or not seen[gpu.uuid].mig_mode)
        }
        # GPUs first: an instance's reason is that of its GPU.
        for gpu in sorted(self._retained(seen), key=lambda gpu: gpu.mig is not None):  # instances after their GPUs
            # The driver counts again after a loss: others may have its numbers.
            others = [other for other in seen.values() if _physical(other) != _physical(gpu)]
            if any(gpu.minor == other.minor or gpu.driver_index == other.driver_index for other in others):
                gpu = replace(gpu, minor=_UNKNOWN_MINOR, driver_index=-1)
            is_gone = gpu.mig is not None and gpu.mig.parent in self._answering
            retained = replace(gpu, mig=replace(gpu.mig, is_gone=True)) if gpu.mig is not None and is_gone else gpu
            seen[gpu.uuid] = _unhealthy(retained, self._why_missing(gpu, seen, unnamed))
        gpus = sorted(seen.values(), key=lambda gpu: gpu.index)
        gpus, topology = self._topology.read(gpus, handles, self.session.openings)
        # Only at the end: a poll that fails half-way leaves what was known.
        self._known = {gpu.uuid: gpu for gpu in gpus}
        on_demand = [gpu for gpu in gpus if gpu.uuid in partitioned and self._is_on_demand(gpu)]
        return GpuInventory(
            gpus=tuple(gpu for gpu in gpus if gpu.uuid not in partitioned),
            mig_partitioned=tuple(gpu for gpu in gpus if gpu.uuid in partitioned),
            mig_layouts=self.layouts.keep(
                {gpu.uuid: "" if gpu.uuid in self._answering else gpu.unhealthy_reason for gpu in on_demand}
            ),
            topology=topology,
            driver_version=ask("nvmlSystemGetDriverVersion") or "",
            cuda_version=_cuda_version(ask("nvmlSystemGetCudaDriverVersion")),
            unreadable=tuple((index, f"NVML: {error}") for index, error in sorted(unnamed.items())),
        )

    def _why_missing(self, gpu: Gpu, seen: dict[GpuUuid, Gpu], unnamed: dict[int, CallError]) -> str:
        if gpu.mig is None:
            error = unnamed.pop(self._last_nvml_index[gpu.uuid], None)
            return f"NVML: {error}" if error is not None else "the driver does not list it any more"
        if gpu.mig.parent in self._answering:
            return _INSTANCE_GONE
        return f"its GPU {gpu.mig.parent_index}: {seen[gpu.mig.parent].unhealthy_reason}"


def _cuda_version(number: int | None) -> str:
    """NVML: 1000 times the major version, and 10 times the minor."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _fabric(handle: Any) -> tuple[str, bool | None, str]:
    """`fabric` and `has_joined` as of Gpu, and why CUDA cannot start: it answers 802 while the GPU waits for its NVLink
    fabric, and NVML shows nothing else of it. Raises DriverLostError. Source: IsFabricAttached in go-nvlib,
    pkg/nvlib/device/device.go; nvmlGpuFabricInfo_t."""
    info = pynvml.c_nvmlGpuFabricInfo_t()
    # Older drivers lack it, and most GPUs are on no fabric.
    is_known = ask("nvmlDeviceGetGpuFabricInfo", handle, byref(info)) is not None
    if is_known and info.state in (pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED, pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS):
        return "", False, _NOT_JOINED.format(why="the driver still waits for it")
    if not is_known or info.state != pynvml.NVML_GPU_FABRIC_STATE_COMPLETED:
        return "", None, ""
    if info.status != pynvml.NVML_SUCCESS:
        return "", False, _NOT_JOINED.format(why=renamed(info.status, "nvmlDeviceGetGpuFabricInfo"))
    cluster = bytes(info.clusterUuid)
    return f"{UUID(bytes=cluster)}.{info.cliqueId}" if any(cluster) else "", True, ""


def _optional(name: str, *arguments: Any, field: str = "") -> Any | None:
    """As `call`, None where the GPU has no such value. Raises CallError, DriverLostError: it may be lost."""
    try:
        return call(name, *arguments, field=field)
    except CallError as error:
        if error.name in _MISSING:
            return None
        raise


def _memory_mib(handle: Any) -> int | None:
    """None where the GPU has no memory of its own, as GB10, which uses the host's. Raises CallError, DriverLostError."""
    total: int = _optional("nvmlDeviceGetMemoryInfo", handle, field="total") or 0
    # Each 256 MiB is a device in the kubelet's list.
    if total // MIB > _MAX_MEMORY_MIB:
        raise unusable("nvmlDeviceGetMemoryInfo", f"{total} bytes are no GPU's memory")
    return total // MIB or None


def _host_memory(handle: Any) -> HostMemory | None:
    """Raises DriverLostError. NVML names a NUMA node only of GPUs that are one; older drivers do not name the mode."""
    mode = ask("nvmlDeviceGetAddressingMode", handle)
    is_coherent = mode is None or mode == pynvml.NVML_DEVICE_ADDRESSING_MODE_ATS
    node = ask("nvmlDeviceGetNumaNodeId", handle) if is_coherent else None
    return HostMemory.NUMA_NODE if node is not None and node >= 0 else None


def _unhealthy(gpu: Gpu, reason: str) -> Gpu:
    return replace(gpu, health=Health.UNHEALTHY, unhealthy_reason=reason, is_withheld=False)


def _withheld(gpu: Gpu, reason: str) -> Gpu:
    return replace(_unhealthy(gpu, reason), is_withheld=True)


def _repair_reason(handle: Any) -> str:
    """Why the GPU must not be used, empty where it may. Raises DriverLostError.

    Rows that merely wait to be remapped are no reason: the driver has already taken them out of use, and the remapping
    itself happens at the next reset, whenever that is.
    """
    asked = ask("nvmlDeviceGetFieldValues", handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    # The field has an error of its own where the GPU does not know it.
    action = asked[0].value.uiVal if asked and asked[0].nvmlReturn == pynvml.NVML_SUCCESS else None
    for name, request in _ACTIONS.items():
        if action is not None and action == getattr(pynvml, f"NVML_GPU_RECOVERY_ACTION_{name}", None):
            return f"the driver asks for {request} (recovery action {name.lower()})"
    remapped = ask("nvmlDeviceGetRemappedRows", handle)
    return _REMAPPING_FAILED if remapped is not None and remapped[-1] else ""
