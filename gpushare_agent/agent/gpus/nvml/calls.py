"""Calls of NVML for one GPU, round after round: a value, or none; and its lists of processes and of how they used it.

Blocking, for usage.py and busy_time.py. The lists are read ten times a second while programs compute, so they are called
without pynvml: it asks for the length first, and makes an object with a name for each field of each entry. With 200
processes on 8 GPUs that was 2.8 ms of processor time a reading, half of what the agent used.

State owned, by `GpuCalls`: what a GPU turned out not to support.

Source: NVML API reference: return values, nvmlProcessInfo_t (the same in the second and third version of the calls) and
nvmlProcessUtilizationSample_t.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from ctypes import byref, c_char, c_uint, c_ulonglong
from math import isfinite
from typing import Any, NamedTuple

import pynvml
from msgspec import Struct, field

from gpushare_agent.agent.gpus.nvml.session import (
    OF_GPU,
    UNSUPPORTED,
    CallError,
    DriverLostError,
    NvmlError,
    call,
    renamed,
)

_EMPTY = ("NOT_FOUND", "NO_DATA", "NOT_READY")
_GREW = "INSUFFICIENT_SIZE"
"""Of a list, between two calls."""
_MAYBE_LOST = "UNKNOWN"
"""A single value may be unknown for its own reasons, but a GPU that answers nothing else is lost, as after a reset."""
_TRIES = 3
"""Of a list that grows."""
_LIST_BYTES = 64 * 1024
"""2,048 samples of utilisation: the driver's list of a GPU is as long as it has processes."""
_MOST_BYTES = 16 * 1024 * 1024
_ROUNDS_UNTIL_RETRIED = 600
"""What a GPU does not support can change while NVML is open: MIG mode, permissions."""
_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
"""Of NVML's union of values, by nvmlValueType_t."""
_PROCESS = struct.Struct("@I4xQII")
"""PID, memory, GPU instance, compute instance."""
_USE = struct.Struct("@I4xQ4I")
"""ProcessUse."""
_IMPOSSIBLE_BYTES = 1 << 48
_CLOCK_SLACK_US = 5_000_000
"""So far ahead of our clock a sample's time may be."""


class GpuLostError(Exception):
    """The GPU does not answer any more; the other GPUs may."""


class ProcessUse(NamedTuple):
    """What a process used of the GPU in one of the driver's periods, which ended at `at_us` of the wall clock; percent."""

    pid: int
    at_us: int
    sm: int
    memory: int
    encoder: int
    decoder: int


class GpuCalls(Struct):
    """One for each GPU, for one opening of NVML. All but `begin_round` raise GpuLostError and DriverLostError: further
    calls would fail too."""

    handle: Any = None
    remembers_lists: bool = False
    """Lists that are not supported are left out, too: for who reads ten times a second a call costs as much as one that
    works."""
    _errors: Counter[str] = field(default_factory=Counter)
    _unsupported: set[object] = field(default_factory=set)
    """Functions with their arguments, and keys of fields."""
    _rounds: int = 0
    _answers: int = 0
    _unknowns: int = 0

    def begin_round(self, handle: Any, errors: Counter[str]) -> None:
        """`errors` counts over all GPUs of the round."""
        self.handle, self._errors = handle, errors
        self._answers = self._unknowns = 0
        self._rounds += 1
        if self._rounds % _ROUNDS_UNTIL_RETRIED == 0:
            self._unsupported.clear()

    def check_alive(self) -> None:
        """Raises GpuLostError where the GPU answered nothing at all in this round."""
        if self._unknowns and not self._answers:
            raise GpuLostError

    def value(self, *calls: tuple[Any, ...]) -> Any | None:
        """The value of the first of these calls, each a function's name and its arguments, that the GPU has one for."""
        for name, *arguments in calls:
            if (name, *arguments) in self._unsupported:
                continue
            try:
                answer = call(name, self.handle, *arguments)
            except CallError as error:
                if self._says_unsupported(error):
                    self._unsupported.add((name, *arguments))
            else:
                self._answers += 1
                return answer
        return None

    def fields(self, keys: Sequence[tuple[int, int]]) -> list[float | None]:
        """The field values of these keys (field, scope) in one call; a key that is not supported is left out of later
        calls."""
        # One key that the driver does not know must not cost the others.
        asked = [key for key in keys if key not in self._unsupported]
        answers = self.value(("nvmlDeviceGetFieldValues", tuple(asked))) if asked else None
        found = {key: self._field(key, answer) for key, answer in zip(asked, answers or (), strict=False)}
        return [found.get(key) for key in keys]

    def _field(self, key: tuple[int, int], answer: Any) -> float | None:
        if answer.nvmlReturn == pynvml.NVML_SUCCESS:
            value: float = getattr(answer.value, _MEMBERS.get(answer.valueType, "ullVal"))
            return value if isfinite(value) else None
        # A field that is younger than the driver is an invalid argument.
        is_unknown = answer.nvmlReturn == pynvml.NVML_ERROR_INVALID_ARGUMENT
        if is_unknown or self._says_unsupported(renamed(answer.nvmlReturn)):
            self._unsupported.add(key)
        return None

    def list_processes(self, name: str) -> dict[int, int | None] | None:
        """Bytes of memory by PID, None where the driver does not say; None where the GPU has no such list. Raises CallError,
        too. `name` is the call's without its version: pynvml's and the library's differ in which that is."""
        rows = self.rows(f"{name}_v3", _PROCESS)
        if rows is None:
            rows = self.rows(f"{name}_v2", _PROCESS)  # older drivers
        if rows is None:
            return None
        return {pid: None if used >= _IMPOSSIBLE_BYTES else used for pid, used, _, _ in rows}

    def list_uses(self, since_us: int, now_us: int) -> list[ProcessUse] | None:
        """The samples since then that can be true: drivers leave entries of their buffer unfilled, with no process, more
        than all of the GPU, or a time that is not one. Else as `list_processes`."""
        rows = self.rows("nvmlDeviceGetProcessUtilization", _USE, since_us)
        if rows is None:
            return None
        latest_us = now_us + _CLOCK_SLACK_US
        uses = map(ProcessUse._make, rows)
        return [one for one in uses if one.pid and max(one[2:]) <= 100 and since_us < one.at_us <= latest_us]

    def rows(self, name: str, row: struct.Struct, since_us: int | None = None) -> list[tuple[int, ...]] | None:
        """A list that C fills, None where the GPU has none; `row` is how an entry lies in memory, and a list of samples is
        of those since a time. Raises CallError, too."""
        function = getattr(pynvml.nvmlLib, name, None)
        if function is None or name in self._unsupported:
            return None
        size = _LIST_BYTES
        for _ in range(_TRIES):
            # New each time, and so cleared: drivers leave entries unfilled.
            buffer, count = (c_char * size)(), c_uint(size // row.size)
            where = (byref(count), buffer) if since_us is None else (buffer, byref(count), c_ulonglong(since_us))
            code = function(self.handle, *where)
            if code == pynvml.NVML_SUCCESS:
                self._answers += 1
                filled = min(count.value, size // row.size)
                return list(row.iter_unpack(memoryview(buffer)[: filled * row.size]))
            error = renamed(code, name)
            if error.name == _GREW:
                size = min(2 * max(size, count.value * row.size), _MOST_BYTES)
                continue
            if self._says_unsupported(error):
                if self.remembers_lists:
                    self._unsupported.add(name)
                return None
            if error.name in _EMPTY:
                return []
            raise error
        self._errors[_GREW.lower()] += 1
        raise error

    def _says_unsupported(self, error: NvmlError) -> bool:
        """Counts the error, and whether the GPU lives."""
        if isinstance(error, DriverLostError):
            raise error
        if error.name in UNSUPPORTED:
            return True
        if error.name in _EMPTY:
            self._answers += 1  # an empty list is an answer
            return False
        self._errors[error.name.lower()] += 1
        self._unknowns += error.name == _MAYBE_LOST
        # After counting: the round's errors show it.
        if error.name in OF_GPU:
            raise GpuLostError from error
        return False
