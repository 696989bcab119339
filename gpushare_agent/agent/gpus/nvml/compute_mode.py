"""Sets the GPUs' compute mode through NVML, and sets it back. Blocking NVML calls go to a thread, bounded.

The mode belongs to the GPU and lasts until the driver is unloaded. Source: NVML API reference
(nvmlDeviceSetComputeMode: root with CAP_SYS_ADMIN only). State owned: what the modes were before.
"""

from __future__ import annotations

from contextlib import suppress

import pynvml
import structlog

from gpushare_agent.agent.gpus.nvml.session import CallError, NvmlError, call
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.model.errors import StartupError, Unavailable

log = structlog.get_logger(__name__)

_ADVICE = "Look for NVRM and Xid lines in `dmesg`."
_TIMEOUT_S = 10.0


class ComputeModes:
    """The compute modes of all GPUs of the node, as they were before they were set."""

    def __init__(self) -> None:
        self._thread = DaemonThread("nvml-compute-mode", advice=_ADVICE)
        self._before: dict[str, int] = {}

    async def make_exclusive(self) -> list[str]:
        """Sets EXCLUSIVE_PROCESS where it is not set; the UUIDs of the GPUs that were changed. Raises StartupError."""
        try:
            return await self._thread.call(self._make_exclusive, "setting the GPUs' compute mode", _TIMEOUT_S)
        except Unavailable as error:
            raise StartupError(
                f"{error} The MPS control daemon was not started; without mps.exclusive_process the mode stays as it is"
            ) from error

    async def restore(self) -> None:
        """Sets the modes back that `make_exclusive` has changed. Raises Unavailable."""
        if self._before:
            await self._thread.call(self._restore, "setting the GPUs' compute mode back", _TIMEOUT_S)

    def _make_exclusive(self) -> list[str]:
        exclusive = pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
        try:
            call("nvmlInit")
            for index in range(call("nvmlDeviceGetCount")):
                try:
                    handle = call("nvmlDeviceGetHandleByIndex", index)
                    before, uuid = call("nvmlDeviceGetComputeMode", handle), call("nvmlDeviceGetUUID", handle)
                except CallError as error:
                    # One that does not answer is given to nobody, and must not keep MPS from the others.
                    log.warning("gpu_without_compute_mode", index=index, reason=str(error))
                    continue
                # Set by the operator already: it is not the agent's to set back.
                if before != exclusive:
                    call("nvmlDeviceSetComputeMode", handle, exclusive)
                    self._before[uuid] = before
        except NvmlError as error:
            raise Unavailable(f"setting the GPUs' compute mode to EXCLUSIVE_PROCESS failed: {error}.") from error
        return sorted(self._before)

    def _restore(self) -> None:
        failed = ""
        # By UUID: indexes may have changed with a GPU that was lost.
        for uuid, mode in sorted(self._before.items()):
            try:
                call("nvmlDeviceSetComputeMode", call("nvmlDeviceGetHandleByUUID", uuid), mode)
                del self._before[uuid]
            except NvmlError as error:
                failed = f"setting the GPUs' compute mode back failed: {error}."
        # What is left is for another try.
        if failed:
            raise Unavailable(failed)
        with suppress(NvmlError):
            call("nvmlShutdown")
