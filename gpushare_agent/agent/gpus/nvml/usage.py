"""What the GPUs and the processes on them use, from NVML. Blocking, called by driver.py.

Every value is read each round, except PCIe traffic: NVML measures it on the spot for 20 ms each way, so it is read of one
GPU per round and the others keep their last value.

NVML has three lists of processes (compute, graphics, clients of MPS), each with the memory, and apart from them samples of
utilisation, one for each process that did something in the driver's sampling period of up to a second. A process may be in
several lists, in a list and in no sample, or in a sample and in no list.

State owned: of each GPU what it does not support, the newest sample seen and the last use of each process; and the number of
the round. All of it ends with the opening of NVML (session.py).

Source: NVML API reference (nvmlDeviceGetComputeRunningProcesses and its siblings, nvmlDeviceGetProcessUtilization). Units
there: percent, milliwatts, MHz, KB/s (1000 bytes), NVLink in KiB.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import pynvml
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.gpus.nvml.calls import GpuCalls, GpuLostError, ProcessUse
from gpushare_agent.agent.gpus.nvml.mig import find_instances, mig_mode
from gpushare_agent.agent.gpus.nvml.session import CallError, NvmlSession
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.usage import DriverSample, GpuSample, ProcessKind, ProcessSample

_LISTS = {
    ProcessKind.GRAPHICS: "nvmlDeviceGetGraphicsRunningProcesses",
    ProcessKind.COMPUTE: "nvmlDeviceGetComputeRunningProcesses",
    ProcessKind.MPS: "nvmlDeviceGetMPSComputeRunningProcesses",
}
"""By ascending precision: a process in two lists is of the later kind."""

_ROUNDS_VALID = 1
"""A busy process without a new sample has its last use for so many rounds: our round may fall between two of the
driver's."""

_RATIOS = ("sm_ratio", "memory_ratio", "encoder_ratio", "decoder_ratio")
"""Of a ProcessSample, in the order of ProcessUse."""
Values = dict[str, Any]
"""Fields of a GpuSample or a ProcessSample."""
_UNKNOWN: Values = {}
_IDLE: Values = dict.fromkeys(_RATIOS, 0.0)


class GpuProcesses:
    def __init__(self) -> None:
        self._newest_us: int | None = None
        self._rounds = 0
        self._last: dict[int, tuple[int, Values]] = {}
        """The last use of each process, and the round that it is of."""

    def read(self, calls: GpuCalls) -> tuple[ProcessSample, ...] | None:
        """The processes by PID; None where the GPU could not list them. Raises GpuLostError, DriverLostError."""
        listed = _read_lists(calls)
        is_first = self._newest_us is None
        # Read also where the lists failed: what is not taken now would be counted in the next round.
        fresh = self._read_use(calls)
        if listed is None:
            return None
        for pid in fresh or ():
            # It ran in this round and has ended since, or is in none of the lists: its use belongs to this round.
            listed.setdefault(pid, ProcessSample(pid=pid))
        self._rounds += 1
        last = self._last | {pid: (self._rounds, use) for pid, use in (fresh or {}).items()}
        self._last = {pid: use for pid, use in last.items() if pid in listed}
        samples = [listed[pid] for pid in sorted(listed)]
        return tuple(samples if is_first or fresh is None else (replace(one, **self._use(one)) for one in samples))

    def _use(self, sample: ProcessSample) -> Values:
        """No sample means idle, except for a client of MPS that never had one: some drivers do not sample those."""
        # NVML has no sample of a process that did nothing.
        if sample.pid not in self._last:
            return _UNKNOWN if sample.kind is ProcessKind.MPS else _IDLE
        of_round, use = self._last[sample.pid]
        return use if self._rounds - of_round <= _ROUNDS_VALID else _IDLE

    def _read_use(self, calls: GpuCalls) -> dict[int, Values] | None:
        """The mean over each process's samples since the last call; None where the GPU has none.

        The first call only notes how far the driver's buffer goes: it may be full of old samples.
        """
        now_us = time.time_ns() // 1000
        # Whatever the buffer has is of before this agent: a mean over it would be no recent use.
        is_first = self._newest_us is None
        since_us = min(self._newest_us or 0, now_us)  # a clock that was set back would else hide all that is newer
        try:
            samples = calls.list_uses(since_us, now_us)
        except CallError:
            return None
        if samples is None:
            return None
        self._newest_us = max((sample.at_us for sample in samples), default=since_us)
        if is_first:
            return {}
        by_pid: defaultdict[int, list[ProcessUse]] = defaultdict(list)
        for sample in samples:
            by_pid[sample.pid].append(sample)
        return {pid: _mean(of_pid) for pid, of_pid in by_pid.items()}


def _mean(samples: list[ProcessUse]) -> Values:
    _, _, *columns = zip(*samples, strict=True)
    return {name: fmean(column) / 100 for name, column in zip(_RATIOS, columns, strict=True)}


def _read_lists(calls: GpuCalls) -> dict[int, ProcessSample] | None:
    """The processes of all lists; None where one failed, because a process left out would look ended, or where the GPU has
    none of the lists."""
    try:
        answers = {kind: calls.list_processes(name) for kind, name in _LISTS.items()}
    except CallError:
        return None
    if all(answer is None for answer in answers.values()):
        return None
    listed: dict[int, ProcessSample] = {}
    for kind, answer in answers.items():
        for pid, used in (answer or {}).items():
            # In two lists: one process, of the more precise kind; its memory is in both, and not to be added up.
            earlier = listed[pid].memory_bytes if pid in listed else None
            most = max((size for size in (earlier, used) if size is not None), default=None)
            listed[pid] = ProcessSample(pid=pid, kind=kind, memory_bytes=most)
    return listed


_ALL_LINKS = 0xFFFFFFFF
_KIB = 1024
_KB = 1000
_MHZ = 1_000_000

_THROTTLE_REASONS = {
    0x002: "applications_clocks",
    0x004: "power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
_GPU_IDLE = 0x001
"""A GPU that has nothing to do is not throttled."""


class _OfGpu(Struct):
    """What one round leaves for the next."""

    calls: GpuCalls = field(default_factory=GpuCalls)
    processes: GpuProcesses = field(default_factory=GpuProcesses)
    pcie: Values = field(default_factory=dict)


class NvmlUsage:
    """`with_instances`: MIG instances are sampled instead of their GPU, whose processes are theirs."""

    def __init__(self, session: NvmlSession, *, with_instances: bool = False) -> None:
        self._session = session
        self._with_instances = with_instances
        self._opening = 0
        self._rounds = 0
        self._gpus: dict[GpuUuid, _OfGpu] = {}

    def sample(self) -> DriverSample:
        """One round over all GPUs. Raises Unavailable: NVML cannot be opened, or was lost as a whole."""
        with self._session.used("sampling the GPUs through NVML"):
            return self._sample()

    def _sample(self) -> DriverSample:
        if self._opening != self._session.openings:
            self._opening = self._session.openings
            self._gpus.clear()
        self._rounds += 1
        handles = dict(self._session.handles())
        # First: GPUs with instances are not sampled themselves.
        instances = self._instances(handles) if self._with_instances else {}
        uuids = sorted(handles)
        # 20 ms each way: of 16 GPUs the round would take two thirds of a second.
        measured = uuids[self._rounds % len(uuids)] if uuids else None
        errors: Counter[str] = Counter()
        gpus: list[GpuSample] = []
        for uuid in (*uuids, *sorted(instances)):
            one = self._gpus.setdefault(uuid, _OfGpu())
            one.calls.begin_round(handles.get(uuid) or instances[uuid], errors)
            try:
                if uuid in instances:  # memory and processes: NVML has nothing else of one
                    gpus.append(
                        GpuSample(uuid=uuid, processes=one.processes.read(one.calls), **_read(one.calls, _MEMORY))
                    )
                else:
                    gpus.append(_sample_gpu(uuid, one, measure_pcie=uuid == measured))
            except GpuLostError:
                # Its counters begin again. A GPU is missing in this round; an instance stays, without numbers: its GPU is
                # reported by the poll.
                del self._gpus[uuid]
                gpus += [GpuSample(uuid=uuid)] if uuid in instances else []
        self._gpus = {uuid: one for uuid, one in self._gpus.items() if uuid in handles or uuid in instances}
        return DriverSample(gpus=tuple(gpus), errors=dict(sorted(errors.items())))

    def _instances(self, handles: dict[GpuUuid, Any]) -> dict[GpuUuid, Any]:
        """Found again in each round, because they come and go; GPUs that have some are taken out of `handles`."""
        instances: dict[GpuUuid, Any] = {}
        for uuid, handle in list(handles.items()):
            found = find_instances(handle) if mig_mode(handle) else []
            if found:
                del handles[uuid]
            instances |= {instance.uuid: instance.handle for instance in found}
        return instances


def _sample_gpu(uuid: GpuUuid, one: _OfGpu, *, measure_pcie: bool) -> GpuSample:
    values = _read(one.calls, _MEMORY, *_VALUES) | _counters(one.calls)
    if measure_pcie:
        one.pcie = _read(one.calls, *_PCIE)
    processes = one.processes.read(one.calls)
    # At the end: a GPU whose every value is unknown is lost, not idle.
    one.calls.check_alive()
    return GpuSample(uuid=uuid, processes=processes, **values, **one.pcie)


_Reading = tuple[Callable[[Any], Values], tuple[tuple[Any, ...], ...]]
"""What becomes of an answer; and the calls, of which the first that the GPU has counts: later ones are of older drivers."""


def _read(calls: GpuCalls, *readings: _Reading) -> Values:
    values: Values = {}
    for converted, names in readings:
        answer = calls.value(*names)
        values |= {} if answer is None else converted(answer)
    return values


def _scaled(name: str, factor: float, *calls: tuple[Any, ...]) -> _Reading:
    return lambda number: {name: number * factor}, calls


# The second version of the call counts what the driver keeps for itself apart from what is used.
_MEMORY: _Reading = (
    lambda it: {"memory_used_bytes": it.used, "memory_free_bytes": it.free, "memory_total_bytes": it.total},
    (("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2), ("nvmlDeviceGetMemoryInfo",)),
)
_VALUES: tuple[_Reading, ...] = (
    (lambda it: {"sm_ratio": it.gpu / 100, "memory_ratio": it.memory / 100}, (("nvmlDeviceGetUtilizationRates",),)),
    (lambda it: {"encoder_ratio": it[0] / 100}, (("nvmlDeviceGetEncoderUtilization",),)),
    (lambda it: {"decoder_ratio": it[0] / 100}, (("nvmlDeviceGetDecoderUtilization",),)),
    (
        lambda degrees: {"temperature_celsius": float(degrees)},
        (
            ("nvmlDeviceGetTemperatureV", pynvml.NVML_TEMPERATURE_GPU),
            ("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
        ),
    ),
    _scaled("power_watts", 1 / 1000, ("nvmlDeviceGetPowerUsage",)),
    _scaled("power_limit_watts", 1 / 1000, ("nvmlDeviceGetEnforcedPowerLimit",)),
    _scaled("sm_clock_hertz", _MHZ, ("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM)),
    _scaled("memory_clock_hertz", _MHZ, ("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM)),
    (
        lambda mask: {"throttle_reasons": throttle_reasons(mask)},
        (("nvmlDeviceGetCurrentClocksEventReasons",), ("nvmlDeviceGetCurrentClocksThrottleReasons",)),
    ),
)
_PCIE = (
    _scaled("pcie_received_bytes_per_second", _KB, ("nvmlDeviceGetPcieThroughput", pynvml.NVML_PCIE_UTIL_RX_BYTES)),
    _scaled("pcie_sent_bytes_per_second", _KB, ("nvmlDeviceGetPcieThroughput", pynvml.NVML_PCIE_UTIL_TX_BYTES)),
)
_COUNTERS: Mapping[str, tuple[tuple[int, int], int]] = {
    "ecc_corrected_total": ((pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL, 0), 1),
    "ecc_uncorrected_total": ((pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, 0), 1),
    "nvlink_received_bytes_total": ((pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS), _KIB),
    "nvlink_sent_bytes_total": ((pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS), _KIB),
}
"""Field and scope, and the unit in bytes or errors."""


def _counters(calls: GpuCalls) -> Values:
    """All in one call; those that the GPU does not have are left out of the next one."""
    counts = calls.fields([key for key, _ in _COUNTERS.values()])
    named = zip(_COUNTERS.items(), counts, strict=True)
    return {name: int(count) * unit for (name, (_, unit)), count in named if count is not None}


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """The names of a mask of clocks event reasons, sorted; a bit without a name here is given by its value."""
    # Unknown bits are shown by number: a newer driver has reasons of its own.
    bits = [1 << place for place in range(mask.bit_length()) if mask >> place & 1 and 1 << place != _GPU_IDLE]
    return tuple(sorted(_THROTTLE_REASONS.get(bit, f"unknown_{bit:#x}") for bit in bits))
