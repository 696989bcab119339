"""The driver's memory limits of cgroups through NVML. Blocking; driver.py calls it from the thread of the polls.

Source: nvml.h of CUDA 13.4 (nvmlDeviceSetMemoryLimits_v1, nvmlDeviceGetMemoryLimits_v1) and NVIDIA's guide to MPS,
"Memory Partitioning". Read there, not tried on a GPU: driver 615 and later; cgroup v2; no MIG. Reading needs no right;
setting needs root with CAP_SYS_ADMIN, by which the driver's kernel module knows an administrator. State owned: none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pynvml

from gpushare_agent.agent.gpus.nvml.session import CallError, NvmlSession, ask, call
from gpushare_agent.core.model.errors import Rejected, Unavailable
from gpushare_agent.core.model.isolation import LimitOutcome, MemoryLimit

_UNLIMITED = 0xFFFFFFFFFFFFFFFF
_CAP_SYS_ADMIN = 21
_GRANT = "take manifests/components/driver-limits, or set driver_limits.set_by_agent to false"
_TOOLKIT = (
    ". NVIDIA's container toolkit 1.20.1 or later sets it, for containers that get GPUs from its runtime or by CDI; or"
    " let the agent set it (driver_limits.set_by_agent)"
)
_NO_LIMIT = ("NOT_FOUND", "NOT_SUPPORTED")
"""Of a reading: driver 615 without the kernel's dmem controller says NOT_SUPPORTED of a cgroup that has no limit."""
_PROBLEMS = {
    "NO_PERMISSION": f"the agent has no right to set it: {_GRANT}",
    "NOT_SUPPORTED": "the GPU takes none: MIG is enabled on it, or the driver's memory accounting is off (RmMemacctMode)",
    "OPERATING_SYSTEM": f"the cgroup cannot be opened or written: {_GRANT}",
    "NOT_FOUND": "its cgroup has no dmem files: the kernel's dmem controller is not enabled for it",
}


def check_limits(session: NvmlSession, cgroup: Path, *, may_set: bool) -> None:
    """Whether limits can be had here; `cgroup` is any. Raises Rejected with the remedy, Unavailable."""
    with session.used("asking NVML for memory limits"):
        # Any GPU: the function is the driver's, and all have it or none.
        handle = next(iter(session.handles().values()), None)
        if handle is None:
            raise Unavailable("the driver shows no GPU")
        try:
            _read(handle, cgroup)
        except CallError as error:
            if error.name != "FUNCTION_NOT_FOUND":
                raise Unavailable(f"NVML does not report memory limits: {error}") from error
            version = ask("nvmlSystemGetDriverVersion") or "of an unknown version"
            raise Rejected(
                f"the driver {version} has no memory limits of cgroups: they come with NVIDIA's driver 615 (CUDA 13.4). "
                "Update the driver, or choose another isolation"
            ) from error
    # Looked at here, because the driver would say so only at the first share.
    if may_set and not _is_administrator():
        raise Rejected(
            "driver_limits.set_by_agent is true, and the agent lacks the capability SYS_ADMIN, which the driver wants: "
            "take manifests/components/driver-limits, or set it to false and let NVIDIA's container toolkit set limits"
        )


def keep_limits(session: NvmlSession, desired: Sequence[MemoryLimit], *, may_set: bool) -> list[LimitOutcome]:
    """One outcome for each of `desired`. A limit that differs is set where that is allowed. Raises Unavailable."""
    with session.used("setting memory limits through NVML"):
        handles = session.handles()
        return [_keep(handles.get(limit.gpu), limit, may_set=may_set) for limit in desired]


def _is_administrator() -> bool:
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", text, flags=re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> _CAP_SYS_ADMIN & 1)


def _keep(handle: Any | None, limit: MemoryLimit, *, may_set: bool) -> LimitOutcome:
    if handle is None:
        return LimitOutcome(problem=f"GPU {limit.gpu} does not answer")
    try:
        found, used = _read(handle, limit.cgroup)
        if found != limit.limit_bytes and may_set:
            # Equal limits: above a lower soft one MPS may end the program for another's sake.
            asked = pynvml.c_nvmlSetMemoryLimits_v1_t(bytes(limit.cgroup), limit.limit_bytes, limit.limit_bytes)
            call("nvmlDeviceSetMemoryLimits_v1", handle, asked)
            found, used = _read(handle, limit.cgroup)
    except CallError as error:
        return LimitOutcome(
            problem=f"the driver's limit cannot be set or read: {_PROBLEMS.get(error.name, f'NVML: {error}')}",
            is_gone=not limit.cgroup.is_dir(),
            has_no_controller=error.name == "NOT_FOUND",
        )
    # A lower limit keeps the share as well: somebody else has set it.
    if found is not None and found <= limit.limit_bytes:
        return LimitOutcome(used_bytes=used)
    has = f"is {found >> 20} MiB" if found is not None else "is not set"
    return LimitOutcome(
        problem=f"the driver's limit {has}, and should be {limit.limit_bytes >> 20} MiB{'' if may_set else _TOOLKIT}",
        is_gone=not limit.cgroup.is_dir(),
    )


def _read(handle: Any, cgroup: Path) -> tuple[int | None, int]:
    """The hard limit in bytes, None where there is none, and what is used under it. Raises CallError, DriverLostError."""
    limits = pynvml.c_nvmlGetMemoryLimits_v1_t(bytes(cgroup))
    try:
        call("nvmlDeviceGetMemoryLimits_v1", handle, limits)
    except CallError as error:
        # No limit is an answer: the caller sets one or reports it.
        if error.name in _NO_LIMIT:
            return None, 0
        raise
    hard = int(limits.hardLimit)
    return (None if hard == _UNLIMITED else hard), int(limits.currentUsed)
