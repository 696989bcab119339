"""Asking NVML for one value of one GPU, and telling an answer from "there is none" from an error.

Blocking, only for the nvml_* modules of this package. State owned: what a GPU turned out not to support.

Source: NVML API reference, return values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from gpushare_agent.gpus.nvml.session import NvmlSession


class Verdict(StrEnum):
    EMPTY = "empty"
    UNSUPPORTED = "unsupported"
    GREW = "grew"
    FAILED = "failed"


_VERDICTS = {
    "SUCCESS": Verdict.EMPTY,  # pynvml raises "no error" where a list has no entries
    "NOT_FOUND": Verdict.EMPTY,
    "NO_DATA": Verdict.EMPTY,
    "NOT_READY": Verdict.EMPTY,
    "INSUFFICIENT_SIZE": Verdict.GREW,  # between the question for a list's length and that for its entries
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
"""One value may be unknown for its own reasons, but a GPU that has nothing else to say is lost, as after a reset."""


_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
"""Of NVML's union of values, by nvmlValueType_t."""


class GpuLostError(Exception):
    """The GPU does not answer any more; the other GPUs may."""


class NvmlCaller:
    """For one GPU in one round. `unsupported` is remembered by the caller for the next round, `errors` for all GPUs."""

    def __init__(
        self, session: NvmlSession, nvml: Any, handle: Any, *, unsupported: set[object], errors: Counter[str]
    ) -> None:
        self.nvml = nvml
        self.handle = handle
        self.unsupported = unsupported
        self._session = session
        self._errors = errors
        self._answers = 0
        self._unknowns = 0

    def value(self, name: str, *arguments: Any) -> Any | None:
        """What NVML's function of this name answers, None where the GPU does not tell.

        Raises:
            CardLostError, DriverLostError: there is no point in asking further.
        """
        asked = (name, *arguments)
        if asked in self.unsupported:
            return None
        answer = self.answer(name, *arguments)
        if answer is Verdict.UNSUPPORTED:
            self.unsupported.add(asked)
        return None if isinstance(answer, Verdict) else answer

    def answer(self, name: str, *arguments: Any) -> Any | Verdict:
        """The same, asked always, and with the verdict where there is no value."""
        function: Callable[..., Any] | None = getattr(self.nvml, name, None)
        if function is None:
            return Verdict.UNSUPPORTED
        try:
            answer = function(self.handle, *arguments)
        except self.nvml.NVMLError as error:
            return self._judge(error)
        self._answers += 1
        return answer

    def _judge(self, error: Exception) -> Verdict:
        self._session.check_driver(error)
        word = self._session.word(error)
        verdict = _VERDICTS.get(word, Verdict.FAILED)
        if verdict is Verdict.FAILED:
            self._errors[word.lower()] += 1
            self._unknowns += word == _MAYBE_LOST
        else:
            self._answers += verdict is Verdict.EMPTY
        if word in _LOST:
            raise GpuLostError from error
        return verdict

    def check_alive(self) -> None:
        """Raises CardLostError where the GPU had no answer at all."""
        if self._unknowns and not self._answers:
            raise GpuLostError

    def entries(self, name: str, *arguments: Any) -> list[Any] | Verdict:
        """A list, asked always, also when it is empty; UNSUPPORTED or FAILED where there is none."""
        for _ in range(_TRIES):
            answer = self.answer(name, *arguments)
            if answer is Verdict.EMPTY:
                return []
            if answer is not Verdict.GREW:
                return answer if isinstance(answer, Verdict) else list(answer)
        self._errors["insufficient_size"] += 1
        return Verdict.FAILED

    def fields(self, keys: Sequence[tuple[int, int]]) -> list[float | None]:
        """The field values of these keys (field, scope) in one call; a key without a value is not asked again.

        Raises:
            CardLostError, DriverLostError: as in `value`.
        """
        name = "nvmlDeviceGetFieldValues"
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
            verdict = self._judge(self.nvml.NVMLError(answer.nvmlReturn))
        if verdict is Verdict.UNSUPPORTED:
            self.unsupported.add(key)
        return None
