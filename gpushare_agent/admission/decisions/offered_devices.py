"""Which device IDs are reported Unhealthy though their GPU is healthy: those that exceed the GPU's free memory, and shares
while the daemon that they need is down. Pure.

An allocated ID is not withheld for want of memory: its container keeps running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.names import DeviceId, device_id
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
) -> frozenset[DeviceId]:
    """IDs of one resource. Whole GPUs need no memory IDs: with `no_shares` all of those are withheld, and no cores."""
    if kind is ResourceKind.VCORE or (kind is ResourceKind.VMEMORY and not names.gpu_mem and not no_shares):
        return frozenset()
    found: set[DeviceId] = set()
    for gpu in gpus:
        count = gpu.total_units if kind is ResourceKind.GPU_MEM else gpu.total_blocks
        own = [device_id(gpu.uuid, number) for number in range(count)]
        if no_shares:
            found.update(own)
            continue
        unallocated = [device for device in own if device not in holders[kind]]
        if kind is ResourceKind.GPU_MEM:
            found.update(unallocated[gpu.free_units :])
        else:
            found.update(unallocated[max(0, len(unallocated) - gpu.blocks_of_units) :])
    return frozenset(found)
