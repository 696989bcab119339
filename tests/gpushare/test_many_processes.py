"""Many processes of a container, and each of them killed at each call: what libgpushare counts is what the driver has."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from gpushare_agent.agent.isolation.gpushare.format import MOST_SLOTS
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import MIB, SHARE_MIB, TAKE, Container, Running
from tests.native.gpu_program import finish

pytestmark = pytest.mark.isolation

PROCESSES, ALLOCATIONS = 64, 10_000
OF_ALL_KINDS = [
    *(f"alloc:{kind}:64:1" for kind in ("alloc", "managed", "pitch", "async", "pool", "vmm", "mapped")),
    *(f"alloc:{kind}:64:1" for kind in ("array", "array3d", "mipmapped")),
    *(f"launch:{kind}:0.01:64" for kind in ("kernel", "ex", "cooperative", "graph", "captured", "sync")),
    *("info", "nvml", "free", "alloc:graphmem:64:1", "info"),
]
"""Every kind of memory and of launch."""


def bytes_of_driver(share: Container, context_mib: int) -> int:
    """What the driver itself says, to a program without the library, but its own context and others of so much."""
    step = share.run("info", preload=[]).step("info")
    used: int = step["total_mib"] - step["free_mib"] - context_mib
    return used * MIB


def test_what_64_processes_have_after_10000_allocations_each_is_what_the_driver_has(machine_with: MachineWith) -> None:
    """In a share that is too small for all of them; then half are killed with what they have, and the others give theirs
    back: nothing is left but the contexts of those that live."""
    context_mib = 2
    machine = machine_with(context_mib=context_mib, memory_mib=100_000)
    share = machine.container(memory_mib=PROCESSES * (context_mib + 10))
    actions = ("wait", f"churn:{ALLOCATIONS}", "wait", "free", "wait", "info", "wait")
    with ExitStack() as stack:
        stack.enter_context(machine.container("other").running("wait", preload=[]))  # so a context can be measured
        # Each has its context before the next one's is measured.
        programs = [stack.enter_context(share.running(*actions)) for _ in range(PROCESSES)]
        steps = [step for step in all_go_on(programs) if step["action"] == "churn"]
        assert {(step["taken"] + step["refused"], step["result"]) for step in steps} == {(ALLOCATIONS, 0)}
        assert len(steps) == PROCESSES and sum(step["refused"] for step in steps) > 0
        held = sum(step["held"] for step in steps) + PROCESSES * context_mib * MIB
        assert (share.usage()[0].held_bytes, bytes_of_driver(share, 2 * context_mib)) == (held, held)
        killed, left = programs[::2], programs[1::2]
        for one in killed:
            one.kill()
        for _ in range(2):  # whoever looks takes back what the dead had
            all_go_on(left)
        contexts = len(left) * context_mib * MIB
        assert (share.usage()[0].held_bytes, bytes_of_driver(share, 2 * context_mib)) == (contexts, contexts)
        assert {(ended.code, ended.error) for ended in (one.finish() for one in left)} == {(0, "")}


def all_go_on(programs: Sequence[Running]) -> list[dict[str, Any]]:
    """At once; what they say until they wait again."""
    for one in programs:
        one.tell()
    return [step for one in programs for step in one.listen()]


def test_a_process_that_is_killed_in_any_call_of_the_driver_gives_its_slot_back(machine_with: MachineWith) -> None:
    """Every function of the driver that a program with all kinds of memory and launches, or the library within it, calls.
    The next program has the slot, and the whole share."""
    share = machine_with(kernel_us=100).container(memory_mib=SHARE_MIB, cores=5000)
    logged = share.run(*OF_ALL_KINDS, env={"FAKE_GPU_LOG": "1"})
    calls = sorted({line.split()[1] for line in logged.error.splitlines() if line.startswith("[driver] ")})
    assert logged.code == 0 and len(calls) > 40, calls
    for call in calls:
        assert share.run(*OF_ALL_KINDS, env={"FAKE_GPU_DIES_IN": call}).code == -9, call
        assert share.run(TAKE).blocks() == [8], call
        _, processes = share.usage()
        assert len(processes) == 1, call  # of the program that has just ended: the first slot again


def test_of_600_programs_at_once_256_have_memory_and_a_neighbour_has_its_share(machine_with: MachineWith) -> None:
    """The others are refused memory with one line each, and none of them is ended."""
    machine = machine_with(context_mib=1, memory_mib=50_000)
    # Next to 599 others a context cannot be measured: the share has room for what each may take it for.
    share = machine.container(memory_mib=600 * MOST_SLOTS)
    neighbour = machine.container("neighbour", memory_mib=SHARE_MIB)
    program = str(machine.built.programs / "hard_program")
    with share.start_command([program, "many", "600"], stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        seen = json.loads(process.stdout.readline())
        assert neighbour.run(TAKE).blocks() == [9]
        ended = finish(process)
    wanted = {"made": 600, "with_memory": MOST_SLOTS, "refused": 600 - MOST_SLOTS, "other": 0}
    assert seen == {"action": "many"} | wanted
    assert (ended.code, ended.steps[-1]["result"]) == (0, 0)
    assert ended.error.count("\n") == 600 - MOST_SLOTS and f"more than {MOST_SLOTS} processes" in ended.error
    assert share.run(TAKE).blocks() == [20]


def test_a_context_does_not_cost_what_a_neighbour_takes_meanwhile(machine_with: MachineWith) -> None:
    """What the GPU as a whole has more around a context's creation is the neighbour's too: here it takes and gives 8 GiB
    again and again. Each program has its whole share all the same."""
    machine = machine_with(memory_mib=50_000)
    share, neighbour = machine.container(memory_mib=SHARE_MIB), machine.container("neighbour")
    actions = ["alloc:alloc:1024:8", "free"] * 5000
    beside = neighbour.start(*actions, preload=[])
    try:
        ended = [share.run(TAKE) for _ in range(60)]
        assert beside.poll() is None
    finally:
        beside.kill()
        beside.communicate()
    assert [one.blocks() for one in ended] == [[8]] * 60, ended
