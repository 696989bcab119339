"""Calls NVML for one value of one GPU, and classifies the result: a value, none, not supported, or an error.

Blocking, for the modules of this package. State owned: `UnsupportedCalls`, what a GPU turned out not to support.

Source: NVML API reference, return values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import byref, c_uint, c_ulonglong
from enum import StrEnum
from struct import Struct as RowFormat
from typing import Any

from msgspec import Struct

from gpushare_agent.gpus.nvml.session import NvmlSession


class Verdict(StrEnum):
    EMPTY = "empty"
    UNSUPPORTED = "unsupported"
    GREW = "grew"
    FAILED = "failed"


_VERDICTS = {
    "NOT_FOUND": Verdict.EMPTY,
    "NO_DATA": Verdict.EMPTY,
    "NOT_READY": Verdict.EMPTY,
    "INSUFFICIENT_SIZE": Verdict.GREW,  # between the calls for a list's length and for its entries
    "NOT_SUPPORTED": Verdict.UNSUPPORTED,
    "FUNCTION_NOT_FOUND": Verdict.UNSUPPORTED,
    "NO_PERMISSION": Verdict.UNSUPPORTED,
    "ARGUMENT_VERSION_MISMATCH": Verdict.UNSUPPORTED,
    "DEPRECATED": Verdict.UNSUPPORTED,
    "VGPU_ECC_NOT_SUPPORTED": Verdict.UNSUPPORTED,
}
"""Of an error's name; every other one is FAILED."""

_TRIES = 3
"""Of a list that grows."""

_LOST = ("GPU_IS_LOST", "RESET_REQUIRED")
_MAYBE_LOST = "UNKNOWN"
"""A single value may be unknown for its own reasons, but a GPU that answers nothing else is lost, as after a reset."""


_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
"""Of NVML's union of values, by nvmlValueType_t."""


class GpuLostError(Exception):
    """The GPU does not answer any more; the other GPUs may."""


class UnsupportedCalls(set[object]):
    """What one GPU does not support, from round to round: (function, arguments), a field's key, or a function's name."""


class NvmlCaller(Struct, eq=False):
    """Calls for a GPU in one round. `unsupported` lasts for the next rounds, `errors` counts over all GPUs of the
    round."""

    session: NvmlSession
    nvml: Any
    handle: Any
    unsupported: UnsupportedCalls
    errors: Counter[str]
    _answers: int = 0
    _unknowns: int = 0

    def value(self, name: str, *arguments: Any) -> Any | None:
        """The value of NVML's function of this name, None where the GPU has none.

        Raises:
            GpuLostError, DriverLostError: further calls would fail too.
        """
        call = (name, *arguments)
        if call in self.unsupported:
            return None
        answer = self.answer(name, *arguments)
        if answer is Verdict.UNSUPPORTED:
            self.unsupported.add(call)
        return None if isinstance(answer, Verdict) else answer

    def answer(self, name: str, *arguments: Any) -> Any | Verdict:
        """The answer of the function, called always, with the verdict where there is no value."""
        function: Callable[..., Any] | None = getattr(self.nvml, name, None)
        # nvidia-ml-py of another version may lack the function.
        if function is None:
            return Verdict.UNSUPPORTED
        try:
            answer = function(self.handle, *arguments)
        except self.nvml.NVMLError as error:
            return self._classify(error)
        self._answers += 1
        return answer

    def _classify(self, error: Exception) -> Verdict:
        # First: an error of the whole driver says nothing of this GPU.
        self.session.check_driver(error)
        error_name = self.session.error_name(error)
        verdict = _VERDICTS.get(error_name, Verdict.FAILED)
        if verdict is Verdict.FAILED:
            self.errors[error_name.lower()] += 1
            self._unknowns += error_name == _MAYBE_LOST
        else:
            # An empty list is an answer: the GPU lives.
            self._answers += verdict is Verdict.EMPTY
        # After counting: the round's errors show it.
        if error_name in _LOST:
            raise GpuLostError from error
        return verdict

    def check_alive(self) -> None:
        """Raises GpuLostError where the GPU answered nothing at all."""
        if self._unknowns and not self._answers:
            raise GpuLostError

    def rows(self, name: str, row: RowFormat, since_us: int | None = None) -> list[tuple[int, ...]] | Verdict:
        """A list that C fills, called always, also when it is empty; UNSUPPORTED or FAILED where there is none. `row` is how
        an entry lies in memory; a list of samples is of those since a time. Without pynvml, for what is read all the time.

        Raises:
            GpuLostError, DriverLostError: as in `value`.
        """
        function = getattr(self.nvml.nvmlLib, name, None)
        if function is None:
            return Verdict.UNSUPPORTED
        for _ in range(_TRIES):
            # Drivers leave entries unfilled: those must not show what an earlier call, of another GPU, has left there.
            buffer = self.session.cleared_buffer()
            count = c_uint(len(buffer) // row.size)
            where = (byref(count), buffer) if since_us is None else (buffer, byref(count), c_ulonglong(since_us))
            code = function(self.handle, *where)
            if code == 0:
                self._answers += 1
                return list(row.iter_unpack(memoryview(buffer)[: count.value * row.size]))
            verdict = self._classify(self.nvml.NVMLError(code))
            if verdict is not Verdict.GREW:
                return [] if verdict is Verdict.EMPTY else verdict
            self.session.grow_buffer(count.value * row.size)
        self.errors["insufficient_size"] += 1
        return Verdict.FAILED

    def fields(self, keys: Sequence[tuple[int, int]]) -> list[float | None]:
        """The field values of these keys (field, scope) in one call; a key that is not supported is left out of later
        calls.

        Raises:
            GpuLostError, DriverLostError: as in `value`.
        """
        name = "nvmlDeviceGetFieldValues"
        # One key that the driver does not know must not cost the others.
        asked = [key for key in keys if key not in self.unsupported] if name not in self.unsupported else []
        answers = self.answer(name, asked) if asked else []
        if answers is Verdict.UNSUPPORTED:
            self.unsupported.add(name)
        if isinstance(answers, Verdict):
            return [None] * len(keys)
        found = {key: self._field(key, answer) for key, answer in zip(asked, answers, strict=True)}
        return [found.get(key) for key in keys]

    def _field(self, key: tuple[int, int], answer: Any) -> float | None:
        if answer.nvmlReturn == self.nvml.NVML_SUCCESS:
            value: float = getattr(answer.value, _MEMBERS.get(answer.valueType, "ullVal"))
            return value
        if answer.nvmlReturn == self.nvml.NVML_ERROR_INVALID_ARGUMENT:  # a field that is younger than the driver
            verdict = Verdict.UNSUPPORTED
        else:
            verdict = self._classify(self.nvml.NVMLError(answer.nvmlReturn))
        if verdict is Verdict.UNSUPPORTED:
            self.unsupported.add(key)
        return None
