"""Which device IDs each GPU has for the kubelet, while containers hold some under other names."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.admission import device_tables
from gpushare_agent.agent.admission.device_tables import DeviceTables
from gpushare_agent.agent.gpus.inventory import GpuInventoryState
from gpushare_agent.agent.kubelet.device_table import DeviceRow, device_rows
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.names import VCORE_RESOURCE, VMEMORY_RESOURCE, GpuUuid, device_id, unit_id
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.settings.settings import Settings
from tests.cluster.support_kube import running
from tests.sandbox.support_sandbox import key_of
from tests.support_core import allocation, container, ids, inventory, pod, used_blocks, used_cores
from tests.support_deadline import DEADLINE_S, poll_until
from tests.support_node import FreeIsolations, node_of


async def test_cores_come_back_when_a_unit_ends_whose_resource_is_no_longer_offered() -> None:
    """Of a container that began when nvidia.enabled was on."""
    gpus = inventory(1)
    node = node_of(gpus)
    uuid, cache = gpus.gpus[0].uuid, node.cache
    tables = DeviceTables(node=node, isolation=FreeIsolations(), ids=DeviceIds())
    cache.subscribe(tables.allocation_changed)
    whole = replace(
        allocation(pod("old", container(cores=0)), "main", [], []),
        ids={ResourceKind.GPU: frozenset({unit_id(uuid, 0, "1")})},
        gpus=(uuid,),
    )
    cache.put(whole)
    tables.refresh()
    assert not any(row.healthy for row in tables.tables[VCORE_RESOURCE].devices)
    async with running(tables.run):
        cache.release(whole.key)
        await _listed(tables, [f"{key_of(uuid)}-{n}" for n in range(100)])


class _Asked(FreeIsolations):
    """Counts how often the lists are made, each of which asks it."""

    lists = 0

    def has_no_shares(self) -> bool:
        self.lists += 1
        return False


async def test_lists_that_were_made_since_a_request_are_not_made_again_for_it() -> None:
    """At the start an isolation is found, then the ledger rebuilt: the lists have thousands of devices."""
    isolations = _Asked()
    tables = DeviceTables(node=node_of(inventory(1)), isolation=isolations, ids=DeviceIds())
    tables.request_refresh()
    tables.refresh()
    async with running(tables.run):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert isolations.lists == 1
        tables.request_refresh()
        await poll_until(lambda: isolations.lists == 2, "the list that was requested")


def test_only_the_lists_that_an_allocation_changes_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica of a GPU makes the agent look at all lists, in the middle of the next admission: they have thousands of
    rows."""
    gpus, made = inventory(1), list[int]()

    def counted(*arguments: Any) -> list[DeviceRow]:
        rows = device_rows(*arguments)
        made.append(len(rows))
        return rows

    monkeypatch.setattr(device_tables, "device_rows", counted)
    node = node_of(gpus)
    tables = DeviceTables(node=node, isolation=FreeIsolations(), ids=DeviceIds())
    tables.refresh()
    rows = [len(tables.tables[name].devices) for name in (VCORE_RESOURCE, VMEMORY_RESOURCE)]
    assert made == rows
    share = allocation(pod("a", container(cores=30, blocks=4)), "main", ids(0, range(30)), ids(0, range(4)))
    node.cache.put(share)
    tables.refresh()
    assert made == rows
    unit = {ResourceKind.GPU: frozenset({unit_id(gpus.gpus[0].uuid, 0, "2s")})}
    node.cache.put(replace(share, key=share.key._replace(container="replica"), ids=unit))
    tables.refresh()
    assert made == rows * 2


async def _listed(tables: DeviceTables, texts: list[str], resource: str = VCORE_RESOURCE) -> None:
    table = tables.tables[resource]
    await table.changes.wait_until(lambda: [row.id for row in table.devices if row.healthy] == texts, DEADLINE_S)


def test_what_containers_hold_of_a_gpu_is_charged_to_it_once_the_driver_shows_it() -> None:
    """An agent that started while the GPU was away knows the IDs, not the GPU."""
    both = inventory(2)
    away = replace(both, gpus=both.gpus[:1])
    node, ids = node_of(away), DeviceIds()
    uuid, cache = both.gpus[1].uuid, node.cache
    tables = DeviceTables(node=node, isolation=FreeIsolations(), ids=ids)
    tables.refresh()
    devices = ids.read([f"{key_of(uuid)}-{n}" for n in range(30)])
    share = allocation(
        pod("a", container(cores=30, blocks=4)), "main", [], [f"{away.gpus[0].uuid}::{n}" for n in range(4)]
    )
    held = {**share.ids, ResourceKind.VCORE: frozenset(devices)}
    cache.put(replace(share, ids=held, gpus=(GpuUuid(key_of(uuid)),)))
    node.inventory.current = both
    tables.refresh()
    assert (used_cores(cache), used_blocks(cache)) == ({uuid: 30}, {uuid: 4})
    assert next(iter(cache)).gpus == (uuid,)


def test_what_containers_hold_of_a_gpu_that_is_no_longer_offered_stays_on_it() -> None:
    """A GPU that went over to claims while a pod has a share of it: its IDs are read after a restart as before."""
    gpus = inventory(1)
    uuid, ids = gpus.gpus[0].uuid, DeviceIds()
    node = node_of(gpus, settings=Settings(node_name="node", excluded_gpus=(uuid,)))
    tables = DeviceTables(node=node, isolation=FreeIsolations(), ids=ids)
    tables.refresh()
    assert ids.read([f"{key_of(uuid)}-7"]) == [device_id(uuid, 7)]
    assert not tables.tables[VCORE_RESOURCE].devices


@pytest.mark.parametrize(
    ("taken_by", "kind"),
    [
        *((one, ContainerKind.INIT) for one in ("excluded_gpus", "dra", "cordon", "no_shares", "fault")),
        ("cordon", ContainerKind.MAIN),
    ],
)
async def test_what_an_init_container_has_of_a_gpu_that_nobody_new_gets_is_healthy_until_its_pod_ends(
    taken_by: str, kind: ContainerKind
) -> None:
    """A kubelet that starts again rejects a running pod if an init container's are not: only a fault of the GPU may do that.
    Of the rest none is offered, and at the pod's end none of its own."""
    gpus, state, resource = inventory(2), GpuInventoryState(), VMEMORY_RESOURCE
    uuid, other = (gpu.uuid for gpu in gpus.gpus)
    state.read(gpus)
    chosen: dict[str, Any] = {"excluded_gpus": {"excluded_gpus": (uuid,)}, "dra": {"dra": {"gpus": (uuid,)}}}
    settings = Settings(node_name="n", **chosen.get(taken_by, {}))
    node = node_of(gpus, settings=settings, has_claims=settings.has_claims, inventory=state)
    if taken_by == "cordon":
        state.cordon(uuid, "")
    elif taken_by == "fault":
        state.lost("it does not answer")
    isolations = FreeIsolations()
    isolations.has_no_shares = lambda: taken_by == "no_shares"  # type: ignore[method-assign]
    tables = DeviceTables(node=node, isolation=isolations, ids=DeviceIds())
    node.cache.subscribe(tables.allocation_changed)
    share = allocation(pod("a", container(cores=30, blocks=4)), "main", ids(0, range(30)), ids(0, range(4)), kind)
    node.cache.put(share)
    tables.refresh()
    held = [] if taken_by == "fault" or kind is ContainerKind.MAIN else [f"{key_of(uuid)}-{n}" for n in range(4)]
    free = [] if taken_by in ("no_shares", "fault") else [f"{key_of(other)}-{n}" for n in range(96)]
    assert [row.id for row in tables.tables[resource].devices if row.healthy] == held + free
    async with running(tables.run):
        node.cache.release(share.key)
        await _listed(tables, free, resource)
