"""What NVML says of the cards, in blocking calls. Only nvml.py uses this, from one thread at a time.

State owned: whether NVML is open, and the cards seen so far. A card keeps the index under which it was first seen, also
when the driver loses another one and numbers the rest anew; a card that is gone stays in the answer, Unhealthy.

pynvml is imported when first needed: it costs 30 ms, and a node with simulated cards does not have to have it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpushare_agent.adapters.nvml_topology import NvmlTopology, canonical_bus_id, kernel_bus_id, text_of
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.gpus import Card, GpuInventory, Health
from gpushare_agent.model.names import GpuUuid

_CHECKLIST = (
    "Check that: the NVIDIA driver is installed and `nvidia-smi` works on the node; libnvidia-ml.so.1 is visible in this "
    "container; /dev/nvidiactl and /dev/nvidia* are mounted into it; the pod runs with the NVIDIA runtime class (or the "
    "library's directory is mounted and in LD_LIBRARY_PATH). After a driver upgrade restart the agent."
)
_MIB = 1024 * 1024
_MIG_REASON = "MIG mode is enabled: a card divided by MIG cannot be shared here. Disable MIG on it."
_UNKNOWN_MINOR = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Why the card at an NVML index could not even be named."""

    nvml_index: int
    reason: str


class _DriverLostError(Exception):
    """NVML as a whole does not answer any more: it has to be opened again."""


class NvmlReader:
    """Opens NVML at the first read, and again after it was lost."""

    def __init__(self, *, pci_devices: Path) -> None:
        self._pci_devices = pci_devices
        self._pynvml: Any = None
        self._is_open = False
        self._topology = NvmlTopology()
        self._known: dict[GpuUuid, Card] = {}
        self._last_nvml_index: dict[GpuUuid, int] = {}

    def read(self) -> GpuInventory:
        """One look. NVML found lost, as a whole or with all its cards, is opened again at once for another.

        Raises:
            Unavailable: NVML cannot be opened, or is lost again straight after.
        """
        try:
            inventory = self._look()
            if not _is_all_lost(inventory):
                return inventory
            self.close()
            inventory = self._look()
        except _DriverLostError:
            self.close()
            try:
                inventory = self._look()
            except _DriverLostError as error:
                self.close()
                raise Unavailable(f"NVML opens, but does not answer: {error.__cause__}. {_CHECKLIST}") from error
        if _is_all_lost(inventory):
            self.close()  # the next look opens it afresh: a reset card comes back only that way
        return inventory

    def close(self) -> None:
        """Shuts NVML down; that may fail where it is lost already, which changes nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self._topology.expire_links()
        try:
            self._pynvml.nvmlShutdown()
        except self._pynvml.NVMLError:
            return

    def _open(self) -> Any:
        import pynvml

        self._pynvml = pynvml
        if not self._is_open:
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise Unavailable(f"opening NVML failed: {error}. {_CHECKLIST}") from error
            self._is_open = True
        return pynvml

    def _look(self) -> GpuInventory:
        nvml = self._open()
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise _DriverLostError from error
        handles: dict[GpuUuid, Any] = {}
        seen: dict[GpuUuid, Card] = {}
        failures: list[_Failure] = []
        for nvml_index in range(count):
            found = self._find_card(nvml, nvml_index)
            if isinstance(found, _Failure):
                failures.append(found)
                continue
            handle, uuid = found
            seen[uuid] = self._read_card(nvml, handle, uuid, nvml_index, taken={card.index for card in seen.values()})
            if seen[uuid].is_healthy:
                handles[uuid] = handle
        return self._inventory(nvml, seen, handles, failures)

    def _find_card(self, nvml: Any, nvml_index: int) -> tuple[Any, GpuUuid] | _Failure:
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(nvml_index)
            return handle, GpuUuid(text_of(nvml.nvmlDeviceGetUUID(handle)))
        except nvml.NVMLError as error:
            self._check_driver(nvml, error)
            return _Failure(nvml_index=nvml_index, reason=f"NVML: {error}")

    def _read_card(self, nvml: Any, handle: Any, uuid: GpuUuid, nvml_index: int, *, taken: Iterable[int]) -> Card:
        self._last_nvml_index[uuid] = nvml_index
        known = self._known.get(uuid)
        index = known.index if known else self._new_index(nvml_index, taken)
        try:
            bus_id = canonical_bus_id(text_of(nvml.nvmlDeviceGetPciInfo(handle).busId))
            card = Card(
                index=index,
                minor=nvml.nvmlDeviceGetMinorNumber(handle),
                uuid=uuid,
                bus_id=bus_id,
                name=text_of(nvml.nvmlDeviceGetName(handle)),
                memory_mib=nvml.nvmlDeviceGetMemoryInfo(handle).total // _MIB,
                numa_node=self._numa_node(bus_id),
            )
        except nvml.NVMLError as error:
            self._check_driver(nvml, error)
            blank = Card(index=index, minor=_UNKNOWN_MINOR, uuid=uuid, bus_id="", name="", memory_mib=0)
            return _unhealthy(known or blank, f"NVML: {error}")
        if self._has_mig(nvml, handle):
            return _unhealthy(card, _MIG_REASON)
        return card

    def _has_mig(self, nvml: Any, handle: Any) -> bool:
        try:
            current, _ = nvml.nvmlDeviceGetMigMode(handle)
        except nvml.NVMLError as error:  # older cards and drivers know no MIG
            self._check_driver(nvml, error)
            return False
        return bool(current)

    def _new_index(self, nvml_index: int, taken: Iterable[int]) -> int:
        """The NVML index, unless a card seen before has it."""
        used = {card.index for card in self._known.values()} | set(taken)
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
        self, nvml: Any, seen: dict[GpuUuid, Card], handles: dict[GpuUuid, Any], failures: list[_Failure]
    ) -> GpuInventory:
        gone = {uuid: card for uuid, card in self._known.items() if uuid not in seen}
        unnamed = {failure.nvml_index: failure.reason for failure in failures}
        for uuid, card in gone.items():
            reason = unnamed.pop(self._last_nvml_index[uuid], "the driver does not list it any more")
            seen[uuid] = _unhealthy(card, reason)
        cards = sorted(seen.values(), key=lambda card: card.index)
        cards, topology = self._topology.read(nvml, cards, handles)
        self._known = {card.uuid: card for card in cards}
        return GpuInventory(
            cards=tuple(cards),
            topology=topology,
            driver_version=self._driver_version(nvml),
            unreadable=tuple(sorted(unnamed.items())),
        )

    def _driver_version(self, nvml: Any) -> str:
        try:
            return text_of(nvml.nvmlSystemGetDriverVersion())
        except nvml.NVMLError as error:
            self._check_driver(nvml, error)
            return ""

    def _check_driver(self, nvml: Any, error: Exception) -> None:
        """Tells an error of one card from one of the whole driver."""
        of_driver = ("UNINITIALIZED", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH")
        if getattr(error, "value", None) in [getattr(nvml, f"NVML_ERROR_{name}") for name in of_driver]:
            raise _DriverLostError from error


def _unhealthy(card: Card, reason: str) -> Card:
    return replace(card, health=Health.UNHEALTHY, unhealthy_reason=reason)


def _is_all_lost(inventory: GpuInventory) -> bool:
    """No card works, for a reason of NVML's: a node whose cards all have MIG enabled has a working NVML."""
    return bool(inventory.cards or inventory.unreadable) and all(
        not card.is_healthy and card.unhealthy_reason != _MIG_REASON for card in inventory.cards
    )
