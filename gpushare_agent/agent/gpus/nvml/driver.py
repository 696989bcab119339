"""The NVML driver: GPUs, topology, use and events of real GPUs, for asyncio.

NVML calls block, and a faulty driver can block them for ever. So they run in daemon threads, bounded by a timeout
(kit/daemon_thread.py): one for the GPUs (reader.py), one that waits for events (events.py), one for the samples (usage.py),
one for who keeps GPUs busy (busy_time.py), one for each GPU on which MIG instances are made (mig_instances.py). All share
one opening of NVML (session.py). A sample that hangs does not affect the GPUs' health: the polls go on. One that takes a
tenth of a second does not delay the next reading of busy_time.

Source: NVML API reference, through nvidia-ml-py (module pynvml).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import structlog

from gpushare_agent.agent.gpus.nvml.busy_time import NvmlBusyTime
from gpushare_agent.agent.gpus.nvml.events import NvmlEvents
from gpushare_agent.agent.gpus.nvml.memory_limits import check_limits, keep_limits
from gpushare_agent.agent.gpus.nvml.mig import MINORS_FILE
from gpushare_agent.agent.gpus.nvml.mig_instances import MigLayouts, create_instance, destroy_instance
from gpushare_agent.agent.gpus.nvml.reader import NvmlReader
from gpushare_agent.agent.gpus.nvml.session import NvmlSession
from gpushare_agent.agent.gpus.nvml.usage import NvmlUsage
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.gpu_health import GpuEvent
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.isolation import LimitOutcome, MemoryLimit
from gpushare_agent.core.model.mig import MigGpuInstance, MigPlacement
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.usage import DriverSample, GpuBusy

log = structlog.get_logger(__name__)

_CLOSE_TIMEOUT_S = 0.8
_HANGS = "The driver may hang: look for NVRM and Xid lines in `dmesg`; a hung driver needs a reboot. "
_READ_HANGS = f"{_HANGS}It is called again at the next poll."
_SAMPLE_HANGS = f"{_HANGS}Polls of the GPUs go on; usage is read again at the next sample."
_INSTANCES_HANG = f"{_HANGS}Polls and the other GPUs go on; the GPU's instances are listed at the next poll."
_EVENTS_HANG = f"{_HANGS}Polls of the GPUs go on; events are waited for again at the next try."


class NvmlDriver:
    """The GPUs of this node. `pci_devices` is where the kernel names each GPU's NUMA node; `timeout_s` bounds one call.
    `unified_memory_mib` is the memory of a GPU that uses the host's. MIG instances are listed where `with_instances`, and
    made on GPUs in MIG mode that `on_demand` selects; `in_use`, called in the loop's thread, are the GPUs that containers
    have.

    Calls raise Unavailable where NVML is absent, was lost as a whole, or does not answer in time. Close it when done; a
    call after that opens NVML again.
    """

    def __init__(
        self,
        *,
        pci_devices: Path = Path("/sys/bus/pci/devices"),
        proc: Path = Path("/proc"),
        timeout_s: float = 10.0,
        with_instances: bool = False,
        on_demand: Sequence[str] = (),
        mig_minors: Path = MINORS_FILE,
        unified_memory_mib: int = 0,
    ) -> None:
        self._session = NvmlSession()
        self._usage = NvmlUsage(self._session, with_instances=with_instances)
        self._busy_time = NvmlBusyTime(self._session)
        self._reader = NvmlReader(
            self._session,
            pci_devices=pci_devices,
            proc=proc,
            layouts=MigLayouts(self._session),
            mig_minors=mig_minors if with_instances else None,
            on_demand=on_demand,
            unified_memory_mib=unified_memory_mib,
        )
        self.in_use: Callable[[], Collection[GpuUuid]] = tuple
        self._events = NvmlEvents(self._session)
        self._timeout_s = timeout_s
        self._thread = DaemonThread("nvml", advice=_READ_HANGS)
        self._event_thread = DaemonThread("nvml-events", advice=_EVENTS_HANG)
        self._sampling_thread = DaemonThread("nvml-sampling", advice=_SAMPLE_HANGS)
        self._busy_thread = DaemonThread("nvml-busy", advice=_SAMPLE_HANGS)
        self._instance_threads: dict[GpuUuid, DaemonThread] = {}

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
        # Bounded as every call: one that hangs is noticed within twice the timeout.
        wait_s = min(wait_s, self._timeout_s)
        what = "waiting for the GPUs' events in NVML"
        return await self._event_thread.call(partial(self._events.take, wait_s), what, wait_s + self._timeout_s)

    async def sample(self) -> DriverSample:
        """What the GPUs that answer and the processes on them use."""
        what = "sampling the GPUs through NVML"
        return await self._sampling_thread.call(self._usage.sample, what, self._timeout_s)

    async def sample_busy(self, gpus: Collection[GpuUuid]) -> Mapping[GpuUuid, GpuBusy]:
        """Who keeps these GPUs busy, of those that answer."""
        read = partial(self._busy_time.read, frozenset(gpus))
        return await self._busy_thread.call(read, "reading who keeps the GPUs busy through NVML", self._timeout_s)

    async def check_memory_limits(self, cgroup: Path, *, may_set: bool) -> None:
        """Whether the driver limits the memory of cgroups. Raises Rejected with the remedy."""
        check = partial(check_limits, self._session, cgroup, may_set=may_set)
        await self._thread.call(check, "asking NVML for memory limits", self._timeout_s)

    async def keep_memory_limits(self, desired: Sequence[MemoryLimit], *, may_set: bool) -> list[LimitOutcome]:
        """Reads the limits of cgroups, and sets those that differ where `may_set`; one outcome for each of `desired`."""
        keep = partial(keep_limits, self._session, desired, may_set=may_set)
        return await self._thread.call(keep, "keeping memory limits through NVML", self._timeout_s)

    async def create_instance(self, place: MigPlacement, *, is_new: bool = False) -> MigGpuInstance:
        """As NodeDriver has it."""
        create = partial(create_instance, self._session, place, is_new=is_new)
        return await self._of(place.parent).call(create, f"making a MIG instance of {place.parent}", self._timeout_s)

    async def destroy_instance(self, parent: GpuUuid, instance: MigGpuInstance) -> None:
        """As NodeDriver has it."""
        destroy = partial(destroy_instance, self._session, parent, instance)
        await self._of(parent).call(destroy, f"removing a MIG instance of {parent}", self._timeout_s)

    def _of(self, uuid: GpuUuid) -> DaemonThread:
        # Of its own for each GPU: one that is slow to divide delays no other.
        new = DaemonThread("nvml-mig", advice=_INSTANCES_HANG)
        return self._instance_threads.setdefault(uuid, new)

    async def close(self) -> None:
        """Shuts NVML down, if it answers within a second; it ends with the process anyway."""
        try:
            await self._thread.call(self._session.close, "closing NVML", min(self._timeout_s, _CLOSE_TIMEOUT_S))
        except Unavailable as error:
            log.warning("nvml_not_closed", reason=str(error))
