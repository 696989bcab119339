"""The driver's lists of a GPU's processes, and of how they used it. Blocking, for usage.py and busy_time.py.

They are read ten times a second while programs compute, so NVML is called without pynvml: it asks for the length first, and
makes an object with a name for each field of each entry. With 200 processes on 8 GPUs that was 2.8 ms of processor time a
reading, half of what the agent used.

Source: NVML API reference, nvmlProcessInfo_t (the same in the second and third version of the calls) and
nvmlProcessUtilizationSample_t.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from gpushare_agent.gpus.nvml.calls import NvmlCaller, Verdict

UTILISATION = "nvmlDeviceGetProcessUtilization"
_PROCESS = struct.Struct("@I4xQII")
"""PID, memory, GPU instance, compute instance."""
_USE = struct.Struct("@I4xQ4I")
"""ProcessUse."""
_NOT_AVAILABLE = 0xFFFF_FFFF_FFFF_FFFF
_CLOCK_SLACK_US = 5_000_000
"""So far ahead of our clock a sample's time may be."""


class ProcessUse(NamedTuple):
    """What a process used of the GPU in one of the driver's periods, which ended at `at_us` of the wall clock; percent."""

    pid: int
    at_us: int
    sm: int
    memory: int
    encoder: int
    decoder: int


def list_processes(caller: NvmlCaller, name: str) -> dict[int, int | None] | Verdict:
    """Bytes of memory by PID, None where the driver does not say; UNSUPPORTED or FAILED where there is no list. `name` is
    the call's without its version: pynvml's and the library's differ in which that is.

    Raises:
        GpuLostError, DriverLostError: further calls would fail too.
    """
    rows = caller.rows(f"{name}_v3", _PROCESS)
    if rows is Verdict.UNSUPPORTED:
        rows = caller.rows(f"{name}_v2", _PROCESS)  # older drivers
    if isinstance(rows, Verdict):
        return rows
    return {pid: None if used == _NOT_AVAILABLE else used for pid, used, _, _ in rows}


def list_uses(caller: NvmlCaller, since_us: int, now_us: int) -> list[ProcessUse] | Verdict:
    """The samples since then that can be true: drivers leave entries of their buffer unfilled, with no process, more than
    all of the GPU, or a time that is not one. Else as `list_processes`."""
    rows = caller.rows(UTILISATION, _USE, since_us)
    if isinstance(rows, Verdict):
        return rows
    latest_us = now_us + _CLOCK_SLACK_US
    uses = map(ProcessUse._make, rows)
    return [one for one in uses if one.pid and max(one[2:]) <= 100 and since_us < one.at_us <= latest_us]
