"""Memory that the driver has beyond what was asked for: whole pages and chunks at once, all else as soon as the agent sees
it. A context takes 300 MiB, a page has 2 MiB.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from gpushare_agent.agent.isolation.gpushare.format import (
    CONFIG_NAME,
    MOST_GPUS,
    USAGE_NAME,
    Observed,
    usage_head_bytes,
    write_observed,
)
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import BLOCK_MIB, CONTEXT_MIB, MIB, Container
from tests.gpushare.test_many_processes import bytes_of_driver, say, steps_until_wait

pytestmark = pytest.mark.isolation

SHARE_MIB = 2560
TAKE = f"alloc:alloc:{BLOCK_MIB}:20"
THREE = f"alloc:alloc:{BLOCK_MIB}:3"
PAGE_MIB, CHUNK_MIB, MODULE_MIB = 2, 32, 2
KIB = 1024
SETTLED_NS = 300_000_000
"""As in region.c: an observation so much later than now finds that nothing has changed since."""


@pytest.fixture
def share(machine_with: MachineWith) -> Container:
    return machine_with().container(memory_mib=SHARE_MIB)


@contextmanager
def running(share: Container, *actions: str) -> Iterator[subprocess.Popen[str]]:
    """A program that has come to its first `wait`."""
    program = str(share.machine.built.programs / "gpu_program")
    process = share.start_command([program, "dlsym", "12080", *actions], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        with process:
            pass


def goes_on(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What it says until it waits again."""
    say([process])
    return steps_until_wait([process])


def write_zeros(share: Container, at: int, count: int) -> None:
    with (share.directory / USAGE_NAME).open("r+b") as file:
        file.seek(at)
        file.write(bytes(count))


def forget_ends(share: Container) -> None:
    """As if it were long since a process has ended."""
    write_zeros(share, 512 + 168, 8)


def observe(share: Container, used_mib: float, later_ns: int = 0) -> None:
    """As the agent writes what it sees now, or so much later."""
    with (share.directory / CONFIG_NAME).open("r+b") as file:
        content = bytearray(file.read())
        write_observed(content, 0, Observed(at_ns=time.monotonic_ns() + later_ns, used_bytes=round(used_mib * MIB)))
        file.seek(0)
        file.write(content)


def blocks(steps: Sequence[dict[str, Any]]) -> list[int]:
    return [step["blocks"] for step in steps if step["action"] == "alloc"]


SIZES = (1, 513, 5000, 300 * KIB, 513 * KIB, 700 * KIB, MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 1, 3 * MIB)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *(("alloc", size) for size in SIZES),
        *(("managed", size) for size in (700 * KIB, MIB + 1)),
        *((kind, size) for kind in ("pitch", "array", "mipmapped") for size in (768 * KIB, 1280 * KIB)),
        *((kind, size) for kind in ("async", "pool") for size in (8 * MIB, 48 * MIB)),
        ("vmm", 2 * MIB),
    ],
)
def test_memory_of_any_size_ends_within_a_page_of_the_share(machine_with: MachineWith, kind: str, size: int) -> None:
    """By the driver's own count, before any agent has looked, and when it was freed all is there again."""
    is_chunked = kind in ("async", "pool")
    room_mib = 8 * CHUNK_MIB + 20 if is_chunked else 16
    machine = machine_with()
    share = machine.container(memory_mib=CONTEXT_MIB + room_mib)
    taking = f"alloc:{kind}:{size}b:65536"
    with running(share, taking, "wait", "free", "sync", taking, "wait") as program:
        first = blocks(steps_until_wait([program]))
        used_mib = bytes_of_driver(share, CONTEXT_MIB) / MIB
        assert CONTEXT_MIB + room_mib - (CHUNK_MIB if is_chunked else PAGE_MIB * max(1, size // MIB)) < used_mib
        assert used_mib <= CONTEXT_MIB + room_mib + (0 if is_chunked or size >= MIB else PAGE_MIB)
        assert blocks(goes_on(program)) == first


@pytest.mark.parametrize(("modules", "of_share"), [(200, 7), (300, 6)])
def test_modules_are_counted_by_the_first_observation_while_a_program_goes_on_allocating(
    share: Container, modules: int, of_share: int
) -> None:
    """Its memory changes just before and just after the agent looks."""
    with running(share, THREE, "wait", f"modules:{modules}", "free", THREE, "wait", TAKE, "info", "wait") as program:
        steps_until_wait([program])
        goes_on(program)
        observe(share, CONTEXT_MIB + 3 * BLOCK_MIB + modules * MODULE_MIB)
        steps = goes_on(program)
        # Before its first window the library knows no most; a program that starts begins one.
        assert (3 + blocks(steps)[0], bytes_of_driver(share, CONTEXT_MIB) <= SHARE_MIB * MIB) == (of_share, True)
        assert steps[-2]["free_mib"] == SHARE_MIB - CONTEXT_MIB - of_share * BLOCK_MIB - modules * MODULE_MIB


def test_the_agent_finds_modules_of_a_program_that_never_rests(share: Container) -> None:
    """Its own code, ten times a second. The program launches nothing, and changes its memory every 50 ms."""
    restless = ["alloc:alloc:2:1", "sleep:0.05"] * 20
    [ended] = share.machine.run_virtual((share, [THREE, "modules:200", *restless, TAKE]))
    assert (ended.code, ended.error, ended.step("alloc")["blocks"]) == (0, "", 4)


def test_what_a_program_held_meanwhile_is_not_taken_for_more(share: Container) -> None:
    """The agent saw six blocks, of which three were given back before the library heard of it."""
    with running(share, THREE, THREE, "wait", "free", THREE, "wait", TAKE, "wait") as program:
        steps_until_wait([program])
        observe(share, CONTEXT_MIB + 6 * BLOCK_MIB)
        goes_on(program)
        assert blocks(goes_on(program)) == [5]


def test_of_an_older_library_that_keeps_no_most_nothing_is_taken_for_more(share: Container) -> None:
    """It is in the container's file since before an update of the agent."""
    with running(share, THREE, "wait", "free", THREE, "wait", TAKE, "wait") as program:
        steps_until_wait([program])
        goes_on(program)
        write_zeros(share, usage_head_bytes(MOST_GPUS) + 4, 4)
        observe(share, CONTEXT_MIB + 5 * BLOCK_MIB)
        assert blocks(goes_on(program)) == [5]


def test_an_observation_from_before_a_program_began_says_nothing_of_it(share: Container) -> None:
    """It is of one that has ended."""
    observe(share, CONTEXT_MIB + 6 * BLOCK_MIB)
    assert blocks(share.run(TAKE).steps) == [8]


@pytest.mark.parametrize(("is_long_ago", "of_share"), [(False, 8), (True, 7)])
def test_memory_of_a_killed_process_that_the_driver_still_has_is_not_the_next_one_s(
    share: Container, is_long_ago: bool, of_share: int
) -> None:
    """For half a second. What the agent sees then is memory that no slot explains."""
    with running(share, THREE, "wait") as first:
        steps_until_wait([first])
    with running(share, "wait", TAKE, "wait") as program:
        steps_until_wait([program])
        if is_long_ago:
            forget_ends(share)
        observe(share, 2 * CONTEXT_MIB)
        assert blocks(goes_on(program)) == [of_share]


def test_a_context_that_was_being_made_at_the_end_is_not_the_next_program_s(share: Container) -> None:
    slow = share.start("info", env={"FAKE_GPU_STOPS_IN": "cuDevicePrimaryCtxRetain"})
    os.waitid(os.P_PID, slow.pid, os.WSTOPPED | os.WNOWAIT)
    slow.kill()
    slow.communicate()
    with running(share, "wait", TAKE, "wait") as program:
        steps_until_wait([program])
        observe(share, 2 * CONTEXT_MIB)
        assert blocks(goes_on(program)) == [8]


def test_what_nobody_explains_ends_with_the_last_process(share: Container) -> None:
    """Of another one that has ended nothing is left but its slot."""
    with running(share, "wait", THREE, "wait") as program, running(share, "wait") as other:
        steps_until_wait([program])
        steps_until_wait([other])
        other.kill()
        other.communicate()
        observe(share, 2 * CONTEXT_MIB + BLOCK_MIB, SETTLED_NS)
        assert blocks(goes_on(program)) == [3]
    assert blocks(share.run(TAKE).steps) == [8]


@pytest.mark.parametrize("kind", ["managed", "pool"])
@pytest.mark.parametrize(("seen_mib", "later_ns", "left"), [(CONTEXT_MIB, SETTLED_NS, 4), (CONTEXT_MIB + 700, 0, 3)])
def test_managed_memory_is_in_no_observation_and_stays_counted(
    share: Container, kind: str, seen_mib: int, later_ns: int, left: int
) -> None:
    """NVML counts it for no process (H200, measured): what it shows less makes no room, and what it shows more is more."""
    taking = ("at:1:0:2", f"alloc:{kind}:{BLOCK_MIB}:4")  # a pool of managed memory
    with running(share, *taking, "wait", TAKE, "wait") as program:
        steps_until_wait([program])
        observe(share, seen_mib, later_ns)
        assert blocks(goes_on(program)) == [left]


@pytest.mark.parametrize(
    ("is_in", "known_mib", "real_mib", "at_first", "of_share"),
    [
        ("start", 0, 300, 8, 8),
        ("start", 526, 526, 7, 7),
        ("observation", 0, 600, 8, 7),
        ("observation", 600, 300, 7, 8),
    ],
)
def test_a_context_costs_what_the_agent_has_measured_until_it_sees_more_or_less(
    machine_with: MachineWith, is_in: str, known_mib: int, real_mib: int, at_first: int, of_share: int
) -> None:
    """Without it 300 MiB. Nobody asks NVML for the whole GPU, which has the neighbours' memory too."""
    share = machine_with(context_mib=real_mib).container(memory_mib=SHARE_MIB, context_bytes=known_mib * MIB)
    logged = share.run(TAKE, env={"FAKE_GPU_LOG": "1"})
    assert blocks(logged.steps) == [at_first] and "nvml" not in logged.error
    with running(share, "wait", TAKE, "wait") as program:
        steps_until_wait([program])
        if is_in == "observation":
            forget_ends(share)
            observe(share, real_mib, SETTLED_NS if real_mib < known_mib else 0)
        assert blocks(goes_on(program)) == [of_share]


def test_a_context_that_the_driver_is_making_stays_counted(share: Container) -> None:
    """It takes longer than an observation is waited for, which finds nothing of it."""
    with running(share, "wait", TAKE, "wait") as program:
        steps_until_wait([program])
        slow = share.start("info", env={"FAKE_GPU_STOPS_IN": "cuDevicePrimaryCtxRetain"})
        try:
            os.waitid(os.P_PID, slow.pid, os.WSTOPPED | os.WNOWAIT)
            observe(share, CONTEXT_MIB, SETTLED_NS)
            assert blocks(goes_on(program)) == [7]
        finally:
            slow.kill()
            slow.communicate()


@pytest.mark.parametrize("share_mib", [299, 300])
def test_a_context_that_does_not_fit_is_refused_before_the_driver_makes_it(
    machine_with: MachineWith, share_mib: int
) -> None:
    """It takes a third of a second, in which the agent would see it."""
    ended = machine_with().container(memory_mib=share_mib).run("info", env={"FAKE_GPU_LOG": "1"})
    assert (ended.code, "[driver] cuDevicePrimaryCtxRetain\n" in ended.error) == ((11, False), (0, True))[
        share_mib == 300
    ]


def test_exported_memory_counts_for_the_importer_once_the_exporter_has_ended(machine_with: MachineWith) -> None:
    """The driver counts it for the process that alone has it. While both live it is the exporter's; so it is between
    containers, where the importer's has it from then on."""
    machine = machine_with()
    share, other = machine.container(memory_mib=SHARE_MIB), machine.container("other", memory_mib=SHARE_MIB)
    for importing in (share, other):
        with running(share, f"export:{4 * BLOCK_MIB}", "wait") as exporter:
            exported = steps_until_wait([exporter])[-2]
            takes, looks = (TAKE, "free", "wait"), ("alloc:alloc:2:1", "free", "wait")
            with running(importing, f"import:{exported['number']}", "wait", *takes, *takes, *looks, *takes) as importer:
                steps_until_wait([importer])
                assert blocks(goes_on(importer)) == [3 if importing is share else 8]
                exporter.kill()
                exporter.communicate()
                assert blocks(goes_on(importer)) == [8]  # its slot is found without a process
                for expected in (1, 4):  # since the first of them eight blocks are in no window
                    forget_ends(importing)
                    observe(importing, bytes_of_driver(importing, CONTEXT_MIB) / MIB)
                    assert blocks(goes_on(importer)) == [expected]
