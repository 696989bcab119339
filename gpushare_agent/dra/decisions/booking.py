"""Claims in the ledger: the allocations that they are booked as, and whether the GPUs have room for one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Protocol

from gpushare_agent.dra.decisions.edits import PreparedClaim, PreparedResult
from gpushare_agent.model.allocations import Allocation, ClaimShare, ContainerKey
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import CORES_PER_GPU, DeviceId, GpuUuid, device_id
from gpushare_agent.model.pods import ContainerKind
from gpushare_agent.model.resources import ResourceKind, ResourceNames

FIRST_UNIT = 100_000
"""Claims' units of a GPU are numbered from here, so that they never equal the device plugins'."""


class Ledger(Protocol):
    def holders(self, kind: ResourceKind) -> Mapping[DeviceId, object]: ...
    def used_cores(self) -> Mapping[GpuUuid, int]: ...
    def used_blocks(self) -> Mapping[GpuUuid, int]: ...
    def __iter__(self) -> Iterator[Allocation]: ...


def allocations_of(claim: PreparedClaim, ledger: Ledger, names: ResourceNames, at: float) -> list[Allocation]:
    """One for each result, but none for admin access: the scheduler counts nothing of it, and gives the GPU to others."""
    made = []
    taken: set[DeviceId] = set()
    for one in claim.charged:
        blocks = 0 if one.is_whole else one.memory_mib // names.memory_block_mib
        cores_ids = _free(one, one.cores, ledger.holders(ResourceKind.VCORE), taken)
        block_ids = _free(one, blocks, ledger.holders(ResourceKind.VMEMORY), taken)
        taken |= cores_ids | block_ids
        made.append(
            Allocation(
                key=one.key,
                namespace=claim.ref.namespace,
                pod_name=claim.pod,
                kind=ContainerKind.MAIN,
                gpus=(GpuUuid(one.gpu),),
                vcore_ids=cores_ids,
                vmemory_ids=block_ids,
                is_whole=one.is_whole,
                allocated_at=at,
                claim=ClaimShare(
                    ref=claim.ref,
                    shown_as=claim.shown_as,
                    request=one.request.partition("/")[0],
                    isolation=claim.isolation,
                    core_limit=one.core_limit,
                    view=one.view,
                ),
            )
        )
    return made


def _free(
    one: PreparedResult, count: int, held: Collection[DeviceId], taken: Collection[DeviceId]
) -> frozenset[DeviceId]:
    units = (device_id(GpuUuid(one.gpu), number) for number in range(FIRST_UNIT, 10 * FIRST_UNIT))
    return frozenset(islice((unit for unit in units if unit not in held and unit not in taken), count))


def shortage(claim: PreparedClaim, ledger: Ledger, gpus: Mapping[GpuUuid, Gpu], names: ResourceNames) -> str:
    """Why the claim has no room, empty where it has: the scheduler counts a share as free when its pod is deleted by force,
    before its containers have ended."""
    cores, blocks = dict(ledger.used_cores()), dict(ledger.used_blocks())
    on_gpu: dict[GpuUuid, list[Allocation]] = {}
    for allocation in ledger:
        for uuid in allocation.gpus:
            on_gpu.setdefault(uuid, []).append(allocation)
    for one in claim.charged:
        uuid = GpuUuid(one.gpu)
        gpu, wanted = gpus[uuid], one.memory_mib // names.memory_block_mib
        capacity = names.units(gpu, ResourceKind.VMEMORY)
        others = on_gpu.get(uuid, [])
        is_taken = any(other.is_whole for other in others) or (one.is_whole and bool(others))
        has_room = cores.get(uuid, 0) + one.cores <= CORES_PER_GPU and blocks.get(uuid, 0) + wanted <= capacity
        if is_taken or not has_room:
            users = ", ".join(sorted({_user(other.key, other) for other in others})[:5])
            return (
                f"GPU {gpu.index} still has {cores.get(uuid, 0)} cores and {blocks.get(uuid, 0)} memory blocks in use, by"
                f" {users}: the claim needs {one.cores} and {wanted} of {CORES_PER_GPU} and {capacity}. It gets them when"
                " their containers have ended"
            )
        cores[uuid] = cores.get(uuid, 0) + one.cores
        blocks[uuid] = blocks.get(uuid, 0) + wanted
    return ""


def _user(key: ContainerKey, allocation: Allocation) -> str:
    if allocation.claim is not None:
        return f"claim {allocation.claim.ref.namespace}/{allocation.claim.ref.name}"
    return f"pod {allocation.namespace}/{allocation.pod_name}"
