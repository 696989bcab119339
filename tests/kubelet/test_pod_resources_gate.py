"""No PodResources List while an Allocate is open, and none beside an admission."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gpushare_agent.agent.kubelet.pod_resources import PodListing, PodResourcesGate
from gpushare_agent.core.model.errors import Unavailable
from tests.fakes.clock import FakeClock
from tests.kubelet.support_plugin import DEADLINE_S


class SlowLister:
    """Answers a List when `answer` is set."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()
        self.timeouts_s: list[float] = []

    async def list_entries(self, *_settled: object, timeout_s: float) -> Sequence[PodListing]:
        self.timeouts_s.append(timeout_s)
        self.asked.set()
        await self.answer.wait()
        return []


async def loop_cycles(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def list_inside(gate: PodResourcesGate) -> None:
    """As a GetPreferredAllocation does."""
    async with gate.preferring() as inside:
        await inside("", {})


async def list_outside(gate: PodResourcesGate) -> None:
    """As a reconcile does."""
    async with gate.quiet_list("reconcile", wait_s=DEADLINE_S):
        pass


async def test_a_list_inside_waits_for_an_open_allocate_and_may_take_what_that_left_of_two_seconds() -> None:
    """A container restart may have one open next to an admission. On a busy node a kubelet took more than a second; an
    admission must not wait for longer than two."""
    lister, clock = SlowLister(), FakeClock()
    lister.answer.set()
    gate = PodResourcesGate(lister, clock=clock)
    await list_inside(gate)
    async with asyncio.TaskGroup() as group:
        with gate.allocating():
            task = group.create_task(list_inside(gate))
            await loop_cycles()
            assert len(lister.timeouts_s) == 1 and not task.done()
            clock.now += 0.5
    assert lister.timeouts_s == [2.0, 1.5]


async def test_an_allocate_that_never_ends_fails_the_list_in_time() -> None:
    """The node must not hang with it."""
    gate = PodResourcesGate(SlowLister(), clock=FakeClock(), list_timeout_s=0.01)
    with gate.allocating(), pytest.raises(Unavailable, match="stays open"):
        await list_inside(gate)


async def test_a_list_outside_waits_until_admissions_are_over_and_quiet() -> None:
    """Neither a GetPreferredAllocation nor an Allocate is open, and the last one ended a while ago."""
    lister, clock = SlowLister(), FakeClock()
    lister.answer.set()
    gate = PodResourcesGate(lister, clock=clock, quiet_s=0.02)
    async with asyncio.TaskGroup() as group:
        async with gate.preferring():
            group.create_task(list_outside(gate))
            await loop_cycles()
        with gate.allocating():
            await loop_cycles()
            assert lister.timeouts_s == []
        await loop_cycles()
        assert lister.timeouts_s == [], "the last Allocate ended just now"
        clock.now += 1.0
    assert len(lister.timeouts_s) == 1


async def test_a_preference_waits_for_a_list_outside() -> None:
    """So the Allocate that follows it cannot meet that List."""
    lister = SlowLister()
    gate = PodResourcesGate(lister, clock=FakeClock(), quiet_s=0.0)
    preferring = asyncio.Event()

    async def prefer() -> None:
        async with gate.preferring():
            preferring.set()

    async with asyncio.TaskGroup() as group:
        listing = group.create_task(list_outside(gate))
        await lister.asked.wait()
        group.create_task(prefer())
        await loop_cycles()
        assert not preferring.is_set()
        lister.answer.set()
        await preferring.wait()
        assert listing.done()


async def test_an_allocate_that_meets_a_list_is_counted() -> None:
    """It cannot be delayed: the kubelet has opened it already."""
    lister, met = SlowLister(), []
    gate = PodResourcesGate(lister, clock=FakeClock(), quiet_s=0.0, on_list=met.append)
    async with asyncio.TaskGroup() as group:
        group.create_task(list_outside(gate))
        await lister.asked.wait()
        with gate.allocating():
            pass
        lister.answer.set()
    assert sorted(met) == ["overlapped", "reconcile"]


async def test_a_cancelled_list_frees_the_gate() -> None:
    """Shutting down in the middle of a reconcile leaves no admission waiting."""
    lister = SlowLister()
    gate = PodResourcesGate(lister, clock=FakeClock(), quiet_s=0.0)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(list_outside(gate))
        await lister.asked.wait()
        task.cancel()
    async with gate.preferring():
        assert not gate.is_idle
    assert gate.is_idle


async def test_admissions_without_a_pause_are_not_waited_for_for_ever() -> None:
    """A storm of rejected pods never leaves the quiet time."""
    gate = PodResourcesGate(SlowLister(), clock=FakeClock(), quiet_s=0.01)
    async with gate.preferring():
        with pytest.raises(Unavailable, match="did not pause"):
            async with gate.quiet_list("reconcile", wait_s=0.02):
                pass
