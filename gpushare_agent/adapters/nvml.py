"""The NVML driver: cards, health and topology of real GPUs, for asyncio.

NVML calls block, and a sick driver can block them for ever. So they run in a thread, one at a time, bounded by a timeout.
The thread is a daemon made for the call, not one of asyncio's pool: the pool's threads are joined when the loop closes,
and a hung driver would then keep the agent from ending. While a call hangs, further ones are refused at once, so that
threads do not pile up. What NVML says is read in nvml_reader.py.

State owned: whether a call is under way. Source: NVML API reference, through nvidia-ml-py (module pynvml).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from gpushare_agent.adapters.nvml_reader import NvmlReader
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.gpus import GpuInventory

log = structlog.get_logger(__name__)

T = TypeVar("T")

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
        self._turn = asyncio.Lock()
        self._in_driver = threading.Lock()

    async def read(self) -> GpuInventory:
        """All cards of the node as they are now, and how they are connected.

        A card that NVML lost is Unhealthy in the answer, with the reason. Cancelled, the look goes on in its thread.

        Raises:
            Unavailable: NVML is absent, was lost as a whole, or does not answer in time.
        """
        return await self._call(self._reader.read, "reading the cards through NVML", self._timeout_s)

    async def close(self) -> None:
        """Shuts NVML down, if it answers within a second; it ends with the process anyway."""
        try:
            await self._call(self._reader.close, "closing NVML", min(self._timeout_s, _CLOSE_TIMEOUT_S))
        except Unavailable as error:
            log.warning("nvml_not_closed", reason=str(error))

    async def _call(self, blocking: Callable[[], T], what: str, timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                if not self._in_driver.acquire(blocking=False):
                    raise Unavailable(f"{what} was not tried: an earlier call still hangs in the driver. {_HANGS}")
                return await self._in_thread(blocking)
        except TimeoutError as error:
            raise Unavailable(f"{what} got no answer within {timeout_s:g} s. {_HANGS}") from error

    async def _in_thread(self, blocking: Callable[[], T]) -> T:
        """Runs `blocking` in a daemon thread, which releases `_in_driver` when it returns, however late."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                settle: Callable[[], None] = partial(answer.set_result, blocking())
            except BaseException as error:  # noqa: BLE001 - handed to the waiting coroutine, whatever it is
                settle = partial(answer.set_exception, error)
            self._in_driver.release()
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(lambda: None if answer.done() else settle())

        threading.Thread(target=work, name="nvml", daemon=True).start()
        return await answer
