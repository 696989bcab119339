"""Reads and edits the shared region in a container's cache file, which the tenant may write at any time.

No link is followed, nothing but a regular file of exactly the region's size is read, each read and write is bounded, and
the file is never mapped: a tenant that cuts it short would end the agent by a signal. Each edit is eight aligned bytes or
four, which the processes that have the file mapped see whole. Blocks; call it in a thread. No state.
The layout: isolation/hami_core/region_format.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from gpushare_agent.isolation.hami_core.region_format import (
    FILE_BYTES,
    HEAD_BYTES,
    SLOT_BYTES,
    SLOTS_OFFSET,
    TAIL_BYTES,
    TAIL_OFFSET,
    RegionHead,
    RegionTail,
    Slot,
    core_limit_edit,
    memory_limit_edit,
    parse_head,
    parse_slot_pids,
    parse_slots,
    parse_tail,
)
from gpushare_agent.isolation.tenant_files import TENANT_FILE, is_oversized, occupied_bytes, renamed
from gpushare_agent.model.errors import Corrupt, Unavailable


class Region:
    """An open cache file. Methods raise Corrupt for what is no region, Unavailable where the file system refuses."""

    def __init__(self, file: int, name: str) -> None:
        self._file = file
        self._name = name

    def head(self) -> RegionHead | None:
        """None where no process of the container has called cuInit since it started."""
        return parse_head(self._read(HEAD_BYTES, 0))

    def tail(self) -> RegionTail:
        return parse_tail(self._read(TAIL_BYTES, TAIL_OFFSET))

    def slots(self, count: int) -> tuple[Slot, ...]:
        """The first ones; as many as `tail` says, at most 1,024."""
        return parse_slots(self._read(count * SLOT_BYTES, SLOTS_OFFSET))

    def slot_pids(self, count: int) -> tuple[tuple[int, int], ...]:
        """The PID and the host PID of each of the first slots."""
        return parse_slot_pids(self._read(count * SLOT_BYTES, SLOTS_OFFSET))

    def set_memory_limit(self, ordinal: int, limit_bytes: int) -> None:
        """Of the GPU with this ordinal in the container, from the next allocation on."""
        self.write(*memory_limit_edit(ordinal, limit_bytes))

    def set_core_limit(self, ordinal: int, percent: int) -> None:
        """Of the GPU with this ordinal in the container, for processes that start from now on."""
        self.write(*core_limit_edit(ordinal, percent))

    def write(self, offset: int, content: bytes) -> None:
        """An edit of `region_format`."""
        with renamed(self._name):
            written = os.pwrite(self._file, content, offset)
        if written != len(content):
            raise Unavailable(f"{self._name} took {written} of {len(content)} bytes")

    def _read(self, size: int, offset: int) -> bytes:
        with renamed(self._name):
            content = os.pread(self._file, size, offset)
        if len(content) != size:
            raise Corrupt(f"{self._name} became shorter while it was read")
        return content


@contextmanager
def opened_region(name: str, directory: int) -> Iterator[Region | None]:
    """The cache file `name` below a directory's descriptor; None while it is empty: no process has called cuInit.

    Raises NotFound, Corrupt for what is no region (a link, another kind or size), Unavailable.
    """
    with renamed(name):
        file = os.open(name, TENANT_FILE, dir_fd=directory)
    try:
        status = os.fstat(file)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_size not in (0, FILE_BYTES)
            or is_oversized(status, FILE_BYTES)
        ):
            raise Corrupt(f"{name} is no regular file of {FILE_BYTES} bytes but one of {occupied_bytes(status)}")
        yield Region(file, name) if status.st_size else None
    finally:
        os.close(file)
