"""Which device IDs are reported Unhealthy though their GPU is healthy: those that exceed the GPU's free memory, and shares
while the daemon that they need is down. Pure.

An allocated ID is not withheld for want of memory: its container keeps running.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpushare_agent.admission.decisions.memory_share import MemoryUse, blocks_taken, free_gpu_mem
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import DeviceId, device_id
from gpushare_agent.model.resources import ResourceKind, ResourceNames

Holders = Mapping[ResourceKind, Mapping[DeviceId, frozenset[ContainerKey]]]


def withheld(
    kind: ResourceKind,
    inventory: GpuInventory,
    holders: Holders,
    use: MemoryUse,
    names: ResourceNames,
    *,
    no_shares: bool,
) -> frozenset[DeviceId]:
    """IDs of one resource. Whole GPUs need no memory IDs: with `no_shares` all of those are withheld, and no cores."""
    if kind is ResourceKind.VCORE or (kind is ResourceKind.VMEMORY and not names.gpu_mem and not no_shares):
        return frozenset()
    found: set[DeviceId] = set()
    for gpu in inventory.gpus:
        own = [device_id(gpu.uuid, number) for number in range(names.units(gpu, kind))]
        if no_shares:
            found.update(own)
            continue
        unallocated = [device for device in own if device not in holders[kind]]
        if kind is ResourceKind.GPU_MEM:
            found.update(unallocated[free_gpu_mem(gpu, use, names) :])
        else:
            taken = blocks_taken(use.gpu_mem.get(gpu.uuid, 0), names)
            found.update(unallocated[max(0, len(unallocated) - taken) :])
    return frozenset(found)
