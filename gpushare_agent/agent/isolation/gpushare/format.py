"""The two files that the agent shares with libgpushare, as native/gpushare/format.h has them. Pure.

    gpushare.config   4,096 bytes, the agent writes, read-only in the container
    usage             131,072 bytes, all processes of the container write; the agent reads, and believes nothing of it

Numbers are native and aligned, so that each is written and read whole: a reader maps the file while it is written.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from threading import Lock

from msgspec import Struct
from msgspec.structs import astuple

from gpushare_agent.core.formats import vdevice
from gpushare_agent.core.model.directory_names import is_container_name, is_pod_uid

CONFIG_NAME, USAGE_NAME = vdevice.GPUSHARE_CONFIG_NAME, vdevice.USAGE_NAME
CONFIG_BYTES, USAGE_BYTES = 4096, vdevice.USAGE_BYTES
LAYOUT = 1
MOST_GPUS, MOST_SLOTS = 16, 256
CORES_OF_GPU = 10_000
"""Hundredths of a percent."""

_HEAD = struct.Struct("@4s3I36s76x48s64s")
_USAGE_HEAD = struct.Struct("@4s3I")
_FIRST_GPU, _GPU_BYTES = 512, 128
_UUID_OFFSET, UUID_BYTES = 8, 48
_LIMITS = ((4, 4), (56, 8), (64, 4), (68, 4))
"""The first byte and the length of each field of a GPU's entry: flags, memory, cores, ceiling."""
_OBSERVED = (*((offset, 8) for offset in range(72, 120, 8)), (120, 4), (124, 2), (126, 2))
"""The fields of Observed in their order."""
_LIMITS_MEMORY, _LIMITS_CORES, _HAS_CEILING = 1, 2, 4
_BETWEEN_OFFSET, _CONTEXT_OFFSET = 240, 272
_FIRST_USAGE_GPU, _USAGE_GPU_BYTES, _SLOT_BYTES = 512, 256, 448
_FIRST_SLOT = _FIRST_USAGE_GPU + MOST_GPUS * _USAGE_GPU_BYTES
_SLOTS = slice(_FIRST_SLOT, _FIRST_SLOT + MOST_SLOTS * _SLOT_BYTES)
_PAID = struct.Struct("@Q40xQQ128xQQQ40x")
"""A GPU's entry in `usage`: changed_at, launched, launches, launched_long, turns, present_long."""
_UNATTRIBUTED = struct.Struct("@8xq")
_SLOT = struct.Struct(f"@i12x{MOST_GPUS}Q304x")
"""A process: its PID, 0 if there is none, and what it has of each GPU."""
_UNHOOKED_OFFSET = 328  # in a slot: how many functions its process was given that the library does not know
FIRST_LOCKED_BYTE = 1 << 20
"""The process of slot i holds a lock on the byte that is i behind this one, for as long as it lives."""


class GpuLimits(Struct, frozen=True, kw_only=True):
    """The limits of one GPU. None: not limited. Cores are hundredths of a percent; the ceiling is for a container that
    computes alone there. `context_bytes` is what a process's context takes there; 0: not known."""

    uuid: str
    memory_bytes: int | None = None
    cores: int | None = None
    ceiling: int | None = None
    context_bytes: int = 0


class Observed(Struct, frozen=True, kw_only=True):
    """What the driver says of a container on one GPU. Times are of CLOCK_MONOTONIC, all in nanoseconds.

    `busy_ns` is how long the GPU was busy between `busy_since_ns` and `busy_until_ns` by samples that name a process of the
    container, `others_ns` by those that name another one. `busy_until_ns` of 0: the driver does not say.

    `companions` is how many others have launched something in the last second before `published_at_ms`, or still pay for it.
    `full`, in hundredths of a percent, is how much of the loss at the beginning of its turns the container must pay, and
    `between_us` how long the others compute between two of them, in microseconds (turns.py).
    """

    at_ns: int = 0
    used_bytes: int = 0
    busy_since_ns: int = 0
    busy_until_ns: int = 0
    busy_ns: int = 0
    others_ns: int = 0
    published_at_ms: int = 0
    companions: int = 0
    full: int = 0
    between_us: int = 0


class Paid(Struct, frozen=True, kw_only=True):
    """What the container's processes say that they have paid on one GPU, in nanoseconds since their files were made;
    `paid_long_ns` of it was for launches of several turns, which were on the GPU for `present_long_ns`, the others' turns
    included. All of them have had so many `turns`. They last took or gave memory at `changed_at_ns`. Each is any number of
    64 bits."""

    paid_ns: int
    launches: int
    paid_long_ns: int = 0
    turns: int = 0
    present_long_ns: int = 0
    changed_at_ns: int = 0


def encode_config(pod_uid: str, container: str, gpus: Sequence[GpuLimits], boot_id: str = "") -> bytes:
    """A whole file, before anything was observed; of `boot_id` the library reads nothing. Raises ValueError."""
    if not is_pod_uid(pod_uid) or not is_container_name(container) or len(gpus) > MOST_GPUS:
        raise ValueError(f"{pod_uid[:64]!r}, {container[:64]!r}, {len(gpus)} GPUs: gpushare.config cannot hold that")
    content = bytearray(CONFIG_BYTES)
    names = (boot_id.encode(), pod_uid.encode(), container.encode())
    _HEAD.pack_into(content, 0, b"GPSH", LAYOUT, CONFIG_BYTES, len(gpus), *names)
    for index, limits in enumerate(gpus):
        uuid = limits.uuid.encode()
        if len(uuid) >= UUID_BYTES:
            raise ValueError(f"{limits.uuid[:64]!r} does not fit into gpushare.config")
        start = _entry_of(index) + _UUID_OFFSET
        content[start : start + len(uuid)] = uuid
        write_limits(content, index, limits)
    return bytes(content)


def encode_usage() -> bytes:
    """An empty region."""
    content = bytearray(USAGE_BYTES)
    _USAGE_HEAD.pack_into(content, 0, b"GPSU", LAYOUT, USAGE_BYTES, MOST_SLOTS)
    return bytes(content)


def boot_of(config: bytes) -> str:
    """The boot in which a whole file was made; empty where it does not say."""
    return bytes(_HEAD.unpack_from(config)[4]).rstrip(b"\0").decode("ascii", "replace")


def gpu_uuids(config: bytes | memoryview) -> list[str]:
    """The UUIDs in a whole file, in the order of its entries, which is that of `usage` too."""
    # Bounded although it is the agent's own file.
    count = min(_HEAD.unpack_from(config)[3], MOST_GPUS)
    starts = [_entry_of(index) + _UUID_OFFSET for index in range(count)]
    return [bytes(config[start : start + UUID_BYTES]).split(b"\0", 1)[0].decode("ascii", "replace") for start in starts]


def write_limits(config: bytearray | memoryview, index: int, limits: GpuLimits) -> None:
    """Writes into a mapped whole file. Raises ValueError."""
    flags = (
        _LIMITS_MEMORY * (limits.memory_bytes is not None)
        | _LIMITS_CORES * (limits.cores is not None)
        | _HAS_CEILING * (limits.ceiling is not None)
    )
    cores, ceiling, context_kib = limits.cores or 0, limits.ceiling or 0, limits.context_bytes // 1024
    if not (0 <= cores <= CORES_OF_GPU and 0 <= ceiling <= CORES_OF_GPU and 0 <= context_kib < 1 << 32):
        raise ValueError(f"{limits} does not fit into gpushare.config")
    places = (*_LIMITS, (_CONTEXT_OFFSET + 4 * index - _entry_of(index), 4))
    _write(config, index, places, (flags, limits.memory_bytes or 0, cores, ceiling, context_kib))


def write_observed(config: bytearray | memoryview, index: int, seen: Observed) -> None:
    """As `write_limits`."""
    between = _BETWEEN_OFFSET + 2 * index - _entry_of(index)
    _write(config, index, (*_OBSERVED, (between, 2)), astuple(seen))


def _entry_of(index: int) -> int:
    return _FIRST_GPU + index * _GPU_BYTES


def _write(
    config: bytearray | memoryview, index: int, places: Sequence[tuple[int, int]], fields: Sequence[int]
) -> None:
    """Writes under the entry's sequence, which is odd meanwhile. By casts: struct would write a number byte by byte."""
    start = _entry_of(index)
    view = memoryview(config)
    numbers = {2: view.cast("H"), 4: view.cast("I"), 8: view.cast("Q")}
    # What can be done before is: whoever reads meanwhile has to wait.
    stores = [(numbers[size], (start + at) // size, number) for (at, size), number in zip(places, fields, strict=True)]
    sequence, place = numbers[4], start // 4
    # The next odd one also where an agent died at an odd one: for that one readers wait no longer.
    sequence[place] = ((sequence[place] + 1) | 1) & 0xFFFFFFFF
    _order_stores()
    for part, at, number in stores:
        part[at] = number
    _order_stores()
    sequence[place] = (sequence[place] + 1) & 0xFFFFFFFF


def _order_stores() -> None:
    """What was written before it is seen before what is written after it, also on Arm, where stores have no order.

    Python has no memory barrier. But a lock's release comes after everything before it, its acquisition before everything
    after it, and a release before an acquisition after it (Arm Architecture Reference Manual, B2.3, Barrier-ordered-before).
    To acquire it and then to release it would be none: both stores may move in between, and change places there.
    """
    lock = Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def usage_head_bytes(gpus: int) -> int:
    """So much of `usage` read_paid needs."""
    return _FIRST_USAGE_GPU + gpus * _USAGE_GPU_BYTES


def read_paid(head: bytes) -> list[Paid]:
    """Of as many GPUs as `head` is for."""
    return [
        Paid(
            paid_ns=paid, launches=launches, paid_long_ns=paid_long, turns=turns, present_long_ns=present_long,
            changed_at_ns=changed_at,
        )
        for changed_at, paid, launches, paid_long, turns, present_long in _PAID.iter_unpack(
            memoryview(head)[_FIRST_USAGE_GPU:]
        )
    ]  # fmt: skip


Slot = tuple[int, int]
"""A process under the library: its PID in its own PID namespace, and how many functions it was given that the library does
not know."""


def read_slots(usage: bytes) -> list[Slot] | None:
    """All slots of a whole file, also those of no process, which have no PID above 0; None of a file of another layout."""
    if _USAGE_HEAD.unpack_from(usage) != (b"GPSU", LAYOUT, USAGE_BYTES, MOST_SLOTS):
        return None
    # By casts: to unpack all fields of 256 slots takes 50 times as long.
    slots = memoryview(usage)[_SLOTS]
    pids, unhooked = slots.cast("i")[:: _SLOT_BYTES // 4], slots.cast("Q")[_UNHOOKED_OFFSET // 8 :: _SLOT_BYTES // 8]
    return list(zip(pids.tolist(), unhooked.tolist(), strict=True))


def read_held(usage: bytes, gpus: int) -> list[int]:
    """Bytes of each of the first `gpus` GPUs that the processes claim to have, including dead processes that were not
    cleared yet."""
    held = [_UNATTRIBUTED.unpack_from(usage, _FIRST_USAGE_GPU + index * _USAGE_GPU_BYTES)[0] for index in range(gpus)]
    for pid, *own in _SLOT.iter_unpack(usage[_SLOTS]):
        if pid > 0:
            held = [sum(pair) for pair in zip(held, own, strict=False)]
    # Numbers that the tenant may write, and the unattributed one is signed.
    return [max(0, one) for one in held]
