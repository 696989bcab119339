"""How long each process kept a GPU busy, counted from NVML's samples of utilisation. Blocking, called by driver.py.

usage.py shows a mean of samples, once a second; this is for who reads ten times a second and adds up. NVML has a sample
of a process for each period in which it did something, a sixth of a second to a second by the reference, and none for
others. So

    no sample yet      says nothing: the period may not be over
    the next sample    counts for the time since the process's sample before
    one after a pause  counts for a period: in the pause the process was idle

NVML does not report the period: it is what lies between two samples of a process that goes on. Two calls of the driver for
a GPU, for all of its processes.

State owned: of each GPU the newest sample, the last one of each process, and what lay between samples.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter

from msgspec import Struct, field

from gpushare_agent.agent.gpus.nvml.calls import GpuCalls, GpuLostError
from gpushare_agent.agent.gpus.nvml.session import CallError, NvmlSession, ask
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.usage import BusyProcess, GpuBusy

_US = 1000
"""Nanoseconds."""
LONGEST_PERIOD_US = 1_000_000
FIRST_PERIOD_US = 1_000_000 // 6
SHORTEST_GAP_US = 50_000
"""What is less is no period: the same sample with another time."""
SILENCE_US = 1_250_000
"""So long after a moment the driver has a sample of it, if a process was busy then."""
LONGEST_GAP_NS = 2_500_000_000
"""Between two readings: the driver keeps a few samples only, so what was longer ago may be missing."""
_MOST_GAPS = 64
_GOES_ON = 1.5
"""Periods between two samples of a process that was busy all the while."""


class SamplePeriod(Struct):
    """The driver's sampling period, by what lay between samples of one process. Samples come a little early or late, so
    it is not the shortest gap, but one of the shortest."""

    _gaps: deque[int] = field(default_factory=deque)
    _sorted: list[int] = field(default_factory=list)
    us: int = FIRST_PERIOD_US

    def note(self, gap_us: int) -> None:
        # Some drivers give the same sample again with a time some microseconds later: it lost a limit (measured).
        if gap_us < SHORTEST_GAP_US:
            return
        if len(self._gaps) == _MOST_GAPS:
            del self._sorted[bisect_left(self._sorted, self._gaps.popleft())]
        self._gaps.append(gap_us)
        insort(self._sorted, gap_us)
        # Near the shortest: a process that pauses has long gaps, one that goes on has the driver's period.
        self.us = min(LONGEST_PERIOD_US, self._sorted[len(self._sorted) // 16])


class GpuBusyTime(Struct):
    """The busy time on one GPU, during one opening of NVML."""

    clock_ns: Callable[[], int] = time.monotonic_ns
    wall_clock_ns: Callable[[], int] = time.time_ns
    period: SamplePeriod = field(default_factory=SamplePeriod)
    calls: GpuCalls = field(default_factory=lambda: GpuCalls(remembers_lists=True))
    _newest_us: int = 0
    """0: nothing was read yet."""
    _until_us: int = 0
    _until_ns: int = 0
    _read_at_ns: int = 0
    _last_us: dict[int, int] = field(default_factory=dict)

    def read(self) -> GpuBusy | None:
        """The busy time of each process; None where the GPU could not list its processes. Raises GpuLostError,
        DriverLostError."""
        # Both at once: NVML's samples have the wall clock's time, readers have the monotonic one.
        at_ns, now_us = self.clock_ns(), self.wall_clock_ns() // _US
        try:
            listed = self.calls.list_processes("nvmlDeviceGetComputeRunningProcesses")
        except CallError:
            return None
        # Without the list nobody knows which processes there are.
        if listed is None:
            return None
        # A pause of ours, or a clock that was set back: both leave what was between unknown.
        is_continued = self._newest_us > 0 and at_ns - self._read_at_ns <= LONGEST_GAP_NS and self._until_us <= now_us
        # Spans would begin before the pause: nobody knows what was in it.
        if not is_continued:
            self._last_us.clear()
        self._read_at_ns = at_ns
        until_us = self._until_us
        busy_us = self._read_busy(now_us, is_continued=is_continued)
        memory = {**dict.fromkeys(busy_us or (), 0), **listed}  # some have just ended
        processes = tuple(
            BusyProcess(pid=pid, memory_bytes=used, busy_ns=round((busy_us or {}).get(pid, 0.0) * _US))
            for pid, used in memory.items()
        )
        # Between the two clocks lie microseconds, others each time. The same moment must stay the same number:
        # libgpushare takes another number for another sample, and an earlier one for a beginning.
        if not is_continued or self._until_us != until_us:
            found_ns = at_ns - (now_us - self._until_us) * _US
            self._until_ns = max(self._until_ns, found_ns) if is_continued else found_ns
        until_ns = 0 if busy_us is None else self._until_ns
        return GpuBusy(at_ns=at_ns, busy_until_ns=until_ns, is_continued=is_continued, processes=processes)

    def _read_busy(self, now_us: int, *, is_continued: bool) -> dict[int, float] | None:
        # A clock that was set back would hide all that is newer.
        since_us = min(self._newest_us, now_us)
        try:
            samples = self.calls.list_uses(since_us, now_us)
        except CallError:
            return None
        if samples is None:
            return None
        samples.sort(key=attrgetter("at_us"))
        # No sample: the driver is silent of a moment until so long after it, so what is before is known to be idle.
        self._newest_us = max(since_us, samples[-1].at_us if samples else now_us - SILENCE_US)
        until_us = min(self._newest_us, now_us)
        self._until_us = max(self._until_us, until_us) if is_continued else until_us
        busy: dict[int, float] = {}
        for sample in samples:
            span_us = self._span_us(sample.pid, sample.at_us)
            if is_continued:
                busy[sample.pid] = busy.get(sample.pid, 0.0) + sample.sm / 100 * span_us
        # Processes come and go without end.
        self._last_us = {pid: at for pid, at in self._last_us.items() if now_us - at < 2 * SILENCE_US}
        return busy

    def _span_us(self, pid: int, at_us: int) -> int:
        last = self._last_us.get(pid)
        self._last_us[pid] = at_us
        # Its first sample: it was busy within the period before, and no more is known.
        if last is None or at_us <= last:
            return self.period.us
        gap = at_us - last
        self.period.note(gap)
        return gap if gap <= _GOES_ON * self.period.us else self.period.us


class NvmlBusyTime:
    """The busy time on the GPUs that are asked for."""

    def __init__(self, session: NvmlSession) -> None:
        self._session = session
        self._opening = 0
        self._gpus: dict[GpuUuid, GpuBusyTime] = {}

    def read(self, gpus: Collection[GpuUuid]) -> Mapping[GpuUuid, GpuBusy]:
        """Raises Unavailable: NVML cannot be opened, or was lost as a whole."""
        with self._session.used("reading the GPUs' processes through NVML"):
            # What was read ended with the opening before.
            if self._opening != self._session.openings:
                self._opening = self._session.openings
                self._gpus.clear()
            handles, found = self._session.handles(), {}
            # Of GPUs that nobody asks for any more nothing is kept: each life of a MIG instance has another UUID.
            self._gpus = {uuid: gpu for uuid, gpu in self._gpus.items() if uuid in gpus}
            for uuid in sorted(set(gpus)):
                gpu = self._gpus.get(uuid) or GpuBusyTime()
                handle = handles.get(uuid)
                # NVML has no utilisation of a MIG instance, but what its processes have. On a busy node a handle may take
                # seconds, so it is kept: another instance has another UUID.
                if handle is None and uuid.startswith("MIG-"):
                    handle = gpu.calls.handle or ask("nvmlDeviceGetHandleByUUID", uuid)
                if handle is None:
                    continue
                self._gpus[uuid] = gpu
                gpu.calls.begin_round(handle, Counter())
                try:
                    read = gpu.read()
                except GpuLostError:
                    # Lost: what follows is a new beginning.
                    del self._gpus[uuid]
                    continue
                if read is not None:
                    found[uuid] = read
            return found
