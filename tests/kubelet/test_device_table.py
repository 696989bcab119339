"""kubelet/device_table.py: frames, versions, device IDs, sizes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.admission.device_tables import offered_ids
from gpushare_agent.agent.kubelet.device_table import (
    MAX_LIST_BYTES,
    MOST_CHANGED,
    WITHDRAWN_S,
    DeviceRow,
    DeviceTable,
    ExpectedOffer,
    check_lists,
    device_rows,
    list_bytes,
    smallest_block_mib,
)
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.errors import StartupError
from gpushare_agent.core.model.gpus import Branch, Gpu, GpuInventory, Health, LinkKind, Topology
from gpushare_agent.core.model.names import DeviceId, GpuUuid, device_id, named_gpus
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames
from gpushare_agent.core.wire import v1beta1

ROWS = st.lists(
    st.builds(
        DeviceRow,
        id=st.text(min_size=1, max_size=150),
        healthy=st.booleans(),
        numa=st.none() | st.integers(0, 1000),
    ),
    max_size=8,
    unique_by=lambda row: row.id,
)

NAMES = ResourceNames()


def gpu(index: int, *, memory_mib: int = 1024, numa: int | None = None, health: Health = Health.HEALTHY) -> Gpu:
    return Gpu(
        index=index,
        minor=index,
        uuid=GpuUuid(f"GPU-{index:08x}-0000-4000-8000-000000000000"),
        bus_id=f"0000:{index:02x}:00.0",
        name="gpu",
        memory_mib=memory_mib,
        numa_node=numa,
        health=health,
    )


def inventory(*gpus: Gpu) -> GpuInventory:
    return GpuInventory(gpus=gpus, topology=Topology(links=(), root=Branch(kind=LinkKind.SYS, gpus=())))


def as_message(rows: list[DeviceRow]) -> v1beta1.ListAndWatchResponse:
    """The list by way of the generated classes."""
    return v1beta1.ListAndWatchResponse(
        devices=[
            v1beta1.Device(
                id=row.id,
                health="Healthy" if row.healthy else "Unhealthy",
                topology=None if row.numa is None else v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=row.numa)]),
            )
            for row in rows
        ]
    )


@settings(deadline=None)
@given(ROWS, ROWS)
def test_the_frames_are_what_the_generated_classes_write_after_any_change(
    first: list[DeviceRow], second: list[DeviceRow]
) -> None:
    """Byte for byte, also where frames of the list before are used again; NUMA node 0 is not lost."""
    table = DeviceTable(first)
    assert table.encode() == bytes(as_message(first))
    table.set_devices(second)
    offered = {row.id for row in second}
    listed = second + [replace(row, healthy=False) for row in first if row.id not in offered]
    assert table.encode() == bytes(as_message(listed))
    assert table.devices == tuple(listed)


def test_an_id_that_is_no_longer_offered_stays_for_a_while_as_unhealthy() -> None:
    """A kubelet (1.36.3) whose Allocate is under way ends with a nil pointer where the ID is gone from its list."""
    now = 0.0
    rows = [DeviceRow(id=name, healthy=True) for name in ("a", "b", "c")]
    earlier = DeviceTable(rows[:2], clock=lambda: now)
    earlier.encode()
    earlier.set_devices(rows[:1])
    table = DeviceTable(rows[2:], clock=lambda: now)
    table.take_over(earlier)
    gone = [replace(row, healthy=False) for row in rows[:2]]
    assert table.devices == (rows[2], *gone) and table.withdrawn_left_s() == WITHDRAWN_S
    now = WITHDRAWN_S
    assert table.set_devices(rows[2:]) and table.devices == (rows[2],) and table.withdrawn_left_s() is None


def test_a_list_that_is_too_long_with_what_is_withdrawn_goes_without_it() -> None:
    rows = [DeviceRow(id=f"{number:02}" + "x" * 100_000, healthy=True) for number in range(60)]
    table = DeviceTable(rows[:30])
    table.encode()
    table.set_devices(rows[30:])
    assert table.devices == tuple(rows[30:]) and len(table.encode()) <= MAX_LIST_BYTES


@settings(deadline=None)
@given(ROWS, ROWS)
def test_the_version_grows_with_a_change_and_only_then(first: list[DeviceRow], second: list[DeviceRow]) -> None:
    """Setting the same devices again is no change; another order is one."""
    table = DeviceTable(first)
    before = table.changes.count
    assert table.set_devices(list(first)) is False
    assert table.changes.count == before
    assert table.set_devices(second) is (first != second)
    assert table.changes.count == before + (first != second)


async def test_every_waiter_sees_the_newest_version_of_several_changes() -> None:
    """Two changes between two reads are one wake-up."""
    table = DeviceTable()
    row = DeviceRow(id="a", healthy=True)
    async with asyncio.TaskGroup() as tasks:
        waiters = [tasks.create_task(table.changes.wait(0)) for _ in range(3)]
        await asyncio.sleep(0)
        table.set_devices([row])
        table.set_devices([DeviceRow(id="a", healthy=False)])
    assert all(waiter.result() for waiter in waiters)
    assert await table.changes.wait(-1) and table.changes.count == 2


def rows_of(kind: ResourceKind, names: ResourceNames, *gpus: Gpu) -> list[DeviceRow]:
    """Of a node that nobody uses yet."""
    devices = {one.uuid: offered_ids(one.uuid, names.units(one, kind)) for one in gpus}
    return device_rows(inventory(*gpus), devices, DeviceIds(one.uuid for one in gpus))


def test_vcore_ids_are_a_hundred_per_gpu_in_order_of_index() -> None:
    """`<key>-0` to `<key>-99`, with the GPU's NUMA node and health on each."""
    rows = rows_of(ResourceKind.VCORE, NAMES, gpu(1, numa=0, health=Health.UNHEALTHY), gpu(0))
    assert [row.id for row in rows[:2]] == ["00000000-0", "00000000-1"]
    assert rows[-1] == DeviceRow(id="00000001-99", healthy=False, numa=0)
    assert len(rows) == 200
    assert {row.numa for row in rows[:100]} == {None}


def test_the_texts_of_a_list_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of a node have thousands, and are made again at every change."""
    found, devices = inventory(gpu(0)), {gpu(0).uuid: offered_ids(gpu(0).uuid, 100)}
    ids = DeviceIds([gpu(0).uuid])
    rows = device_rows(found, devices, ids)
    monkeypatch.delattr(DeviceIds, "write")
    assert device_rows(found, devices, ids) == rows


def test_vmemory_ids_count_whole_blocks_of_each_gpu() -> None:
    """A rest smaller than a block is not offered; GPUs may differ."""
    rows = rows_of(ResourceKind.VMEMORY, NAMES, gpu(0, memory_mib=1023), gpu(1, memory_mib=512))
    assert [row.id for row in rows] == [f"0000000{i}" for i in ("0-0", "0-1", "0-2", "1-0", "1-1")]


def test_gpu_mem_units_are_those_of_each_gpus_own_memory() -> None:
    """GPUShare's plugin takes the first GPU's for all."""
    names = ResourceNames(gpu_mem="aliyun.com/gpu-mem")
    rows = rows_of(ResourceKind.GPU_MEM, names, gpu(0, memory_mib=2 * 1024 + 500), gpu(1, memory_mib=4 * 1024))
    assert [row.id for row in rows] == [f"0000000{i}" for i in ("0-0", "0-1", "1-0", "1-1", "1-2", "1-3")]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.none() | st.integers(0, 300)), max_size=3),
    st.sampled_from([1, 2, 16, 256]),
)
def test_the_computed_size_is_that_of_the_message_with_every_gpu_unhealthy(
    shapes: list[tuple[int, int | None]], block_mib: int
) -> None:
    """ "Unhealthy" is the longer word: a list that fits so fits always."""
    gpus = [gpu(i, memory_mib=m, numa=n, health=Health.UNHEALTHY) for i, (m, n) in enumerate(shapes)]
    table = DeviceTable(rows_of(ResourceKind.VMEMORY, ResourceNames(memory_block_mib=block_mib), *gpus))
    assert list_bytes(gpus, block_mib) == len(table.encode())


def test_a_list_over_4_mib_is_refused_with_the_smallest_block_that_works() -> None:
    """The size named in the text passes the check, half of it does not."""
    gpus = [gpu(i, memory_mib=81920, numa=0) for i in range(16)]
    with pytest.raises(StartupError, match=r"blocks of 1 MiB.*memory_block_mib\) to 16 MiB or more"):
        check_lists(inventory(*gpus), ResourceNames(memory_block_mib=1))
    assert smallest_block_mib(gpus) == 16
    check_lists(inventory(*gpus), ResourceNames(memory_block_mib=16))
    with pytest.raises(StartupError):
        check_lists(inventory(*gpus), ResourceNames(memory_block_mib=8))
    table = DeviceTable(rows_of(ResourceKind.VMEMORY, ResourceNames(memory_block_mib=16), *gpus))
    assert len(table.encode()) <= MAX_LIST_BYTES


def test_no_gpus_make_an_empty_list_of_any_block_size() -> None:
    """A node whose driver found nothing serves zero devices."""
    assert rows_of(ResourceKind.VMEMORY, ResourceNames(memory_block_mib=1)) == []
    check_lists(inventory(), ResourceNames(memory_block_mib=1))
    assert smallest_block_mib([]) == 1


UNITS = [device_id(GpuUuid(f"GPU-{key}"), number) for key in ("8f3e2b1c-01", "71ab55ce-02") for number in range(12)]


def fields_of(ids: DeviceIds, devices: Sequence[DeviceId]) -> list[bytes]:
    """As `decode_preferred_allocation` takes them from an offer."""
    texts = [ids.write(device).encode() for device in devices]
    return [bytes([255 if len(text) == 10 else len(text)]) + text for text in texts]


@example([("offer", UNITS[:1] * 2), ("taken", UNITS[:1]), ("offer", UNITS[:1])])
@given(
    st.lists(
        st.tuples(st.sampled_from(["offer", "freed", "taken"]), st.lists(st.sampled_from(UNITS), max_size=6))
        | st.tuples(st.just("expected"), st.randoms()),
        max_size=12,
    )
)
def test_an_offer_is_what_it_says_whatever_was_expected(steps: list[tuple[str, Any]]) -> None:
    """In any order, with an ID twice, with changes of IDs that were offered or not."""
    ids, offer, expected = DeviceIds({device.partition("::")[0] for device in UNITS}), ExpectedOffer(), set[DeviceId]()
    for step, chosen in steps:
        match step:
            case "freed":
                offer.change(ids, freed=chosen)
                expected |= set(chosen)
            case "taken":
                offer.change(ids, taken=chosen)
                expected -= set(chosen)
            case _:
                offered = chosen if step == "offer" else chosen.sample(sorted(expected), len(expected))
                found = offer.read(ids, fields_of(ids, offered))
                assert found is not None
                for one, has in ((found, set(offered)), (found.but(UNITS[:3]), set(offered) ^ set(UNITS[:3]))):
                    assert one == has and len(one) == len(has) and one.of(dict.fromkeys(UNITS[1:])) == has - {UNITS[0]}
                    assert one.by_gpu == Counter(named_gpus(has))
                    some = set(UNITS[::2])
                    assert (one - some, some - one) == (has - some, some - has)
                    assert (one & some, one | some) == (has & some, has | some)
                expected = set(offered)


def test_an_offer_that_differs_by_many_ids_is_kept_for_the_next_ones() -> None:
    """It is as right, and so is what follows it; nothing grows with the offers."""
    units = [device_id(GpuUuid("GPU-8f3e2b1c-01"), number) for number in range(4 * MOST_CHANGED)]
    ids, offer = DeviceIds([GpuUuid("GPU-8f3e2b1c-01")]), ExpectedOffer()
    offer.read(ids, fields_of(ids, units))
    ids.announced.clear()
    for first in (1, MOST_CHANGED + 1, 2 * MOST_CHANGED + 2, 2 * MOST_CHANGED + 3):
        offer.change(ids, taken=units[:first])
        found = offer.read(ids, fields_of(ids, units[first:]))
        assert found == set(units[first:]) and found.by_gpu == Counter(named_gpus(units[first:]))
        assert len(offer._changed) <= MOST_CHANGED


def test_an_offer_does_not_change_with_what_is_expected_next() -> None:
    """A call waits for the kubelet's List while allocations end; what it may choose from is what it was offered."""
    ids, offer = DeviceIds({device.partition("::")[0] for device in UNITS}), ExpectedOffer()
    offer.read(ids, fields_of(ids, UNITS))
    offer.change(ids, taken=UNITS[:3])
    found = offer.read(ids, fields_of(ids, UNITS[3:]))
    offer.change(ids, freed=UNITS[:3])
    assert found == set(UNITS[3:])


def test_what_is_expected_is_looked_up_in_no_table() -> None:
    """Thousands of IDs come in each call; one that nobody announced is found out all the same."""
    ids, offer = DeviceIds({device.partition("::")[0] for device in UNITS}), ExpectedOffer()
    fields = fields_of(ids, UNITS)
    offer.read(ids, fields)
    offer.change(ids, taken=UNITS[:3])
    offer.change(ids, freed=UNITS[:1])
    ids.announced.clear()
    assert offer.read(ids, fields[:0:-1][:-2] + fields[:1]) == frozenset(UNITS[:1] + UNITS[3:])
    assert offer.read(ids, fields) is None
    assert offer.read(ids, [*fields[:1], *fields[3:], b""]) is None
    assert offer.read(ids, fields[:1] + fields[3:]) == frozenset(UNITS[:1] + UNITS[3:])
