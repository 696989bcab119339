"""The NVML driver: GPUs, topology, use and events of real GPUs, for asyncio.

NVML calls block, and a faulty driver can block them for ever. So they run in daemon threads, bounded by a timeout
(kit/daemon_thread.py): one for the GPUs (reader.py), one that waits for events (events.py), one for the samples (usage.py),
one for who keeps GPUs busy (busy_time.py), each with its own opening of NVML. A sample that hangs does not affect the
GPUs' health: the polls go on. One that takes a tenth of a second does not delay the next reading of busy_time.

Source: NVML API reference, through nvidia-ml-py (module pynvml).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from gpushare_agent.gpus.health import GpuEvent
from gpushare_agent.gpus.nvml.busy_time import NvmlBusyTime
from gpushare_agent.gpus.nvml.events import NvmlEvents
from gpushare_agent.gpus.nvml.memory_limits import NvmlMemoryLimits
from gpushare_agent.gpus.nvml.mig import MINORS_FILE
from gpushare_agent.gpus.nvml.reader import NvmlReader
from gpushare_agent.gpus.nvml.session import NvmlSession, Poll
from gpushare_agent.gpus.nvml.usage import NvmlUsage
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.isolation import LimitOutcome, MemoryLimit
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.usage import DriverSample, GpuBusy

log = structlog.get_logger(__name__)
T = TypeVar("T")

_CLOSE_TIMEOUT_S = 0.8
_HANGS = "The driver may hang: look for NVRM and Xid lines in `dmesg`; a hung driver needs a reboot. "
_READ_HANGS = f"{_HANGS}It is called again at the next poll."
_SAMPLE_HANGS = f"{_HANGS}Polls of the GPUs go on; usage is read again at the next sample."
_EVENTS_HANG = f"{_HANGS}Polls of the GPUs go on; events are waited for again at the next try."
_MOMENT_S = 0.02
_ROUND_WAIT_S = 0.6
"""A round of samples takes about a tenth of a second, a wait for events ends within half of one; the poll that waits for
them has a timeout of its own."""


class _Opening:
    """Samples, or waits for events, through an opening of its own, so that neither blocks the polls.

    NVML may be called from several threads and counts its openings: it shuts down when the last one is closed, and only a
    complete shutdown brings back a GPU that was reset, or a driver that was reloaded. So the reader's thread, which
    detects these, also closes this opening, at the latest when the round under way ends. `call` is called from the
    thread of its calls, `note_read` from the reader's, the rest from either. State owned: the opening, the lock for its
    use, and what the last poll found. `before_close` is called while it is still open.
    """

    def __init__(self) -> None:
        self.session = NvmlSession()
        self.before_close: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._must_close = False
        self._found: Poll | None = None
        self._enumerated: Poll | None = None

    @property
    def must_end(self) -> bool:
        """Whether a wait should end: somebody closes the opening, or a poll found other GPUs."""
        return self._must_close or self._found != self._enumerated

    @property
    def found(self) -> Poll | None:
        """The poll to which the handles belong: a newer one may come while they are in use."""
        return self._enumerated

    def call(self, read: Callable[[], T]) -> T:
        """Raises what `read` raises."""
        with self._lock:
            self.close_if_requested()
            found = self._found
            # The reader enumerates at each poll; here handles stay while it finds the same GPUs.
            if found != self._enumerated:
                self.session.forget_gpus()
                self._enumerated = found
            try:
                return read()
            finally:
                # Requested while the read went on: the reader's thread does not wait for it.
                self.close_if_requested()

    def close(self) -> None:
        """Closes the opening now, or when the round under way ends; the next call opens it again."""
        self.request_close()
        # A moment: the thread that lets go may just have looked.
        if self.hold(_MOMENT_S):
            self.close_if_requested()
            self.release()

    def request_close(self) -> None:
        """Whoever has the lock closes the opening when it lets go."""
        self._must_close = True

    def hold(self, timeout_s: float = _ROUND_WAIT_S) -> bool:
        """Keeps `call` from opening it until `release`. Not waited for for ever: a sample that hangs has the lock."""
        return self._lock.acquire(timeout=timeout_s)

    def release(self) -> None:
        self._lock.release()

    def note_read(self, found: Poll) -> None:
        """What a poll found; where it differs from the poll before, the next call enumerates the GPUs again."""
        self._found = found

    def close_if_requested(self) -> None:
        if self._must_close:
            self._must_close = False
            self.before_close()
            self.session.close()


def _close_together(openings: Sequence[_Opening]) -> None:
    """None is opened again before all are closed: NVML shuts down wholly only with the last one."""
    for opening in openings:
        opening.request_close()
    held = [opening for opening in openings if opening.hold()]
    for opening in held:
        opening.close_if_requested()
    for opening in held:
        opening.release()


class NvmlDriver:
    """The GPUs of this node. `pci_devices` is where the kernel names each GPU's NUMA node; `timeout_s` bounds one call.
    MIG instances are listed where `with_instances`; `in_use`, called in the loop's thread, are the GPUs that containers
    have.

    Calls raise Unavailable where NVML is absent, was lost as a whole, or does not answer in time. Close it when done; a
    call after that opens NVML again.
    """

    def __init__(
        self,
        *,
        pci_devices: Path = Path("/sys/bus/pci/devices"),
        timeout_s: float = 10.0,
        with_instances: bool = False,
        mig_minors: Path = MINORS_FILE,
    ) -> None:
        self._session = NvmlSession()
        # An opening for each thread: NVML counts them, and a hung call of one leaves the others open.
        self._waits, self._samples, self._busy_times = self._openings = _Opening(), _Opening(), _Opening()
        self._usage = NvmlUsage(self._samples.session, with_instances=with_instances)
        self._busy_time = NvmlBusyTime(self._busy_times.session)
        self._reader = NvmlReader(
            self._session,
            pci_devices=pci_devices,
            close_others=partial(_close_together, self._openings),
            on_read=self._note_read,
            mig_minors=mig_minors if with_instances else None,
        )
        self.in_use: Callable[[], Collection[GpuUuid]] = tuple
        self._events = NvmlEvents(self._waits.session, lambda: self._waits.must_end)
        self._waits.before_close = self._events.close
        self._limits = NvmlMemoryLimits(self._session)
        self._timeout_s = timeout_s
        self._thread = DaemonThread("nvml", advice=_READ_HANGS)
        self._event_thread = DaemonThread("nvml-events", advice=_EVENTS_HANG)
        self._sampling_thread = DaemonThread("nvml-sampling", advice=_SAMPLE_HANGS)
        self._busy_thread = DaemonThread("nvml-busy", advice=_SAMPLE_HANGS)

    async def read(self) -> GpuInventory:
        """All GPUs of the node as they are now, and how they are connected.

        A GPU that NVML lost is Unhealthy in the answer, with the reason. Cancelled, the call goes on in its thread.
        """
        # Asked here, in the loop's thread, to which the allocation cache belongs.
        read = partial(self._reader.read, frozenset(self.in_use()))
        return await self._thread.call(read, "reading the GPUs through NVML", self._timeout_s)

    async def events(self, wait_s: float) -> list[GpuEvent]:
        """Events since the last call, oldest first, at most 1,024; up to `wait_s` is waited for the first one. Where waiting
        for events fails, Unavailable is raised once; the next call registers again."""

        def take() -> list[GpuEvent]:
            polled = self._waits.found
            return self._events.take(wait_s, polled.answering if polled is not None else None)

        # Bounded as every call: one that hangs is noticed within twice the timeout.
        wait_s = min(wait_s, self._timeout_s)
        what = "waiting for the GPUs' events in NVML"
        return await self._event_thread.call(partial(self._waits.call, take), what, wait_s + self._timeout_s)

    async def sample(self) -> DriverSample:
        """What the GPUs that answer and the processes on them use."""
        what = "sampling the GPUs through NVML"
        sample = partial(self._samples.call, self._usage.sample)
        return await self._sampling_thread.call(sample, what, self._timeout_s)

    async def sample_busy(self, gpus: Collection[GpuUuid]) -> Mapping[GpuUuid, GpuBusy]:
        """Who keeps these GPUs busy, of those that answer."""
        read = partial(self._busy_times.call, partial(self._busy_time.read, frozenset(gpus)))
        return await self._busy_thread.call(read, "reading who keeps the GPUs busy through NVML", self._timeout_s)

    async def check_memory_limits(self, cgroup: Path, *, may_set: bool) -> None:
        """Whether the driver limits the memory of cgroups. Raises Rejected with the remedy."""
        check = partial(self._limits.check, cgroup, may_set=may_set)
        await self._thread.call(check, "asking NVML for memory limits", self._timeout_s)

    async def keep_memory_limits(self, desired: Sequence[MemoryLimit], *, may_set: bool) -> list[LimitOutcome]:
        """Reads the limits of cgroups, and sets those that differ where `may_set`; one outcome for each of `desired`."""
        keep = partial(self._limits.keep, desired, may_set=may_set)
        return await self._thread.call(keep, "keeping memory limits through NVML", self._timeout_s)

    async def close(self) -> None:
        """Shuts NVML down, if it answers within a second; it ends with the process anyway."""
        # Its thread closes it when it has waited, and is not waited for: the process may end before.
        self._waits.request_close()
        async with asyncio.TaskGroup() as group:
            # At once, not one after the other: the process has a second for all.
            group.create_task(_closed(self._thread, self._close, self._timeout_s), name="close nvml")
            for name, thread, opening in (
                ("sampling", self._sampling_thread, self._samples),
                ("busy", self._busy_thread, self._busy_times),
            ):
                group.create_task(_closed(thread, opening.close, self._timeout_s), name=f"close nvml {name}")

    def _close(self) -> None:
        self._session.close()
        # Their own threads are not called while a sample hangs, which closes it on return.
        for opening in self._openings:
            opening.close()

    def _note_read(self, found: Poll) -> None:
        for opening in self._openings:
            opening.note_read(found)


async def _closed(thread: DaemonThread, close: Callable[[], None], timeout_s: float) -> None:
    try:
        await thread.call(close, "closing NVML", min(timeout_s, _CLOSE_TIMEOUT_S))
    except Unavailable as error:
        log.warning("nvml_not_closed", reason=str(error))
