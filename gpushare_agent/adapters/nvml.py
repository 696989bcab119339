"""The NVML driver: cards, health and topology of real GPUs, for asyncio.

NVML calls block, and a sick driver can block them for ever. So they run in a daemon thread, one at a time, bounded by a
timeout (kit/daemon_thread.py). What NVML says is read in nvml_reader.py.

Source: NVML API reference, through nvidia-ml-py (module pynvml).
"""

from __future__ import annotations

from pathlib import Path

import structlog

from gpushare_agent.adapters.nvml_reader import NvmlReader
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.gpus import GpuInventory

log = structlog.get_logger(__name__)

_CLOSE_TIMEOUT_S = 1.0
_HANGS = (
    "The driver may hang: look for NVRM and Xid lines in `dmesg`; a hung driver needs a reboot. "
    "It is asked again at the next look."
)


class NvmlDriver:
    """Reads the cards of this node. Close it when done; reading after that opens NVML again."""

    def __init__(self, *, pci_devices: Path = Path("/sys/bus/pci/devices"), timeout_s: float = 10.0) -> None:
        """`pci_devices` is where the kernel tells each card's NUMA node; `timeout_s` bounds one whole look."""
        self._reader = NvmlReader(pci_devices=pci_devices)
        self._timeout_s = timeout_s
        self._thread = DaemonThread("nvml", advice=_HANGS)

    async def read(self) -> GpuInventory:
        """All cards of the node as they are now, and how they are connected.

        A card that NVML lost is Unhealthy in the answer, with the reason. Cancelled, the look goes on in its thread.

        Raises:
            Unavailable: NVML is absent, was lost as a whole, or does not answer in time.
        """
        return await self._thread.call(self._reader.read, "reading the cards through NVML", self._timeout_s)

    async def close(self) -> None:
        """Shuts NVML down, if it answers within a second; it ends with the process anyway."""
        try:
            await self._thread.call(self._reader.close, "closing NVML", min(self._timeout_s, _CLOSE_TIMEOUT_S))
        except Unavailable as error:
            log.warning("nvml_not_closed", reason=str(error))
