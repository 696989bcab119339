"""The NVML driver: GPUs, topology, use and events of real GPUs, for asyncio.

NVML calls block, and a sick driver can block them for ever. So they run in daemon threads, bounded by a timeout
(kit/daemon_thread.py): one for the GPUs (nvml_reader.py) and the events (nvml_events.py), one for the samples
(nvml_sampler.py), each with an opening of NVML of its own. That a sample hangs says nothing of the GPUs' health: the looks
go on.

Source: NVML API reference, through nvidia-ml-py (module pynvml).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from gpushare_agent.gpus.events import GpuEvent
from gpushare_agent.gpus.nvml.events import NvmlEvents
from gpushare_agent.gpus.nvml.reader import NvmlReader
from gpushare_agent.gpus.nvml.sampler import NvmlSampler
from gpushare_agent.gpus.nvml.session import NvmlSession
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.usage import DriverSample

log = structlog.get_logger(__name__)

_CLOSE_TIMEOUT_S = 0.8
_HANGS = "The driver may hang: look for NVRM and Xid lines in `dmesg`; a hung driver needs a reboot. "
_LOOK_HANGS = f"{_HANGS}It is asked again at the next look."
_SAMPLE_HANGS = f"{_HANGS}The looks at the GPUs go on; use is asked for again at the next sample."


class NvmlDriver:
    """Asks the GPUs of this node. Close it when done; asking after that opens NVML again."""

    def __init__(self, *, pci_devices: Path = Path("/sys/bus/pci/devices"), timeout_s: float = 10.0) -> None:
        """`pci_devices` is where the kernel tells each GPU's NUMA node; `timeout_s` bounds one call."""
        self._session = NvmlSession()
        self._sampler = NvmlSampler()
        self._reader = NvmlReader(
            self._session, pci_devices=pci_devices, let_go=self._sampler.let_go, on_look=self._sampler.looked
        )
        self._events = NvmlEvents(self._session)
        self._timeout_s = timeout_s
        self._thread = DaemonThread("nvml", advice=_LOOK_HANGS)
        self._sampling_thread = DaemonThread("nvml-sampling", advice=_SAMPLE_HANGS)

    async def read(self) -> GpuInventory:
        """All GPUs of the node as they are now, and how they are connected.

        A GPU that NVML lost is Unhealthy in the answer, with the reason. Cancelled, the look goes on in its thread.

        Raises:
            Unavailable: NVML is absent, was lost as a whole, or does not answer in time.
        """
        return await self._thread.call(self._reader.read, "reading the GPUs through NVML", self._timeout_s)

    async def events(self) -> list[GpuEvent]:
        """What happened since the last call, oldest first, at most 1,024. Does not wait for news.

        Raises:
            Unavailable: NVML cannot be opened, or waiting for events failed (told once; the next call registers anew).
        """
        return await self._thread.call(self._events.take, "taking the GPUs' events from NVML", self._timeout_s)

    async def sample(self) -> DriverSample:
        """What the GPUs that answer and the processes on them use.

        Raises:
            Unavailable: NVML is absent, was lost as a whole, or does not answer in time.
        """
        what = "sampling the GPUs through NVML"
        return await self._sampling_thread.call(self._sampler.sample, what, self._timeout_s)

    async def close(self) -> None:
        """Shuts NVML down, if it answers within a second; it ends with the process anyway."""
        async with asyncio.TaskGroup() as group:
            group.create_task(_closed(self._thread, self._close, self._timeout_s), name="close nvml")
            group.create_task(
                _closed(self._sampling_thread, self._sampler.let_go, self._timeout_s), name="close nvml sampling"
            )

    def _close(self) -> None:
        self._events.close()
        self._session.close()
        self._sampler.let_go()  # its own thread is not asked while a sample hangs, which lets go when it returns


async def _closed(thread: DaemonThread, close: Callable[[], None], timeout_s: float) -> None:
    try:
        await thread.call(close, "closing NVML", min(timeout_s, _CLOSE_TIMEOUT_S))
    except Unavailable as error:
        log.warning("nvml_not_closed", reason=str(error))
