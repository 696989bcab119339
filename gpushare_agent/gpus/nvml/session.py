"""One opening of NVML, used from one thread at a time: polls have one, events another, and samples.

NVML counts its openings and shuts down with the last one. State owned: whether this one is open, how often it was, the
handles of the GPUs, and the memory for lists. Handles end with the opening that gave them.

pynvml is imported when first needed: it costs 30 ms, and a node with simulated GPUs does not have to have it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.names import GpuUuid

CHECKLIST = (
    "Check that: the NVIDIA driver is installed and `nvidia-smi` works on the node; libnvidia-ml.so.1 is visible in this "
    "container; /dev/nvidiactl and /dev/nvidia* can be opened in it; the pod runs with the NVIDIA runtime class (or has the "
    "component driver-from-host). After a driver upgrade restart the agent. If this is no GPU "
    "node, keep the agent off it by the DaemonSet's nodeSelector (nvidia-device-enable=enable), or a taint that it does not "
    "tolerate."
)
_OF_DRIVER = ("UNINITIALIZED", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH")
_ERROR_PREFIX = "NVML_ERROR_"
_BUFFER_BYTES = 4096
"""128 samples of utilisation: the driver's list of a GPU is as long as it has processes."""


def text_of(value: str | bytes) -> str:
    """pynvml returns text or bytes, depending on its version and the call."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


class DriverLostError(Exception):
    """NVML as a whole does not answer any more: it has to be opened again. Its cause is NVML's error."""


class FoundGpu(Struct, frozen=True, kw_only=True):
    """A GPU that has a handle and a UUID; whether it answers further calls is not known yet."""

    nvml_index: int
    uuid: GpuUuid
    handle: Any


class UnnamedGpu(Struct, frozen=True, kw_only=True):
    """Why the GPU at an NVML index could not even be named."""

    nvml_index: int
    reason: str


class Poll(Struct, frozen=True, kw_only=True):
    """What a poll found: the GPUs with their NVML indexes, and which of them answered, each with the number of
    polls that it did not answer."""

    gpus: tuple[tuple[int, GpuUuid], ...]
    answering: frozenset[tuple[GpuUuid, int]]


class NvmlSession:
    """Opens NVML at the first use, and again after it was closed."""

    def __init__(self) -> None:
        self._pynvml: Any = None
        self._is_open = False
        self._openings = 0
        self._handles: dict[GpuUuid, Any] | None = None
        self._error_names: dict[int, str] = {}
        self._buffer = (ctypes.c_char * _BUFFER_BYTES)()

    @property
    def openings(self) -> int:
        """Grows with each opening: what was read in an earlier one is void."""
        return self._openings

    @property
    def is_open(self) -> bool:
        return self._is_open

    def open(self) -> Any:
        """The module to call NVML with. Raises Unavailable."""
        # 30 ms, and a node with simulated GPUs need not have it.
        import pynvml

        self._pynvml = pynvml
        if not self._is_open:
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise Unavailable(f"opening NVML failed: {error}. {CHECKLIST}") from error
            self._is_open = True
            # Counted, so that others notice that handles and event sets of before are void.
            self._openings += 1
        return pynvml

    def close(self) -> None:
        """Shuts NVML down; that may fail where it is lost already, which changes nothing."""
        self._handles = None
        if not self._is_open:
            return
        # Before the shutdown, which may fail: NVML is opened again in any case.
        self._is_open = False
        try:
            self._pynvml.nvmlShutdown()
        except self._pynvml.NVMLError:
            return

    def find_gpus(self) -> tuple[list[FoundGpu], list[UnnamedGpu]]:
        """All GPUs by NVML's index, enumerated anew. Raises DriverLostError, Unavailable."""
        nvml = self.open()
        try:
            count = nvml.nvmlDeviceGetCount()
        # No count, no NVML: even a driver without GPUs has one.
        except nvml.NVMLError as error:
            raise DriverLostError from error
        answers = [self._find_gpu(nvml, nvml_index) for nvml_index in range(count)]
        found = [answer for answer in answers if isinstance(answer, FoundGpu)]
        self._handles = {gpu.uuid: gpu.handle for gpu in found}
        return found, [answer for answer in answers if isinstance(answer, UnnamedGpu)]

    def _find_gpu(self, nvml: Any, nvml_index: int) -> FoundGpu | UnnamedGpu:
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(nvml_index)
            uuid = GpuUuid(text_of(nvml.nvmlDeviceGetUUID(handle)))
        except nvml.NVMLError as error:
            # A GPU that cannot be named is reported by its index; a driver that is lost ends the poll.
            self.check_driver(error)
            return UnnamedGpu(nvml_index=nvml_index, reason=f"NVML: {error}")
        return FoundGpu(nvml_index=nvml_index, uuid=uuid, handle=handle)

    def handles(self) -> Mapping[GpuUuid, Any]:
        """The handles of the GPUs that the last enumeration of this opening found. Raises DriverLostError, Unavailable."""
        if self._handles is None:
            self.find_gpus()
        return self._handles or {}

    def forget_gpus(self) -> None:
        """The next call of `handles` enumerates the GPUs anew."""
        self._handles = None

    def check_driver(self, error: Exception) -> None:
        """Raises DriverLostError where the error is of the whole driver and not of one GPU."""
        if self.error_name(error) in _OF_DRIVER:
            raise DriverLostError from error

    def ask(self, name: str, *arguments: Any) -> Any | None:
        """What NVML's function of this name returns, None where it fails for one GPU alone. Raises DriverLostError."""
        try:
            return getattr(self._pynvml, name)(*arguments)
        except self._pynvml.NVMLError as error:
            self.check_driver(error)
            return None

    def cleared_buffer(self) -> ctypes.Array[ctypes.c_char]:
        """For one list that NVML fills, until the next one."""
        ctypes.memset(self._buffer, 0, len(self._buffer))
        return self._buffer

    def grow_buffer(self, size: int) -> None:
        """For a list that has so many bytes now, and may have more at the next call."""
        if size > len(self._buffer):
            self._buffer = (ctypes.c_char * (2 * size))()

    def error_name(self, error: Exception) -> str:
        """NVML's name of the error without its prefix: `GPU_IS_LOST`."""
        code = getattr(error, "value", None)
        if not self._error_names:
            names = [name for name in dir(self._pynvml) if name.startswith(_ERROR_PREFIX)]
            self._error_names = {getattr(self._pynvml, name): name.removeprefix(_ERROR_PREFIX) for name in names}
        return self._error_names.get(code or -1, f"CODE_{code}")
