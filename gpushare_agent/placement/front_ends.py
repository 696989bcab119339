"""Which GPUs belong to the device plugins and which to claims. Pure.

The setting says which front end a GPU is to have. One that the other still uses is offered by neither until it is free: each
front end's scheduler knows its own allocations alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.gpus import Gpu, GpuInventory, Health
from gpushare_agent.model.names import GpuUuid


class FrontEnds(Struct, frozen=True, kw_only=True):
    """By UUID: the GPUs that claims can have now, and those that no device plugin offers, with the reason."""

    claimable: frozenset[GpuUuid] = frozenset()
    not_plugins: tuple[tuple[GpuUuid, str], ...] = ()


def front_ends(
    chosen: Collection[str], gpus: Iterable[Gpu], allocations: Iterable[Allocation], excluded: Collection[str] = ()
) -> FrontEnds:
    """`chosen` is the setting dra.gpus, `excluded` the setting excluded_gpus. MIG instances stay the device plugins'."""
    by_claims: set[GpuUuid] = set()
    by_plugins: set[GpuUuid] = set()
    for allocation in allocations:
        (by_plugins if allocation.claim is None else by_claims).update(allocation.gpus)
    claimable, not_plugins = set(), []
    for gpu in gpus:
        if gpu.is_selected(excluded):
            not_plugins.append((gpu.uuid, "it is excluded (setting excluded_gpus)"))
        elif gpu.mig is None and gpu.is_selected(chosen):
            not_plugins.append((gpu.uuid, "it is offered by ResourceClaims alone (setting dra.gpus)"))
            if gpu.uuid not in by_plugins:
                claimable.add(gpu.uuid)
        elif gpu.uuid in by_claims:
            not_plugins.append((gpu.uuid, "ResourceClaims still use it; the device plugins get it when they end"))
    return FrontEnds(claimable=frozenset(claimable), not_plugins=tuple(not_plugins))


def plugins_inventory(inventory: GpuInventory, found: FrontEnds) -> GpuInventory:
    """As admission sees it: the rows of the topology are indexes, so every GPU stays in its place."""
    reasons = dict(found.not_plugins)
    gpus = tuple(
        replace(gpu, health=Health.UNHEALTHY, unhealthy_reason=reasons[gpu.uuid]) if gpu.uuid in reasons else gpu
        for gpu in inventory.gpus
    )
    return replace(inventory, gpus=gpus)


def plugins_devices(inventory: GpuInventory, found: FrontEnds) -> GpuInventory:
    """As the kubelet sees it: the node's capacity has none of the others."""
    others = {uuid for uuid, _ in found.not_plugins}
    return replace(inventory, gpus=tuple(gpu for gpu in inventory.gpus if gpu.uuid not in others))
