"""For isolation hami-core: a library of no more than a header, a shared region, and where the real source is."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpushare_agent.isolation.hami_core import region_format as layout
from gpushare_agent.model.names import ENV_HAMI_CORE_CACHE
from native.build_hami_core import CannotBuildError, opened_source
from tests.native.build import library_source

INSIDE = "/usr/local/vgpu/libvgpu.so"
MACHINES = {"x86_64": 62, "aarch64": 183}


def fake_library(path: Path, *, machine: int | None = None) -> Path:
    """An ELF header of 64 bits for this machine, without sections and segments, and the variable that HAMi-core reads."""
    number = MACHINES[os.uname().machine] if machine is None else machine
    identification = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = identification + struct.pack("<HHIQQQIHHHHHH", 3, number, 1, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0)
    path.write_bytes(header + ENV_HAMI_CORE_CACHE.encode())
    return path


@contextmanager
def hami_core_source() -> Iterator[Path]:
    """The directory of HAMi-core's source (found by tests/native/build.py), or the test is skipped with the reason."""
    try:
        source = library_source("HAMI_CORE_SOURCE")
    except CannotBuildError as error:
        pytest.skip(str(error))
    with opened_source(source) as directory:
        yield directory


def region_file(
    *, owner: int = 0, lock: int = 1, postinit_lock: int = 1, slots: Sequence[tuple[int, int, int]] = ()
) -> bytes:
    """The content of a cache file; a slot is (PID, host PID, bytes in use on GPU 0)."""
    raw = bytearray(layout.FILE_BYTES)
    struct.pack_into("<iII", raw, 0, layout.MAGIC, *layout.VERSION)
    struct.pack_into("<Q", raw, layout.OWNER_OFFSET, owner)
    struct.pack_into("<I", raw, layout.LOCK_OFFSET, lock)
    struct.pack_into("<i", raw, layout.TAIL_OFFSET, len(slots))
    struct.pack_into("<I", raw, layout.POSTINIT_LOCK_OFFSET, postinit_lock)
    for number, (pid, host_pid, used) in enumerate(slots):
        start = layout.SLOTS_OFFSET + number * layout.SLOT_BYTES
        struct.pack_into("<ii", raw, start, pid, host_pid)
        struct.pack_into("<Q", raw, start + layout.SLOT_USED_OFFSET + layout.SLOT_USED_TOTAL_OFFSET, used)
    return bytes(raw)
