"""The usage file of simulated GPUs: what processes use of them. The values of the whole GPU are computed from it.

`{"processes": [{"pid": 123, "card": 0, "sm": 0.25, "memory_bytes": 1073741824}]}` (docs/reference/sandbox.md). Ratios are
of the whole GPU, 0..1. Optional: `memory`, `encoder` and `decoder`, ratios too, and `kind`: compute, graphics or mps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from gpushare_agent.gpus.simulated.input import entries, ratio, whole_number
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import MIB
from gpushare_agent.model.usage import GpuSample, ProcessKind, ProcessSample
from gpushare_agent.placement.topology_text import MAX_GPUS

MAX_PROCESSES = 50_000
MAX_PID = 4_194_304
"""Linux has none above (PID_MAX_LIMIT)."""

_MAX_MEMORY_BYTES = 2**50
_IDLE_CELSIUS, _BUSY_CELSIUS = 32.0, 74.0
_IDLE_WATTS, _LIMIT_WATTS = 45.0, 300.0
_IDLE_SM_HERTZ, _BUSY_SM_HERTZ = 210e6, 1_410e6
_IDLE_MEMORY_HERTZ, _BUSY_MEMORY_HERTZ = 405e6, 1_215e6
_PCIE_BYTES_PER_SECOND = 2e9
"""Received at full load; a quarter of it is sent."""
_MEMORY_PER_SM = 0.6
"""Of the memory's time, for each part of the SMs' time, where the file does not give it."""
_CAPPED_FROM = 0.97


class RehearsedProcess(Struct, frozen=True, kw_only=True):
    gpu: int
    sample: ProcessSample


Usage = tuple[RehearsedProcess, ...]


def parse_usage(text: str) -> Usage:
    """Raises ValueError."""
    raw_usage = json.loads(text)
    if not isinstance(raw_usage, dict):
        raise ValueError('expected {"processes": [{"pid": 1, "card": 0, "sm": 0.5, "memory_bytes": 1}]}')
    found = [_process(entry) for entry in entries(raw_usage, "processes", MAX_PROCESSES)]
    seen: set[tuple[int, int]] = set()
    for process in found:
        where = (process.gpu, process.sample.pid)
        if where in seen:
            raise ValueError(f"process {where[1]} is on GPU {where[0]} twice")
        seen.add(where)
    return tuple(found)


def encode_usage(usage: Iterable[RehearsedProcess]) -> str:
    """What parse_usage reads, by GPU and PID."""
    raw = [
        {"pid": process.sample.pid, "card": process.gpu, "sm": process.sample.sm_ratio,
         "memory_bytes": process.sample.memory_bytes}
        for process in sorted(usage, key=lambda process: (process.gpu, process.sample.pid))
    ]  # fmt: skip
    return json.dumps({"processes": raw})


def _process(entry: dict[str, Any]) -> RehearsedProcess:
    sm, memory = ratio(entry, "sm"), ratio(entry, "memory")
    sample = ProcessSample(
        pid=whole_number(entry, "pid", 1, MAX_PID),
        kind=ProcessKind(entry.get("kind", ProcessKind.COMPUTE.value)),
        memory_bytes=whole_number(entry, "memory_bytes", 0, _MAX_MEMORY_BYTES, default=0),
        sm_ratio=sm or 0.0,
        memory_ratio=round((sm or 0.0) * _MEMORY_PER_SM, 6) if memory is None else memory,
        encoder_ratio=ratio(entry, "encoder") or 0.0,
        decoder_ratio=ratio(entry, "decoder") or 0.0,
    )
    return RehearsedProcess(gpu=whole_number(entry, "card", 0, MAX_GPUS - 1), sample=sample)


def gpu_samples(gpus: Sequence[Gpu], usage: Usage) -> tuple[GpuSample, ...]:
    """One for each GPU, in their order; processes on a GPU that is not there are left out."""
    by_gpu: dict[int, list[ProcessSample]] = {gpu.index: [] for gpu in gpus}
    for process in usage:
        if process.gpu in by_gpu:
            by_gpu[process.gpu].append(process.sample)
    return tuple(_gpu_sample(gpu, by_gpu[gpu.index]) for gpu in gpus)


def _gpu_sample(gpu: Gpu, processes: Sequence[ProcessSample]) -> GpuSample:
    """The sums, none above the whole GPU; temperature, power, clocks and traffic as a GPU under such a load has them."""
    total_bytes = gpu.memory_mib * MIB
    used_bytes = min(total_bytes, sum(p.memory_bytes or 0 for p in processes))
    if gpu.mig is not None:  # NVML has nothing else of an instance
        only = tuple(ProcessSample(pid=p.pid, kind=p.kind, memory_bytes=p.memory_bytes) for p in processes)
        return GpuSample(
            uuid=gpu.uuid,
            memory_used_bytes=used_bytes,
            memory_total_bytes=total_bytes,
            processes=tuple(sorted(only, key=lambda p: p.pid)),
        )
    load = _whole(p.sm_ratio for p in processes)
    memory_load = _whole(p.memory_ratio for p in processes)
    return GpuSample(
        uuid=gpu.uuid,
        sm_ratio=load,
        memory_ratio=memory_load,
        encoder_ratio=_whole(p.encoder_ratio for p in processes),
        decoder_ratio=_whole(p.decoder_ratio for p in processes),
        memory_used_bytes=used_bytes,
        memory_total_bytes=total_bytes,
        temperature_celsius=round(_between(_IDLE_CELSIUS, _BUSY_CELSIUS, load)),
        power_watts=round(_between(_IDLE_WATTS, _LIMIT_WATTS, load), 1),
        power_limit_watts=_LIMIT_WATTS,
        sm_clock_hertz=_BUSY_SM_HERTZ if load else _IDLE_SM_HERTZ,
        memory_clock_hertz=_BUSY_MEMORY_HERTZ if load else _IDLE_MEMORY_HERTZ,
        ecc_corrected_total=0,
        ecc_uncorrected_total=0,
        throttle_reasons=("power_cap",) if load >= _CAPPED_FROM else (),
        pcie_received_bytes_per_second=round(load * _PCIE_BYTES_PER_SECOND),
        pcie_sent_bytes_per_second=round(load * _PCIE_BYTES_PER_SECOND / 4),
        processes=tuple(sorted(processes, key=lambda p: p.pid)),
    )


def _whole(ratios: Iterable[float | None]) -> float:
    return min(1.0, round(sum(ratio or 0.0 for ratio in ratios), 6))


def _between(idle: float, busy: float, load: float) -> float:
    return idle + (busy - idle) * load
