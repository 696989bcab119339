"""Programs that are hard on a library within them (tests/native/hard_program.c), and what is written into `usage` by those
who may: nobody else notices, no program ends that would not have ended, and no limit is lifted without a word.

A share of 30 cores and 2,560 MiB: 8 blocks of 256 MiB next to a context, and 300 launches of a millisecond a second.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpushare_agent.agent.isolation.gpushare.format import (
    CONFIG_NAME,
    MOST_SLOTS,
    USAGE_BYTES,
    USAGE_NAME,
    encode_usage,
)
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import IS_EMULATED, MIB, SHARE_MIB, TAKE, Container
from tests.native.gpu_program import finish

pytestmark = pytest.mark.isolation

CORES = 30
OUT_OF_MEMORY = 2
is_root = os.geteuid() == 0


@pytest.fixture
def share(machine_with: MachineWith) -> Container:
    machine = machine_with(sm_count=132, block_us=1000)
    return machine.container(memory_mib=SHARE_MIB, cores=100 * CORES)


@contextmanager
def begun(share: Container, *words: str) -> Iterator[subprocess.Popen[str]]:
    program = str(share.machine.built.programs / "hard_program")
    with share.start_command([program, *words], stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def end(process: subprocess.Popen[str]) -> tuple[int, int, str]:
    """Its last line's blocks and result, and standard error; its code is 0."""
    ended = finish(process)
    assert ended.code == 0, ended
    return ended.steps[-1]["blocks"], ended.steps[-1]["result"], ended.error


def run(share: Container, *words: str) -> tuple[int, int, str]:
    with begun(share, *words) as process:
        return end(process)


def is_share_of_gpu(rate: int) -> bool:
    """In real time on a busy machine: hardly less than 300 a second, and in the first one 100 more, which an idle share has
    saved. 1,000 would be all."""
    return 200 <= rate <= 420


def blocks(share: Container) -> int:
    """What a new program gets."""
    [found] = share.run(TAKE).blocks()
    return found


@pytest.mark.smoke
@pytest.mark.skipif(IS_EMULATED, reason="qemu-user gives a child all maps of its parent (MADV_DONTFORK)")
@pytest.mark.parametrize("way", ["orphan", "orphan-clone"])
def test_a_child_does_not_keep_what_its_killed_parent_had(share: Container, way: str) -> None:
    """It outlives it, and has nothing of a GPU."""
    with begun(share, way) as process:
        assert process.wait(30) == -9
        assert blocks(share) == 8


def test_a_program_that_closes_every_file_keeps_its_slot_and_its_files(share: Container) -> None:
    """Another one finds its blocks counted; the numbers of the closed files are the program's, without locks of ours, and a
    child has them all."""
    with begun(share, "close") as process:
        assert process.stdout is not None and process.stdout.readline()
        assert blocks(share) == 3
        assert end(process) == (4, 0, "")


needs_root = pytest.mark.skipif(not is_root, reason="needs root for other users and roots")


@pytest.mark.parametrize(
    ("case", "blocks", "result"),
    [
        pytest.param("early", 8, 4, id="calls before cuInit"),
        pytest.param("fork-frees", 100, 0, id="a child, while a thread holds a lock over an empty table"),
        pytest.param("end", 0, 0, id="calls from atexit, destructors of a thread and of a library"),
        pytest.param("namespace", 8, 0, id="dlmopen, which preloads nothing: the agent alone sees what is done there"),
        pytest.param("user", 8, 0, id="another user than at the beginning", marks=needs_root),
        pytest.param("root", 8, 0, id="another root than at the beginning", marks=needs_root),
    ],
)
def test_an_odd_program_is_limited_and_ends_well(share: Container, case: str, blocks: int, result: int) -> None:
    assert run(share, case) == (blocks, result, "")


@pytest.mark.parametrize(("case", "taken"), [("threads", 8), ("threads-of-child", 4)])
def test_threads_that_begin_at_once_have_the_share_together(share: Container, case: str, taken: int) -> None:
    """32 of a program; 32 of a child, whose parent has a context and three blocks."""
    assert run(share, case) == (taken, 0, "")


def test_children_of_a_program_with_busy_threads_begin_anew(share: Container) -> None:
    """At a fork other threads are within the library, with its locks."""
    assert run(share, "fork") == (100, 0, "")
    assert blocks(share) == 8


def test_a_child_of_a_fork_within_a_call_begins_anew(share: Container) -> None:
    """At each of the driver's reallocations: two for 65 allocations, one for each mapping."""
    assert run(share, "fork-within") == (4, 0, "")
    assert blocks(share) == 8


@pytest.mark.parametrize("case", ["signals", "jump", "cancel"])
def test_signals_jumps_and_cancels_lift_no_limit(share: Container, case: str) -> None:
    """A handler at 2,000 a second, one that leaves a launch which waits by longjmp, threads that end there."""
    taken, rate, error = run(share, case)
    assert (taken, error) == (8, "") and is_share_of_gpu(rate), rate


def test_a_thread_that_leaves_the_driver_by_longjmp_stays_limited(share: Container) -> None:
    """But for the next call, where nothing has taken the place of the frame that was left."""
    taken, _, error = run(share, "jump-out-of-driver")
    assert (taken in (8, 9), error) == (True, "")


@pytest.mark.parametrize("call", ["alloc", "async", "context"])
def test_a_cancelled_thread_leaves_no_lock(share: Container, call: str) -> None:
    """It ends behind the call, in which files were opened and closed, and a line was written."""
    usage = share.directory / USAGE_NAME
    usage.rename(share.directory / "later")
    with begun(share, "cancel-within", call) as process:
        assert process.stdout is not None and '"blocks": 0' in process.stdout.readline()
        (share.directory / "later").rename(usage)
        taken, result, error = end(process)
    assert (taken, result, error.count("\n")) == (7, 0, 1)


def test_where_the_kernel_has_no_such_locks_memory_is_refused_with_the_reason(share: Container) -> None:
    """And compute is limited."""
    taken, rate, error = run(share, "locks")
    assert taken == 0 and is_share_of_gpu(rate), rate
    assert error.count("\n") == 1 and "F_OFD_SETLK" in error


def test_files_that_come_later_than_the_program_are_taken(share: Container) -> None:
    """What it had before, its context, is counted when the agent observes it."""
    usage = share.directory / USAGE_NAME
    usage.rename(share.directory / "later")
    with begun(share, "later") as process:
        assert process.stdout is not None and '"blocks": 0' in process.stdout.readline()
        (share.directory / "later").rename(usage)
        taken, before, error = end(process)
    assert (taken, before, error.count("\n")) == (10, 0, 1)


def test_a_reader_of_standard_error_that_is_gone_ends_nothing(share: Container) -> None:
    (share.directory / CONFIG_NAME).unlink()
    reading, writing = os.pipe()
    os.close(reading)
    program = [str(share.machine.built.programs / "gpu_program"), "dlsym", "0", TAKE]
    env = share.machine.env([share.machine.built.library])
    try:
        done = subprocess.run(
            program, cwd=share.directory, env=env, stderr=writing, stdout=subprocess.PIPE, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, b'"blocks": 0' in done.stdout) == (0, True)


@pytest.mark.skipif(not is_root, reason="needs root for a time namespace")
@pytest.mark.parametrize("seconds", [-1, 86400])
def test_a_program_with_another_clock_stops_nobody(share: Container, seconds: int) -> None:
    """Before and after one whose monotonic clock is a day ahead, or behind."""
    ahead = seconds if seconds > 0 else -int(time.monotonic()) + 1
    for shifted in (False, True, False):
        if not shifted:
            ended = share.run("launch:kernel:1:1056")
            assert is_share_of_gpu(ended.rates()[0]), ended
            continue
        with begun(share, "clock", str(ahead)) as process:
            ended = finish(process)
        if ended.code == 77:
            pytest.skip("the kernel makes no time namespace")
        assert is_share_of_gpu(ended.steps[-1]["result"]), ended


@pytest.mark.parametrize("seed", range(12))
def test_a_region_of_any_bytes_ends_no_program(share: Container, seed: int) -> None:
    """Random ones everywhere behind the head, or the extremes of numbers: what is taken is refused or given, and back."""
    picked = random.Random(seed)
    extremes = [0, 1, -1, 2**63 - 1, -(2**63), 0x7FF0000000000000, 0x7FF8000000000001, 2**62]
    content = bytearray(encode_usage())
    for offset in range(16, USAGE_BYTES, 8):
        number = picked.getrandbits(64) if seed % 2 else picked.choice(extremes) % 2**64
        struct.pack_into("Q", content, offset, number)
    (share.directory / USAGE_NAME).write_bytes(content)
    ended = share.run(TAKE, "info", "alloc:async:256:3", "free", "nvml", "alloc:array:1:3", "free")
    assert ended.code == 0 or (ended.code, ended.step("gpu")["result"]) == (11, OUT_OF_MEMORY), ended


def test_a_region_that_is_written_while_it_is_used_ends_no_program(share: Container) -> None:
    """All of its numbers, again and again, by a program of the container; a neighbour on the GPU has its share."""
    neighbour = share.machine.container("neighbour", memory_mib=SHARE_MIB, cores=2000)
    beside = neighbour.start(TAKE, "launch:kernel:2:1056")
    picked = random.Random(1)
    with (
        share.running(TAKE, "wait", *["free", TAKE, "info"] * 100) as program,
        (share.directory / USAGE_NAME).open("r+b") as usage,
    ):
        program.tell()
        while program.process.poll() is None:
            usage.seek(16 + 8 * picked.randrange(USAGE_BYTES // 8 - 2))
            usage.write(struct.pack("Q", picked.getrandbits(64)))
            usage.flush()
        assert program.finish().code == 0
    ended = finish(beside)
    assert (ended.code, ended.error, ended.step("alloc")["blocks"]) == (0, "", 8)
    assert ended.rates()[0] <= 270


def test_slots_with_others_pids_harm_nobody(share: Container) -> None:
    """PIDs are shown, and never signalled or looked up: 1, the reader's own, the largest, negative ones."""
    content = bytearray(encode_usage())
    struct.pack_into("I", content, 16, MOST_SLOTS)
    for index, pid in enumerate([1, os.getpid(), 2**31 - 1, -5]):
        struct.pack_into("iIQ", content, 512 + 16 * 256 + index * 448, pid, 0, 0)
        struct.pack_into("Q", content, 512 + 16 * 256 + index * 448 + 16, 512 * MIB)
    (share.directory / USAGE_NAME).write_bytes(content)
    assert blocks(share) == 8  # of slots whose locks nobody holds nothing is left at the first refusal


def test_a_sequence_that_stays_odd_stops_nobody(share: Container) -> None:
    """An agent was killed while it wrote."""
    with (share.directory / CONFIG_NAME).open("r+b") as config:
        config.seek(512)
        config.write(struct.pack("I", 7))
    ended = share.run(TAKE, "launch:kernel:1:1056")
    assert ended.step("alloc")["blocks"] == 8 and is_share_of_gpu(ended.rates()[0]), ended


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_config_that_is_removed_or_replaced_leaves_its_limits(share: Container, how: str) -> None:
    """To programs that run: they have it mapped."""
    config = share.directory / CONFIG_NAME
    with share.running("alloc:alloc:256:1", "wait", TAKE) as program:
        if how == "replaced":
            (share.directory / "new").write_bytes(config.read_bytes()[:512] + bytes(4096 - 512))
            (share.directory / "new").replace(config)
        else:
            config.unlink()
        assert program.finish().blocks() == [7]


@pytest.mark.parametrize("size", [1, 100, 520])
def test_a_config_that_is_cut_on_the_host_is_no_end_of_its_limits(share: Container, size: int) -> None:
    """The kernel shows zeros behind the new end: memory is refused with the reason, and the program goes on."""
    content = (share.directory / CONFIG_NAME).read_bytes()
    with share.running("alloc:alloc:256:1", "wait", TAKE, "launch:kernel:0.1:1056", "info") as program:
        os.truncate(share.directory / CONFIG_NAME, size)
        ended = program.finish()
    assert ended.blocks() == [0]
    assert (ended.code, ended.step("launch")["result"], ended.error.count("\n")) == (0, 0, 1)
    assert "gpushare.config is empty: no memory" in ended.error
    (share.directory / CONFIG_NAME).write_bytes(content)
    assert blocks(share) == 8


@pytest.mark.parametrize("kind", ["directory", "pipe", "link", "missing", "unreadable", "text"])
@pytest.mark.parametrize("name", [CONFIG_NAME, USAGE_NAME])
def test_what_is_no_file_of_the_agent_s_gives_no_memory_and_stops_nobody(
    share: Container, name: str, kind: str
) -> None:
    """A program that waits at a pipe for ever would be worse. Its neighbour on the GPU notices nothing."""
    path = share.directory / name
    content = path.read_bytes()
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (share.directory / "elsewhere").write_bytes(content)
        path.symlink_to("elsewhere")
    elif kind == "unreadable":
        path.symlink_to("/proc/self/mem")
    elif kind == "text":
        path.write_bytes(b"limits: none\n" * 20_000)
    neighbour = share.machine.container("neighbour", memory_mib=SHARE_MIB)
    ended = share.run(TAKE, "launch:kernel:0.1:1056", "info", "nvml")
    assert (ended.step("alloc")["blocks"], ended.step("launch")["result"], ended.code) == (0, 0, 0)
    assert ended.error.count("\n") == 1 and name in ended.error
    assert blocks(neighbour) == 8


def test_more_programs_than_slots_compute_within_the_share_and_are_told(machine_with: MachineWith) -> None:
    """The slots are held by others; the one that finds none gets no memory, but its part of the time, and sees its share."""
    machine = machine_with(sm_count=132, block_us=1000, context_mib=1)
    share = machine.container(memory_mib=SHARE_MIB, cores=100 * CORES)
    with (share.directory / USAGE_NAME).open("r+b") as usage:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 1 << 20, MOST_SLOTS, 0)
        fcntl.fcntl(usage, fcntl.F_OFD_SETLK, lock)
        ended = share.run(TAKE, "info", "launch:kernel:1:1056")
    assert ended.step("alloc")["blocks"] == 0 and ended.step("info")["total_mib"] == SHARE_MIB
    assert is_share_of_gpu(ended.rates()[0]), ended
    assert ended.error.count("\n") == 1 and f"more than {MOST_SLOTS} processes" in ended.error
    assert blocks(share) > 0
