"""What the GPUs and the processes on them use, from NVML. Blocking, called by driver.py.

Every value is read each round, except PCIe traffic: NVML measures it on the spot for 20 ms each way, so it is read of one
GPU per round and the others keep their last value.

NVML has three lists of processes (compute, graphics, clients of MPS), each with the memory, and apart from them samples of
utilisation, one for each process that did something in the driver's sampling period of up to a second. A process may be in
several lists, in a list and in no sample, or in a sample and in no list.

State owned: what each GPU does not support, the newest sample seen, the last use of each process, and the number of the
round; all end with the opening of NVML (session.py).

Source: NVML API reference (nvmlDeviceGetComputeRunningProcesses and its siblings, nvmlDeviceGetProcessUtilization). Units
there: percent, milliwatts, MHz, KB/s (1000 bytes), NVLink in KiB.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import Any

from msgspec import Struct, field

from gpushare_agent.gpus.nvml.calls import GpuLostError, NvmlCaller, UnsupportedCalls, Verdict
from gpushare_agent.gpus.nvml.mig import find_instances, mig_mode
from gpushare_agent.gpus.nvml.process_lists import ProcessUse, list_processes, list_uses
from gpushare_agent.gpus.nvml.session import CHECKLIST, DriverLostError, NvmlSession
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.usage import DriverSample, GpuSample, ProcessKind, ProcessSample

_LISTS = {
    ProcessKind.GRAPHICS: "nvmlDeviceGetGraphicsRunningProcesses",
    ProcessKind.COMPUTE: "nvmlDeviceGetComputeRunningProcesses",
    ProcessKind.MPS: "nvmlDeviceGetMPSComputeRunningProcesses",
}
"""By ascending precision: a process in two lists is of the later kind."""

_ROUNDS_VALID = 1
"""A busy process without a new sample has its last use for so many rounds: our round may fall between two of the
driver's."""


class _Use(Struct, frozen=True, kw_only=True):
    sm_ratio: float | None = None
    memory_ratio: float | None = None
    encoder_ratio: float | None = None
    decoder_ratio: float | None = None


class _LastUse(Struct):
    use: _Use
    rounds_ago: int = 0


_UNKNOWN = _Use()
_IDLE = _Use(sm_ratio=0.0, memory_ratio=0.0, encoder_ratio=0.0, decoder_ratio=0.0)


class _Listed(Struct, frozen=True, kw_only=True):
    kind: ProcessKind = ProcessKind.COMPUTE
    memory_bytes: int | None = None


class GpuProcesses:
    def __init__(self) -> None:
        self._newest_us: int | None = None
        self._last: dict[int, _LastUse] = {}

    def read(self, caller: NvmlCaller) -> tuple[ProcessSample, ...] | None:
        """The processes by PID; None where the GPU could not list them. Raises GpuLostError, DriverLostError."""
        listed = _read_lists(caller)
        is_known = self._newest_us is not None
        # Read also where the lists failed: what is not taken now would be counted in the next round.
        fresh = self._read_use(caller)
        if listed is None:
            return None
        # Its use belongs to this round, though it is in no list any more.
        for pid in (fresh or {}).keys() - listed.keys():
            listed[pid] = _Listed()  # it ran in this round and has ended since, or is in none of the lists
        self._remember(fresh or {}, listed)
        return tuple(self._sample(pid, listed[pid], is_known=is_known and fresh is not None) for pid in sorted(listed))

    def _remember(self, fresh: Mapping[int, _Use], listed: Mapping[int, _Listed]) -> None:
        for last in self._last.values():
            # Before the new samples, which begin at 0.
            last.rounds_ago += 1
        self._last.update({pid: _LastUse(use) for pid, use in fresh.items()})
        self._last = {pid: last for pid, last in self._last.items() if pid in listed}

    def _sample(self, pid: int, listed: _Listed, *, is_known: bool) -> ProcessSample:
        use = self._use(pid, listed.kind) if is_known else _UNKNOWN
        return ProcessSample(
            pid=pid,
            kind=listed.kind,
            memory_bytes=listed.memory_bytes,
            sm_ratio=use.sm_ratio,
            memory_ratio=use.memory_ratio,
            encoder_ratio=use.encoder_ratio,
            decoder_ratio=use.decoder_ratio,
        )

    def _use(self, pid: int, kind: ProcessKind) -> _Use:
        """No sample means idle, except for a client of MPS that never had one: some drivers do not sample those."""
        last = self._last.get(pid)
        # NVML has no sample of a process that did nothing.
        if last is None:
            return _UNKNOWN if kind is ProcessKind.MPS else _IDLE
        return last.use if last.rounds_ago <= _ROUNDS_VALID else _IDLE

    def _read_use(self, caller: NvmlCaller) -> dict[int, _Use] | None:
        """The mean over each process's samples since the last call; None where the GPU has none.

        The first call only notes how far the driver's buffer goes: it may be full of old samples.
        """
        now_us = time.time_ns() // 1000
        # Whatever the buffer has is of before this agent: a mean over it would be no recent use.
        is_first = self._newest_us is None
        since_us = min(self._newest_us or 0, now_us)  # a clock that was set back would else hide all that is newer
        samples = list_uses(caller, since_us, now_us)
        if isinstance(samples, Verdict):
            return None
        self._newest_us = max((sample.at_us for sample in samples), default=since_us)
        if is_first:
            return {}
        by_pid: defaultdict[int, list[ProcessUse]] = defaultdict(list)
        for sample in samples:
            by_pid[sample.pid].append(sample)
        return {pid: _mean(of_pid) for pid, of_pid in by_pid.items()}


def _mean(samples: list[ProcessUse]) -> _Use:
    return _Use(
        sm_ratio=fmean(sample.sm for sample in samples) / 100,
        memory_ratio=fmean(sample.memory for sample in samples) / 100,
        encoder_ratio=fmean(sample.encoder for sample in samples) / 100,
        decoder_ratio=fmean(sample.decoder for sample in samples) / 100,
    )


def _read_lists(caller: NvmlCaller) -> dict[int, _Listed] | None:
    """The processes of all lists; None where one failed, for a process left out would look ended, or where the GPU has
    none of the lists."""
    listed: dict[int, _Listed] = {}
    answers = {kind: list_processes(caller, name) for kind, name in _LISTS.items()}
    # A part of the lists would show processes as ended that run.
    if Verdict.FAILED in answers.values() or all(answer is Verdict.UNSUPPORTED for answer in answers.values()):
        return None
    for kind, answer in answers.items():
        for pid, used in () if isinstance(answer, Verdict) else answer.items():
            # In two lists: one process, of the more precise kind.
            earlier = listed.get(pid, _Listed())
            listed[pid] = _Listed(kind=kind, memory_bytes=_larger(earlier.memory_bytes, used))
    return listed


def _larger(first: int | None, second: int | None) -> int | None:
    """Two lists give the memory of the same process: it must not be added up."""
    if first is None or second is None:
        return second if first is None else first
    return max(first, second)


_ROUNDS_UNTIL_RETRIED = 600
"""What a GPU does not support can change while NVML is open: MIG mode, permissions."""

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

Values = dict[str, Any]
"""Fields of GpuSample."""


class _GpuMemory(Struct):
    """What one round leaves for the next."""

    processes: GpuProcesses = field(default_factory=GpuProcesses)
    unsupported: UnsupportedCalls = field(default_factory=UnsupportedCalls)
    pcie: Values = field(default_factory=dict)


class NvmlUsage:
    """`with_instances`: MIG instances are sampled in place of their GPU, whose processes are theirs."""

    def __init__(self, session: NvmlSession, *, with_instances: bool = False) -> None:
        self._session = session
        self._with_instances = with_instances
        self._opening = 0
        self._rounds = 0
        self._gpus: dict[GpuUuid, _GpuMemory] = {}

    def sample(self) -> DriverSample:
        """One round over all GPUs.

        Raises:
            Unavailable: NVML cannot be opened, or was lost as a whole; the next call opens it again.
        """
        try:
            return self._sample()
        except DriverLostError as error:
            self._session.close()
            raise Unavailable(
                f"sampling the GPUs through NVML failed: {error.__cause__}. It is opened again at the next sample. "
                f"{CHECKLIST}"
            ) from error

    def _sample(self) -> DriverSample:
        nvml = self._session.open()
        handles = dict(self._session.handles())
        # First, for GPUs with instances are not sampled themselves.
        instances = self._instances(handles) if self._with_instances else {}
        self._begin_round()
        uuids = sorted(handles)
        # 20 ms each way: of 16 GPUs the round would take two thirds of a second.
        measured = uuids[self._rounds % len(uuids)] if uuids else None
        errors: Counter[str] = Counter()
        gpus: list[GpuSample] = []
        for uuid in uuids:
            memory = self._gpus.setdefault(uuid, _GpuMemory())
            caller = NvmlCaller(self._session, nvml, handles[uuid], unsupported=memory.unsupported, errors=errors)
            try:
                gpus.append(_sample_gpu(uuid, caller, memory, measure_pcie=uuid == measured))
            except GpuLostError:
                # No sample: the GPU is missing in this round, and its counters begin anew.
                del self._gpus[uuid]
        self._gpus = {uuid: memory for uuid, memory in self._gpus.items() if uuid in handles or uuid in instances}
        gpus += [self._sample_instance(nvml, uuid, instances[uuid], errors) for uuid in sorted(instances)]
        return DriverSample(gpus=tuple(gpus), errors=dict(sorted(errors.items())))

    def _instances(self, handles: dict[GpuUuid, Any]) -> dict[GpuUuid, Any]:
        """Found anew in each round, for they come and go; GPUs that have some are taken out of `handles`."""
        instances: dict[GpuUuid, Any] = {}
        for uuid, handle in list(handles.items()):
            found = find_instances(self._session, handle) if mig_mode(self._session, handle) else []
            if found:
                del handles[uuid]
            instances |= {instance.uuid: instance.handle for instance in found}
        return instances

    def _sample_instance(self, nvml: Any, uuid: GpuUuid, handle: Any, errors: Counter[str]) -> GpuSample:
        """Memory and processes: NVML has nothing else of a MIG instance."""
        memory = self._gpus.setdefault(uuid, _GpuMemory())
        caller = NvmlCaller(self._session, nvml, handle, unsupported=memory.unsupported, errors=errors)
        try:
            return GpuSample(uuid=uuid, processes=memory.processes.read(caller), **dict(_memory(caller)))
        # The instance stays in the answer, without numbers: its GPU is reported by the poll.
        except GpuLostError:
            return GpuSample(uuid=uuid)

    def _begin_round(self) -> None:
        if self._opening != self._session.openings:
            self._opening = self._session.openings
            self._gpus.clear()
        self._rounds += 1
        # Some ten minutes at a round each second.
        if self._rounds % _ROUNDS_UNTIL_RETRIED == 0:
            for memory in self._gpus.values():
                memory.unsupported.clear()


def _sample_gpu(uuid: GpuUuid, caller: NvmlCaller, memory: _GpuMemory, *, measure_pcie: bool) -> GpuSample:
    values: Values = {}
    for part in _PARTS:
        values.update(part(caller))
    if measure_pcie:
        memory.pcie = dict(_pcie(caller))
    processes = memory.processes.read(caller)
    # At the end: a GPU whose every value is unknown is lost, not idle.
    caller.check_alive()
    return GpuSample(uuid=uuid, processes=processes, **values, **memory.pcie)


def _utilisation(caller: NvmlCaller) -> Iterator[tuple[str, Any]]:
    rates = caller.value("nvmlDeviceGetUtilizationRates")
    if rates is not None:
        yield "sm_ratio", rates.gpu / 100
        yield "memory_ratio", rates.memory / 100
    for name, coder in (("encoder_ratio", "Encoder"), ("decoder_ratio", "Decoder")):
        use = caller.value(f"nvmlDeviceGet{coder}Utilization")
        if use is not None:
            yield name, use[0] / 100


def _memory(caller: NvmlCaller) -> Iterator[tuple[str, Any]]:
    """The second version of the call counts what the driver keeps for itself apart from what is used."""
    use = caller.value("nvmlDeviceGetMemoryInfo", caller.nvml.nvmlMemory_v2)
    if use is None:
        use = caller.value("nvmlDeviceGetMemoryInfo")
    if use is not None:
        yield "memory_used_bytes", use.used
        yield "memory_total_bytes", use.total


def _temperature_and_power(caller: NvmlCaller) -> Iterator[tuple[str, Any]]:
    sensor = caller.nvml.NVML_TEMPERATURE_GPU
    degrees = caller.value("nvmlDeviceGetTemperatureV", sensor)
    if degrees is None:
        degrees = caller.value("nvmlDeviceGetTemperature", sensor)  # its older name
    yield "temperature_celsius", None if degrees is None else float(degrees)
    yield "power_watts", _scaled(caller.value("nvmlDeviceGetPowerUsage"), 1 / 1000)
    yield "power_limit_watts", _scaled(caller.value("nvmlDeviceGetEnforcedPowerLimit"), 1 / 1000)


def _clocks(caller: NvmlCaller) -> Iterator[tuple[str, Any]]:
    nvml = caller.nvml
    yield "sm_clock_hertz", _scaled(caller.value("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM), _MHZ)
    yield "memory_clock_hertz", _scaled(caller.value("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM), _MHZ)
    reasons = caller.value("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = caller.value("nvmlDeviceGetCurrentClocksThrottleReasons")  # its older name
    if reasons is not None:
        yield "throttle_reasons", throttle_reasons(reasons)


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """The names of a mask of clocks event reasons, sorted; a bit without a name here is given by its value."""
    # Unknown bits are shown by number: a newer driver has reasons of its own.
    bits = [1 << place for place in range(mask.bit_length()) if mask >> place & 1 and 1 << place != _GPU_IDLE]
    return tuple(sorted(_THROTTLE_REASONS.get(bit, f"unknown_{bit:#x}") for bit in bits))


def _counters(caller: NvmlCaller) -> Iterator[tuple[str, Any]]:
    """All in one call; those that the GPU does not have are left out of the next one."""
    nvml = caller.nvml
    counters = {
        "ecc_corrected_total": ((nvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL, 0), 1),
        "ecc_uncorrected_total": ((nvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, 0), 1),
        "nvlink_received_bytes_total": ((nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS), _KIB),
        "nvlink_sent_bytes_total": ((nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS), _KIB),
    }
    counts = caller.fields([key for key, _ in counters.values()])
    for (name, (_, unit)), count in zip(counters.items(), counts, strict=True):
        yield name, None if count is None else int(count) * unit


def _pcie(caller: NvmlCaller) -> Iterator[tuple[str, Any]]:
    nvml = caller.nvml
    received = caller.value("nvmlDeviceGetPcieThroughput", nvml.NVML_PCIE_UTIL_RX_BYTES)
    sent = caller.value("nvmlDeviceGetPcieThroughput", nvml.NVML_PCIE_UTIL_TX_BYTES)
    yield "pcie_received_bytes_per_second", _scaled(received, _KB)
    yield "pcie_sent_bytes_per_second", _scaled(sent, _KB)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


_PARTS: tuple[Callable[[NvmlCaller], Iterator[tuple[str, Any]]], ...] = (
    _memory,
    _utilisation,
    _temperature_and_power,
    _clocks,
    _counters,
)
