"""All that the processes of a container write into `usage`, for tests; the agent reads what they have and what they pay."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from gpushare_agent.agent.isolation.gpushare.format import MOST_GPUS, MOST_SLOTS, read_held, usage_head_bytes

KINDS = ("linear", "managed", "virtual", "array", "pool", "graph", "context")
_SLOT, _SLOT_BYTES = struct.Struct(f"@iIQ{MOST_GPUS}Q{MOST_GPUS}Q{len(KINDS)}QQ"), 448
"""PID, started at, held and pending on each GPU, bytes of each kind, functions without a hook."""
_LAUNCHED_NS = 512 + 48


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """What the container's processes say of the first GPU."""

    held_bytes: int
    launched_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """`pid` is the process's own, in its PID namespace."""

    pid: int
    bytes_of_kind: dict[str, int]
    unhooked: int


def read_usage(usage: bytes) -> tuple[GpuUsage, list[ProcessUsage]]:
    """The use of the first GPU, and of each process that has a slot, dead ones among them that nobody has cleared yet."""
    [launched_ns] = struct.unpack_from("Q", usage, _LAUNCHED_NS)
    first = usage_head_bytes(MOST_GPUS)
    slots = [_SLOT.unpack_from(usage, first + index * _SLOT_BYTES) for index in range(MOST_SLOTS)]
    return GpuUsage(held_bytes=read_held(usage, 1)[0], launched_ns=launched_ns), [
        ProcessUsage(
            pid=pid, bytes_of_kind=dict(zip(KINDS, numbers[2 + 2 * MOST_GPUS :], strict=False)), unhooked=numbers[-1]
        )
        for pid, *numbers in slots
        if pid > 0
    ]
