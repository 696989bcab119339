"""The driver's own limits of a cgroup's GPU memory, as values. Source: nvml.h of CUDA 13.4, `nvmlSetMemoryLimits_v1_t`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from gpushare_agent.model.names import GpuUuid


class MemoryLimit(Struct, frozen=True, kw_only=True):
    """What the processes in a cgroup and below may have of one GPU. `cgroup` is its directory, in cgroup v2."""

    gpu: GpuUuid
    cgroup: Path
    limit_bytes: int


class LimitOutcome(Struct, frozen=True, kw_only=True):
    """`problem` says why the limit is not in force and what to do, empty where it is. `is_gone`: the cgroup has ended.
    `has_no_controller`: the kernel's dmem controller is not enabled for this cgroup, so the driver takes no limit for it.
    `used_bytes` is what its processes have; a limit below it takes nothing from them."""

    problem: str = ""
    used_bytes: int = 0
    is_gone: bool = False
    has_no_controller: bool = False


class MemoryLimiter(Protocol):
    """The GPUs' driver."""

    async def check_memory_limits(self, cgroup: Path, *, may_set: bool) -> None:
        """Raises AgentError with the cure where limits cannot be had here."""

    async def keep_memory_limits(self, wanted: Sequence[MemoryLimit], *, may_set: bool) -> list[LimitOutcome]:
        """Reads, sets what differs where `may_set`; one outcome for each of `wanted`. Raises Unavailable."""
