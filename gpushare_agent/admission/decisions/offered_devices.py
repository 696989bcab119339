"""Which device IDs a GPU has, and which of them are reported Unhealthy though their GPU is healthy: those that exceed the
GPU's free memory, those whose capacity is lent to a share that has grown, and shares while the daemon that they need is
down. Pure.

An allocated ID is not withheld for want of memory: its container keeps running.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import (
    DeviceId,
    GpuUuid,
    device_id,
    gpu_of,
    has_kubelet_text,
    split_device_id,
)
from gpushare_agent.model.resources import Measure, ResourceKind, ResourceNames
from gpushare_agent.model.units import UnitLayout, terms_of
from gpushare_agent.placement import GpuAccount

Holders = Mapping[ResourceKind, Mapping[DeviceId, frozenset[ContainerKey]]]


def offered_ids(
    units: Mapping[GpuUuid, int], holders: Mapping[DeviceId, frozenset[ContainerKey]]
) -> dict[GpuUuid, list[DeviceId]]:
    """The IDs of one resource by GPU: as many as it has units, by number.

    A number that a container holds under an earlier text is offered under that text alone, until the container ends. Where
    containers hold it under both, a free one is left out for it.
    """
    found = {gpu: [device_id(gpu, number) for number in range(count)] for gpu, count in units.items()}
    if not has_kubelet_text(holders):
        return found
    earlier: dict[GpuUuid, dict[int, list[DeviceId]]] = {}
    for device in holders:
        if has_kubelet_text((device,)) and (split := split_device_id(device)) is not None and split[0] in units:
            earlier.setdefault(split[0], {}).setdefault(split[1], []).append(device)
    for gpu, by_number in earlier.items():
        held = [device for devices in by_number.values() for device in devices]
        held += [device for device in found[gpu] if device in holders]
        free = [device for number, device in enumerate(found[gpu]) if number not in by_number and device not in holders]
        found[gpu] = sorted([*held, *free[: max(0, units[gpu] - len(held))]], key=_by_number)
    return found


def unit_ids(
    gpus: Sequence[Gpu], resource: str, layout: UnitLayout, in_use: Collection[DeviceId]
) -> dict[GpuUuid, list[DeviceId]]:
    """The units under one of NVIDIA's names: of every GPU those that it serves, by number, and those that containers hold on
    other terms or under NVIDIA's own texts, until they end. `in_use` are this resource's that containers have."""
    by_gpu: dict[GpuUuid, list[DeviceId]] = {}
    for device in in_use:
        by_gpu.setdefault(gpu_of(device), []).append(device)
    found: dict[GpuUuid, list[DeviceId]] = {}
    for gpu in gpus:
        served = layout.served(gpu)
        own = served.ids(gpu.uuid) if served is not None and served.resource == resource else []
        if of_gpu := by_gpu.get(gpu.uuid, []):
            under_another_text = {device.partition("~")[0] for device in of_gpu if has_kubelet_text((device,))}
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
    """Of the units under one of NVIDIA's names those that the GPU's other users leave no room for. `no_replicas`: what
    limits them cannot be had. `no_units`: none is given."""
    found: set[DeviceId] = set()
    for gpu in gpus:
        free = [device for device in ids[gpu.uuid] if device not in holders]
        if free:
            terms = terms_of(free[0])
            room = 0 if no_units or (no_replicas and not terms.is_whole) else gpu.free_units_of(terms.of)
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
    lent: Mapping[GpuUuid, int],
) -> frozenset[DeviceId]:
    """Of the `ids` of one resource. `lent` are units of it that are booked beyond a GPU's allocated IDs. Whole GPUs need no
    memory IDs: with `no_shares` all of those are withheld, and no cores.

    vmemory IDs are counters, so where a GPU has too few free ones of its own name, free ones of other names stand for them.
    """
    has_units = any(gpu.used_part is not None for gpu in gpus)
    if (
        not lent
        and not has_units
        and (kind.measure is Measure.CORES or (kind.measure is Measure.BLOCKS and not names.gpu_mem and not no_shares))
    ):
        return frozenset()
    found: set[DeviceId] = set()
    unbacked = 0
    left: list[DeviceId] = []
    for gpu in gpus:
        own = ids[gpu.uuid]
        if no_shares and kind.measure is not Measure.CORES:
            found.update(own)
            continue
        unallocated = [device for device in own if device not in holders[kind]]
        if kind.measure is Measure.UNITS:
            found.update(unallocated[gpu.free_units :])
            continue
        of_memory = gpu.blocks_of_units + gpu.blocks_of_part
        others = of_memory if kind.measure is Measure.BLOCKS else gpu.cores_of_part
        count = lent.get(gpu.uuid, 0) + others
        unbacked += max(0, count - len(unallocated))
        found.update(unallocated[max(0, len(unallocated) - count) :])
        left += unallocated[: max(0, len(unallocated) - count)]
    if kind.measure is Measure.BLOCKS and (lent or has_units):
        found.update(left[max(0, len(left) - unbacked) :])
    return frozenset(found)
