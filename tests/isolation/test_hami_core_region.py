"""The shared region: its layout against the library's own header, and what a tenant may make of the file."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest

from gpushare_agent.isolation.hami_core import region_format as layout
from gpushare_agent.isolation.hami_core.files import HamiCoreFiles
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.errors import Corrupt, NotFound
from gpushare_agent.model.names import PodUid
from tests.isolation.support_driver import NATIVE, require_cc
from tests.isolation.support_hami_core import fake_library, hami_core_source, region_file

KEY = ContainerKey(PodUid("11111111-2222-3333-4444-555555555555"), "cuda")
MIB = 1024 * 1024


@pytest.fixture
def files(short_dir: Path) -> HamiCoreFiles:
    files = HamiCoreFiles(fake_library(short_dir / "libvgpu.so"), short_dir / "hami")
    files.prepare(KEY)
    return files


def test_the_layout_is_that_of_the_librarys_header(tmp_path: Path) -> None:
    """Every offset and size that is used, printed by a program that includes the header."""
    (tmp_path / "cuda.h").write_text("typedef struct context *CUcontext;\n")
    (tmp_path / "static_config.h").write_text("")
    program, source = tmp_path / "layout", str(NATIVE / "hami_core_layout.c")
    with hami_core_source() as directory:
        command = [require_cc(), "-w", "-o", str(program), f"-I{tmp_path}", f"-I{directory / 'src'}", source]
        subprocess.run(command, check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert {name: int(number) for name, number in map(str.split, printed.splitlines())} == {
        "initialized_flag": 0,
        "major_version": 4,
        "minor_version": 8,
        "owner_pid": layout.OWNER_OFFSET,
        "sem": layout.LOCK_OFFSET,
        "limit": layout.LIMITS_OFFSET,
        "sm_limit": layout.CORE_LIMITS_OFFSET,
        "procs": layout.SLOTS_OFFSET,
        "proc_num": layout.TAIL_OFFSET,
        "sem_postinit": layout.POSTINIT_LOCK_OFFSET,
        "slot.pid": 0,
        "slot.hostpid": 4,
        "slot.used": layout.SLOT_USED_OFFSET,
        "slot.seqlock": layout.SLOT_SEQLOCK_OFFSET,
        "used.total": layout.SLOT_USED_TOTAL_OFFSET,
        "sizeof.used": layout.SLOT_USED_BYTES,
        "sizeof.slot": layout.SLOT_BYTES,
        "sizeof.region": layout.REGION_BYTES,
        "magic": layout.MAGIC,
        "major": layout.VERSION[0],
        "minor": layout.VERSION[1],
        "gpus": layout.MAX_GPUS,
        "processes": layout.MAX_PROCESSES,
    }


def test_a_region_is_read_and_its_limits_are_edited(files: HamiCoreFiles) -> None:
    """Limits by the GPU's ordinal; nothing beside them changes."""
    path = files.cache_file(KEY)
    path.write_bytes(region_file(owner=7, lock=0, postinit_lock=0, slots=((41, 0, 3 * MIB), (42, 4242, 0))))
    before = path.read_bytes()
    with files.opened_region(KEY) as region:
        assert region is not None
        head, tail = region.head(), region.tail()
        assert head is not None
        assert (head.owner_pid, head.lock.value, tail.slots, tail.postinit_lock.value) == (7, 0, 2, 0)
        slots = region.slots(tail.slots)
        assert [(slot.pid, slot.host_pid, slot.used_bytes[0]) for slot in slots] == [(41, 0, 3 * MIB), (42, 4242, 0)]
        region.set_memory_limit(1, 512 * MIB)
        region.set_core_limit(0, 35)
        edited = region.head()
    assert edited is not None
    assert edited.memory_limits[:3] == (0, 512 * MIB, 0) and edited.core_limits[:2] == (35, 0)
    after = path.read_bytes()
    changed = [place for place in range(0, len(before) - 1, 8) if before[place : place + 8] != after[place : place + 8]]
    assert changed == [layout.LIMITS_OFFSET + 8, layout.CORE_LIMITS_OFFSET]


def test_a_limit_of_zero_which_would_be_none_cannot_be_written() -> None:
    """Nor one of a GPU that the array does not have."""
    for ordinal, value in ((0, 0), (0, -1), (16, 1), (-1, 1)):
        with pytest.raises(AssertionError, match="no limit"):
            layout.memory_limit_edit(ordinal, value)


def test_before_the_first_cuinit_there_is_no_region(files: HamiCoreFiles) -> None:
    """An empty file, and one that a process has just given its size."""
    with files.opened_region(KEY) as region:
        assert region is None
    os.truncate(files.cache_file(KEY), layout.FILE_BYTES)
    with files.opened_region(KEY) as region:
        assert region is not None and region.head() is None


def test_what_a_tenant_makes_of_its_file_is_corrupt_and_never_waited_for(files: HamiCoreFiles, tmp_path: Path) -> None:
    """Another size, another version, a link to a file of the right size, a FIFO, a directory."""
    path = files.cache_file(KEY)
    honest = tmp_path / "honest"
    honest.write_bytes(region_file())

    def expect_corrupt() -> None:
        with pytest.raises(Corrupt), files.opened_region(KEY) as region:
            assert region is not None
            region.head()
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    path.write_bytes(region_file() + b"x")
    expect_corrupt()
    path.write_bytes(struct.pack("<iII", layout.MAGIC, 9, 9) + region_file()[12:])
    expect_corrupt()
    path.symlink_to(honest)
    expect_corrupt()
    os.mkfifo(path)
    expect_corrupt()
    path.mkdir()
    expect_corrupt()
    with pytest.raises(NotFound), files.opened_region(KEY):
        pass


def test_a_file_that_is_cut_short_while_it_is_open_is_corrupt(files: HamiCoreFiles) -> None:
    """And ends nobody by a signal, as a mapping would."""
    path = files.cache_file(KEY)
    path.write_bytes(region_file())
    with files.opened_region(KEY) as region:
        assert region is not None
        os.truncate(path, 100)
        with pytest.raises(Corrupt, match="shorter"):
            region.tail()


def test_a_count_of_slots_beyond_the_array_is_cut_to_it() -> None:
    """The count is the tenant's."""
    for told, taken in ((5000, 1024), (-3, 0)):
        raw = struct.pack("<i", told) + bytes(layout.TAIL_BYTES - 4)
        assert layout.parse_tail(raw).slots == taken
