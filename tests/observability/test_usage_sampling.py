"""The rounds of sampling: what they join, what is logged and counted when they fail or take long, and when numbers are
dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.observability.usage_sampling import IDS_AGAIN_S, UsageSampling
from gpushare_agent.agent.runtime.cgroup_paths import PeerIdentity
from gpushare_agent.core.kit.rate import LOG_PERIOD_S
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import ContainerKind, Pod, PodPhase
from gpushare_agent.core.model.usage import DriverSample, UsageRound
from tests.agent.support_agent import poll_until
from tests.cluster.support_kube import running
from tests.observability.support_usage import (
    UUIDS,
    allocation,
    driver_sample,
    gpu_sample,
    id_of,
    key_of,
    owner,
    process,
)


def pod_of(key: ContainerKey, *, container_id: str = "", has_started: bool = True) -> Pod:
    return Pod(
        uid=key.pod_uid,
        namespace="default",
        name="p",
        phase=PodPhase.RUNNING,
        containers=(),
        has_started=has_started,
        container_ids={key.container: container_id} if container_id else {},
    )


@dataclass
class World:
    """Everything that the sampling reads, and what it reports."""

    sample_now: DriverSample = field(default_factory=driver_sample)
    error: Exception | None = None
    owners: dict[int, PeerIdentity] = field(default_factory=dict)
    owners_error: Exception | None = None
    reported_ids: dict[ContainerKey, str] = field(default_factory=dict)
    allocations: dict[ContainerKey, Allocation] = field(default_factory=dict)
    known_pods: dict[PodUid, Pod] = field(default_factory=dict)
    counted: list[tuple[Any, ...]] = field(default_factory=list)
    asked_ids: int = 0
    open_samples: int = 0
    most_open: int = 0
    samples: int = 0
    gate: asyncio.Event | None = None
    now: float = 100.0

    async def sample(self) -> DriverSample:
        self.samples += 1
        self.open_samples += 1
        self.most_open = max(self.most_open, self.open_samples)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.error is not None:
                raise self.error
            return self.sample_now
        finally:
            self.open_samples -= 1

    async def identify(self, pids: Collection[int]) -> Mapping[int, PeerIdentity]:
        if self.owners_error is not None:
            raise self.owners_error
        return {pid: self.owners[pid] for pid in pids if pid in self.owners}

    async def running(self) -> Mapping[ContainerKey, str]:
        self.asked_ids += 1
        return self.reported_ids

    def pods(self) -> list[Pod]:
        return list(self.known_pods.values())

    def get(self, uid: PodUid) -> Pod | None:
        return self.known_pods.get(uid)

    def sampled(self, duration_s: float) -> None:
        self.counted.append(("sampled",))

    def sampling_failed(self) -> None:
        self.counted.append(("failed",))

    def sampling_overran(self) -> None:
        self.counted.append(("overran",))

    def driver_error(self, error: str, count: int = 1) -> None:
        self.counted.append(("error", error, count))

    def allocate(
        self, key: ContainerKey, gpus: tuple[int, ...] = (0,), *, container_id: str = "", **others: Any
    ) -> None:
        self.allocations[key] = allocation(key, gpus, **others)
        self.known_pods[key.pod_uid] = pod_of(key, container_id=container_id)

    def sampling(
        self, *, period_s: float = 1.0, idle_period_s: float = 0.0, clock: Callable[[], float] | None = None
    ) -> UsageSampling:
        return UsageSampling(
            driver=self,
            owners=self,
            pods=self,
            ids=self,
            allocations=lambda: self.allocations,
            metrics=self,
            period_s=period_s,
            idle_period_s=idle_period_s,
            clock=clock or (lambda: self.now),
            wall_clock=lambda: 5000.0,
            boot_clock=lambda: 70.0 + self.samples,  # before the driver is asked
        )


@asynccontextmanager
async def rounds(sampling: UsageSampling) -> AsyncIterator[asyncio.Queue[UsageRound | None]]:
    """A running sampling and what it reports to its observer."""
    reported: asyncio.Queue[UsageRound | None] = asyncio.Queue()
    sampling.subscribe(reported.put_nowait)
    async with running(sampling.run):
        yield reported


@asynccontextmanager
async def paused(sampling: UsageSampling) -> AsyncIterator[asyncio.Queue[UsageRound | None]]:
    """As `rounds`, after the first one, once nobody reads."""
    async with rounds(sampling) as reported:
        await reported.get()
        await poll_until(lambda: sampling.is_idle, "the pause")
        yield reported


async def test_a_round_joins_processes_with_the_pods_container_ids() -> None:
    """The current round is what observers get, with the driver's errors counted by name."""
    world = World(owners={10: owner(1)})
    world.allocate(key_of(1), container_id=id_of(1))
    world.sample_now = driver_sample(gpu_sample(0, process(10)), errors={"timeout": 2})
    sampling, reported = world.sampling(), list[UsageRound | None]()
    sampling.subscribe(reported.append)
    await sampling.sample_once()
    assert sampling.current is not None
    assert sampling.current.containers[key_of(1), UUIDS[0]].pids == (10,)
    assert (sampling.current.sampled_at, sampling.current.sampled_boot_s) == (5000.0, 70.0)
    assert reported == [sampling.current]
    assert world.counted == [("error", "timeout", 2), ("sampled",)]
    assert world.asked_ids == 0


async def test_the_runtime_is_asked_for_ids_that_no_status_has_and_not_each_round() -> None:
    """A container that has just started is found by it; one that is unknown to it too does not cost a call each round."""
    world = World(owners={10: owner(1), 11: owner(1, "f" * 64)})
    for name in ("a", "b"):
        world.allocate(key_of(1, name))
    world.reported_ids = {key_of(1, "b"): id_of(1)}
    world.sample_now = driver_sample(gpu_sample(0, process(10), process(11)))
    sampling = world.sampling()
    for _ in range(3):
        await sampling.sample_once()
        world.now += IDS_AGAIN_S / 4
    assert world.asked_ids == 1
    assert sampling.current is not None
    assert sampling.current.containers[key_of(1, "b"), UUIDS[0]].pids == (10,)
    assert [one.pid for one in sampling.current.unattributed[UUIDS[0]]] == [11]
    world.now += IDS_AGAIN_S
    await sampling.sample_once()
    assert world.asked_ids == 2


async def test_an_init_container_that_has_run_has_nothing_allocated() -> None:
    """The main container took its share over: it is the pod's only container with an allocation."""
    world = World(owners={10: owner(1, "f" * 64)})
    world.allocate(key_of(1, "init"), kind=ContainerKind.INIT)
    world.allocate(key_of(1, "main"))
    world.sample_now = driver_sample(gpu_sample(0, process(10)))
    sampling = world.sampling()
    await sampling.sample_once()
    assert sampling.current is not None
    assert [key.container for key, _ in sampling.current.containers] == ["main"]
    assert sampling.current.containers[key_of(1, "main"), UUIDS[0]].pids == (10,)
    uid = key_of(1).pod_uid
    world.known_pods[uid] = replace(world.known_pods[uid], has_started=False)
    await sampling.sample_once()
    assert [key.container for key, _ in sampling.current.containers] == ["init", "main"]


async def test_stale_numbers_are_dropped_after_three_periods() -> None:
    """Two failed rounds keep the last one, the third drops it: observers get None once. It is logged once and comes back by
    itself."""
    world = World(sample_now=driver_sample(gpu_sample(0)))
    sampling, reported = world.sampling(), list[UsageRound | None]()
    sampling.subscribe(reported.append)
    await sampling.sample_once()
    last = sampling.current
    world.error = Unavailable("the driver does not answer")
    with capture_logs() as logs:
        for _ in range(2):
            world.now += 1.0
            await sampling.sample_once()
            assert sampling.current is last
        world.error, world.owners_error = None, Unavailable("/proc does not answer")
        for _ in range(3):
            world.now += 1.0
            await sampling.sample_once()
            assert sampling.current is None
    assert [line["event"] for line in logs] == ["usage_not_sampled", "usage_unknown"]
    assert world.counted.count(("failed",)) == 5
    world.owners_error = None
    await sampling.sample_once()
    assert sampling.current is not None
    assert reported == [last, None, sampling.current]


async def test_a_round_stands_for_the_time_since_the_one_before() -> None:
    """Of a pause, too, and of a reload; but for one period after a time of which nothing is known."""
    world = World()
    sampling, reported = world.sampling(idle_period_s=60.0), list[UsageRound | None]()

    async def covered_s(after_s: float) -> float | None:
        world.now += after_s
        await sampling.sample_once()
        return reported[-1].covered_s if reported and reported[-1] is not None else None

    sampling.subscribe(reported.append)
    assert [await covered_s(after_s) for after_s in (0, 1.5, 61.5, 64, 1)] == [1.0, 1.5, 61.5, 1.0, 1.0]
    world.error = Unavailable("the driver does not answer")
    assert await covered_s(3) is None
    world.error = None
    assert await covered_s(1) == 1.0
    former, sampling = sampling, world.sampling()
    sampling.take_over(former)
    sampling.subscribe(reported.append)
    assert await covered_s(2) == 2.0


async def test_a_bug_in_one_round_costs_that_round() -> None:
    """It is logged with its traceback, and the next round works."""
    world = World(error=ZeroDivisionError("a bug"))
    sampling = world.sampling()
    with capture_logs() as logs:
        await sampling.sample_once()
        await sampling.sample_once()
    assert [(line["event"], line["log_level"]) for line in logs] == [("usage_not_sampled", "error")]
    world.error = None
    await sampling.sample_once()
    assert sampling.current is not None


async def test_a_driver_that_fails_in_every_other_round_is_logged_once_a_minute() -> None:
    """And where the failure then lasts, the log does not end with the success before."""
    world = World(sample_now=driver_sample(gpu_sample(0)))
    sampling = world.sampling()
    with capture_logs() as logs:
        for number in range(int(LOG_PERIOD_S) - 20):
            world.now += 1.0
            world.error = Unavailable("the driver does not answer") if number % 2 == 0 else None
            await sampling.sample_once()
        assert [line["event"] for line in logs] == ["usage_not_sampled", "usage_sampled_again"]
        world.error = Unavailable("the driver does not answer")
        for _ in range(100):
            world.now += 1.0
            await sampling.sample_once()
    lines = ["usage_not_sampled", "usage_sampled_again", "usage_unknown", "usage_not_sampled"]
    assert [line["event"] for line in logs] == lines
    assert world.counted.count(("failed",)) == 120


async def test_a_slow_driver_delays_the_next_round_and_none_overlap() -> None:
    """However many periods pass during a round, the next one begins after it; that is logged once, also where it is in time
    for a moment, and counted."""
    world = World(gate=asyncio.Event())
    period_s = 0.02
    with capture_logs() as logs:
        async with rounds(world.sampling(period_s=period_s)) as reported:
            for number, periods in enumerate((3.5, 3.5, 0.0, 3.5), 1):
                while not world.open_samples:
                    await asyncio.sleep(0)
                world.now += periods * period_s
                gate, world.gate = world.gate, asyncio.Event()
                assert gate is not None
                gate.set()
                await reported.get()
                assert world.samples == number
    assert world.most_open == 1
    assert world.counted.count(("overran",)) == 3
    assert [line["event"] for line in logs].count("usage_sampling_slow") == 1


async def test_rounds_go_on_until_cancelled() -> None:
    """Each period another one."""
    world = World(sample_now=driver_sample(gpu_sample(0)))
    async with rounds(world.sampling(period_s=0.01, clock=asyncio.get_running_loop().time)) as reported:
        for _ in range(3):
            assert await reported.get() is not None


async def test_without_a_reader_rounds_are_rare_and_a_reader_gets_one_of_its_own() -> None:
    """What is from before the pause is not shown; readers that come together wait for the same round."""
    world = World(sample_now=driver_sample(gpu_sample(0)))
    sampling = world.sampling(period_s=0.01, idle_period_s=3600.0)
    async with paused(sampling) as reported:
        world.now += 60.0
        assert reported.empty()
        world.gate = asyncio.Event()
        assert sampling.current is None
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(sampling.refresh())
            while not world.open_samples:
                await asyncio.sleep(0)
            world.gate.set()
        assert sampling.current is not None
        assert world.samples == 2
        while world.samples < 5:  # each period now
            await reported.get()


async def begin_round(world: World, sampling: UsageSampling) -> None:
    """Requests one, which goes on until the world's gate is set."""
    world.gate = asyncio.Event()
    sampling.request_round()
    await poll_until(lambda: world.open_samples == 1, "the requested round")


async def test_a_slow_round_of_a_pause_counts_from_its_end() -> None:
    """A reader that comes soon after it does not wait for another, and has its numbers."""
    world = World(sample_now=driver_sample(gpu_sample(0)))
    sampling = world.sampling(period_s=0.01, idle_period_s=3600.0)
    async with paused(sampling) as reported:
        await begin_round(world, sampling)
        world.now += 0.02
        world.gate.set()
        await reported.get()
        await poll_until(lambda: sampling.is_idle, "the pause after it")
        world.now += 0.02
        await sampling.refresh()
        assert sampling.current is not None and world.samples == 2


async def test_a_reader_does_not_wait_for_a_driver_that_hangs() -> None:
    """It gets no numbers, after a second."""
    world = World(gate=asyncio.Event())
    sampling = world.sampling(idle_period_s=60.0)
    async with running(sampling.run):
        await sampling.refresh()
    assert sampling.current is None


async def test_a_round_that_fails_is_tried_again_before_a_pause() -> None:
    """Who requested it waits for one that says something. It is one more: the driver may be away for hours."""
    world = World(sample_now=driver_sample(gpu_sample(0)))
    sampling = world.sampling(period_s=0.01, idle_period_s=3600.0)
    async with paused(sampling) as reported:
        world.error = Unavailable("the driver")
        await begin_round(world, sampling)
        first, world.gate = world.gate, asyncio.Event()
        first.set()
        await poll_until(lambda: world.samples == 3, "the next one")
        world.error = None
        world.gate.set()
        assert await reported.get() is not None
    failing, other = World(error=Unavailable("the driver")), World()
    async with (
        running(failing.sampling(period_s=0.01, idle_period_s=3600.0).run),
        rounds(other.sampling(period_s=0.01)) as reported,
    ):
        for _ in range(20):
            await reported.get()
    assert failing.samples == 2


async def test_a_requested_round_is_one_and_no_more() -> None:
    """A request of nobody who reads does not have the use sampled for seconds; one that comes during a round is not lost."""
    world = World(sample_now=driver_sample(gpu_sample(0)))
    sampling = world.sampling(period_s=0.01, idle_period_s=3600.0)
    async with paused(sampling) as reported:
        await begin_round(world, sampling)
        sampling.request_round()
        world.gate.set()
        for _ in range(2):
            assert await reported.get() is not None
        await poll_until(lambda: sampling.is_idle, "the pause after them")
        assert world.samples == 3
