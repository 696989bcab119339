"""Isolation gpushare: what containers are told of themselves, by what the driver shows, and of what the others pay."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import struct
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

import gpushare_agent.agent.isolation.gpushare.observed as observed_module
from gpushare_agent.agent.isolation.gpushare.format import CONFIG_NAME, USAGE_BYTES, Observed, encode_config
from gpushare_agent.agent.isolation.gpushare.observed import (
    RUNS_FOR_S,
    BusyCount,
    ObservedContainers,
    memory_of,
    owners_of,
    pause_s,
    used_bytes,
)
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.names import MIB, GpuUuid
from gpushare_agent.core.model.usage import BusyProcess, ContainerUse, GpuBusy, ProcessSample, UsageRound
from tests.cluster.support_kube import running
from tests.fakes.clock import FakeClock
from tests.isolation.support_gpushare import GPUS, KEY, LIMITS, OTHER, UUID, World
from tests.isolation.support_tenant import open_in, open_usages

SECOND = 1_000_000_000
READING = GpuBusy(
    at_ns=20 * SECOND,
    busy_until_ns=19 * SECOND,
    is_continued=True,
    processes=(
        BusyProcess(pid=7, memory_bytes=700 * MIB, busy_ns=200),
        BusyProcess(pid=8, memory_bytes=900 * MIB, busy_ns=500),
        BusyProcess(pid=9, memory_bytes=1, busy_ns=100),
    ),
)
OWNERS = {7: KEY, 8: OTHER, 9: None}


def usage(age_s: float = 0.0) -> UsageRound:
    uses = [
        ContainerUse(key=KEY, uuid=UUID, pids=(7,), memory_bytes=600 * MIB),
        ContainerUse(key=OTHER, uuid=UUID, pids=(8,), memory_bytes=900 * MIB),
        ContainerUse(key=OTHER, uuid=GPUS[1].uuid, pids=(8,), memory_bytes=1),
    ]
    return UsageRound(
        sampled_at=0.0,  # of a clock that is set afterwards
        sampled_boot_s=time.clock_gettime(time.CLOCK_BOOTTIME) - age_s,
        gpus={},
        containers={(one.key, one.uuid): one for one in uses},
        unattributed={UUID: (ProcessSample(pid=9),)},
    )


def counted(*reads: GpuBusy, owners: Mapping[int, ContainerKey | None] = OWNERS) -> BusyCount:
    count = BusyCount()
    for read in reads:
        count.add(read, owners)
    return count


def test_a_round_says_whose_each_process_is() -> None:
    round_ = usage()
    assert owners_of(round_.containers.values(), round_.unattributed) == {UUID: OWNERS, GPUS[1].uuid: {8: OTHER}}


def test_a_container_is_told_of_itself_and_one_number_of_all_others() -> None:
    """Added up from the first reading on, which itself counts nothing."""
    first = replace(READING, is_continued=False, busy_until_ns=18 * SECOND, processes=())
    count = counted(first, READING, READING)
    seen = count.observed(KEY, Observed(), READING.at_ns, 5)
    assert seen == Observed(
        at_ns=20 * SECOND,
        used_bytes=5,
        busy_since_ns=18 * SECOND,
        busy_until_ns=19 * SECOND,
        busy_ns=400,
        others_ns=1200,
    )
    assert count.observed(KEY, seen, 21 * SECOND, None).at_ns == 20 * SECOND


@pytest.mark.parametrize("broken", [replace(READING, is_continued=False), replace(READING, busy_until_ns=0)])
def test_what_is_not_known_makes_the_count_begin_anew(broken: GpuBusy) -> None:
    """A pause of the readings; a driver that does not say: libgpushare takes neither for idleness."""
    count = counted(READING, READING, broken)
    seen = count.observed(KEY, Observed(), 0, None)
    assert (seen.busy_since_ns, seen.busy_until_ns, seen.busy_ns, seen.others_ns) == (
        broken.busy_until_ns, broken.busy_until_ns, 0, 0
    )  # fmt: skip
    count.add(READING, OWNERS)
    assert count.since_ns == READING.busy_until_ns


def test_of_a_container_without_a_known_process_nothing_is_said() -> None:
    """As without the host's PID namespace: its processes are nobody's, and it must not be taken for an idle one, or for one
    that has no memory."""
    first = replace(READING, is_continued=False, busy_until_ns=18 * SECOND)
    count = counted(first, READING, owners={7: None, 8: OTHER, 9: None})
    assert count.observed(KEY, Observed(), READING.at_ns, None).busy_until_ns == 0
    assert count.observed(OTHER, Observed(), READING.at_ns, None).busy_until_ns == READING.busy_until_ns
    count.add(READING, OWNERS)
    assert count.observed(KEY, Observed(), READING.at_ns, None).busy_until_ns == READING.busy_until_ns
    assert memory_of([ContainerUse(key=KEY, uuid=UUID, pids=(), memory_bytes=0)]) == {}


def test_a_process_that_no_round_has_shown_keeps_what_it_was_busy_until_one_does() -> None:
    first = replace(READING, is_continued=False, processes=())
    count = counted(first, READING, READING, owners={8: OTHER})
    assert (count.total_ns, count.observed(OTHER, Observed(), 0, None).others_ns) == (1000, 0)
    gone = replace(READING, processes=READING.processes[:1])
    count.add(gone, OWNERS)  # 7 is known now, with what it had before; 9 has ended, so it was somebody else's
    assert (count.by_container, count.total_ns) == ({KEY: 600, OTHER: 1000}, 1800)


def test_memory_is_not_told_while_a_process_is_anybodys() -> None:
    """Its container would seem to have less than it has, and its library would let it take more."""
    assert used_bytes(READING, OWNERS) == {KEY: 700 * MIB, OTHER: 900 * MIB}
    assert used_bytes(READING, {7: KEY, 8: OTHER}) == {}
    unknown = (*READING.processes, BusyProcess(pid=10, memory_bytes=None, busy_ns=0))
    assert used_bytes(replace(READING, processes=unknown), {**OWNERS, 10: KEY}) == {OTHER: 900 * MIB}


def test_readings_have_a_twentieth_of_a_processor_and_half_of_the_time() -> None:
    """Ten a second while they use 5 ms and take 50, and one a second at least."""
    for took_s, used_s in ((0.0, 0.0), (0.001, 0.001), (0.05, 0.005)):
        assert took_s + pause_s(took_s, used_s) == pytest.approx(0.1)
    assert 0.02 + pause_s(0.02, 0.02) == pytest.approx(0.4)
    assert pause_s(0.2, 0.001) == 0.2
    assert pause_s(0.5, 0.5) == pause_s(10, 0.001) == 1.0


class ReadDriver:
    """Answers `reading` for each GPU, and notes which it was asked for."""

    def __init__(self, reading: GpuBusy | None = READING) -> None:
        self.reading = reading
        self.asked: list[frozenset[GpuUuid]] = []

    async def sample_busy(self, gpus: Collection[GpuUuid]) -> Mapping[GpuUuid, GpuBusy]:
        self.asked.append(frozenset(gpus))
        if self.reading is None:
            raise Unavailable("NVML is away")
        return dict.fromkeys(gpus, self.reading)


def published(world: World) -> Observed:
    """Without what others pay."""
    values = struct.unpack_from("6Q", world.config(), 512 + 72)
    return Observed(**dict(zip(Observed.__struct_fields__, values, strict=False)))


def observing(world: World, **others: Any) -> ObservedContainers:
    shares = {KEY: (LIMITS,)}  # the same at each look, as a node has them while nothing changes
    given: dict[str, Any] = {"files": world.files, "shares": lambda: shares, "driver": ReadDriver()}
    return ObservedContainers(**given | others)


async def launched_and_read(world: World, service: ObservedContainers, round_: UsageRound) -> None:
    """The container launches, is looked at, a round shows whose its processes are, and the driver is read."""
    world.launch(3)
    await service.look()
    service.usage_sampled(round_)
    await service.read()


@pytest.fixture
def world(short_dir: Path) -> World:
    """Its container is prepared."""
    made = World(short_dir)
    made.files.prepare(KEY)
    return made


async def test_only_who_computes_is_told_and_only_then_the_driver_is_asked(world: World) -> None:
    clock, requests, driver = FakeClock(), list[int](), ReadDriver()

    service = observing(world, driver=driver, clock=clock, request_usage=lambda: requests.append(1))
    await service.look()
    service.usage_sampled(usage())
    await service.read()
    assert (len(requests), driver.asked, published(world)) == (0, [], Observed())
    world.launch(3)
    await service.look()
    service.usage_sampled(usage())
    service.usage_sampled(None)
    await service.read()
    await service.read()
    assert (len(requests), driver.asked) == (1, [{UUID}, {UUID}])
    assert published(world) == Observed(
        at_ns=READING.at_ns, used_bytes=700 * MIB, busy_since_ns=READING.busy_until_ns,
        busy_until_ns=READING.busy_until_ns, busy_ns=200, others_ns=600,
    )  # fmt: skip
    clock.now += 6
    await service.look()
    await service.read()
    assert (len(requests), len(driver.asked)) == (1, 2)


async def test_who_takes_memory_or_gives_it_back_is_told_too(world: World) -> None:
    """Without a launch: what its programs have beyond what they asked for is found in what the driver shows."""
    clock = FakeClock()
    service = observing(world, clock=clock)
    service.usage_sampled(usage())
    for changed_at in (7, 3):
        world.write_usage(changed_at=changed_at)
        world.files.write_observed(KEY, {UUID: Observed()})
        await service.look()
        await service.read()
        assert published(world).used_bytes == 700 * MIB
        clock.now += 6
        world.files.write_observed(KEY, {UUID: Observed()})
        await service.look()
        await service.read()
        assert published(world).used_bytes == 0


async def test_rounds_are_requested_only_while_a_process_is_unknown_and_now_and_then(world: World) -> None:
    clock, requests, driver = FakeClock(), list[int](), ReadDriver(replace(READING, processes=READING.processes[:2]))

    async def second() -> int:
        """How many requests it brought."""
        before, clock.now = len(requests), clock.now + 1.0
        world.launch(int(clock.now))
        await service.look()
        await service.read()
        return len(requests) - before

    service = observing(world, driver=driver, clock=clock, request_usage=lambda: requests.append(1))
    assert [await second(), await second()] == [1, 1]
    service.usage_sampled(usage())
    assert await second() == 1  # the reading before had unknown ones
    assert [await second() for _ in range(60)].count(1) == 2
    driver.reading = READING  # with one that is in no container with a share, as it seems
    assert [await second(), await second(), await second()] == [0, 1, 1]
    driver.reading = replace(READING, processes=READING.processes[1:2])
    assert [await second(), await second()] == [1, 0]
    driver.reading = replace(READING, processes=READING.processes[:2])  # the PID of one that had ended
    assert [await second(), await second()] == [0, 1]
    driver.reading = None
    service.usage_sampled(usage())
    assert [await second(), await second(), await second()] == [1, 1, 1]


async def test_of_a_mig_instance_the_memory_is_told_and_no_busy_time(world: World) -> None:
    """Of which NVML has no utilisation: the container learns who else computes, and no further round is asked for."""
    processes = tuple(replace(one, busy_ns=0) for one in READING.processes[:2])
    requests, driver = list[int](), ReadDriver(replace(READING, processes=processes, busy_until_ns=0))

    service = observing(world, driver=driver, request_usage=lambda: requests.append(1))
    await launched_and_read(world, service, usage())
    before = len(requests)
    for _ in range(5):
        await service.read()
        await service.look()
    assert published(world) == Observed(at_ns=READING.at_ns, used_bytes=700 * MIB) and len(requests) == before
    published_at_ms, companions, _ = struct.unpack_from("I2H", world.config(), 512 + 120)
    assert published_at_ms > 0 and companions == 0


async def test_a_driver_that_cannot_be_read_leaves_what_a_round_shows(world: World) -> None:
    """The memory, as old as the round is; nothing of who was busy."""
    service = observing(world, driver=ReadDriver(None))
    await launched_and_read(world, service, usage(age_s=2.0))
    seen = published(world)
    assert seen == Observed(at_ns=seen.at_ns, used_bytes=600 * MIB)
    assert time.monotonic_ns() - seen.at_ns >= 2 * SECOND


async def test_who_begins_after_all_have_rested_is_told_and_so_again(world: World) -> None:
    """Also where its last launches became old while another's file was read."""
    requests = list[int]()
    service, clock = two_shares(world, request_usage=lambda: requests.append(1))
    read = world.files.changed_heads

    def read_late(before: Mapping[ContainerKey, tuple[int, bytes]]) -> Any:
        clock.now += RUNS_FOR_S / 2
        return read(before)

    world.files.changed_heads = read_late  # type: ignore[method-assign]
    for begun in range(1, 3):
        for _ in range(4):
            await service.look()
        requests.clear()
        await service.look()
        assert not requests
        world.launch(begun)
        await service.look()
        assert requests


async def test_limits_that_could_not_be_written_are_written_while_all_rest(world: World) -> None:
    shares = {KEY: (LIMITS,)}
    service = observing(world, shares=lambda: shares)
    for _ in range(3):
        await service.look()
    config, new = world.files.container_directory(KEY) / CONFIG_NAME, replace(LIMITS, cores=123)
    aside, shares = config.rename(config.with_name("aside")), {KEY: (new,)}
    for _ in range(2):
        await service.look()
    aside.rename(config)
    await service.look()
    assert world.config()[516:] == encode_config(KEY.pod_uid, KEY.container, [new])[516:]  # all but its sequence


async def test_files_that_are_made_anew_are_told_all_again(world: World) -> None:
    """A container that starts again: what is written does not go into the file that its last instance had mapped, and what
    was seen of that one not into the new file."""
    service = observing(world)
    await launched_and_read(world, service, usage())
    assert published(world).used_bytes == 700 * MIB
    world.files.prepare(KEY)
    world.launch(1)
    await service.read()
    assert published(world) == Observed()
    for launches in (1, 2):
        world.launch(launches)
        await service.look()
    await service.read()
    assert published(world).used_bytes == 700 * MIB


async def test_a_reading_of_100_containers_opens_no_file_twice(world: World) -> None:
    """Ten times a second, so the maps stay; they go with the last launch."""
    clock = FakeClock()
    service = observing(world, clock=clock)
    world.launch(3)
    await service.look()
    # Not all descriptors: those that earlier tests left are closed when they are collected.
    before = len(open_in(world.path))
    for _ in range(5):
        await service.read()
    assert len(open_in(world.path)) == before + 1
    clock.now += 60
    await service.look()
    assert len(open_in(world.path)) == before


async def test_limits_that_changed_without_a_resize_are_put_right_and_trouble_is_logged_once(world: World) -> None:
    """An elastic ceiling; a region that a tenant has broken; files that are about to be made."""
    wanted = [LIMITS]
    service = observing(world, shares=lambda: {KEY: (wanted[0],)})
    await service.look()
    wanted[0] = replace(LIMITS, ceiling=6000)
    await service.look()
    assert struct.unpack_from("I", world.config(), 512 + 68) == (6000,)
    os.truncate(world.usage(), 100)
    with capture_logs() as logs:
        await service.look()
        await service.look()
        shutil.rmtree(world.path)
        await service.look()
    assert [entry["event"] for entry in logs] == ["gpushare_files_not_used"]


# ---- what others pay ----


def pay(world: World, key: ContainerKey, launched: int, ms: float, *, gpu: int = 0, long_ms: float = 0.0) -> None:
    world.write_usage(key, gpu, launches=launched, paid_ns=ms * 1e6, paid_long_ns=long_ms * 1e6)


def told_of_others(world: World, key: ContainerKey, gpu: int = 0) -> tuple[int, int, int]:
    """Companions, how full the GPU is, and how long they compute between two turns."""
    config = world.config(key)
    assert struct.unpack_from("I", config, 512 + 128 * gpu)[0] % 2 == 0
    return (*struct.unpack_from("HH", config, 512 + 128 * gpu + 124), *struct.unpack_from("H", config, 240 + 2 * gpu))


def companions(world: World, key: ContainerKey, gpu: int = 0) -> int:
    return told_of_others(world, key, gpu)[0]


async def observed_for(
    service: ObservedContainers, clock: FakeClock, seconds: float, work: Callable[[int], object]
) -> None:
    """Ten readings a second, and a look before every third; `work` is what containers do before each."""
    for n in range(round(10 * seconds)):
        clock.now += 0.1
        work(n)
        if n % 3 == 0:
            await service.look()
        await service.read()


def two_shares(world: World, **others: Any) -> tuple[ObservedContainers, FakeClock]:
    clock = FakeClock()
    world.files.prepare(OTHER)
    shares = {KEY: (LIMITS,), OTHER: (replace(LIMITS, cores=6000),)}
    return observing(world, **({"clock": clock, "shares": lambda: shares} | others)), clock


async def test_the_file_of_a_container_that_ended_is_closed_also_after_a_disk_that_hung(world: World) -> None:
    """Nothing else happens on the node; open, a removed file keeps its place on the disk."""
    shares = {KEY: (LIMITS,), OTHER: (LIMITS,)}
    service, _ = two_shares(world, shares=lambda: shares)
    await service.look()
    release, answers = world.files.release, iter([Unavailable("an earlier call still hangs")])

    def release_late(*kept: Collection[ContainerKey]) -> None:
        for error in answers:
            raise error
        release(*kept)

    world.files.release = release_late  # type: ignore[method-assign]
    shares = {KEY: (LIMITS,)}
    for _ in range(3):
        await service.look()
    assert open_usages(world.files.containers) == [str(world.usage())]


async def test_containers_are_told_what_the_others_pay(world: World) -> None:
    """And who asks what one pays gets the same number, under the key of any allocation of the share."""
    part_of_other = ContainerKey(OTHER.pod_uid, "part")
    service, clock = two_shares(world, share_of=lambda key: OTHER if key == part_of_other else key)
    await service.look()

    def work(n: int) -> None:
        pay(world, KEY, n, 20 * n)
        pay(world, OTHER, n, 60 * n, long_ms=30 * n)

    await observed_for(service, clock, 3, work)
    assert companions(world, KEY) == companions(world, OTHER) == 1
    assert told_of_others(world, KEY)[2] > told_of_others(world, OTHER)[2] > 0
    assert [service.paid(key, UUID) for key in (KEY, OTHER, part_of_other)] == pytest.approx([0.2, 0.6, 0.6])
    assert service.paid(KEY, GPUS[1].uuid) is None
    await observed_for(service, clock, 1.5, lambda n: pay(world, KEY, 100 + n, 600 + 20 * n))
    assert told_of_others(world, KEY) == (0, 0, 0) and service.paid(OTHER, UUID) is None


async def test_a_neighbour_that_begins_is_told_of_at_the_next_look(world: World) -> None:
    """It was idle for long; its launches are known before its first reading."""
    service, clock = two_shares(world)
    await service.look()
    await observed_for(service, clock, 3, lambda n: pay(world, KEY, n, 30 * n))
    assert told_of_others(world, KEY) == (0, 0, 0)
    pay(world, OTHER, 1, 50)
    clock.now += 0.1
    await service.look()
    await service.read()
    assert companions(world, KEY) == 1


async def test_the_file_of_a_share_is_opened_by_its_first_look_alone_and_closed_after_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {KEY: (LIMITS,), OTHER: (LIMITS,)}
    service, clock = two_shares(world, shares=lambda: shares)
    paths = [str(world.usage(key)) for key in shares]
    await service.look()
    assert sorted(open_usages(world.files.containers)) == sorted(paths)
    with monkeypatch.context() as patch:
        patch.delattr(os, "open")
        await service.look()
    shares = {KEY: (LIMITS,)}
    clock.now += 1
    await service.look()
    assert open_usages(world.files.containers) == paths[:1]


async def test_the_files_of_shares_are_closed_when_the_agents_settings_are_read_again(world: World) -> None:
    """Nobody looks any more, and a pod's end removes its file: what the tenant has written must not stay on the disk."""
    service = observing(world)
    async with running(service.run):
        while not open_usages(world.files.containers):
            await asyncio.sleep(0)
    assert open_usages(world.files.containers) == []


async def test_of_containers_that_rest_nothing_is_noted_and_their_next_payment_counts_from_the_look_before(
    world: World,
) -> None:
    """One call of the thread a look. The tenant of one may shorten its file meanwhile, and put it right."""
    service, clock = two_shares(world)
    await service.look()
    claim, calls, call = service._claims[UUID].of[KEY], list[str](), service._thread.call

    async def counted_call(blocking: Callable[[], Any], what: str, timeout_s: float) -> Any:
        calls.append(what)
        return await call(blocking, what, timeout_s)

    service._thread.call = counted_call  # type: ignore[method-assign]
    noted_at_ns = claim.at_ns
    for look in range(4):
        clock.now += 1
        if look in (1, 2):
            os.truncate(world.usage(OTHER), USAGE_BYTES - (look == 1))
        await service.look()
    assert (claim.at_ns, calls) == (noted_at_ns, ["reading the use of containers"] * 4)
    assert service._containers[OTHER].has_files
    pay(world, KEY, 1, 100)
    clock.now += 1
    await service.look()
    assert service.paid(KEY, UUID) == pytest.approx(0.1)


async def test_while_nobody_computes_the_thread_looks_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until somebody begins, whose payment counts from the look before; the shares may be others; or it is needed."""
    monkeypatch.setattr(observed_module, "IDLE_PERIOD_S", 0.0)
    service, clock = two_shares(world)
    for _ in range(2):  # the first one writes limits
        await service.look()
    changed_heads, looks, has_rested = world.files.changed_heads, 0, asyncio.Event()

    def look(before: Mapping[ContainerKey, tuple[int, bytes]]) -> Any:
        nonlocal looks
        looks += 1
        if looks == 5:
            pay(world, KEY, 1, 100)
        else:
            clock.now += 1
        if looks > 10:
            loop.call_soon_threadsafe(has_rested.set)
        return changed_heads(before)

    loop = asyncio.get_running_loop()
    world.files.changed_heads = look  # type: ignore[method-assign]
    await service.look(3600)
    assert (looks, service.paid(KEY, UUID)) == (5, pytest.approx(0.1))
    clock.now += RUNS_FOR_S
    for _ in range(2):
        await service.look()
    async with asyncio.TaskGroup() as group:
        group.create_task(service.look(3600))
        await has_rested.wait()
        service.changed()
    async with running(partial(service.look, 3600)):
        has_rested.clear()
        await has_rested.wait()
    assert await service._call(lambda: "needed", "something else") == "needed"


async def test_what_a_round_shows_while_files_are_read_is_not_lost(world: World) -> None:
    """The round comes in the event loop, between a reading and what is written by it."""
    service, clock = two_shares(world, driver=ReadDriver(replace(READING, at_ns=1)))
    await observed_for(service, clock, 1, lambda n: pay(world, KEY, n, n))
    read = world.files.changed_heads

    def read_meanwhile(before: Mapping[ContainerKey, tuple[int, bytes]]) -> Any:
        loop.call_soon_threadsafe(service.usage_sampled, usage())
        return read(before)

    loop = asyncio.get_running_loop()
    world.files.changed_heads = read_meanwhile  # type: ignore[method-assign]
    await service.read()
    await service.read()
    assert published(world).used_bytes == 600 * MIB


async def test_what_has_ended_leaves_nothing_behind(world: World) -> None:
    """Containers, and GPUs of which nobody has a share any more."""
    service, clock = two_shares(world)

    await observed_for(service, clock, 1, lambda n: [pay(world, key, n, n) for key in (KEY, OTHER)])
    assert companions(world, KEY) == 1
    service.shares = lambda: {KEY: (LIMITS,)}
    await observed_for(service, clock, 0.4, lambda n: pay(world, KEY, 100 + n, n))
    assert companions(world, KEY) == 0
    service.shares = dict
    await service.look()
    assert (service._containers, service._counts, service._claims, service._listed) == ({}, {}, {}, {})


async def test_a_container_of_two_gpus_pays_on_each(world: World) -> None:
    """In the order of its files, in whichever order its limits come later: those of a claim may."""
    second = replace(LIMITS, uuid=GPUS[1].uuid)
    world.files._limits = lambda key: (LIMITS, second)
    world.files.prepare(KEY)
    service, clock = two_shares(world, shares=lambda: {KEY: (second, LIMITS), OTHER: (LIMITS, second)})
    await service.look()

    def work(n: int) -> None:
        pay(world, KEY, n, 10 * n)
        pay(world, KEY, n, 20 * n, gpu=1)
        pay(world, OTHER, n, 0)

    await observed_for(service, clock, 2, work)
    assert [service.paid(KEY, gpu.uuid) for gpu in GPUS[:2]] == pytest.approx([0.1, 0.2])
    assert [companions(world, key, gpu) for key in (KEY, OTHER) for gpu in (0, 1)] == [1, 0, 1, 1]


async def test_a_ceiling_that_comes_counts_for_what_is_believed(world: World) -> None:
    """And one that goes, at once."""
    limits = [LIMITS]
    service, clock = two_shares(world, shares=lambda: {KEY: (limits[0],), OTHER: (LIMITS,)})
    await service.look()
    begun = [0]

    def work(n: int) -> None:
        begun[0] += 1
        pay(world, KEY, begun[0], 90 * begun[0])
        pay(world, OTHER, begun[0], 0)

    await observed_for(service, clock, 2, work)
    assert service.paid(KEY, UUID) == pytest.approx(0.3)
    limits[0] = replace(LIMITS, ceiling=8000)
    await observed_for(service, clock, 7, work)
    assert service.paid(KEY, UUID) == pytest.approx(0.8, abs=0.002)
    limits[0] = LIMITS
    await observed_for(service, clock, 0.5, work)
    assert service.paid(KEY, UUID) == pytest.approx(0.3)


@pytest.mark.parametrize("seed", range(4))
async def test_random_bytes_in_a_region_cost_its_own_container_alone(world: World, seed: int) -> None:
    """All of it, twice in each reading; others are never told of more than the liar's share."""
    service, clock = two_shares(world)
    service.usage_sampled(usage())
    await service.look()
    found, numbers = [], random.Random(seed)

    def work(n: int) -> None:
        world.usage(OTHER).write_bytes(numbers.randbytes(USAGE_BYTES))
        pay(world, KEY, n, 30 * n)
        found.append((*told_of_others(world, KEY), service.paid(OTHER, UUID) or 0.0))

    with capture_logs() as logs:
        await observed_for(service, clock, 5, work)
    assert logs == [] and service.paid(KEY, UUID) == pytest.approx(0.3)
    companions_, full, between_us, paid = (max(each) for each in zip(*found, strict=True))
    assert companions_ <= 1 and full <= 10_000 and between_us <= 8000 and paid <= 0.6
    assert published(world).used_bytes == 700 * MIB
