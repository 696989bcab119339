"""What is prepared before a container starts: for one start, and never for one that has come already."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gpushare_agent.agent.isolation.ahead import NOT_STARTED_FOR_S, PreparedAhead
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.names import PodUid
from tests.agent.support_agent import poll_until
from tests.cluster.support_kube import running

FIRST, SECOND = (ContainerKey(PodUid("11111111-2222-3333-4444-555555555555"), name) for name in ("a", "b"))


class Disk:
    """Prepares, unless it is held, when it is let to; and notes what it was asked for together."""

    def __init__(self, *, is_held: bool = False) -> None:
        self.may_go_on = asyncio.Event()
        if not is_held:
            self.may_go_on.set()
        self.asked: list[list[ContainerKey]] = []
        self.fails = False

    async def prepare(self, keys: Sequence[ContainerKey]) -> Sequence[ContainerKey]:
        self.asked.append(list(keys))
        await self.may_go_on.wait()
        return [] if self.fails else keys


async def test_one_preparation_serves_one_start() -> None:
    disk = Disk()
    ahead = PreparedAhead(disk.prepare)
    async with running(ahead.run):
        ahead.add(FIRST)
        await poll_until(lambda: ahead.prepared == {FIRST}, "the container prepared")
    assert [ahead.take(FIRST), ahead.take(FIRST)] == [True, False]


@pytest.mark.parametrize("is_allocated_again", [False, True])
async def test_a_start_that_comes_first_gets_no_preparation_of_before(is_allocated_again: bool) -> None:
    """Its own preparation made the files that it has; one that follows another allocation counts again."""
    disk = Disk(is_held=True)
    ahead = PreparedAhead(disk.prepare)
    async with running(ahead.run):
        ahead.add(FIRST)
        await poll_until(lambda: disk.asked == [[FIRST]], "the preparation under way")
        assert not ahead.take(FIRST)
        if is_allocated_again:
            ahead.add(FIRST)
        disk.may_go_on.set()
        ahead.add(SECOND)
        await poll_until(lambda: SECOND in ahead.prepared, "the next one prepared")
    assert (FIRST in ahead.prepared) is is_allocated_again


async def test_what_fails_is_left_to_the_start() -> None:
    disk = Disk()
    disk.fails = True
    ahead = PreparedAhead(disk.prepare)
    async with running(ahead.run):
        ahead.add(FIRST)
        await poll_until(lambda: disk.asked == [[FIRST]], "the preparation")
        await asyncio.sleep(0)
    assert not ahead.prepared and not ahead.take(FIRST)


@pytest.mark.parametrize(("at_once", "expected"), [(None, [[FIRST, SECOND]]), (1, [[FIRST], [SECOND]])])
async def test_a_burst_is_prepared_together_or_one_by_one(
    at_once: int | None, expected: list[list[ContainerKey]]
) -> None:
    disk = Disk()
    ahead = PreparedAhead(disk.prepare, at_once=at_once)
    ahead.add(FIRST)
    ahead.add(SECOND)
    async with running(ahead.run):
        await poll_until(lambda: ahead.prepared == {FIRST, SECOND}, "both prepared")
    assert disk.asked == expected


async def test_containers_that_are_gone_or_never_start_are_forgotten() -> None:
    disk, now = Disk(), [0.0]
    ahead = PreparedAhead(disk.prepare, clock=lambda: now[0])
    async with running(ahead.run):
        ahead.add(FIRST)
        ahead.add(SECOND)
        await poll_until(lambda: ahead.prepared == {FIRST, SECOND}, "both prepared")
    ahead.keep_only({FIRST}.__contains__)
    assert ahead.prepared == {FIRST}
    now[0] += NOT_STARTED_FOR_S
    ahead.keep_only({FIRST}.__contains__)
    assert not ahead.prepared
