"""Which device IDs the kubelet is told not to give away though their GPU is well: what the GPU's memory account cannot pay
for any more, and shares while the daemon that they need is down. Pure.

An ID that somebody holds is not withheld for the account's sake: the container runs on.
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
        unheld = [device for device in own if device not in holders[kind]]
        if kind is ResourceKind.GPU_MEM:
            found.update(unheld[gpu.free_units :])
        else:
            found.update(unheld[max(0, len(unheld) - gpu.blocks_of_units) :])
    return frozenset(found)
