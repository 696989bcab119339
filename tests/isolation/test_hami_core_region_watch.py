"""What the agent mends in a shared region that the test makes: locks that nobody can hold, host PIDs that nobody found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.isolation.hami_core import region_format as layout
from gpushare_agent.isolation.hami_core.files import HamiCoreFiles
from gpushare_agent.isolation.hami_core.region_watch import ASK_AGAIN_S, RegionWatch
from gpushare_agent.isolation.hami_core.repairs import (
    CONFIRM_S,
    POSTINIT_S,
    SLOTS_S,
    WAITING_S,
    Held,
    LockName,
    can_correct,
    held_locks,
    is_left,
    right_host_pids,
)
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.gpus import KernelModule
from gpushare_agent.model.names import PodUid
from gpushare_agent.runtime.cgroups import CgroupProcesses, Cgroups
from tests.isolation.support_hami_core import fake_library, region_file
from tests.support_core import allocation, container, ids, pod

UID = PodUid("11111111-2222-3333-4444-555555555555")
KEY = ContainerKey(UID, "cuda")
CONTAINER_ID = "c" * 64


def look(before: Mapping[LockName, Held], now: float, waiters: int = 0, **region: Any) -> dict[LockName, Held]:
    raw = bytearray(region_file(**region))
    raw[layout.POSTINIT_LOCK_OFFSET + 4] = waiters
    head = layout.parse_head(bytes(raw[: layout.HEAD_BYTES]))
    assert head is not None
    tail = layout.parse_tail(bytes(raw[layout.TAIL_OFFSET : layout.REGION_BYTES]))
    slots = layout.parse_slots(bytes(raw[layout.SLOTS_OFFSET :][: tail.slots * layout.SLOT_BYTES]))
    return held_locks(head, tail, slots, before, now)


def test_free_locks_are_no_matter() -> None:
    """Nor is a slots lock with an owner: the library's next process frees it where that one is dead."""
    assert look({}, 0.0) == {}
    assert look({}, 0.0, lock=0, owner=41) == {}


def test_a_slots_lock_without_an_owner_is_left_after_some_polls() -> None:
    """Whoever is alive: it is taken without an owner for two instructions only."""
    held = look(look({}, 0.0, lock=0), 9.0, lock=0)[LockName.SLOTS]
    assert not is_left(LockName.SLOTS, held, 9.0, None)
    assert is_left(LockName.SLOTS, held, SLOTS_S, {1, 41})


def test_where_nobody_of_cuinit_is_alive_the_lock_is_left_at_the_second_poll() -> None:
    """The one that held it was killed; a process that came later waits, and is not suspected."""
    first = look({}, 0.0, postinit_lock=0, slots=((41, 0, 0),))
    held = look(first, 2.0, waiters=1, postinit_lock=0, slots=((52, 0, 0),))[LockName.POSTINIT]
    assert not is_left(LockName.POSTINIT, first[LockName.POSTINIT], 0.0, {1, 52})
    assert is_left(LockName.POSTINIT, held, CONFIRM_S, {1, 52})


def test_a_process_that_is_still_in_cuinit_may_hold_the_lock() -> None:
    """For as long as a context may take; also where its PIDs are not known."""
    held = look({}, 0.0, postinit_lock=0, slots=((41, 0, 0),))[LockName.POSTINIT]
    for alive in ({41}, None):
        assert not is_left(LockName.POSTINIT, held, POSTINIT_S - 0.1, alive)
        assert is_left(LockName.POSTINIT, held, POSTINIT_S, alive)


def test_where_all_who_are_alive_wait_nobody_holds_it() -> None:
    """A program that is started again at once waits before the agent has looked."""
    held = look({}, 0.0, waiters=1, postinit_lock=0, slots=((41, 0, 0),))[LockName.POSTINIT]
    assert not is_left(LockName.POSTINIT, held, WAITING_S - 0.1, {41})
    assert is_left(LockName.POSTINIT, held, WAITING_S, {41})


def test_one_that_got_its_host_pid_begins_the_time_anew() -> None:
    """The lock is handed from one to the next: a burst of starts is no deadlock."""
    first = look({}, 0.0, postinit_lock=0, slots=((41, 0, 0), (42, 0, 0)))
    second = look(first, 29.0, postinit_lock=0, slots=((41, 4141, 0), (42, 0, 0)))
    assert second[LockName.POSTINIT].since == 29.0
    assert not is_left(LockName.POSTINIT, second[LockName.POSTINIT], POSTINIT_S, {42})


# --- which host PIDs are missing or wrong ---


OPEN = {major: KernelModule(version=f"{major}.10", is_open=True) for major in (510, 550, 580)}


def test_a_slots_host_pid_is_that_of_the_process_with_its_pid() -> None:
    """Missing, right, of another container, and of a process that has ended; one in a PID namespace of its own inside."""
    slots = ((7, 0), (8, 4108), (9, 5555), (10, 0), (2, 0))
    processes = {4107: (7,), 4108: (8,), 4109: (9,), 4120: (12, 2)}
    for module in (None, OPEN[510], KernelModule(version="580.10", is_open=False)):
        assert right_host_pids(slots, processes, module) == {0: 4107, 2: 4109, 4: 4120}


def test_two_processes_with_one_pid_are_left_alone() -> None:
    """Of a claim's containers, or in PID namespaces that a tenant made: nothing says which of them it is."""
    assert right_host_pids(((1, 0), (2, 0)), {4101: (1,), 4201: (1,), 4102: (2,)}, None) == {1: 4102}


def test_a_process_of_the_hosts_pid_namespace_has_its_host_pid_inside() -> None:
    assert right_host_pids(((4107, 0),), {4107: ()}, None) == {0: 4107}


def test_under_the_open_modules_it_is_the_pid_inside_or_there_are_two() -> None:
    """What the driver says to those who ask from the container."""
    assert right_host_pids(((7, 0), (8, 8)), {4107: (7,), 4108: (8,)}, OPEN[580]) == {0: 7}
    assert [can_correct(module) for module in (None, OPEN[510], OPEN[550], OPEN[580])] == [True, True, False, True]


# --- on a file ---


class KnownProcesses:
    """The cgroups as far as the watch asks them: one container, whose PIDs are the same inside and outside but for those of
    `inside`, by the host's."""

    def __init__(self, alive: set[int]) -> None:
        self.alive = alive
        self.inside: dict[int, tuple[int, ...]] = {}
        self.asked = 0

    async def find_many_in_thread(self, wanted: Iterable[tuple[str, PodUid]]) -> dict[str, str]:
        return {container_id: container_id for container_id, _ in wanted}

    async def processes_round_in_thread(self, places: Iterable[str]) -> dict[str, CgroupProcesses]:
        text = b"".join(b"%d\n" % pid for pid in self.alive)
        return {place: CgroupProcesses({place: text}) for place in places}

    async def namespace_pids_in_thread(self, pids: Iterable[int]) -> dict[int, tuple[int, ...]]:
        self.asked += 1
        return {pid: self.inside.get(pid, (pid,)) for pid in pids}


class World:
    def __init__(self, directory: Path, module: KernelModule | None = None) -> None:
        self.files = HamiCoreFiles(fake_library(directory / "libvgpu.so"), directory / "hami")
        self.files.prepare(KEY)
        self.pod = pod(
            "share", container(name="cuda", cores=30, blocks=8), uid=UID, container_ids={"cuda": CONTAINER_ID}
        )
        self.processes = KnownProcesses({1})
        self.now = 100.0
        own = allocation(self.pod, "cuda", ids(0, range(30)), ids(0, range(8)))
        self.allocations = {own.key: own}
        self.watch = RegionWatch(
            files=self.files,
            allocations=lambda: self.allocations,
            pods=cast("Any", SimpleNamespace(get=lambda uid: self.pod)),
            is_in_use=lambda pod: True,
            cgroups=cast("Cgroups", self.processes),
            clock=lambda: self.now,
            module=module,
        )

    @property
    def cache(self) -> Path:
        return self.files.cache_file(KEY)

    def postinit_value(self) -> int:
        return self.cache.read_bytes()[layout.POSTINIT_LOCK_OFFSET]


async def test_a_left_lock_is_freed_and_logged_once_for_a_container(short_dir: Path) -> None:
    """Its value alone is written; a tenant that takes it again and again does not fill the log."""
    world = World(short_dir)
    with capture_logs() as lines:
        for _ in range(2):
            left = region_file(postinit_lock=0, slots=((41, 0, 0), (42, 4242, 7)))
            world.cache.write_bytes(left)
            await world.watch.poll()
            assert world.postinit_value() == 0
            world.now += CONFIRM_S
            await world.watch.poll()
            after = world.cache.read_bytes()
            changed = [place for place in range(len(left)) if left[place] != after[place]]
            assert changed == [layout.POSTINIT_LOCK_OFFSET] and world.postinit_value() == 1
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == ["hami_core_lock_freed"]


async def test_a_region_that_cannot_be_read_holds_up_no_other(short_dir: Path) -> None:
    world = World(short_dir)
    other = ContainerKey(UID, "broken")
    world.allocations = {other: replace(world.allocations[KEY], key=other), **world.allocations}
    world.files.prepare(other)
    broken = world.files.cache_file(other)
    broken.unlink()
    broken.mkdir()
    world.cache.write_bytes(region_file(postinit_lock=0, slots=((41, 0, 0),)))
    with capture_logs() as lines:
        await world.watch.poll()
        world.now += CONFIRM_S
        await world.watch.poll()
    assert world.postinit_value() == 1
    assert {line["container"] for line in lines if line["event"] == "region_not_read"} == {"broken"}


async def test_the_lock_of_a_living_process_is_left_to_it(short_dir: Path) -> None:
    """The kernel's list of the container's processes decides."""
    world = World(short_dir)
    world.processes.alive = {1, 41}
    world.cache.write_bytes(region_file(postinit_lock=0, slots=((41, 0, 0),)))
    for _ in range(5):
        await world.watch.poll()
        world.now += CONFIRM_S
    assert world.postinit_value() == 0
    world.processes.alive = {1}
    await world.watch.poll()
    assert world.postinit_value() == 1


def pids_in(world: World) -> list[tuple[int, int]]:
    with world.files.opened_region(KEY) as region:
        assert region is not None
        return list(region.slot_pids(region.tail().slots))


async def test_a_host_pid_that_was_not_found_is_written_and_logged_once(short_dir: Path) -> None:
    """A wrong one too; nothing else of the region changes, and nobody is asked again until there is another process."""
    world = World(short_dir)
    world.processes.alive, world.processes.inside = {4101, 4107, 4108}, {4101: (1,), 4107: (7,), 4108: (8,)}
    with capture_logs() as lines:
        world.cache.write_bytes(region_file(slots=((7, 0, 5), (8, 9999, 6))))
        await world.watch.poll()
        assert world.cache.read_bytes() == region_file(slots=((7, 4107, 5), (8, 4108, 6)))
        for _ in range(5):
            await world.watch.poll()
        assert world.processes.asked == 2, "the second time for what the library may have moved meanwhile"
        world.cache.write_bytes(region_file(slots=((8, 0, 6), (7, 4107, 5))))
        await world.watch.poll()
        assert pids_in(world) == [(8, 4108), (7, 4107)]
    assert [line["event"] for line in lines] == ["hami_core_host_pid_written"]


async def test_a_process_that_has_ended_is_asked_for_again_now_and_then(short_dir: Path) -> None:
    """Its slot stays until the library's next process comes, and its PID may be another process's by then."""
    world = World(short_dir)
    world.cache.write_bytes(region_file(slots=((7, 0, 0),)))
    for _ in range(3):
        await world.watch.poll()
    assert (world.processes.asked, pids_in(world)) == (1, [(7, 0)])
    world.now += ASK_AGAIN_S
    world.processes.alive, world.processes.inside = {4107}, {4107: (7,)}
    await world.watch.poll()
    assert (world.processes.asked, pids_in(world)) == (2, [(7, 4107)])


async def test_a_process_that_was_given_its_host_pid_may_hold_the_lock_still(short_dir: Path) -> None:
    """It had a slot and was not yet looking for its PID when the agent saw it."""
    world = World(short_dir)
    world.processes.alive = {1, 41}
    world.cache.write_bytes(region_file(slots=((41, 0, 0),)))
    await world.watch.poll()
    assert pids_in(world) == [(41, 41)]
    world.cache.write_bytes(region_file(postinit_lock=0, slots=((41, 41, 0),)))
    for _ in range(10):
        await world.watch.poll()
        world.now += CONFIRM_S
    assert world.postinit_value() == 0
    world.processes.alive = {1}
    await world.watch.poll()
    assert world.postinit_value() == 1


async def test_where_the_driver_has_two_pids_for_a_process_none_is_written(short_dir: Path) -> None:
    """Compute is not limited there in any case; and none is where the container has more processes than a region slots."""
    for module, others in ((OPEN[550], 0), (None, layout.MAX_PROCESSES)):
        world = World(short_dir / str(others), module)
        world.processes.alive = {7, *range(10_000, 10_000 + others)}
        world.cache.write_bytes(region_file(slots=((7, 0, 0),)))
        await world.watch.poll()
        assert pids_in(world) == [(7, 0)]


@pytest.mark.parametrize("content", [b"", b"short", bytes(layout.FILE_BYTES)])
async def test_a_file_that_is_no_region_is_passed_over(short_dir: Path, content: bytes) -> None:
    """Nothing is written there, and nothing is logged that a tenant could repeat."""
    world = World(short_dir)
    world.cache.write_bytes(content)
    with capture_logs() as lines:
        for _ in range(3):
            await world.watch.poll()
            world.now += POSTINIT_S
    assert world.cache.read_bytes() == content
    assert [line for line in lines if line["log_level"] != "debug"] == []
