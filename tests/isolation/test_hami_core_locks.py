"""Which lock of the shared region nobody can hold, and that the agent frees it, on a region made by the test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from gpushare_agent.isolation.decisions import hami_core_region as layout
from gpushare_agent.isolation.decisions.hami_core_locks import (
    CONFIRM_S,
    POSTINIT_S,
    SLOTS_S,
    WAITING_S,
    Held,
    LockName,
    held_locks,
    is_left,
)
from gpushare_agent.isolation.hami_core.files import HamiCoreFiles
from gpushare_agent.isolation.hami_core.locks import LockWatch
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.names import PodUid
from gpushare_agent.runtime.cgroups import CgroupProcesses, Cgroups
from tests.support_core import allocation, container, ids, pod
from tests.support_hami_core import INSIDE, fake_library, region_file

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


class KnownProcesses:
    """The cgroups as far as the watch asks them: one container, whose PIDs are the same inside and outside."""

    def __init__(self, alive: set[int]) -> None:
        self.alive = alive

    async def find_many_in_thread(self, wanted: Iterable[tuple[str, PodUid]]) -> dict[str, str]:
        return {container_id: container_id for container_id, _ in wanted}

    async def processes_round_in_thread(self, places: Iterable[str]) -> dict[str, CgroupProcesses]:
        text = b"".join(b"%d\n" % pid for pid in self.alive)
        return {place: CgroupProcesses({place: text}) for place in places}

    async def namespace_pids_in_thread(self, pids: Iterable[int]) -> dict[int, tuple[int, ...]]:
        return {pid: (pid,) for pid in pids}


class World:
    def __init__(self, directory: Path) -> None:
        self.files = HamiCoreFiles(fake_library(directory / "libvgpu.so"), directory / "hami", INSIDE)
        self.files.prepare(KEY)
        self.pod = pod(
            "share", container(name="cuda", cores=30, blocks=8), uid=UID, container_ids={"cuda": CONTAINER_ID}
        )
        self.processes = KnownProcesses({1})
        self.now = 100.0
        own = allocation(self.pod, "cuda", ids(0, range(30)), ids(0, range(8)))
        self.allocations = {own.key: own}
        self.watch = LockWatch(
            files=self.files,
            allocations=lambda: self.allocations,
            pods=cast("Any", SimpleNamespace(get=lambda uid: self.pod)),
            is_in_use=lambda pod: True,
            cgroups=cast("Cgroups", self.processes),
            clock=lambda: self.now,
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
