"""HAMi-core's shared region, version 1.2: the limits, the usage and the locks of one container's processes.

The library makes it in the container's cache file from the environment, at the first cuInit, and reads it from then on. The
file is the tenant's: every number here is a claim, of use for the tenant's own container alone. Native, little-endian.
Source: HAMi-core 8f3a89c, `shared_region_t` in src/multiprocess/multiprocess_memory_limit.h; a test compiles its offsets.

| offset | size | field |
|---|---|---|
| 0 | 4 | int32 initialized: 19920718 |
| 4 | 4 + 4 | uint32 major, minor version |
| 16 | 8 | size_t owner: the PID, in the container, that holds `sem`; 0 none |
| 24 | 32 | sem_t sem: 1 where nobody changes the process slots |
| 56 | 8 | uint64 number of GPUs |
| 1600 | 16 * 8 | uint64 memory limit of each GPU, bytes; 0: none. Read at every allocation |
| 1728 | 16 * 8 | uint64 compute limit of each GPU, percent; 0, 100 and more: none. Read once by each process |
| 1856 | 1024 * 1960 | process slots |
| 2008896 | 4 | int32 number of slots in use |
| 2008920 | 32 | sem_t sem_postinit: 1 where no process is looking for its host PID, the last step of cuInit |

A slot has int32 pid at 0, int32 hostpid at 4 (0 until it is found), 16 records of 64 bytes at 8, whose uint64 at 32 is the
memory in use on that GPU, and uint64 seqlock at 1936, odd while a process writes there. A sem_t of glibc on 64-bit machines
begins with uint32 value, uint32 waiters.
"""

from __future__ import annotations

import struct

from msgspec import Struct

from gpushare_agent.model.errors import Corrupt

REGION_BYTES = 2_008_952
FILE_BYTES = REGION_BYTES + 1
"""The library writes one byte after the region to give the file its size."""
MAGIC = 19_920_718
VERSION = (1, 2)
MAX_GPUS = 16
MAX_PROCESSES = 1024

OWNER_OFFSET = 16
LOCK_OFFSET = 24
LIMITS_OFFSET = 1600
CORE_LIMITS_OFFSET = 1728
HEAD_BYTES = SLOTS_OFFSET = 1856
SLOT_BYTES = 1960
TAIL_OFFSET = SLOTS_OFFSET + MAX_PROCESSES * SLOT_BYTES
TAIL_BYTES = REGION_BYTES - TAIL_OFFSET
POSTINIT_LOCK_OFFSET = 2_008_920

SLOT_USED_OFFSET = 8
SLOT_USED_BYTES = 64
SLOT_USED_TOTAL_OFFSET = 32
SLOT_SEQLOCK_OFFSET = 1936

_HEAD = struct.Struct("<iII4xQII")
_LIMITS = struct.Struct(f"<{MAX_GPUS}Q")
_LOCK = struct.Struct("<II")
_COUNT = struct.Struct("<i")
_UINT64 = struct.Struct("<Q")
_USED = f"{SLOT_USED_TOTAL_OFFSET}xQ{SLOT_USED_BYTES - SLOT_USED_TOTAL_OFFSET - _UINT64.size}x"
_BEFORE_SEQLOCK = SLOT_SEQLOCK_OFFSET - SLOT_USED_OFFSET - MAX_GPUS * SLOT_USED_BYTES
_AFTER_SEQLOCK = SLOT_BYTES - SLOT_SEQLOCK_OFFSET - _UINT64.size
_SLOT = struct.Struct(f"<ii{MAX_GPUS * _USED}{_BEFORE_SEQLOCK}xQ{_AFTER_SEQLOCK}x")
_SLOT_PIDS = struct.Struct(f"<ii{SLOT_BYTES - 2 * _COUNT.size}x")


class Lock(Struct, frozen=True, kw_only=True):
    """A semaphore of value 1. `waiters` counts also those that were killed while they waited."""

    value: int
    waiters: int


class Slot(Struct, frozen=True, kw_only=True):
    """A process that has called cuInit; PIDs as it and the driver reported them."""

    pid: int
    host_pid: int
    seqlock: int
    used_bytes: tuple[int, ...]


class RegionHead(Struct, frozen=True, kw_only=True):
    """The limits by the GPU's ordinal in the container, and who holds the lock of the slots."""

    owner_pid: int
    lock: Lock
    memory_limits: tuple[int, ...]
    core_limits: tuple[int, ...]


class RegionTail(Struct, frozen=True, kw_only=True):
    """What follows the slots. `slots` is within the array, whatever the file says."""

    slots: int
    postinit_lock: Lock


def parse_head(raw: bytes) -> RegionHead | None:
    """The first HEAD_BYTES; None where no process has made the region yet. Raises Corrupt for another version."""
    magic, major, minor, owner, value, waiters = _HEAD.unpack_from(raw)
    # The file has its size from the first cuInit on, and the numbers a moment later.
    if magic == 0:
        return None
    if magic != MAGIC or (major, minor) != VERSION:
        raise Corrupt(f"no shared region of HAMi-core {VERSION[0]}.{VERSION[1]}: it begins {magic}, {major}.{minor}")
    return RegionHead(
        owner_pid=owner,
        lock=Lock(value=value, waiters=waiters),
        memory_limits=_LIMITS.unpack_from(raw, LIMITS_OFFSET),
        core_limits=_LIMITS.unpack_from(raw, CORE_LIMITS_OFFSET),
    )


def parse_tail(raw: bytes) -> RegionTail:
    """The TAIL_BYTES from TAIL_OFFSET."""
    value, waiters = _LOCK.unpack_from(raw, POSTINIT_LOCK_OFFSET - TAIL_OFFSET)
    (count,) = _COUNT.unpack_from(raw)
    # The count is the tenant's to write: it decides how much is read.
    return RegionTail(slots=min(max(count, 0), MAX_PROCESSES), postinit_lock=Lock(value=value, waiters=waiters))


def parse_slots(raw: bytes) -> tuple[Slot, ...]:
    """Whole slots of SLOT_BYTES each."""
    whole = len(raw) // SLOT_BYTES * SLOT_BYTES
    return tuple(
        Slot(pid=pid, host_pid=host_pid, used_bytes=tuple(used), seqlock=seqlock)
        for pid, host_pid, *used, seqlock in _SLOT.iter_unpack(raw[:whole])
    )


def parse_slot_pids(raw: bytes) -> tuple[tuple[int, int], ...]:
    """The PID and the host PID of each: of a thousand slots in a tenth of the time of `parse_slots`."""
    return tuple(_SLOT_PIDS.iter_unpack(raw[: len(raw) // SLOT_BYTES * SLOT_BYTES]))


def memory_limit_edit(ordinal: int, limit_bytes: int) -> tuple[int, bytes]:
    """The place and the bytes to write for a limit of memory, of at least one byte: 0 is none."""
    return _edit(LIMITS_OFFSET, ordinal, limit_bytes)


def core_limit_edit(ordinal: int, percent: int) -> tuple[int, bytes]:
    """The place and the bytes to write for a limit of compute; 100 percent is no limit."""
    return _edit(CORE_LIMITS_OFFSET, ordinal, percent)


def host_pid_edit(slot: int, host_pid: int) -> tuple[int, bytes]:
    """The place and the bytes to write for the host PID in the slot of this number."""
    if not (0 <= slot < MAX_PROCESSES and host_pid > 0):
        raise AssertionError(f"no host PID: {host_pid} in slot {slot}")
    return SLOTS_OFFSET + slot * SLOT_BYTES + _COUNT.size, _COUNT.pack(host_pid)


def free_lock_edit(*, is_postinit: bool) -> tuple[int, bytes]:
    """The place and the bytes to write into a semaphore that nobody holds: the value alone, for the count of waiters is
    theirs."""
    return POSTINIT_LOCK_OFFSET if is_postinit else LOCK_OFFSET, _COUNT.pack(1)


def _edit(array: int, ordinal: int, value: int) -> tuple[int, bytes]:
    if not (0 <= ordinal < MAX_GPUS and value >= 1):
        raise AssertionError(f"no limit: {value} for GPU {ordinal}")
    return array + ordinal * _UINT64.size, _UINT64.pack(value)
