"""Which device IDs are reported Unhealthy though their GPU is healthy: those that exceed the GPU's free memory, those whose
capacity is lent to a share that has grown, and shares while the daemon that they need is down. Pure.

An allocated ID is not withheld for want of memory: its container keeps running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.names import CORES_PER_GPU, DeviceId, GpuUuid, device_id
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.placement import GpuAccount

Holders = Mapping[ResourceKind, Mapping[DeviceId, frozenset[ContainerKey]]]


def withheld(
    kind: ResourceKind,
    gpus: Sequence[GpuAccount],
    holders: Holders,
    names: ResourceNames,
    *,
    no_shares: bool,
    lent: Mapping[GpuUuid, int],
) -> frozenset[DeviceId]:
    """IDs of one resource. `lent` are units of it that are booked beyond a GPU's allocated IDs. Whole GPUs need no memory
    IDs: with `no_shares` all of those are withheld, and no cores.

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
        own = [device_id(gpu.uuid, number) for number in range(_units(kind, gpu))]
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


def _units(kind: ResourceKind, gpu: GpuAccount) -> int:
    match kind:
        case ResourceKind.VCORE:
            return CORES_PER_GPU
        case ResourceKind.VMEMORY:
            return gpu.total_blocks
        case ResourceKind.GPU_MEM:
            return gpu.total_units
