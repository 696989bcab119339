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

from msgspec import Struct
from msgspec.structs import replace

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
from gpushare_agent.model.allocations import ContainerEdits
from gpushare_agent.model.decision_records import Asked, Candidate
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import DeviceId, GpuUuid, split_device_id
from gpushare_agent.model.requests import WHOLE_GPU, Request, request_of
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.placement import GpuAccount, Placed, place, validate_request
from gpushare_agent.placement.gpu_account import capacity_of
from gpushare_agent.placement.lack import Cause, Lack, describe_request

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


class Decision(Struct, frozen=True, kw_only=True):
    """What a container gets by one GetPreferredAllocation, and why; pending until the Allocate that carries it out.

    `refused` stands in the place of where the container goes (`placed`), the `size` `ids` of `resource` to prefer, and its
    `edits`. `target` is None where the container could not be identified. `asked` and `candidates`, every GPU with its
    verdict, are what it was made from. `at` is seconds on the monotonic clock.
    """

    target: Target | None = None
    resource: str = ""
    size: int = 0
    placed: Placed | None = None
    ids: tuple[DeviceId, ...] = ()
    edits: ContainerEdits = ContainerEdits()
    refused: Refused | None = None
    asked: Asked | None = None
    candidates: tuple[Candidate, ...] = ()
    taken_ids: int = 0
    """Offered, though other containers have them."""
    at: float = 0.0

    @property
    def gpus(self) -> tuple[GpuUuid, ...]:
        return self.placed.gpus if self.placed is not None else ()

    @property
    def policy(self) -> str:
        """Empty for a refusal, as `why`: its own text says it."""
        return self.placed.policy if self.placed is not None else ""

    @property
    def why(self) -> str:
        return self.placed.explanation if self.placed is not None else ""


def plan(
    target: Target,
    offer: Offer,
    *,
    free: Sequence[DeviceId],
    ledger: Ledger,
    policy: Policy,
    hint: tuple[int, ...],
    gpus: Sequence[GpuAccount],
) -> Decision | Refused:
    """Place the container on one of `gpus` (`offer_accounts`) and choose the IDs of the offered resource from `free`
    (`free_ids`)."""
    if (refused := _invalid(target, policy)) is not None:
        return refused
    if offer.kind.is_part:
        found = units.plan_units(target, offer, free, ledger, policy, gpus)
        if isinstance(found, Refused):
            return _named(target, _with_unhealthy_gpus(found, ledger), policy.names)
        placed, ids = found
        return Decision(placed=placed, ids=ids)
    request = plan_request(target, offer, ledger, policy.names, hint)
    if isinstance(request, Refused):
        return request
    outcome = place(request, gpus, ledger.inventory.topology, share_policy=policy.share_policy, names=policy.names)
    if isinstance(outcome, Refused):
        return _named(target, _with_unhealthy_gpus(outcome, ledger), policy.names)
    return _prefer(target, offer, free, outcome)


def plan_request(
    target: Target, offer: Offer, ledger: Ledger, names: ResourceNames, hint: tuple[int, ...]
) -> Request | Refused:
    """What must be free where the container is placed, and which GPUs it cannot avoid."""
    effective = effective_request(target.pod, target.container, names)
    if isinstance(effective, Refused):
        return effective
    return effective._replace(hint=hint, must_gpus=must_gpus(target, offer, ledger, names))


def check(
    target: Target, kind: ResourceKind, ids: Sequence[str], ledger: Ledger, policy: Policy, planned: tuple[GpuUuid, ...]
) -> tuple[GpuUuid, ...] | Refused:
    """The GPUs to which the allocated IDs bind the container, or why they cannot be accepted.

    `planned` are the GPUs of the plan, needed where vmemory comes first and its IDs say nothing of the GPU.
    """
    refused = _check_ids(target, kind, ids, ledger, policy) or _invalid(target, policy)
    if refused is not None:
        return refused
    if kind.is_part:
        named = units.check_units(target, kind, ids, ledger, policy)
        return _named(target, named, policy.names) if isinstance(named, Refused) else named
    own = ledger.allocations.get(target.key)
    if kind.binds_gpu:
        gpus = _named_gpus(ids, ledger.inventory)
    elif own is not None and own.bound_ids:
        gpus = own.gpus
    else:
        gpus = planned
    return _check_gpus(target, gpus, ledger, policy, has_ids=kind.binds_gpu, ids=ids) or gpus


def _invalid(target: Target, policy: Policy) -> Refused | None:
    """What is wrong with the container's limits whatever is free."""
    names = policy.names
    if problem := units.unusable_request(target.container, names):
        return Refused(reason=RefusalReason.INVALID_REQUEST, detail=f"{_who(target)}: {problem}.")
    if names.part_kind(target.container) is not None:
        return None
    refused = validate_request(request_of(target.container, names), names, share_mode=policy.share_mode)
    return _named(target, refused, names) if refused is not None else None


def _with_unhealthy_gpus(refused: Refused, ledger: Ledger) -> Refused:
    """Adds which GPUs were not counted, and why."""
    unhealthy = sorted((gpu for gpu in ledger.inventory.gpus if not gpu.is_healthy), key=lambda gpu: gpu.index)
    if refused.reason not in _ABOUT_CAPACITY or not unhealthy:
        return refused
    named = "; ".join(
        f"GPU {gpu.label}: {gpu.unhealthy_reason[:_REASON_CHARS].rstrip('.') or 'no reason given'}"
        for gpu in unhealthy[:_GPUS_NAMED]
    )
    more = f"; and {len(unhealthy) - _GPUS_NAMED} more" if len(unhealthy) > _GPUS_NAMED else ""
    return replace(refused, detail=f"{refused.detail} Out of service, and not counted: {named}{more}.")


def _prefer(target: Target, offer: Offer, free: Sequence[DeviceId], placed: Placed) -> Decision | Refused:
    ids = _choose(offer, free, placed.gpus)
    if len(ids) >= offer.size:
        return Decision(placed=placed, ids=ids)
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
    if not offer.kind.binds_gpu and len(chosen) < offer.size:
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
    if kind.is_part:
        return units.unknown_unit(target, kind, ids, ledger, names)
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
    request = request_of(target.container, policy.names)
    asks = f"{_who(target)} asks for {describe_request(request, policy.names)}"
    wanted_gpus = max(1, request.whole_gpus)
    if has_ids and len(gpus) != wanted_gpus:
        return Refused(
            reason=RefusalReason.WRONG_GPUS,
            detail=f"{asks}, which must come from {wanted_gpus} GPU(s), but the allocated IDs are on {len(gpus)}: "
            f"{_spread(ids)}. The kubelet did not follow the preferred allocation (a reused init container's devices or the "
            "topology manager can cause this). Give init containers as much as the main container, or nothing.",
        )
    accounts = gpu_accounts(target, ledger, policy, only=gpus)
    if not gpus or {account.uuid for account in accounts} != set(gpus):
        return Refused(
            reason=RefusalReason.NOT_READY,
            detail=f"{_who(target)}: the GPUs changed during its admission. Create the pod again.",
        )
    for account in accounts:
        lack = account.lack(WHOLE_GPU if request.whole_gpus else request)
        if lack is not None and lack.cause is Cause.UNHEALTHY:
            return Refused(
                reason=lack.reason,
                detail=f"{_who(target)}: GPU {account.label} ({account.uuid}) became unhealthy during the admission. Create "
                "the pod again: it will be placed elsewhere.",
            )
        if lack is not None:
            return _lacking(f"{asks}, which GPU {account.label} cannot serve: {lack.of_gpu_in_detail()}", lack)
    lack = capacity_of(accounts).lack(request)  # the memory of whole GPUs together
    return _lacking(f"{asks}: {lack.of_node()}", lack) if lack is not None else None


def _lacking(state: str, lack: Lack) -> Refused:
    return Refused(reason=lack.reason, detail=f"{state}. {lack.cure}")


def _named_gpus(ids: Sequence[str], inventory: GpuInventory) -> tuple[GpuUuid, ...]:
    known = inventory.by_uuid()
    found = {GpuUuid(device.partition("::")[0]) for device in ids}
    return tuple(sorted(found, key=lambda uuid: known[uuid].index))


def _spread(ids: Sequence[str]) -> str:
    counts = Counter(device.partition("::")[0] for device in ids)
    return ", ".join(f"{n} on {uuid}" for uuid, n in sorted(counts.items()))


def _named(target: Target, refused: Refused, names: ResourceNames) -> Refused:
    """Placement knows numbers; the user knows the pod and the resources by name."""
    wanted = names.asked(target.container)
    if names.part_kind(target.container) is None:  # a share is of both, also where one is missing
        wanted = {ResourceKind.VCORE: 0, ResourceKind.VMEMORY: 0, **wanted}
    asked = ", ".join(f"{count} {names.name_in(target.container, kind)}" for kind, count in wanted.items())
    return Refused(reason=refused.reason, detail=f"{_who(target)} (asks for {asked}): {refused.detail}")


def _who(target: Target) -> str:
    return f"pod {target.pod.namespace}/{target.pod.name}, container {target.container.name}"
