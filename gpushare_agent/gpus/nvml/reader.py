"""What NVML says of the GPUs, in blocking calls. Only nvml.py uses this, from one thread at a time.

State owned: the GPUs seen so far. A GPU keeps the index under which it was first seen, also when the driver loses
another one and numbers the rest anew; a GPU that is gone stays in the answer, Unhealthy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpushare_agent.gpus.nvml.repair import repair_reason
from gpushare_agent.gpus.nvml.session import CHECKLIST, DriverLostError, FoundGpu, NvmlSession, UnnamedGpu
from gpushare_agent.gpus.nvml.topology import NvmlTopology, canonical_bus_id, kernel_bus_id, text_of
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.gpus import Gpu, GpuInventory, Health
from gpushare_agent.model.names import GpuUuid

_MIB = 1024 * 1024
_MIG_REASON = "MIG mode is enabled: a GPU divided by MIG cannot be shared here. Disable MIG on it."
_UNKNOWN_MINOR = -1


class NvmlReader:
    """Reads through `session`, which it closes where NVML has to be opened again. `let_go` closes what else holds NVML
    open; `on_look` is told what each look found, to be compared with what the look before found."""

    def __init__(
        self,
        session: NvmlSession,
        *,
        pci_devices: Path,
        let_go: Callable[[], None],
        on_look: Callable[[object], None],
    ) -> None:
        self._session = session
        self._let_go = let_go
        self._on_look = on_look
        self._pci_devices = pci_devices
        self._topology = NvmlTopology()
        self._opening_of_links = 0
        self._known: dict[GpuUuid, Gpu] = {}
        self._last_nvml_index: dict[GpuUuid, int] = {}
        self._answering: set[GpuUuid] = set()

    def read(self) -> GpuInventory:
        """One look. NVML found lost, as a whole or with all its GPUs, is opened again at once for another.

        Raises:
            Unavailable: NVML cannot be opened, or is lost again straight after.
        """
        try:
            inventory = self._look()
            if not self._is_all_lost(inventory):
                return inventory
            self._close_wholly()
            inventory = self._look()
        except DriverLostError:
            self._close_wholly()
            try:
                inventory = self._look()
            except DriverLostError as error:
                self._close_wholly()
                raise Unavailable(f"NVML opens, but does not answer: {error.__cause__}. {CHECKLIST}") from error
        if self._is_all_lost(inventory):
            self._close_wholly()  # the next look opens it afresh: a reset GPU comes back only that way
        return inventory

    def _close_wholly(self) -> None:
        self._session.close()
        self._let_go()

    def _is_all_lost(self, inventory: GpuInventory) -> bool:
        """No GPU answers. One that answers but must not be given, as with MIG enabled, shows that NVML works."""
        return bool(inventory.gpus or inventory.unreadable) and not self._answering

    def _look(self) -> GpuInventory:
        self._answering.clear()
        found, unnamed = self._session.find_gpus()
        nvml = self._session.open()
        seen: dict[GpuUuid, Gpu] = {}
        for gpu in found:
            seen[gpu.uuid] = self._read_gpu(nvml, gpu, taken={earlier.index for earlier in seen.values()})
        self._session.looked(self._answering)
        self._on_look((tuple((gpu.nvml_index, gpu.uuid) for gpu in found), frozenset(self._answering)))
        return self._inventory(nvml, seen, found, unnamed)

    def _read_gpu(self, nvml: Any, found: FoundGpu, *, taken: Iterable[int]) -> Gpu:
        handle, uuid = found.handle, found.uuid
        self._last_nvml_index[uuid] = found.nvml_index
        known = self._known.get(uuid)
        index = known.index if known else self._new_index(found.nvml_index, taken)
        try:
            bus_id = canonical_bus_id(text_of(nvml.nvmlDeviceGetPciInfo(handle).busId))
            gpu = Gpu(
                index=index,
                minor=nvml.nvmlDeviceGetMinorNumber(handle),
                uuid=uuid,
                bus_id=bus_id,
                name=text_of(nvml.nvmlDeviceGetName(handle)),
                memory_mib=nvml.nvmlDeviceGetMemoryInfo(handle).total // _MIB,
                numa_node=self._numa_node(bus_id),
                compute_capability=self._compute_capability(nvml, handle),
            )
        except nvml.NVMLError as error:
            self._session.check_driver(error)
            blank = Gpu(index=index, minor=_UNKNOWN_MINOR, uuid=uuid, bus_id="", name="", memory_mib=0)
            return _unhealthy(known or blank, f"NVML: {error}")
        self._answering.add(uuid)
        reason = _MIG_REASON if self._has_mig(nvml, handle) else repair_reason(self._session, nvml, handle)
        return _unhealthy(gpu, reason) if reason else gpu

    def _compute_capability(self, nvml: Any, handle: Any) -> tuple[int, int] | None:
        try:
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        except nvml.NVMLError as error:
            self._session.check_driver(error)
            return None
        return major, minor

    def _has_mig(self, nvml: Any, handle: Any) -> bool:
        try:
            current, _ = nvml.nvmlDeviceGetMigMode(handle)
        except nvml.NVMLError as error:  # older GPUs and drivers know no MIG
            self._session.check_driver(error)
            return False
        return bool(current)

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

    def _inventory(
        self, nvml: Any, seen: dict[GpuUuid, Gpu], found: list[FoundGpu], failures: list[UnnamedGpu]
    ) -> GpuInventory:
        handles = {gpu.uuid: gpu.handle for gpu in found if self._can_tell_links(seen[gpu.uuid])}
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
            driver_version=self._driver_version(nvml),
            unreadable=tuple(sorted(unnamed.items())),
        )

    def _can_tell_links(self, gpu: Gpu) -> bool:
        return gpu.uuid in self._answering and gpu.unhealthy_reason != _MIG_REASON

    def _driver_version(self, nvml: Any) -> str:
        try:
            return text_of(nvml.nvmlSystemGetDriverVersion())
        except nvml.NVMLError as error:
            self._session.check_driver(error)
            return ""


def _unhealthy(gpu: Gpu, reason: str) -> Gpu:
    return replace(gpu, health=Health.UNHEALTHY, unhealthy_reason=reason)
