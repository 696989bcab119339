"""Pools of several slices: one generation, the right count, few writes, and none lost on the way.

`PoolUnderTest.devices` is the rule of the scheduler (GatherPools): the slices of the highest generation are the pool, and it
takes no device of one that lacks a slice, or in which two devices have one name.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.dra import slices
from gpushare_agent.agent.dra.slices import slice_name
from gpushare_agent.core.claims.mig_devices import CONFLICT_TAINT
from gpushare_agent.core.kube.claims import (
    Counter,
    CounterConsumption,
    CounterSet,
    Device,
    SliceContent,
)
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.taints import Taint
from tests.dra.support_claims import DRIVER, NODE
from tests.dra.test_mig_devices import known_instance, on_demand, published, static
from tests.dra.test_slices import FakeSlices, Published
from tests.extender.support_extender import eventually
from tests.support_json import undecoded

BASE = f"{NODE}-{DRIVER}"


def device(name: str, *taints: str) -> Device:
    consumed = [CounterConsumption("gpu-0", {"memory-slice-0": Counter("1")})]
    made = [Taint(key, "NoSchedule", "why") for key in taints]
    return Device(
        name=name,
        allow_multiple_allocations=True,
        attributes={},
        capacity={},
        consumes_counters=consumed,
        taints=made or (),
    )


def of(*names: str) -> SliceContent:
    return SliceContent(devices=[device(name) for name in names])


def counters(*names: str) -> SliceContent:
    return SliceContent(shared_counters=[CounterSet(name, {"memory-slice-0": Counter("1")}) for name in names])


class CountedSlices(FakeSlices):
    """Writes after `fails_after` fail, and each write is remembered by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.fails_after: int | None = None

    def _fail(self) -> None:
        super()._fail()
        if self.fails_after is not None and len(self.names) >= self.fails_after:
            raise Unavailable("down")

    def _stored(self, raw: Any) -> Any:
        self.names.append(raw["metadata"]["name"])
        return super()._stored(raw)


class PoolUnderTest(Published):
    def __init__(self, *contents: SliceContent, api: CountedSlices | None = None) -> None:
        super().__init__(None)
        self.contents: list[SliceContent] | None = list(contents)
        self.slices = api or CountedSlices()
        self.api = self.slices
        self.slices.publisher = self.publisher
        for stored in self.slices.slices.values():
            self.publisher.put(undecoded(stored))

    def desired(self) -> list[SliceContent] | None:
        return self.contents

    def wants(self, *contents: SliceContent) -> None:
        self.slices.names.clear()
        self.contents = list(contents)
        self.publisher.changed()

    async def settled(self, *contents: SliceContent) -> None:
        """Asks for these, and waits until they are there."""
        self.wants(*contents)
        await eventually(lambda: self.devices == [[one.name for one in content.devices] for content in contents])

    @property
    def devices(self) -> list[list[str]] | None:
        """The names by slice, in the order of the slices; None where the scheduler would take none."""
        specs = [one["spec"] for _, one in sorted(self.slices.slices.items())]
        newest = max((one["pool"]["generation"] for one in specs), default=0)
        pool = [one for one in specs if one["pool"]["generation"] == newest]
        names = [[one["name"] for one in spec.get("devices", ())] for spec in pool]
        flat = [name for part in names for name in part]
        is_whole = len(pool) == len(specs) and {one["pool"]["resourceSliceCount"] for one in pool} <= {len(pool)}
        is_whole = is_whole and bool(specs) == bool(self.contents)
        return names if is_whole and len(set(flat)) == len(flat) else None

    @property
    def is_there(self) -> bool:
        return self.devices is not None

    @property
    def generations(self) -> set[int]:
        return {one["spec"]["pool"]["generation"] for one in self.slices.slices.values()}


THREE = (of("gpu-0"), of("a", "b"), counters("gpu-0"))


@pytest.fixture
async def pool() -> AsyncIterator[PoolUnderTest]:
    """Of three slices, which are there."""
    made = PoolUnderTest(*THREE)
    async with made.written():
        yield made


async def test_all_slices_have_one_generation_and_the_count(pool: PoolUnderTest) -> None:
    assert pool.devices == [["gpu-0"], ["a", "b"], []] and pool.slices.names == [BASE, f"{BASE}-001", f"{BASE}-002"]
    specs = [one["spec"] for one in pool.slices.slices.values()]
    assert ["devices" in one for one in specs] == [True, True, False]
    assert ["sharedCounters" in one for one in specs] == [False, False, True]


def tainted(*names: str) -> SliceContent:
    return SliceContent(devices=[device(name, CONFLICT_TAINT) for name in names])


async def test_a_change_of_one_gpu_writes_its_slice_alone(pool: PoolUnderTest) -> None:
    pool.wants(of("gpu-0"), tainted("a", "b"), counters("gpu-0"))
    await eventually(lambda: bool(pool.slices.names))
    assert pool.slices.names == [f"{BASE}-001"] and pool.generations == {1}
    await pool.settled(of("gpu-0"), of("a", "c"), counters("gpu-0"))
    assert pool.slices.names == [f"{BASE}-001"] and pool.generations == {1}


@pytest.mark.parametrize(
    "then",
    [
        (of("gpu-0"), of("a", "b"), of("c"), counters("gpu-0", "gpu-1")),
        (of("a", "b"), counters("gpu-0")),
        (of("gpu-0", "a"), of("b"), counters("gpu-0")),
        (of("gpu-0"), of("a", "b"), counters("gpu-1")),
        (of("gpu-0"),),
        (),
    ],
    ids=["more", "fewer", "moved", "other counters", "one", "none"],
)
async def test_another_set_of_slices_is_written_with_the_next_generation(
    then: Sequence[SliceContent], pool: PoolUnderTest
) -> None:
    await pool.settled(*then)
    await eventually(lambda: pool.generations == ({2} if then else set()))
    assert len(pool.slices.slices) == len(then)
    await pool.settled(*THREE)
    assert len(pool.generations) == 1


async def test_slices_that_the_kubelet_deleted_come_back() -> None:
    """All of them, in whatever order the deletions are seen."""
    for seed in range(10):
        pool = PoolUnderTest(*THREE)
        async with pool.written():
            pool.slices.names.clear()
            for name in random.Random(seed).sample([*pool.slices.slices], 3):
                pool.slices.delete(name)
                for _ in range(seed):
                    await asyncio.sleep(0)
            await eventually(lambda: pool.devices is not None)  # noqa: B023
            assert pool.devices == [["gpu-0"], ["a", "b"], []]


@pytest.mark.parametrize("written", range(4))
async def test_a_pool_that_was_left_half_written_is_completed(written: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same agent once the API server answers again, and by the next one."""
    monkeypatch.setattr(slices, "RETRY_S", 0.0)
    after = (of("a"), of("b"), of("c"), counters("gpu-0"))
    for is_next_agent in (False, True):
        pool = PoolUnderTest(*THREE)
        async with pool.written():
            pool.slices.fails_after, writes = written, pool.slices.writes
            pool.wants(*after)
            await eventually(lambda: pool.slices.writes > writes + written)  # noqa: B023
            if not is_next_agent:
                pool.slices.fails_after = None
                await eventually(lambda: pool.devices == [["a"], ["b"], ["c"], []])  # noqa: B023
        if is_next_agent:
            pool.slices.fails_after = None
            pool = PoolUnderTest(*after, api=pool.slices)
            async with pool.running():
                await eventually(lambda: pool.devices == [["a"], ["b"], ["c"], []])  # noqa: B023


async def test_a_slice_that_changed_meanwhile_is_written_again(pool: PoolUnderTest) -> None:
    name = f"{BASE}-001"
    newer = {**pool.slices.slices[name], "metadata": {"name": name, "resourceVersion": "other"}}
    pool.slices.slices[name] = newer
    pool.wants(of("gpu-0"), of("a", "c"), counters("gpu-0"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert pool.slices.names == [], "a conflict was answered"
    pool.publisher.put(undecoded(newer))
    await eventually(lambda: pool.devices == [["gpu-0"], ["a", "c"], []])


async def test_the_end_of_conflicts_waits_and_their_beginning_does_not(
    monkeypatch: pytest.MonkeyPatch, pool: PoolUnderTest
) -> None:
    """An instance that cannot be destroyed is tried again and again: each would be a write of its GPU's slice."""
    monkeypatch.setattr(slices, "ORDER_PERIOD_S", 3600.0)
    for round_ in range(3):
        pool.wants(of("gpu-0"), tainted("a", "b"), counters("gpu-0"))
        await eventually(lambda: pool.slices.names == [f"{BASE}-001"] or round_ > 0)  # noqa: B023
        pool.wants(of("gpu-0"), of("a", "b"), counters("gpu-0"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert pool.slices.names == []
    # What is urgent in another slice does not wait for it.
    pool.wants(of("gpu-9"), of("a", "b"), counters("gpu-0"))
    await eventually(lambda: pool.slices.names == [BASE])
    monkeypatch.setattr(slices, "ORDER_PERIOD_S", 0.0)
    pool.publisher.changed()
    await eventually(lambda: pool.slices.names == [BASE, f"{BASE}-001"])


async def test_an_agent_that_starts_writes_nothing_that_is_there() -> None:
    """As the API server returns it."""
    found = on_demand(3)
    first = replace(found.mig_layouts[0], problem="no right")
    contents = published(replace(found, mig_layouts=(first, *found.mig_layouts[1:])), static(found, known_instance()))
    pool = PoolUnderTest(*contents)
    async with pool.written():
        pass
    pool.slices.names.clear()
    pool = PoolUnderTest(*contents, api=pool.slices)
    async with pool.running():
        await eventually(pool.publisher.published.is_set)
    assert pool.slices.names == [] and len(pool.slices.slices) == 5


def test_names_are_in_the_order_of_the_slices() -> None:
    names = [slice_name("n", number) for number in range(40)]
    assert sorted(names) == names and len({*names}) == 40
    assert all(len(slice_name("n" * 253, number)) <= 253 for number in (0, 7))
