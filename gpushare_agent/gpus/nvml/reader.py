"""Reads the GPUs through NVML, and whether one needs a repair. Blocking; driver.py calls it from one thread at a time.

State owned: the GPUs seen so far. A GPU keeps the index under which it was first seen, also when the driver loses
another one and numbers the rest anew; a GPU that is missing stays in the answer, Unhealthy.

Source: NVML API reference (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION of newer drivers, nvmlDeviceGetRemappedRows of GPUs from
Ampere on); `nvidia-smi -q`, "GPU Recovery Action", shows the same to an operator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpushare_agent.gpus.nvml.session import CHECKLIST, DriverLostError, FoundGpu, NvmlSession, UnnamedGpu
from gpushare_agent.gpus.nvml.topology import NvmlTopology, canonical_bus_id, kernel_bus_id, text_of
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.gpus import Gpu, GpuInventory, Health
from gpushare_agent.model.names import GpuUuid

_MIB = 1024 * 1024
_PCIE_ROOT = re.compile(r"pci[0-9a-f]{4}:[0-9a-f]{2}")
_MIG_REASON = "MIG mode is enabled: a GPU divided by MIG cannot be shared here. Disable MIG on it."
_UNKNOWN_MINOR = -1

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


class NvmlReader:
    """Reads through `session`, which it closes where NVML has to be opened again. `close_others` closes the other openings;
    `on_read` gets what each poll found, to be compared with the poll before."""

    def __init__(
        self,
        session: NvmlSession,
        *,
        pci_devices: Path,
        close_others: Callable[[], None],
        on_read: Callable[[object], None],
    ) -> None:
        self._session = session
        self._close_others = close_others
        self._on_read = on_read
        self._pci_devices = pci_devices
        self._topology = NvmlTopology()
        self._opening_of_links = 0
        self._known: dict[GpuUuid, Gpu] = {}
        self._last_nvml_index: dict[GpuUuid, int] = {}
        self._answering: set[GpuUuid] = set()

    def read(self) -> GpuInventory:
        """One poll. Where NVML is lost, as a whole or with all its GPUs, it is opened again at once and read once more.

        Raises:
            Unavailable: NVML cannot be opened, or is lost again straight after.
        """
        try:
            inventory = self._read_once()
            if not self._is_all_lost(inventory):
                return inventory
            self._close_wholly()
            inventory = self._read_once()
        except DriverLostError:
            self._close_wholly()
            try:
                inventory = self._read_once()
            except DriverLostError as error:
                self._close_wholly()
                raise Unavailable(f"NVML opens, but does not answer: {error.__cause__}. {CHECKLIST}") from error
        if self._is_all_lost(inventory):
            self._close_wholly()  # the next poll opens it again: a reset GPU returns only that way
        return inventory

    def _close_wholly(self) -> None:
        self._session.close()
        self._close_others()

    def _is_all_lost(self, inventory: GpuInventory) -> bool:
        """No GPU answers. One that answers but must not be used, as with MIG enabled, shows that NVML works."""
        return bool(inventory.gpus or inventory.unreadable) and not self._answering

    def _read_once(self) -> GpuInventory:
        self._answering.clear()
        found, unnamed = self._session.find_gpus()
        nvml = self._session.open()
        seen: dict[GpuUuid, Gpu] = {}
        for gpu in found:
            seen[gpu.uuid] = self._read_gpu(nvml, gpu, taken={earlier.index for earlier in seen.values()})
        self._session.set_answering(self._answering)
        self._on_read((tuple((gpu.nvml_index, gpu.uuid) for gpu in found), frozenset(self._answering)))
        return self._inventory(nvml, seen, found, unnamed)

    def _read_gpu(self, nvml: Any, found: FoundGpu, *, taken: Iterable[int]) -> Gpu:
        handle, uuid = found.handle, found.uuid
        self._last_nvml_index[uuid] = found.nvml_index
        known = self._known.get(uuid)
        index = known.index if known else self._new_index(found.nvml_index, taken)
        try:
            bus_id = canonical_bus_id(text_of(nvml.nvmlDeviceGetPciInfo(handle).busId))
            capability = self._session.ask("nvmlDeviceGetCudaComputeCapability", handle)
            mode = self._session.ask("nvmlDeviceGetComputeMode", handle)
            gpu = Gpu(
                index=index,
                minor=nvml.nvmlDeviceGetMinorNumber(handle),
                uuid=uuid,
                bus_id=bus_id,
                name=text_of(nvml.nvmlDeviceGetName(handle)),
                memory_mib=nvml.nvmlDeviceGetMemoryInfo(handle).total // _MIB,
                numa_node=self._numa_node(bus_id),
                pcie_root=self._pcie_root(bus_id),
                compute_capability=(capability[0], capability[1]) if capability is not None else None,
                is_exclusive_process=mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
            )
        except nvml.NVMLError as error:
            self._session.check_driver(error)
            blank = Gpu(index=index, minor=_UNKNOWN_MINOR, uuid=uuid, bus_id="", name="", memory_mib=0)
            return _unhealthy(known or blank, f"NVML: {error}")
        self._answering.add(uuid)
        mig = self._session.ask("nvmlDeviceGetMigMode", handle)  # None: older GPUs and drivers know no MIG
        reason = _MIG_REASON if mig is not None and mig[0] else _repair_reason(self._session, nvml, handle)
        return _unhealthy(gpu, reason) if reason else gpu

    def _new_index(self, nvml_index: int, taken: Iterable[int]) -> int:
        """The NVML index, unless a GPU seen before has it."""
        used = {gpu.index for gpu in self._known.values()} | set(taken)
        while nvml_index in used:
            nvml_index += 1
        return nvml_index

    def _numa_node(self, bus_id: str) -> int | None:
        try:
            directory = self._pci_devices / kernel_bus_id(bus_id)
            node = int((directory / "numa_node").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def _pcie_root(self, bus_id: str) -> str:
        """The entry links to the device's place below its root: /sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0."""
        place = (self._pci_devices / kernel_bus_id(bus_id)).resolve()
        return next((part for part in place.parts if _PCIE_ROOT.fullmatch(part)), "")

    def _inventory(
        self, nvml: Any, seen: dict[GpuUuid, Gpu], found: list[FoundGpu], failures: list[UnnamedGpu]
    ) -> GpuInventory:
        handles = {gpu.uuid: gpu.handle for gpu in found if self._answers_for_links(seen[gpu.uuid])}
        gone = {uuid: gpu for uuid, gpu in self._known.items() if uuid not in seen}
        unnamed = {failure.nvml_index: failure.reason for failure in failures}
        for uuid, gpu in gone.items():
            reason = unnamed.pop(self._last_nvml_index[uuid], "the driver does not list it any more")
            seen[uuid] = _unhealthy(gpu, reason)
        gpus = sorted(seen.values(), key=lambda gpu: gpu.index)
        if self._opening_of_links != self._session.openings:
            self._topology.expire_links()
            self._opening_of_links = self._session.openings
        gpus, topology = self._topology.read(nvml, gpus, handles)
        self._known = {gpu.uuid: gpu for gpu in gpus}
        return GpuInventory(
            gpus=tuple(gpus),
            topology=topology,
            driver_version=text_of(self._session.ask("nvmlSystemGetDriverVersion") or ""),
            cuda_version=_cuda_version(self._session.ask("nvmlSystemGetCudaDriverVersion")),
            unreadable=tuple(sorted(unnamed.items())),
        )

    def _answers_for_links(self, gpu: Gpu) -> bool:
        return gpu.uuid in self._answering and gpu.unhealthy_reason != _MIG_REASON


def _cuda_version(number: int | None) -> str:
    """NVML: 1000 times the major version, and 10 times the minor."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _unhealthy(gpu: Gpu, reason: str) -> Gpu:
    return replace(gpu, health=Health.UNHEALTHY, unhealthy_reason=reason)


def _repair_reason(session: NvmlSession, nvml: Any, handle: Any) -> str:
    """Why the GPU must not be used, empty where it may. Raises DriverLostError.

    Rows that merely wait to be remapped are no reason: the driver has already taken them out of use, and the remapping
    itself happens at the next reset, whenever that is.
    """
    asked = session.ask("nvmlDeviceGetFieldValues", handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    action = asked[0].value.uiVal if asked and asked[0].nvmlReturn == nvml.NVML_SUCCESS else None
    for name, request in _ACTIONS.items():
        if action is not None and action == getattr(nvml, f"NVML_GPU_RECOVERY_ACTION_{name}", None):
            return f"the driver asks for {request} (recovery action {name.lower()})"
    remapped = session.ask("nvmlDeviceGetRemappedRows", handle)
    return _REMAPPING_FAILED if remapped is not None and remapped[-1] else ""
