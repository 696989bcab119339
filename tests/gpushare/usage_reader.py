"""All that the processes of a container write into `usage`, for tests; the agent reads what they have and what they pay."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from gpushare_agent.agent.isolation.gpushare.format import MOST_GPUS, MOST_SLOTS, read_held, usage_head_bytes

KINDS = ("linear", "managed", "virtual", "array", "pool", "graph", "context")
_GPU = struct.Struct("@QqQqQQQQQ")
"""changed at, unattributed, refused, tokens, earned, refilled at, launched, launches, throttled."""
_SLOT, _SLOT_BYTES = struct.Struct(f"@iIQ{MOST_GPUS}Q{MOST_GPUS}Q{len(KINDS)}QQ"), 448
_FIRST_SLOT = usage_head_bytes(MOST_GPUS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """What the container's processes say of one GPU."""

    held_bytes: int
    refused: int
    launches: int
    launched_ns: int
    throttled_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """`pid` is the process's own, in its PID namespace; bytes by index of the GPU, and by kind of memory."""

    pid: int
    started_at_ns: int
    held_bytes: Sequence[int]
    bytes_of_kind: dict[str, int]
    unhooked: int


def read_usage(usage: bytes) -> tuple[GpuUsage, list[ProcessUsage]]:
    """The use of the first GPU, and of each process that has a slot, dead ones among them that nobody has cleared yet."""
    slots = [_SLOT.unpack_from(usage, _FIRST_SLOT + index * _SLOT_BYTES) for index in range(MOST_SLOTS)]
    _, _, refused, _, _, _, launched, launches, throttled = _GPU.unpack_from(usage, 512)
    gpu = GpuUsage(
        held_bytes=read_held(usage, 1)[0],
        refused=refused,
        launches=launches,
        launched_ns=launched,
        throttled_ns=throttled,
    )
    processes = [
        ProcessUsage(
            pid=slot[0],
            started_at_ns=slot[2],
            held_bytes=slot[3:4],
            bytes_of_kind=dict(zip(KINDS, slot[3 + 2 * MOST_GPUS :], strict=False)),
            unhooked=slot[-1],
        )
        for slot in slots
        if slot[0] > 0
    ]
    return gpu, processes
