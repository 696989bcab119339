"""Keeps every resource's device list up to date: GPUs' health at once, the memory account a moment after a change.

State owned: the tables (kubelet/device_table.py), whether they are behind the allocation cache, whether IDs in them are
withheld for shares that have grown, and what was last logged. A table that is behind does no harm: the admission decides by
the cache itself.

IDs of a healthy GPU are reported Unhealthy if they exceed its free memory, if a share that has grown borrows their
capacity, and for shares while the daemon that they need is down. An allocated ID is not withheld when memory is short: its
container keeps running. What an init container has stays healthy until its pod ends, also of a GPU that is cordoned,
excluded or claims' by now, unless the GPU has a fault: a kubelet that starts again rejects the pod, which runs, if it is not
(measured on 1.36). Not what others have: where a pod ends, the scheduler would count on it until the kubelet's next report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, NoReturn

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.recovery import gpus_of
from gpushare_agent.agent.isolation.isolations import Isolations
from gpushare_agent.agent.kubelet.device_table import DeviceTable, ExpectedOffer, device_rows
from gpushare_agent.agent.node import Node
from gpushare_agent.core.kit.supervision import ReportOnce, wait_for
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.gpus import Gpu, GpuInventory
from gpushare_agent.core.model.names import DeviceId, GpuUuid, device_id, gpu_of, has_kubelet_text, split_device_id
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.model.resources import (
    Measure,
    ReplicaLayout,
    ResourceKind,
    ResourceNames,
    UnitLayout,
    replica_layout,
)
from gpushare_agent.core.placement import GpuAccount


@lru_cache(maxsize=512)
def offered_ids(gpu: GpuUuid, count: int) -> Sequence[DeviceId]:
    """The IDs of one resource on a GPU that has so many units of it, by number."""
    return tuple(device_id(gpu, number) for number in range(count))


def as_held(
    offered: Mapping[GpuUuid, Sequence[DeviceId]], in_use: Collection[DeviceId]
) -> dict[GpuUuid, Sequence[DeviceId]]:
    """The same, with what containers hold under another text in the place of as many free IDs of the GPU, the highest.
    Without them the kubelet would reject such a pod when it admits it again."""
    found = dict(offered)
    others = (device for device in in_use if has_kubelet_text((device,))) if has_kubelet_text(in_use) else ()
    for gpu, held in _by_gpu(others).items():
        free = [device for device in found.get(gpu, ()) if device not in in_use]
        hidden = set(free[max(0, len(free) - len(held)) :])
        found[gpu] = [device for device in found.get(gpu, ()) if device not in hidden] + sorted(held)
    return found


def _by_gpu(devices: Iterable[DeviceId]) -> dict[GpuUuid, list[DeviceId]]:
    found: dict[GpuUuid, list[DeviceId]] = {}
    for device in devices:
        found.setdefault(gpu_of(device), []).append(device)
    return found


def unit_ids(
    gpus: Sequence[Gpu], resource: str, layout: UnitLayout, in_use: Collection[DeviceId]
) -> dict[GpuUuid, Sequence[DeviceId]]:
    """The units under one of NVIDIA's names: those that every GPU serves, by number, and those that containers hold by
    another replica layout or under NVIDIA's own texts, until they end. `in_use` are those that containers have."""
    by_gpu = _by_gpu(in_use)
    found: dict[GpuUuid, Sequence[DeviceId]] = {}
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


def _by_number(device: DeviceId) -> tuple[int, str]:
    split = split_device_id(device)
    return (split[1] if split is not None else 0, device)


class Missing(NamedTuple):
    """What is not available on the node now: any share, what limits replicas of GPUs, all units under NVIDIA's names."""

    shares: bool = False
    replicas: bool = False
    units: bool = False


def withheld(
    kind: ResourceKind,
    gpus: Sequence[GpuAccount],
    ids: Mapping[GpuUuid, Sequence[DeviceId]],
    holders: Mapping[DeviceId, frozenset[ContainerKey]],
    names: ResourceNames,
    *,
    borrowed: Mapping[GpuUuid, int],
    missing: Missing = Missing(),  # noqa: B008 - a tuple
) -> frozenset[DeviceId]:
    """The `ids` of one resource that stand for nothing free. `borrowed` are units of it that are charged beyond a GPU's
    allocated IDs. Whole GPUs need no memory IDs: without shares all of those are withheld, and no cores.

    vmemory IDs are counters, so if a GPU has too few free IDs of its own name, free IDs of other names stand for them.
    """
    measure, has_units = kind.measure, any(gpu.used.part for gpu in gpus)
    is_counted = measure is Measure.CORES or (measure is Measure.BLOCKS and not names.gpu_mem and not missing.shares)
    if is_counted and not borrowed and not has_units:
        return frozenset()
    found: set[DeviceId] = set()
    unbacked = 0
    left: list[DeviceId] = []
    for gpu in gpus:
        # Cores stay: whole GPUs are asked for by them.
        if missing.shares and measure in (Measure.BLOCKS, Measure.UNITS):
            found.update(ids[gpu.uuid])
            continue
        free = [device for device in ids[gpu.uuid] if device not in holders]
        room = _room(measure, gpu, free, borrowed.get(gpu.uuid, 0), missing)
        # The highest numbers: preferences begin with the lowest.
        found.update(free[max(0, room) :])
        left += free[: max(0, room)]
        unbacked += max(0, -room)
    # The total must be right for the scheduler, which counts the node's IDs and no GPU's.
    if measure is Measure.BLOCKS and (borrowed or has_units):
        found.update(left[max(0, len(left) - unbacked) :])
    return frozenset(found)


def _room(measure: Measure, gpu: GpuAccount, free: Sequence[DeviceId], borrowed: int, missing: Missing) -> int:
    """How many of the free IDs have room next to the GPU's other users; less than 0 for IDs of other GPUs' names."""
    match measure:
        case Measure.UNITS:
            return gpu.free_units
        case Measure.BLOCKS:
            return len(free) - borrowed - gpu.blocks_of_units - gpu.blocks_of_part
        case Measure.CORES:
            return len(free) - borrowed - gpu.cores_of_part
        case Measure.PART:
            # Free units are all of the present layout: those of another one are listed only while a container has them.
            replicas = replica_layout(free[0]) if free else ReplicaLayout(1)
            is_missing = missing.units or (missing.replicas and not replicas.is_whole)
            return 0 if is_missing else gpu.free_units_of(replicas.of)


log = structlog.get_logger(__name__)

PAUSE_S = 0.2
"""Many allocations in a row make one ListAndWatch message."""


class DeviceTables(Struct, kw_only=True, eq=False):
    """One table for each resource that the node offers, by its name."""

    node: Node
    isolation: Isolations
    ids: DeviceIds
    tables: dict[str, DeviceTable] = field(default_factory=dict)
    _is_behind: asyncio.Event = field(default_factory=asyncio.Event)
    _followed: set[GpuUuid] = field(default_factory=set)
    """GPUs whose lists depend on who has them: shares have grown there, or it gives nobody anything new."""
    _unlike: ReportOnce = field(default_factory=ReportOnce)
    _shown: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """What each list was made of."""

    def __post_init__(self) -> None:
        self.tables |= {name: DeviceTable() for name in self.node.names.names}

    def allocation_changed(self, old: Allocation | None, new: Allocation | None) -> None:
        """Changes what the kubelet will offer next. Refreshes the lists if they depend on it: on allocations of GPUShare's
        resource, of units under NVIDIA's names (even if this agent offers none), and of shares that have grown. For
        AllocationCache.subscribe."""
        names = self.node.names
        for resource, table in self.tables.items():
            before, now = (
                one.ids_of(names.by_name[resource]) if one is not None else frozenset() for one in (old, new)
            )
            table.offer.change(self.ids, freed=before - now, taken=now - before)
        depends = names.gpu_mem or names.offers_parts or self.node.cache.resized
        for one in filter(None, (old, new)):
            if depends or one.unit_ids or one.started_by or not self._followed.isdisjoint(one.gpus):
                self._is_behind.set()

    def request_refresh(self) -> None:
        """Whether shares can be had may have changed."""
        self._is_behind.set()

    def refresh(self) -> None:
        """Bring every table up to date now."""
        self._is_behind.clear()
        names, cache, known = self.node.names, self.node.cache, self.node.gpus()
        if names.gpu:  # the kubelet may have texts of NVIDIA's plugin
            served = {gpu.uuid: names.nvidia.served(gpu) for gpu in known.gpus}
            self.ids.expect_units({uuid: found.replicas for uuid, found in served.items() if found is not None})
        # Texts that named no known GPU when they were read may name this one now.
        if self.ids.add_gpus(gpu.uuid for gpu in known.gpus):
            self._read_again(known)
            for table in self.tables.values():
                table.offer = ExpectedOffer()  # a text may name another GPU now
        inventory = self.node.plugins_devices()  # containers may hold IDs of the others
        others = {gpu.uuid for gpu in known.gpus} - inventory.by_uuid().keys()
        in_order = self.node.inventory.in_order
        ledger = cache.ledger(inventory)
        gpus = ledger.accounts(names)
        missing = Missing(shares=self.isolation.has_no_shares(), replicas=self.isolation.has_no_replicas())
        reasons = (kind.layout(names).unlike(inventory.gpus) for kind in names.kinds)
        unlike = "; ".join(filter(None, reasons))
        if not unlike:
            self._unlike.is_over()
        elif self._unlike.is_new(unlike):
            log.error("nvidia_units_refused", reason=unlike)
        borrowed = cache.borrowed()
        away = {gpu.uuid for gpu in known.gpus if any(missing) or not gpu.is_healthy}
        self._followed = others | away | borrowed.keys()
        init = {one.key for one in cache if one.kind is ContainerKind.INIT and (others or away)}
        for resource, table in self.tables.items():
            kind = names.by_name[resource]
            holders = ledger.holders[kind]
            layout, found = kind.layout(names), missing
            held: Collection[DeviceId] = self._in_use(resource, holders) if kind.is_part else holders.keys()
            if kind.is_part:
                ids = unit_ids(inventory.gpus, resource, layout, held)
                found = missing._replace(units=bool(layout.unlike(inventory.gpus)))
            else:
                ids = as_held(
                    {gpu.uuid: offered_ids(gpu.uuid, names.units(gpu, kind)) for gpu in inventory.gpus}, holders
                )
            of_kind = {gpu: count for gpu, charge in borrowed.items() if (count := charge.count(kind))}
            withheld_ids = withheld(kind, gpus, ids, holders, names, borrowed=of_kind, missing=found)
            of_init = [one for one in held if not init.isdisjoint(holders[one])] if init else ()
            kept = {one for one in of_init if gpu_of(one) in in_order}
            of_others = _by_gpu(sorted(device for device in kept if gpu_of(device) in others))
            ids |= {gpu: of_others.get(gpu, []) for gpu in others}
            made_of = (known, ids, withheld_ids, kept)
            # Allocations change few lists, and one has thousands of rows.
            if made_of != self._shown.get(resource) or table.withdrawn_left_s() is not None:
                table.set_devices(device_rows(known, ids, self.ids, withheld_ids, kept))
                self._shown[resource] = made_of

    def _in_use(self, resource: str, holders: Mapping[DeviceId, Collection[ContainerKey]]) -> list[DeviceId]:
        """Units that containers have under this name."""
        held = ((device, next(map(self.node.cache.get, keys), None)) for device, keys in holders.items())
        return [device for device, allocation in held if allocation is not None and allocation.gpu_resource == resource]

    def _read_again(self, inventory: GpuInventory) -> None:
        """Containers may hold IDs of GPUs that were not there when the kubelet's records were read."""
        for allocation in list(self.node.cache):
            if allocation.started_by:  # its texts name no GPU: garbage collection reads its records again
                continue
            texts = {kind: [self.ids.write(device) for device in ids] for kind, ids in allocation.ids.items()}
            found = replace(allocation, ids={kind: frozenset(self.ids.read(own)) for kind, own in texts.items()})
            if found != allocation:
                gpus = gpus_of(found.bound_ids, inventory)
                self.node.cache.put(replace(found, gpus=gpus or allocation.gpus))

    async def run(self) -> NoReturn:
        """Refreshes the tables when something has changed, until cancelled."""
        while True:
            left = [left_s for table in self.tables.values() if (left_s := table.withdrawn_left_s()) is not None]
            await wait_for(self._is_behind, min(left, default=None))
            self.refresh()
            await asyncio.sleep(PAUSE_S)
