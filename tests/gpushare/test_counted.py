"""Memory that the driver has beyond what was asked for: whole pages and chunks at once, all else as soon as the agent sees
it. A context takes 300 MiB, a page has 2 MiB.
"""

from __future__ import annotations

import os

import pytest

from gpushare_agent.agent.isolation.gpushare.format import MOST_GPUS, USAGE_NAME, usage_head_bytes
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import BLOCK_MIB, CONTEXT_MIB, MIB, SETTLED_NS, SHARE_MIB, TAKE, Container
from tests.gpushare.test_many_processes import bytes_of_driver
from tests.native.gpu_program import blocks_in

pytestmark = pytest.mark.isolation

THREE = f"alloc:alloc:{BLOCK_MIB}:3"
PAGE_MIB, CHUNK_MIB, MODULE_MIB = 2, 32, 2
KIB = 1024


def write_zeros(share: Container, at: int, count: int) -> None:
    with (share.directory / USAGE_NAME).open("r+b") as file:
        file.seek(at)
        file.write(bytes(count))


def forget_ends(share: Container) -> None:
    """As if it were long since a process has ended."""
    write_zeros(share, 512 + 168, 8)


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
    with share.running(taking, "wait", "free", "sync", taking, "wait") as program:
        first = blocks_in(program.said)
        used_mib = bytes_of_driver(share, CONTEXT_MIB) / MIB
        assert CONTEXT_MIB + room_mib - (CHUNK_MIB if is_chunked else PAGE_MIB * max(1, size // MIB)) < used_mib
        assert used_mib <= CONTEXT_MIB + room_mib + (0 if is_chunked or size >= MIB else PAGE_MIB)
        assert blocks_in(program.go_on()) == first


@pytest.mark.parametrize(("modules", "of_share"), [(200, 7), (300, 6)])
def test_modules_are_counted_by_the_first_observation_while_a_program_goes_on_allocating(
    share: Container, modules: int, of_share: int
) -> None:
    """Its memory changes just before and just after the agent looks."""
    with share.running(THREE, "wait", f"modules:{modules}", "free", THREE, "wait", TAKE, "info", "wait") as program:
        program.go_on()
        share.observe(CONTEXT_MIB + 3 * BLOCK_MIB + modules * MODULE_MIB)
        steps = program.go_on()
        # Before its first window the library knows no most; a program that starts begins one.
        assert (3 + blocks_in(steps)[0], bytes_of_driver(share, CONTEXT_MIB) <= SHARE_MIB * MIB) == (of_share, True)
        assert steps[-2]["free_mib"] == SHARE_MIB - CONTEXT_MIB - of_share * BLOCK_MIB - modules * MODULE_MIB


def test_the_agent_finds_modules_of_a_program_that_never_rests(share: Container) -> None:
    """Its own code, ten times a second. The program launches nothing, and changes its memory every 50 ms."""
    restless = ["alloc:alloc:2:1", "sleep:0.05"] * 20
    [ended] = share.machine.run_virtual((share, [THREE, "modules:200", *restless, TAKE]))
    assert (ended.code, ended.error, ended.step("alloc")["blocks"]) == (0, "", 4)


def test_what_a_program_held_meanwhile_is_not_taken_for_more(share: Container) -> None:
    """The agent saw six blocks, of which three were given back before the library heard of it."""
    with share.running(THREE, THREE, "wait", "free", THREE, "wait", TAKE, "wait") as program:
        share.observe(CONTEXT_MIB + 6 * BLOCK_MIB)
        program.go_on()
        assert blocks_in(program.go_on()) == [5]


def test_of_an_older_library_that_keeps_no_most_nothing_is_taken_for_more(share: Container) -> None:
    """It is in the container's file since before an update of the agent."""
    with share.running(THREE, "wait", "free", THREE, "wait", TAKE, "wait") as program:
        program.go_on()
        write_zeros(share, usage_head_bytes(MOST_GPUS) + 4, 4)
        share.observe(CONTEXT_MIB + 5 * BLOCK_MIB)
        assert blocks_in(program.go_on()) == [5]


def test_an_observation_from_before_a_program_began_says_nothing_of_it(share: Container) -> None:
    """It is of one that has ended."""
    share.observe(CONTEXT_MIB + 6 * BLOCK_MIB)
    assert share.run(TAKE).blocks() == [8]


@pytest.mark.parametrize(("is_long_ago", "of_share"), [(False, 8), (True, 7)])
def test_memory_of_a_killed_process_that_the_driver_still_has_is_not_the_next_one_s(
    share: Container, is_long_ago: bool, of_share: int
) -> None:
    """For half a second. What the agent sees then is memory that no slot explains."""
    with share.running(THREE, "wait"):
        pass
    with share.running("wait", TAKE, "wait") as program:
        if is_long_ago:
            forget_ends(share)
        share.observe(2 * CONTEXT_MIB)
        assert blocks_in(program.go_on()) == [of_share]


def test_a_context_that_was_being_made_at_the_end_is_not_the_next_program_s(share: Container) -> None:
    slow = share.start("info", env={"FAKE_GPU_STOPS_IN": "cuDevicePrimaryCtxRetain"})
    os.waitid(os.P_PID, slow.pid, os.WSTOPPED | os.WNOWAIT)
    slow.kill()
    slow.communicate()
    with share.running("wait", TAKE, "wait") as program:
        share.observe(2 * CONTEXT_MIB)
        assert blocks_in(program.go_on()) == [8]


def test_what_nobody_explains_ends_with_the_last_process(share: Container) -> None:
    """Of another one that has ended nothing is left but its slot."""
    with share.running("wait", THREE, "wait") as program, share.running("wait") as other:
        other.kill()
        share.observe(2 * CONTEXT_MIB + BLOCK_MIB, SETTLED_NS)
        assert blocks_in(program.go_on()) == [3]
    assert share.run(TAKE).blocks() == [8]


@pytest.mark.parametrize("kind", ["managed", "pool"])
@pytest.mark.parametrize(("seen_mib", "later_ns", "left"), [(CONTEXT_MIB, SETTLED_NS, 4), (CONTEXT_MIB + 700, 0, 3)])
def test_managed_memory_is_in_no_observation_and_stays_counted(
    share: Container, kind: str, seen_mib: int, later_ns: int, left: int
) -> None:
    """NVML counts it for no process (H200, measured): what it shows less makes no room, and what it shows more is more."""
    taking = ("at:1:0:2", f"alloc:{kind}:{BLOCK_MIB}:4")  # a pool of managed memory
    with share.running(*taking, "wait", TAKE, "wait") as program:
        share.observe(seen_mib, later_ns)
        assert blocks_in(program.go_on()) == [left]


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
    assert logged.blocks() == [at_first] and "nvml" not in logged.error
    with share.running("wait", TAKE, "wait") as program:
        if is_in == "observation":
            forget_ends(share)
            share.observe(real_mib, SETTLED_NS if real_mib < known_mib else 0)
        assert blocks_in(program.go_on()) == [of_share]


def test_a_context_that_the_driver_is_making_stays_counted(share: Container) -> None:
    """It takes longer than an observation is waited for, which finds nothing of it."""
    with share.running("wait", TAKE, "wait") as program:
        slow = share.start("info", env={"FAKE_GPU_STOPS_IN": "cuDevicePrimaryCtxRetain"})
        try:
            os.waitid(os.P_PID, slow.pid, os.WSTOPPED | os.WNOWAIT)
            share.observe(CONTEXT_MIB, SETTLED_NS)
            assert blocks_in(program.go_on()) == [7]
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
        with share.running(f"export:{4 * BLOCK_MIB}", "wait") as exporter:
            exported = exporter.said[-2]
            takes, looks = (TAKE, "free", "wait"), ("alloc:alloc:2:1", "free", "wait")
            with importing.running(f"import:{exported['number']}", "wait", *takes, *takes, *looks, *takes) as importer:
                assert blocks_in(importer.go_on()) == [3 if importing is share else 8]
                exporter.kill()
                assert blocks_in(importer.go_on()) == [8]  # its slot is found without a process
                for expected in (1, 4):  # since the first of them eight blocks are in no window
                    forget_ends(importing)
                    importing.observe(bytes_of_driver(importing, CONTEXT_MIB) / MIB)
                    assert blocks_in(importer.go_on()) == [expected]
