"""Claims in the ledger: the allocations that they are booked as, and whether the GPUs have room for one. Pure."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from msgspec.structs import replace

from gpushare_agent.admission.decisions.ledger import Ledger, Policy, gpu_accounts
from gpushare_agent.dra.decisions.edits import PreparedClaim, PreparedResult
from gpushare_agent.model.allocations import Allocation, ClaimShare
from gpushare_agent.model.names import DeviceId, GpuUuid, device_id
from gpushare_agent.model.pods import ContainerKind
from gpushare_agent.model.requests import WHOLE_GPU, Request
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.placement.lack import describe_request

FIRST_UNIT = 100_000
"""Claims' units of a GPU are numbered from here, so that they never equal the device plugins'."""


def allocations_of(claim: PreparedClaim, ledger: Ledger, names: ResourceNames, at: float) -> list[Allocation]:
    """One for each result, but none for admin access: the scheduler counts nothing of it, and gives the GPU to others."""
    made = []
    taken: set[DeviceId] = set()
    for one in claim.charged:
        blocks = 0 if one.is_whole else one.memory_mib // names.memory_block_mib
        cores_ids = _free(one, one.cores, ledger.holders[ResourceKind.VCORE], taken)
        block_ids = _free(one, blocks, ledger.holders[ResourceKind.VMEMORY], taken)
        taken |= cores_ids | block_ids
        made.append(
            Allocation(
                key=one.key,
                namespace=claim.ref.namespace,
                pod_name=claim.pod,
                kind=ContainerKind.MAIN,
                gpus=(GpuUuid(one.gpu),),
                ids={ResourceKind.VCORE: cores_ids, ResourceKind.VMEMORY: block_ids},
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


def shortage(claim: PreparedClaim, ledger: Ledger, names: ResourceNames) -> str:
    """Why the claim has no room, empty where it has: the scheduler counts a share as free when its pod is deleted by force,
    before its containers have ended."""
    accounts = {account.uuid: account for account in gpu_accounts(None, ledger, Policy(names=names))}
    for one in claim.charged:
        # On a GPU that is not healthy too: its device has a taint, which the pod then tolerates.
        account = replace(accounts[GpuUuid(one.gpu)], is_healthy=True)
        request = WHOLE_GPU
        if not one.is_whole:
            request = Request(cores=one.cores, blocks=one.memory_mib // names.memory_block_mib, is_share=True)
        if (lack := account.lack(request)) is not None:
            others = [other for other in ledger.allocations.values() if account.uuid in other.gpus]
            users = ", ".join(sorted({_user(other) for other in others})[:5])
            return (
                f"GPU {account.label} cannot serve {describe_request(request, names)}: {lack.of_gpu_in_detail()}. It is"
                f" still used by {users}; the claim gets its part when their containers have ended"
            )
        accounts[account.uuid] = account.allocate(request)
    return ""


def _user(allocation: Allocation) -> str:
    if allocation.claim is not None:
        return f"claim {allocation.claim.ref.namespace}/{allocation.claim.ref.name}"
    return f"pod {allocation.namespace}/{allocation.pod_name}"
