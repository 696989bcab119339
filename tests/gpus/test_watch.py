"""GPUs that fail and come back, a driver that goes away, and what it reports between two polls."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.gpus.inventory import GpuInventoryState
from gpushare_agent.agent.gpus.watch import GpuWatch
from gpushare_agent.core.kit.logs import TenantLines
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.gpu_health import HealthPolicy
from gpushare_agent.core.model.gpus import GpuInventory
from tests.cluster.support_kube import running
from tests.gpus.support_health import IMMEDIATE, ShownDriver, xid
from tests.support_core import inventory
from tests.support_node import node_of


class Counted:
    """Records what would be counted."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, bool]] = []
        self.errors: list[str] = []

    def gpu_event(self, kind: str, xid: int, is_ignored: bool, uuid: str | None) -> None:
        self.events.append((kind, xid, is_ignored))

    def driver_error(self, name: str) -> None:
        self.errors.append(name)


def health(state: GpuInventoryState) -> list[str]:
    return [gpu.health.value for gpu in state.current.gpus]


def _watch(
    driver: ShownDriver,
    state: GpuInventoryState,
    metrics: Counted | None = None,
    *,
    period_s: float = 1,
    **given: float,
) -> GpuWatch:
    settings = SimpleNamespace(health=SimpleNamespace(check_period_s=period_s))
    node = node_of(inventory=state, metrics=metrics or Counted(), settings=settings)
    return GpuWatch(node, driver, **given)


async def _poll(watch: GpuWatch, driver: ShownDriver, *shown: GpuInventory | Exception) -> None:
    for one in shown:
        driver.shown = one
        await watch.poll()


async def test_a_driver_that_cannot_be_read_makes_every_gpu_unhealthy() -> None:
    """With the reason, until it can be read again."""
    state, driver, counted = GpuInventoryState(IMMEDIATE), ShownDriver(), Counted()
    watch = _watch(driver, state, counted)
    await _poll(watch, driver, inventory(), Unavailable("NVML is gone"))
    assert health(state) == ["Unhealthy", "Unhealthy"]
    assert state.current.gpus[0].unhealthy_reason.startswith("NVML is gone")
    assert counted.errors == ["look_failed"]
    await _poll(watch, driver, inventory())
    assert health(state) == ["Healthy", "Healthy"]


async def test_a_gpu_that_is_not_shown_any_more_stays_unhealthy_in_its_place() -> None:
    """Containers may hold its IDs; the topology keeps its rows."""
    state, driver, three = GpuInventoryState(IMMEDIATE), ShownDriver(), inventory(3)
    two = replace(three, gpus=(three.gpus[0], replace(three.gpus[2], index=1)), topology=inventory(2).topology)
    watch = _watch(driver, state)
    await _poll(watch, driver, three, two)
    assert [(c.index, c.uuid, c.is_healthy) for c in state.current.gpus] == [
        (0, "GPU-0", True),
        (1, "GPU-1", False),
        (2, "GPU-2", True),
    ]
    assert state.current.topology == three.topology
    await _poll(watch, driver, three)
    assert health(state) == ["Healthy"] * 3


async def test_an_event_takes_its_gpu_away_before_the_driver_is_polled() -> None:
    """A GPU that hangs may keep the driver busy for seconds; the other GPU is not touched."""
    state, driver = GpuInventoryState(IMMEDIATE), ShownDriver()
    watch = _watch(driver, state, period_s=3600)
    await watch.poll()
    driver.pending.append([xid(79, 1)])
    await watch.fetch_events()
    assert (health(state), driver.polls) == (["Healthy", "Unhealthy"], 1)


async def test_an_event_that_counts_is_followed_by_a_poll_at_once() -> None:
    """Not at the next usual time, which is an hour away; an ignored one is not followed."""
    state, driver = GpuInventoryState(IMMEDIATE), ShownDriver()
    watch = _watch(driver, state, period_s=3600, event_period_s=0.005)
    await watch.poll()
    async with running(watch.run):
        driver.pending.append([xid(13)])
        await driver.wait(lambda: not driver.pending and driver.fetches > 5)
        assert driver.polls == 1
        driver.pending.append([xid(79)])
        await driver.wait(lambda: driver.polls == 2)


async def test_a_thousand_events_are_one_change() -> None:
    """Of two GPUs together; the counter counts each."""
    state, driver, counted, reported = GpuInventoryState(IMMEDIATE), ShownDriver(inventory(3)), Counted(), []
    watch = _watch(driver, state, counted)
    await watch.poll()
    state.subscribe(lambda found: reported.append([c.is_healthy for c in found.gpus]))
    driver.pending.extend([[xid(79, n % 2) for n in range(1000)], [xid(79, 0)] * 1000])
    with capture_logs() as logs:
        await watch.fetch_events()
        await watch.fetch_events()
    assert reported == [[False, False, True]]
    assert len(counted.events) == 2000
    assert [(line["uuid"], line["count"]) for line in logs if line["event"] == "gpu_event"] == [
        ("GPU-0", 500),
        ("GPU-1", 500),
        ("GPU-0", 1000),
    ]


async def test_a_storm_that_goes_on_does_not_fill_the_log() -> None:
    """A program can cause it: its lines are among those of tenants, which have a limit."""
    driver = ShownDriver()
    watch = _watch(driver, GpuInventoryState(IMMEDIATE))
    await watch.poll()
    driver.pending.extend([xid(79)] for _ in range(101))
    limit = TenantLines(lambda: 0.0)
    with capture_logs([limit]) as logs:
        for _ in range(101):
            await watch.fetch_events()
        limit.report(is_end=True)
    assert len(logs) < 50
    assert logs[-1]["events"] == {"gpu_event": 101 - (len(logs) - 1)}


async def test_an_event_of_no_gpu_makes_none_unhealthy_and_is_followed_by_a_poll() -> None:
    """And an error in the log."""
    state, driver = GpuInventoryState(IMMEDIATE), ShownDriver()
    watch = _watch(driver, state, period_s=3600, event_period_s=0.005)
    await watch.poll()
    driver.pending.append([xid(79, None)])
    with capture_logs() as logs:
        async with running(watch.run):
            await driver.wait(lambda: driver.polls == 2)
    assert health(state) == ["Healthy", "Healthy"]
    assert [line["log_level"] for line in logs if line["event"] == "gpu_event_of_no_gpu"] == ["error"]


async def test_a_driver_whose_events_fail_is_called_ever_later_and_reported_once() -> None:
    """It never spins; polls go on, and the first success is reported, too."""
    state, driver, counted = GpuInventoryState(IMMEDIATE), ShownDriver(), Counted()
    watch = _watch(driver, state, counted, event_period_s=0.5)
    driver.events_fail = Unavailable("the wait for events failed")
    with capture_logs() as logs:
        delays = [await watch.fetch_events() for _ in range(8)]
        driver.events_fail = None
        assert await watch.fetch_events() == 0.5
    assert all(delay >= 0.5 for delay in delays) and delays[-1] >= 15
    assert [line["event"] for line in logs] == ["gpu_events_lost", "gpu_events_back"]
    assert counted.errors == ["events_failed"] * 8


async def test_an_unhealthy_gpu_is_polled_when_its_probe_is_due() -> None:
    """The usual poll is an hour away."""
    state = GpuInventoryState(HealthPolicy(recovery_probes=3, recovery_period_s=0.02, recovery_period_max_s=1.0))
    driver = ShownDriver()
    watch = _watch(driver, state, period_s=3600, event_period_s=3600)
    await watch.poll()
    driver.pending.append([xid(94)])
    await watch.fetch_events()
    async with running(watch.run):
        await driver.wait(lambda: health(state) == ["Healthy", "Healthy"])
    assert driver.polls >= 4


async def test_polls_never_overlap() -> None:
    """One that is asked for during another waits for its end."""
    state, order = GpuInventoryState(IMMEDIATE), []

    class Slow(ShownDriver):
        async def read(self) -> GpuInventory:
            order.append("begin")
            await asyncio.sleep(0)
            order.append("end")
            return inventory()

    watch = _watch(Slow(), state)
    async with asyncio.TaskGroup() as group:
        group.create_task(watch.poll())
        group.create_task(watch.poll())
    assert order == ["begin", "end"] * 2


async def test_a_node_whose_gpus_are_all_divided_is_polled_as_any() -> None:
    """With no instance it offers nothing, and has GPUs all the same: a lost driver is reported once."""
    state, driver = GpuInventoryState(IMMEDIATE), ShownDriver()
    watch, found = _watch(driver, state), inventory()
    await _poll(watch, driver, replace(found, gpus=(), mig_partitioned=found.gpus))
    assert watch._pause_s() == 1
    with capture_logs() as logs:
        await _poll(watch, driver, Unavailable("NVML is gone"), Unavailable("NVML is gone"))
    assert [line["event"] for line in logs] == ["gpus_lost"]
