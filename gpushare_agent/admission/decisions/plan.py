"""Plans a container's devices when the kubelet asks for a preference, and checks what it then allocates. Pure.

The first GetPreferredAllocation of a container places the whole container, cores and memory; the calls that follow carry
the plan out. A device ID says which GPU it is on: for vcore it binds the GPU. For vmemory the IDs are counters, and the
memory is charged to the GPU that the container's vcore IDs name.

Planning never fails a GetPreferredAllocation: a refusal is kept and becomes the error of the Allocate that follows, where
the kubelet shows it to the user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpushare_agent.admission.decisions import units
from gpushare_agent.admission.decisions.identity import Target
from gpushare_agent.admission.decisions.ledger import (
    Ledger,
    Offer,
    Policy,
    free_ids,
    gpu_accounts,
    must_gpus,
)
from gpushare_agent.admission.decisions.reuse import effective_request
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import CORES_PER_GPU, DeviceId, GpuUuid, split_device_id
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.placement import GpuAccount, GpuRequest, Placed, memory_share, place, validate_request
from gpushare_agent.placement.request import describe_blocks

_ABOUT_CAPACITY = frozenset(
    {
        RefusalReason.NO_HEALTHY_GPU,
        RefusalReason.NOT_ENOUGH_CORES,
        RefusalReason.NOT_ENOUGH_MEMORY,
        RefusalReason.FRAGMENTED,
    }
)
_GPUS_NAMED = 3
_REASON_CHARS = 160
"""Of a driver's text: the kubelet shows the text in the pod's status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where the container goes, and the IDs to prefer for the resource that was asked about."""

    gpus: tuple[GpuUuid, ...]
    ids: tuple[DeviceId, ...]
    placed: Placed


def plan(
    target: Target,
    offer: Offer,
    *,
    free: Sequence[DeviceId],
    ledger: Ledger,
    policy: Policy,
    hint: tuple[int, ...],
    gpus: Sequence[GpuAccount],
) -> Plan | Refused:
    """Place the container on one of `gpus` (`offer_accounts`) and choose the IDs of the offered resource from `free`
    (`free_ids`)."""
    if (refused := _unusable_request(target, policy.names)) is not None:
        return refused
    if offer.kind is ResourceKind.GPU:
        return _plan_units(target, offer, free=free, ledger=ledger, policy=policy, gpus=gpus)
    if policy.names.wanted(target.container, ResourceKind.GPU_MEM):
        return _plan_memory(target, offer, free=free, ledger=ledger, policy=policy, hint=hint, gpus=gpus)
    if (refused := _invalid_share(target, policy)) is not None:
        return refused
    effective = effective_request(target.pod, target.container, policy.names)
    if isinstance(effective, Refused):
        return effective
    request = GpuRequest(
        cores=effective.cores, blocks=effective.blocks, hint=hint, must_gpus=must_gpus(target, offer, ledger)
    )
    placed = place(
        request,
        gpus,
        ledger.inventory.topology,
        share_policy=policy.share_policy,
        share_mode=policy.share_mode,
        memory_block_mib=policy.names.memory_block_mib,
    )
    if isinstance(placed, Refused):
        return _named(target, _with_absent_gpus(placed, gpus, ledger, policy), policy.names)
    return _prefer(target, offer, free, placed)


def check(
    target: Target, kind: ResourceKind, ids: Sequence[str], ledger: Ledger, policy: Policy, planned: tuple[GpuUuid, ...]
) -> tuple[GpuUuid, ...] | Refused:
    """The GPUs to which the allocated IDs bind the container, or why they cannot be accepted.

    `planned` are the GPUs of the plan, needed where vmemory comes first and its IDs say nothing of the GPU.
    """
    refused = _check_ids(target, kind, ids, ledger, policy) or _unusable_request(target, policy.names)
    if refused is not None:
        return refused
    if kind is ResourceKind.GPU:
        named = units.check_units(target, ids, ledger, policy)
        return _named(target, named, policy.names) if isinstance(named, Refused) else named
    if policy.names.wanted(target.container, ResourceKind.GPU_MEM):
        return _check_memory(target, _named_gpus(ids, ledger.inventory), ids, ledger, policy)
    own = ledger.allocations.get(target.key)
    if kind is ResourceKind.VCORE:
        gpus = _named_gpus(ids, ledger.inventory)
    elif own is not None and own.vcore_ids:
        gpus = own.gpus
    else:
        gpus = planned
    return _check_gpus(target, gpus, ledger, policy, has_ids=kind is ResourceKind.VCORE, ids=ids) or gpus


def _unusable_request(target: Target, names: ResourceNames) -> Refused | None:
    problem = units.unusable_request(target.container, names)
    return Refused(reason=RefusalReason.INVALID_REQUEST, detail=f"{_who(target)}: {problem}.") if problem else None


def _invalid_share(target: Target, policy: Policy) -> Refused | None:
    names = policy.names
    cores, blocks = (names.wanted(target.container, kind) for kind in (ResourceKind.VCORE, ResourceKind.VMEMORY))
    refused = validate_request(cores, blocks, share_mode=policy.share_mode, memory_block_mib=names.memory_block_mib)
    return _named(target, refused, names) if refused is not None else None


def _with_absent_gpus(refused: Refused, gpus: Sequence[GpuAccount], ledger: Ledger, policy: Policy) -> Refused:
    """Adds which GPUs were not counted, and why."""
    if refused.reason not in _ABOUT_CAPACITY:
        return refused
    reported = ""
    full = sum(gpu.is_full for gpu in gpus)
    if full:
        reported += (
            f" {full} GPUs count as full, for they have {policy.max_shares_of_gpu} sharing containers, the most "
            "that one serves (setting mps.max_clients)."
        )
    unhealthy = [gpu for gpu in ledger.inventory.gpus if not gpu.is_healthy]
    if unhealthy:
        named = "; ".join(
            f"GPU {gpu.label}: {gpu.unhealthy_reason[:_REASON_CHARS].rstrip('.') or 'no reason given'}"
            for gpu in sorted(unhealthy, key=lambda gpu: gpu.index)[:_GPUS_NAMED]
        )
        more = f"; and {len(unhealthy) - _GPUS_NAMED} more" if len(unhealthy) > _GPUS_NAMED else ""
        reported += f" Out of service, and not counted: {named}{more}."
    return replace(refused, detail=refused.detail + reported) if reported else refused


def _plan_units(
    target: Target,
    offer: Offer,
    *,
    free: Sequence[DeviceId],
    ledger: Ledger,
    policy: Policy,
    gpus: Sequence[GpuAccount],
) -> Plan | Refused:
    found = units.plan_units(target, offer, free, ledger, policy, gpus)
    if isinstance(found, Refused):
        return _named(target, _with_absent_gpus(found, gpus, ledger, policy), policy.names)
    placed, ids = found
    return Plan(gpus=placed.gpus, ids=ids, placed=placed)


def _plan_memory(
    target: Target,
    offer: Offer,
    *,
    free: Sequence[DeviceId],
    ledger: Ledger,
    policy: Policy,
    hint: tuple[int, ...],
    gpus: Sequence[GpuAccount],
) -> Plan | Refused:
    names = policy.names
    refused = memory_share.validate(target.container, names, gpus, share_mode=policy.share_mode)
    if refused is not None:
        return _named(target, refused, names)
    placed = memory_share.place_memory(
        memory_share.effective_request(target.pod, target.container, names),
        gpus,
        names,
        share_policy=policy.share_policy,
        hint=hint,
        must_gpus=must_gpus(target, offer, ledger, ResourceKind.GPU_MEM),
    )
    if isinstance(placed, Refused):
        return _named(target, _with_absent_gpus(placed, gpus, ledger, policy), names)
    gpu, why = placed
    return _prefer(target, offer, free, Placed(gpus=(gpu,), policy="memory", explanation=why))


def _check_memory(
    target: Target, gpus: tuple[GpuUuid, ...], ids: Sequence[str], ledger: Ledger, policy: Policy
) -> tuple[GpuUuid, ...] | Refused:
    names = policy.names
    accounts = gpu_accounts(target, ledger, policy)
    refused = memory_share.validate(target.container, names, accounts, share_mode=policy.share_mode)
    if refused is not None:
        return _named(target, refused, names)
    if len(gpus) != 1:
        return Refused(
            reason=RefusalReason.WRONG_GPUS,
            detail=f"{_who(target)} asks for memory of one GPU, but the allocated IDs are on {len(gpus)}: {_spread(ids)}. "
            "The kubelet did not follow the preferred allocation (a reused init container's devices or the topology "
            "manager can cause this). Give init containers the same amount as the main container, or none.",
        )
    account = next(account for account in accounts if account.uuid == gpus[0])
    if not account.is_healthy:
        return _unhealthy(target, account)
    if account.free_units < len(ids):
        return Refused(
            reason=RefusalReason.NOT_ENOUGH_MEMORY,
            detail=f"{_who(target)} asks for {memory_share.describe(len(ids), names)}; GPU {account.label} has "
            f"{memory_share.describe(account.free_units, names)} free. Ask for less, or wait until a pod on this node ends.",
        )
    return gpus


def _prefer(target: Target, offer: Offer, free: Sequence[DeviceId], placed: Placed) -> Plan | Refused:
    ids = _choose(offer, free, placed.gpus)
    if len(ids) >= offer.size:
        return Plan(gpus=placed.gpus, ids=ids, placed=placed)
    name = f"{target.pod.namespace}/{target.pod.name} container {target.container.name}"
    return Refused(
        reason=RefusalReason.DEVICE_IN_USE,
        detail=f"{name} asks for {offer.size} {offer.kind} units, but only {len(ids)} of the {len(offer.available)} IDs "
        "that the kubelet offers are free: containers that still run have the others. Create the pod again once "
        "they have ended; if it persists, restart the kubelet of this node.",
    )


def _choose(offer: Offer, free: Sequence[DeviceId], gpus: tuple[GpuUuid, ...]) -> tuple[DeviceId, ...]:
    """The IDs to prefer: those to include first, then the lowest free ones of the GPUs; for vmemory any will do."""
    chosen = dict.fromkeys(DeviceId(device) for device in offer.must_include)
    for gpu in gpus:
        prefix = f"{gpu}::"
        _fill(chosen, offer.size, [device for device in free if device.startswith(prefix)])
    if offer.kind is ResourceKind.VMEMORY and len(chosen) < offer.size:
        _fill(chosen, offer.size, free)
    return tuple(chosen)


def _fill(chosen: dict[DeviceId, None], size: int, ids: Sequence[DeviceId]) -> None:
    if len(chosen) >= size:
        return
    for device in sorted(sorted(ids), key=len):  # by number: the IDs of one GPU differ in nothing else
        if len(chosen) >= size:
            return
        chosen[device] = None


def _check_ids(
    target: Target, kind: ResourceKind, ids: Sequence[str], ledger: Ledger, policy: Policy
) -> Refused | None:
    wanted, resource = policy.names.wanted(target.container, kind), policy.names.name_in(target.container, kind)
    if len(set(ids)) != len(ids) or len(ids) != wanted:
        return Refused(
            reason=RefusalReason.INVALID_REQUEST,
            detail=f"{_who(target)} asks for {wanted} {resource}, but {len(ids)} device IDs were "
            f"allocated ({len(set(ids))} distinct). Delete the pod and create it again.",
        )
    unknown = _unknown_id(target, kind, ids, ledger, policy.names)
    if unknown is not None:
        return Refused(
            reason=RefusalReason.UNKNOWN_DEVICE,
            detail=f"{_who(target)}: device ID {unknown[:80]!r} of {resource} names no GPU of this "
            "node. The GPUs may have changed since they were reported to the kubelet; they are reported again now. "
            "Create the pod again.",
        )
    free = free_ids(target, kind, ids, ledger)
    if len(free) < len(ids):
        taken = sorted(set(ids) - set(free))
        return Refused(
            reason=RefusalReason.DEVICE_IN_USE,
            detail=f"{_who(target)}: the kubelet allocated {len(taken)} device ID(s) that another container still "
            f"has (first: {taken[0]}). Nothing was allocated twice. Create the pod again.",
        )
    return None


def _unknown_id(
    target: Target, kind: ResourceKind, ids: Sequence[str], ledger: Ledger, names: ResourceNames
) -> str | None:
    if kind is ResourceKind.GPU:
        return units.unknown_unit(target, ids, ledger, names)
    counts = {gpu.uuid: names.units(gpu, kind) for gpu in ledger.inventory.gpus}
    for device in ids:
        split = split_device_id(device)
        if split is None or split[1] >= counts.get(split[0], 0):
            return device
    return None


def _check_gpus(
    target: Target,
    gpus: tuple[GpuUuid, ...],
    ledger: Ledger,
    policy: Policy,
    *,
    has_ids: bool,
    ids: Sequence[str],
) -> Refused | None:
    cores = policy.names.wanted(target.container, ResourceKind.VCORE)
    blocks = policy.names.wanted(target.container, ResourceKind.VMEMORY)
    if (refused := _invalid_share(target, policy)) is not None:
        return refused
    wanted_gpus = 1 if cores < CORES_PER_GPU else cores // CORES_PER_GPU
    if has_ids and len(gpus) != wanted_gpus:
        return Refused(
            reason=RefusalReason.WRONG_GPUS,
            detail=f"{_who(target)} asks for {cores} cores, which must come from {wanted_gpus} GPU(s), but the "
            f"allocated IDs are on {len(gpus)}: {_spread(ids)}. The kubelet did not follow the preferred allocation "
            "(a reused init container's devices or the topology manager can cause this). Give init containers the same "
            "number of cores as the main container, or none.",
        )
    accounts = {account.uuid: account for account in gpu_accounts(target, ledger, policy, only=gpus)}
    if not gpus or not all(gpu in accounts for gpu in gpus):
        return Refused(
            reason=RefusalReason.NOT_READY,
            detail=f"{_who(target)}: the GPUs changed during its admission. Create the pod again.",
        )
    if cores >= CORES_PER_GPU:
        return _check_whole(target, [accounts[gpu] for gpu in gpus], blocks)
    return _check_share(target, accounts[gpus[0]], cores, blocks, policy)


def _check_share(target: Target, account: GpuAccount, cores: int, blocks: int, policy: Policy) -> Refused | None:
    if not account.is_healthy:
        return _unhealthy(target, account)
    if account.free_cores < cores or account.free_blocks < blocks:
        block = policy.names.memory_block_mib
        return Refused(
            reason=RefusalReason.NOT_ENOUGH_MEMORY if account.free_cores >= cores else RefusalReason.NOT_ENOUGH_CORES,
            detail=f"{_who(target)} asks for {cores} cores and {describe_blocks(blocks, block)}; GPU "
            f"{account.label} has {account.free_cores} cores and {describe_blocks(account.free_blocks, block)} "
            f"free. Ask for less, or wait until a pod on this node ends.",
        )
    return None


def _check_whole(target: Target, accounts: list[GpuAccount], blocks: int) -> Refused | None:
    for account in accounts:
        if not account.is_healthy:
            return _unhealthy(target, account)
        if not account.is_free:
            use = "a MIG instance" if account.is_instance else "in use"
            return Refused(
                reason=RefusalReason.NOT_ENOUGH_CORES,
                detail=f"{_who(target)} asks for whole GPUs, but GPU {account.label} is {use}: {account.free_cores} of "
                f"{CORES_PER_GPU} cores and {account.free_blocks} of {account.total_blocks} memory blocks are free. "
                "Wait until its shares end, or use a node with a free GPU.",
            )
    total = sum(account.total_blocks for account in accounts)
    if blocks > total:
        return Refused(
            reason=RefusalReason.NOT_ENOUGH_MEMORY,
            detail=f"{_who(target)} asks for {blocks} memory blocks, but its {len(accounts)} GPU(s) have {total}. "
            "Whole GPUs come with all their memory: leave the memory request out.",
        )
    return None


def _unhealthy(target: Target, account: GpuAccount) -> Refused:
    return Refused(
        reason=RefusalReason.NO_HEALTHY_GPU,
        detail=f"{_who(target)}: GPU {account.label} ({account.uuid}) became unhealthy during the admission. Create the "
        "pod again: it will be placed elsewhere.",
    )


def _named_gpus(ids: Sequence[str], inventory: GpuInventory) -> tuple[GpuUuid, ...]:
    known = inventory.by_uuid()
    found = {GpuUuid(device.partition("::")[0]) for device in ids}
    return tuple(sorted(found, key=lambda uuid: known[uuid].index))


def _spread(ids: Sequence[str]) -> str:
    counts = Counter(device.partition("::")[0] for device in ids)
    return ", ".join(f"{n} on {uuid}" for uuid, n in sorted(counts.items()))


def _named(target: Target, refused: Refused, names: ResourceNames) -> Refused:
    """Placement knows numbers; the user knows the pod and the resources by name."""
    wanted = {kind: names.wanted(target.container, kind) for kind in names.kinds}
    always = () if wanted.get(ResourceKind.GPU) else (ResourceKind.VCORE, ResourceKind.VMEMORY)
    asked = ", ".join(
        f"{count} {names.name_in(target.container, kind)}" for kind, count in wanted.items() if count or kind in always
    )
    return Refused(reason=refused.reason, detail=f"{_who(target)} (asks for {asked}): {refused.detail}")


def _who(target: Target) -> str:
    return f"pod {target.pod.namespace}/{target.pod.name}, container {target.container.name}"
