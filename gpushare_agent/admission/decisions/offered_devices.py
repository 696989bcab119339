"""Which device IDs a GPU has, and which of them are reported Unhealthy though their GPU is healthy: those that exceed the
GPU's free memory, those whose capacity is lent to a share that has grown, and shares while the daemon that they need is
down. Pure.

An allocated ID is not withheld for want of memory: its container keeps running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.names import DeviceId, GpuUuid, device_id, has_kubelet_text, split_device_id
from gpushare_agent.model.resources import ResourceKind, ResourceNames
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
    if not lent and (
        kind is ResourceKind.VCORE or (kind is ResourceKind.VMEMORY and not names.gpu_mem and not no_shares)
    ):
        return frozenset()
    found: set[DeviceId] = set()
    unbacked = 0
    left: list[DeviceId] = []
    for gpu in gpus:
        own = ids[gpu.uuid]
        if no_shares and kind is not ResourceKind.VCORE:
            found.update(own)
            continue
        unallocated = [device for device in own if device not in holders[kind]]
        if kind is ResourceKind.GPU_MEM:
            found.update(unallocated[gpu.free_units :])
            continue
        blocks_of_units = gpu.blocks_of_units if kind is ResourceKind.VMEMORY else 0
        count = lent.get(gpu.uuid, 0) + blocks_of_units
        unbacked += max(0, count - len(unallocated))
        found.update(unallocated[max(0, len(unallocated) - count) :])
        left += unallocated[: max(0, len(unallocated) - count)]
    if kind is ResourceKind.VMEMORY and lent:
        found.update(left[max(0, len(left) - unbacked) :])
    return frozenset(found)
