"""The one opening of NVML, used by several threads; and the calls of NVML with its errors renamed once.

NVML is thread-safe. Only a complete shutdown brings back a GPU that was reset, or a driver that was reloaded. So a
shutdown waits until no thread uses NVML, and whoever leaves it last does it; a call that hangs keeps NVML open meanwhile,
and the others go on with it.

State owned: whether NVML is open, how often it was opened, who uses it, the handles of the GPUs, and what the last poll
found. Handles end with the opening that gave them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from typing import Any

import pynvml
from msgspec import Struct

from gpushare_agent.core.model.errors import DriverLost
from gpushare_agent.core.model.names import GpuUuid

CHECKLIST = (
    "Check that: the NVIDIA driver is installed and `nvidia-smi` works on the node; libnvidia-ml.so.1 is visible in this "
    "container; /dev/nvidiactl and /dev/nvidia* can be opened in it; the pod runs with the NVIDIA runtime class (or has the "
    "component driver-from-host). After a driver upgrade restart the agent. If this is no GPU "
    "node, keep the agent off it by the DaemonSet's nodeSelector (nvidia-device-enable=enable), or a taint that it does not "
    "tolerate."
)
_OF_DRIVER = ("UNINITIALIZED", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH")
OF_GPU = ("GPU_IS_LOST", "RESET_REQUIRED")
"""No call of the GPU is answered any more."""
UNSUPPORTED = (
    "NOT_SUPPORTED",
    "FUNCTION_NOT_FOUND",
    "NO_PERMISSION",
    "ARGUMENT_VERSION_MISMATCH",
    "DEPRECATED",
    "VGPU_ECC_NOT_SUPPORTED",
)
UNUSABLE = "UNUSABLE"
"""Our own: NVML has no such error."""
UUID_TEXT = re.compile(r"[\w./-]{1,96}", re.ASCII)
"""Of GPUs and instances, as they become device IDs and variables of containers."""
_MOST_GPUS = 1024
_PREFIX = "NVML_ERROR_"
_ERROR_NAMES = {getattr(pynvml, name): name.removeprefix(_PREFIX) for name in dir(pynvml) if name.startswith(_PREFIX)}
_CLOSE_WAIT_S = 0.6
"""A round of samples takes about a tenth of a second, a wait for events ends within half of one; the poll that waits for
them has a timeout of its own."""


class NvmlError(Exception):
    """`name` is NVML's name of the error without its prefix, as `GPU_IS_LOST`; the text is NVML's."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class CallError(NvmlError):
    """One call failed; others, of other GPUs, may not."""


class DriverLostError(NvmlError):
    """NVML as a whole does not answer any more: it has to be opened again."""


def renamed(code: int, name: str = "") -> NvmlError:
    """The error of a code, which the call of this name answered."""
    error = _ERROR_NAMES.get(code, f"CODE_{code}")
    try:
        text = str(pynvml.NVMLError(code))
    except (pynvml.NVMLError, ValueError):  # the library's own text, of any bytes
        text = f"error {code}"
    if error in _OF_DRIVER and not _has_count():
        return DriverLostError(error, text)
    # What is said of the GPU as a whole is the same for each call.
    return CallError(error, text if error in OF_GPU or not name else f"{text} ({name})")


def _has_count() -> bool:
    """Whether the driver answers at all: else an error of the driver is that of one GPU, and the others go on."""
    try:
        pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return False
    return True


def call(name: str, *arguments: Any, field: str = "") -> Any:
    """What NVML's function of this name returns, or this field of it. Raises CallError, DriverLostError."""
    function: Callable[..., Any] | None = getattr(pynvml, name, None)
    # nvidia-ml-py of another version may lack the function.
    if function is None:
        raise CallError("FUNCTION_NOT_FOUND", f"nvidia-ml-py has no {name}")
    try:
        answer = function(*arguments)
        return getattr(answer, field) if field else answer
    except pynvml.NVMLError as error:
        raise renamed(error.value, name) from error
    # nvidia-ml-py decodes texts as UTF-8, and looks up and converts what the driver answers.
    except Exception as error:
        raise unusable(name, str(error)) from error


def unusable(name: str, why: str) -> CallError:
    """An answer that nobody can use, though the call did not fail."""
    return CallError(UNUSABLE, f"the answer of {name} cannot be used: {why}")


def ask(name: str, *arguments: Any) -> Any | None:
    """What NVML's function of this name returns, None where it fails for one GPU alone. Raises DriverLostError."""
    try:
        return call(name, *arguments)
    except CallError:
        return None


class FoundGpu(Struct, frozen=True, kw_only=True):
    """A GPU that has a handle and a UUID; whether it answers further calls is not known yet."""

    nvml_index: int
    uuid: GpuUuid
    handle: Any


class NvmlSession:
    """`before_close` is called while NVML is still open, in whichever thread shuts it down. `answering` are the GPUs that
    answered the last poll, each with the number of polls that it did not answer; None before the first one."""

    def __init__(self) -> None:
        self.before_close: Callable[[], None] = lambda: None
        self.answering: Set[tuple[GpuUuid, int]] | None = None
        self.openings = 0
        """Grows with each opening: what was read in an earlier one is void."""
        self.must_close = False
        """Somebody waits for the end of all calls."""
        self._is_open = False
        self._users = 0
        self._changed = threading.Condition()
        self._handles: dict[GpuUuid, Any] | None = None

    @contextmanager
    def used(self, what: str) -> Iterator[None]:
        """NVML stays open inside; it is opened where it is not. Raises DriverLost: it cannot be opened, or was lost
        inside."""
        with self._changed:
            if not self._is_open:
                try:
                    call("nvmlInit")
                except NvmlError as error:
                    raise DriverLost(f"opening NVML failed: {error}. {CHECKLIST}") from error
                self._is_open = True
                self.openings += 1
            self._users += 1
        try:
            yield
        except DriverLostError as error:
            self.must_close = True
            raise DriverLost(f"{what} failed: {error}. It is opened again at the next call. {CHECKLIST}") from error
        finally:
            with self._changed:
                self._users -= 1
                self._close_if_free()

    def close(self) -> None:
        """Shuts NVML down, now or with the end of the last call under way, for which this waits a moment. The next use opens
        it again."""
        with self._changed:
            self.must_close = True
            self._close_if_free()
            # Not for ever: a call that hangs is a use, too.
            self._changed.wait_for(lambda: not self.must_close, _CLOSE_WAIT_S)

    def _close_if_free(self) -> None:
        if not self.must_close or self._users:
            return
        if self._is_open:
            self.before_close()
            with suppress(NvmlError):  # where NVML is lost already
                call("nvmlShutdown")
        self._is_open, self._handles, self.must_close = False, None, False
        self._changed.notify_all()

    def find_gpus(self) -> tuple[list[FoundGpu], dict[int, CallError]]:
        """All GPUs by NVML's index, enumerated again; and why others could not even be named, by their index. Raises
        DriverLostError."""
        try:
            # Bounded: what is no number of GPUs must not keep this thread for ever.
            count = min(call("nvmlDeviceGetCount"), _MOST_GPUS)
        # No count, no NVML: even a driver without GPUs has one.
        except NvmlError as error:
            raise DriverLostError(error.name, str(error)) from error
        found: list[FoundGpu] = []
        unnamed: dict[int, CallError] = {}
        for nvml_index in range(count):
            try:
                handle = call("nvmlDeviceGetHandleByIndex", nvml_index)
                uuid = GpuUuid(call("nvmlDeviceGetUUID", handle))
                if UUID_TEXT.fullmatch(uuid) is None or any(gpu.uuid == uuid for gpu in found):
                    raise unusable("nvmlDeviceGetUUID", f"{uuid!r} does not tell this GPU from others")
                found.append(FoundGpu(nvml_index=nvml_index, uuid=uuid, handle=handle))
            # A GPU that cannot be named is reported by its index.
            except CallError as error:
                unnamed[nvml_index] = error
        self._handles = {gpu.uuid: gpu.handle for gpu in found}
        return found, unnamed

    def handles(self) -> Mapping[GpuUuid, Any]:
        """The handles of the GPUs that the last enumeration of this opening found. Raises DriverLostError."""
        if self._handles is None:
            self.find_gpus()
        return self._handles or {}
