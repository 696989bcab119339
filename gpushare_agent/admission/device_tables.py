"""Keeps every resource's device list up to date: the GPUs' health at once, the memory account a moment after a change.

State owned: the tables (kubelet/device_table.py), whether they are behind the allocation cache, whether IDs in them are
withheld for shares that have grown, or listed as an older agent named them, and what was last logged. A table that is
behind does no harm: the admission decides by the cache itself.

IDs are reported Unhealthy though their GPU is healthy where they exceed its free memory, where a share that has grown
borrows their capacity, and for shares while the daemon that they need is down. An allocated ID is not withheld for want
of memory: its container keeps running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.decisions.ledger import Policy, gpu_accounts
from gpushare_agent.admission.decisions.recovery import gpus_of
from gpushare_agent.kit.supervision import ReportOnce, wait_for
from gpushare_agent.kubelet.device_table import DeviceIds, DeviceTable, device_rows
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.gpus import Gpu, GpuInventory
from gpushare_agent.model.names import (
    DeviceId,
    GpuUuid,
    device_id,
    gpu_of,
    has_kubelet_text,
    split_device_id,
)
from gpushare_agent.model.resources import Measure, ResourceKind, ResourceNames, UnitLayout, replica_layout
from gpushare_agent.placement import GpuAccount

Holders = Mapping[ResourceKind, Mapping[DeviceId, frozenset[ContainerKey]]]


def offered_ids(
    units: Mapping[GpuUuid, int], holders: Mapping[DeviceId, frozenset[ContainerKey]]
) -> dict[GpuUuid, list[DeviceId]]:
    """The IDs of one resource by GPU: as many as it has units, by number.

    A number that a container holds under an older text is offered under that text alone, until the container ends. Where
    containers hold it under both, a free one is left out for it.
    """
    found = {gpu: [device_id(gpu, number) for number in range(count)] for gpu, count in units.items()}
    # The usual case: no container is left to which an older agent gave IDs.
    if not has_kubelet_text(holders):
        return found
    older: dict[GpuUuid, dict[int, list[DeviceId]]] = {}
    for device in holders:
        if has_kubelet_text((device,)) and (split := split_device_id(device)) is not None and split[0] in units:
            older.setdefault(split[0], {}).setdefault(split[1], []).append(device)
    for gpu, by_number in older.items():
        held = [device for devices in by_number.values() for device in devices]
        held += [device for device in found[gpu] if device in holders]
        free = [device for number, device in enumerate(found[gpu]) if number not in by_number and device not in holders]
        found[gpu] = sorted([*held, *free[: max(0, units[gpu] - len(held))]], key=_by_number)
    return found


def unit_ids(
    gpus: Sequence[Gpu], resource: str, layout: UnitLayout, in_use: Collection[DeviceId]
) -> dict[GpuUuid, list[DeviceId]]:
    """The units under one of NVIDIA's names: of every GPU those that it serves, by number, and those that containers hold by
    another replica layout or under NVIDIA's own texts, until they end. `in_use` are this resource's that containers have."""
    by_gpu: dict[GpuUuid, list[DeviceId]] = {}
    for device in in_use:
        by_gpu.setdefault(gpu_of(device), []).append(device)
    found: dict[GpuUuid, list[DeviceId]] = {}
    for gpu in gpus:
        served = layout.served(gpu)
        own = served.ids(gpu.uuid) if served is not None and served.resource == resource else []
        if of_gpu := by_gpu.get(gpu.uuid, []):
            under_another_text = {device.partition("~")[0] for device in of_gpu if has_kubelet_text((device,))}
            # The same unit twice in the list would be offered to two containers.
            own = [device for device in own if device not in under_another_text or device in of_gpu]
            own += sorted(set(of_gpu).difference(own), key=_by_number)
        found[gpu.uuid] = own
    return found


def withheld_units(
    gpus: Sequence[GpuAccount],
    ids: Mapping[GpuUuid, Sequence[DeviceId]],
    holders: Mapping[DeviceId, frozenset[ContainerKey]],
    *,
    no_replicas: bool,
    no_units: bool = False,
) -> frozenset[DeviceId]:
    """The units under one of NVIDIA's names that the GPU's other users leave no room for. `no_replicas`: what
    limits them cannot be had. `no_units`: none is given."""
    found: set[DeviceId] = set()
    for gpu in gpus:
        free = [device for device in ids[gpu.uuid] if device not in holders]
        if free:
            # Free units are all of the present layout: those of another one are listed only while a container has them.
            replicas = replica_layout(free[0])
            room = 0 if no_units or (no_replicas and not replicas.is_whole) else gpu.free_units_of(replicas.of)
            # The highest numbers: preferences begin with the lowest.
            found.update(free[room:])
    return frozenset(found)


def _by_number(device: DeviceId) -> tuple[int, str]:
    split = split_device_id(device)
    return (split[1] if split is not None else 0, device)


def withheld(
    kind: ResourceKind,
    gpus: Sequence[GpuAccount],
    ids: Mapping[GpuUuid, Sequence[DeviceId]],
    holders: Holders,
    names: ResourceNames,
    *,
    no_shares: bool,
    borrowed: Mapping[GpuUuid, int],
) -> frozenset[DeviceId]:
    """The `ids` of one resource that stand for nothing free. `borrowed` are units of it that are charged beyond a GPU's
    allocated IDs. Whole GPUs need no memory IDs: with `no_shares` all of those are withheld, and no cores.

    vmemory IDs are counters, so where a GPU has too few free ones of its own name, free ones of other names stand for them.
    """
    has_units = any(gpu.used_part is not None for gpu in gpus)
    if (
        not borrowed
        and not has_units
        and (kind.measure is Measure.CORES or (kind.measure is Measure.BLOCKS and not names.gpu_mem and not no_shares))
    ):
        return frozenset()
    found: set[DeviceId] = set()
    unbacked = 0
    left: list[DeviceId] = []
    for gpu in gpus:
        own = ids[gpu.uuid]
        # Cores stay: whole GPUs are asked for by them.
        if no_shares and kind.measure is not Measure.CORES:
            found.update(own)
            continue
        unallocated = [device for device in own if device not in holders[kind]]
        if kind.measure is Measure.UNITS:
            found.update(unallocated[gpu.free_units :])
            continue
        of_memory = gpu.blocks_of_units + gpu.blocks_of_part
        others = of_memory if kind.measure is Measure.BLOCKS else gpu.cores_of_part
        count = borrowed.get(gpu.uuid, 0) + others
        unbacked += max(0, count - len(unallocated))
        found.update(unallocated[max(0, len(unallocated) - count) :])
        left += unallocated[: max(0, len(unallocated) - count)]
    # The total must be right for the scheduler, which counts the node's IDs and no GPU's.
    if kind.measure is Measure.BLOCKS and (borrowed or has_units):
        found.update(left[max(0, len(left) - unbacked) :])
    return frozenset(found)


log = structlog.get_logger(__name__)

PAUSE_S = 0.2
"""Many allocations in a row make one ListAndWatch message."""


class DeviceTables(Struct, kw_only=True, eq=False):
    """One table for each resource that the node offers, by its name. `inventory` has all GPUs, `offered` those that the
    device plugins offer: containers may hold IDs of the others. `no_shares` is whether no share can be allocated at all now,
    `no_replicas` whether no replica of a GPU."""

    names: ResourceNames
    inventory: Callable[[], GpuInventory]
    offered: Callable[[], GpuInventory]
    cache: AllocationCache
    ids: DeviceIds
    no_shares: Callable[[], bool]
    no_replicas: Callable[[], bool] = lambda: False
    tables: dict[str, DeviceTable] = field(default_factory=dict)
    _is_behind: asyncio.Event = field(default_factory=asyncio.Event)
    _has_borrowed: bool = False
    _has_older_ids: bool = False
    _unlike: ReportOnce = field(default_factory=ReportOnce)

    def __post_init__(self) -> None:
        self.tables |= {name: DeviceTable() for name in self.names.names}

    def allocation_changed(self, old: Allocation | None, new: Allocation | None) -> None:
        """Refreshes the lists where they depend on it. For AllocationCache.subscribe. They depend on what is allocated for
        GPUShare's resource and of units under NVIDIA's names (also where this agent offers none), for shares that have
        grown, and for containers that hold IDs as an older agent named them."""
        depends = self.names.gpu_mem or self.cache.resized or self._has_borrowed or self._has_older_ids
        offers_units = any(kind.is_part for kind in self.names.kinds)
        is_of_units = offers_units or any(one is not None and one.unit_ids for one in (old, new))
        has_texts = new is not None and any(map(has_kubelet_text, new.ids.values()))
        if depends or is_of_units or has_texts:
            self._is_behind.set()

    def request_refresh(self) -> None:
        """`no_shares` may have changed."""
        self._is_behind.set()

    def refresh(self) -> None:
        """Bring every table up to date now."""
        known = self.inventory()
        if self.names.gpu:  # the kubelet may have texts of NVIDIA's plugin
            served = {gpu.uuid: self.names.nvidia.served(gpu) for gpu in known.gpus}
            self.ids.expect_units({uuid: found.replicas for uuid, found in served.items() if found is not None})
        # Texts that named no known GPU when they were read may name this one now.
        if self.ids.add_gpus(gpu.uuid for gpu in known.gpus):
            self._read_again(known)
        inventory = self.offered()
        ledger = self.cache.ledger(inventory)
        gpus = gpu_accounts(None, ledger, Policy(names=self.names))
        no_shares = self.no_shares()
        reasons = (kind.layout(self.names).unlike(inventory.gpus) for kind in self.names.kinds)
        unlike = "; ".join(filter(None, reasons))
        if not unlike:
            self._unlike.is_over()
        elif self._unlike.is_new(unlike):
            log.error("nvidia_units_refused", reason=unlike)
        borrowed = self.cache.borrowed()
        self._has_borrowed = False
        for resource, table in self.tables.items():
            kind = self.names.kind_of(resource)
            holders = ledger.holders[kind]
            if kind.is_part:
                layout = kind.layout(self.names)
                ids = unit_ids(inventory.gpus, resource, layout, self._in_use(resource, holders))
                no_units = bool(layout.unlike(inventory.gpus))
                withheld_ids = withheld_units(gpus, ids, holders, no_replicas=self.no_replicas(), no_units=no_units)
                table.set_devices(device_rows(inventory, ids, self.ids, withheld_ids))
                continue
            borrowed_of_kind = {gpu: count for gpu, charge in borrowed.items() if (count := charge.count(kind))}
            ids = offered_ids({gpu.uuid: self.names.units(gpu, kind) for gpu in inventory.gpus}, holders)
            withheld_ids = withheld(
                kind, gpus, ids, ledger.holders, self.names, no_shares=no_shares, borrowed=borrowed_of_kind
            )
            self._has_borrowed = self._has_borrowed or bool(borrowed_of_kind)
            table.set_devices(device_rows(inventory, ids, self.ids, withheld_ids))
        self._has_older_ids = any(has_kubelet_text(ledger.holders[kind]) for kind in self.names.kinds)

    def _in_use(self, resource: str, holders: Mapping[DeviceId, Collection[ContainerKey]]) -> list[DeviceId]:
        """Units that containers have under this name."""
        held = ((device, next(map(self.cache.get, keys), None)) for device, keys in holders.items())
        return [device for device, allocation in held if allocation is not None and allocation.gpu_resource == resource]

    def _read_again(self, inventory: GpuInventory) -> None:
        """Containers may hold IDs of GPUs that were not there when the kubelet's records were read."""
        for allocation in list(self.cache):
            texts = {kind: [self.ids.write(device) for device in ids] for kind, ids in allocation.ids.items()}
            found = replace(allocation, ids={kind: frozenset(self.ids.read(own)) for kind, own in texts.items()})
            if found != allocation:
                gpus = gpus_of(found.bound_ids, inventory)
                self.cache.put(replace(found, gpus=gpus or allocation.gpus))

    async def run(self) -> NoReturn:
        """Refreshes the tables when something has changed, until cancelled."""
        while True:
            left = [left_s for table in self.tables.values() if (left_s := table.withdrawn_left_s()) is not None]
            await wait_for(self._is_behind, min(left, default=None))
            self._is_behind.clear()
            self.refresh()
            await asyncio.sleep(PAUSE_S)
