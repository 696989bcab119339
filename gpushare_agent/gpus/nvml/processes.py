"""The processes on one GPU and what each uses of it, from NVML's lists and utilisation samples.

Blocking, called by usage.py. NVML has three lists of processes (compute, graphics, clients of MPS), each with the
memory, and apart from them samples of utilisation, one for each process that did something in the driver's sampling
period of up to a second. A process may be in several lists, in a list and in no sample, or in a sample and in no list.

State owned: the newest sample seen and the last use of each process, for one GPU in one opening of NVML.

Source: NVML API reference (nvmlDeviceGetComputeRunningProcesses and its siblings, nvmlDeviceGetProcessUtilization).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from msgspec import Struct

from gpushare_agent.gpus.nvml.calls import NvmlCaller, Verdict
from gpushare_agent.model.usage import ProcessKind, ProcessSample

_LISTS = {
    ProcessKind.GRAPHICS: "nvmlDeviceGetGraphicsRunningProcesses",
    ProcessKind.COMPUTE: "nvmlDeviceGetComputeRunningProcesses",
    ProcessKind.MPS: "nvmlDeviceGetMPSComputeRunningProcesses",
}
"""By ascending precision: a process in two lists is of the later kind."""

_CLOCK_SLACK_US = 5_000_000
"""So far ahead of our clock a sample's time may be."""

_ROUNDS_KEPT = 1
"""A busy process without a new sample keeps its last use for so long: our round may fall between two of the driver's."""


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
        """By PID; None where the GPU could not list them. Raises GpuLostError, DriverLostError."""
        listed = _read_lists(caller)
        is_known = self._newest_us is not None
        fresh = self._read_use(caller)
        if listed is None:
            return None
        for pid in (fresh or {}).keys() - listed.keys():
            listed[pid] = _Listed()  # it ran in this round and has ended since, or is in none of the lists
        self._remember(fresh or {}, listed)
        return tuple(self._sample(pid, listed[pid], is_known=is_known and fresh is not None) for pid in sorted(listed))

    def _remember(self, fresh: Mapping[int, _Use], listed: Mapping[int, _Listed]) -> None:
        for last in self._last.values():
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
        if last is None:
            return _UNKNOWN if kind is ProcessKind.MPS else _IDLE
        return last.use if last.rounds_ago <= _ROUNDS_KEPT else _IDLE

    def _read_use(self, caller: NvmlCaller) -> dict[int, _Use] | None:
        """The mean over each process's samples since the last call; None where the GPU has none.

        The first call only notes how far the driver's buffer goes: it may be full of old samples.
        """
        now_us = time.time_ns() // 1000
        is_first = self._newest_us is None
        since_us = min(self._newest_us or 0, now_us)  # a clock that was set back would else hide all that is newer
        answer = caller.entries("nvmlDeviceGetProcessUtilization", since_us)
        if isinstance(answer, Verdict):
            return None
        samples = [sample for sample in answer if _is_sound(sample, since_us, now_us)]
        self._newest_us = max((sample.timeStamp for sample in samples), default=since_us)
        if is_first:
            return {}
        by_pid: defaultdict[int, list[Any]] = defaultdict(list)
        for sample in samples:
            by_pid[sample.pid].append(sample)
        return {pid: _mean(of_pid) for pid, of_pid in by_pid.items()}


def _is_sound(sample: Any, since_us: int, now_us: int) -> bool:
    """Drivers leave entries of their buffer unfilled: no process, more than all of the GPU, a time that is not one."""
    shares = (sample.smUtil, sample.memUtil, sample.encUtil, sample.decUtil)
    return bool(sample.pid and max(shares) <= 100 and since_us < sample.timeStamp <= now_us + _CLOCK_SLACK_US)


def _mean(samples: list[Any]) -> _Use:
    return _Use(
        sm_ratio=fmean(sample.smUtil for sample in samples) / 100,
        memory_ratio=fmean(sample.memUtil for sample in samples) / 100,
        encoder_ratio=fmean(sample.encUtil for sample in samples) / 100,
        decoder_ratio=fmean(sample.decUtil for sample in samples) / 100,
    )


def _read_lists(caller: NvmlCaller) -> dict[int, _Listed] | None:
    """None where a list failed, for a process left out would look ended, or where the GPU has none of the lists."""
    listed: dict[int, _Listed] = {}
    answers = {kind: _entries(caller, name) for kind, name in _LISTS.items()}
    if Verdict.FAILED in answers.values() or all(answer is Verdict.UNSUPPORTED for answer in answers.values()):
        return None
    for kind, answer in answers.items():
        for process in () if isinstance(answer, Verdict) else answer:
            earlier = listed.get(process.pid, _Listed())
            listed[process.pid] = _Listed(kind=kind, memory_bytes=_larger(earlier.memory_bytes, process.usedGpuMemory))
    return listed


def _entries(caller: NvmlCaller, name: str) -> list[Any] | Verdict:
    """By the versions' own names: pynvml's name without a version raises an error of its own on older drivers."""
    answer = caller.entries(f"{name}_v3")
    return caller.entries(f"{name}_v2") if answer is Verdict.UNSUPPORTED else answer  # older drivers


def _larger(first: int | None, second: int | None) -> int | None:
    """Two lists give the memory of the same process: it must not be added up."""
    return max((size for size in (first, second) if size is not None), default=None)
