"""Decides what a container gets: its GPU, its IDs, its edits; and gives a verdict on every GPU of the node. Pure.

`decide` answers a GetPreferredAllocation, `check` examines what the kubelet then allocates. The first call of a container
places the whole container, cores and memory; the calls that follow carry the plan out. A device ID says which GPU it is on.
A vcore ID binds the GPU. vmemory IDs are counters, and the memory is charged to the GPU that the container's vcore IDs
name.

A decision never fails a GetPreferredAllocation: a refusal is held back and becomes the error of the Allocate that follows,
where the kubelet shows it to the user.

For units under NVIDIA's names, whole GPUs are placed by their links, like those of 100 cores and more. Replicas and MIG
instances are taken one after the other from the GPU with the fewest or the most allocated ones (setting
nvidia.replica_policy; greedyAlloc in internal/rm/allocate.go of k8s-device-plugin v0.20.0 counts alike), as far as the GPU's
other users leave room.

The edits are container_edits.py's. The verdicts are read from the ledger as it was at the decision, so that they cannot
differ from it. No state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heapreplace

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.container_edits import EditPolicy, edits_for, isolation_of, units_asked
from gpushare_agent.agent.admission.decisions.identity import Target
from gpushare_agent.agent.admission.decisions.ledger import Case, Ledger, Policy
from gpushare_agent.core.model.allocations import ContainerEdits
from gpushare_agent.core.model.decision_records import Asked, Candidate
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.isolation import Sharing
from gpushare_agent.core.model.names import (
    CORES_PER_GPU,
    GPUSHARE_INDEX_ANNOTATION,
    MIB,
    PREDICATE_GPU_INDEX_PREFIX,
    PREDICATE_NODE_ANNOTATION,
    DeviceId,
    GpuUuid,
    device_id,
    named_gpus,
    split_device_id,
)
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec
from gpushare_agent.core.model.resources import (
    WHOLE_GPU,
    Measure,
    Request,
    ResourceKind,
    ResourceNames,
    UnitLayout,
    parts_of,
    replica_layout,
    request_of,
)
from gpushare_agent.core.placement import GpuAccount, Placed, place, validate_request
from gpushare_agent.core.placement.gpu_account import Cause, capacity_of, describe_request
from gpushare_agent.core.placement.place import effective_request, why_not_chosen

_ABOUT_CAPACITY = frozenset(
    {
        RefusalReason.NO_HEALTHY_GPU,
        RefusalReason.NOT_ENOUGH_CORES,
        RefusalReason.NOT_ENOUGH_MEMORY,
        RefusalReason.FRAGMENTED,
    }
)

MAX_REASON_CHARS = 200
"""The length of a driver's text in a verdict."""
CHOSEN = "chosen"
_NEVER = (RefusalReason.INVALID_REQUEST, RefusalReason.SHARING_DISABLED)
_GPUS_NAMED = 3
_REASON_CHARS = 160
"""The length of a driver's text in a refusal: the kubelet shows the refusal in the pod's status."""
MAX_HINTED_GPUS = 64
MAX_HINT_CHARS = 256


class Decision(Struct, frozen=True, kw_only=True):
    """What a container gets by one GetPreferredAllocation, and why; pending until its Allocate comes.

    It has either `refused`, or the container's place (`placed`), the `size` `ids` of `resource` to prefer, and its `edits`.
    `target` is None where the container could not be identified. `asked` and `candidates`, every GPU with its
    verdict, are its grounds; a further resource of the same container has neither, and has `edits` only if it
    binds the GPU. `at` is seconds on the monotonic clock.
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
    """IDs that are offered although other containers have them."""
    at: float = 0.0

    @property
    def gpus(self) -> tuple[GpuUuid, ...]:
        return self.placed.gpus if self.placed is not None else ()

    @property
    def policy(self) -> str:
        """Empty for a refusal, like `why`: its own text says it."""
        return self.placed.policy if self.placed is not None else ""

    @property
    def why(self) -> str:
        return self.placed.explanation if self.placed is not None else ""


def decide(case: Case, edits: EditPolicy, unavailable_reason: Callable[[str], str]) -> Decision:
    """What the container gets of the offered IDs. Refused also if its isolation cannot carry it out: the admission then ends
    before anything is allocated. `unavailable_reason` is why an isolation is not available on the node now, empty if it
    is."""
    decision = _further_ids(case)
    if decision is None:
        gpus = offer_accounts(case)
        outcome = plan(case, gpus)
        # The edits now, not at the Allocate: a refusal by the isolation must come before anything is allocated. Memory that
        # follows the cores needs none: they are in the answer with the resource that binds the GPU.
        if isinstance(outcome, Decision) and (case.kind.binds_gpu or case.own is None):
            made = edits_for_ids(case.target, outcome.gpus, outcome.ids, case.ledger.inventory, edits)
            if not isinstance(made, Refused):
                made = _unavailable(case, outcome, edits, unavailable_reason) or made
            outcome = made if isinstance(made, Refused) else replace(outcome, edits=made)
        decision = explain(case, gpus, outcome)
    size = case.asked.get(case.kind, 0)
    return replace(decision, target=case.target, size=size, taken_ids=len(case.ids) - len(case.free))


def offer_accounts(case: Case) -> Sequence[GpuAccount]:
    """Each GPU as the container may use it, with no more cores than are offered."""
    return case.accounts(offered=case.free if case.kind.measure is Measure.CORES else None)


def _further_ids(case: Case) -> Decision | None:
    """More IDs where the container's GPU is bound: these are counters, and GPU and verdicts were recorded with the resource
    that bound it. None if it is not bound, or has no room left: then all is decided again, to say why."""
    if case.own is None or not case.own.bound_ids or case.kind.binds_gpu:
        return None
    one = WHOLE_GPU if case.request.whole_gpus else case.request
    accounts = case.accounts(only=case.own.gpus)
    if len(accounts) < len(case.own.gpus) or not all(account.fits(one) for account in accounts):
        return None
    outcome = _with_ids(case, Placed(gpus=case.own.gpus, policy="must-include", explanation=""))
    return outcome if isinstance(outcome, Decision) else None


def edits_for_ids(
    target: Target, gpus: Collection[GpuUuid], ids: Sequence[DeviceId], inventory: GpuInventory, edits: EditPolicy
) -> ContainerEdits | Refused:
    """The edits for a container that has these IDs on these GPUs; `ids` matter only if they are NVIDIA's units."""
    known = inventory.by_uuid()
    units = units_asked(target.container, ids, edits.names)
    return edits_for(target.pod, target.container, [known[gpu] for gpu in gpus if gpu in known], edits, units)


def _unavailable(
    case: Case, decision: Decision, edits: EditPolicy, unavailable_reason: Callable[[str], str]
) -> Refused | None:
    target, is_share = case.target, not case.request.whole_gpus
    if (units := units_asked(target.container, decision.ids, edits.names)) is not None:
        is_share = units.sharing in (Sharing.MPS, Sharing.SHARES)
    name = isolation_of(target.pod.annotations, units, edits)
    # A whole GPU needs no isolation, and a refused name was refused with its own text.
    if not is_share or isinstance(name, Refused) or not (reason := unavailable_reason(name)):
        return None
    return Refused(
        RefusalReason.NOT_READY,
        f"container {target.container.name} of pod {target.pod.namespace}/{target.pod.name} requests a share "
        f"under isolation {name}, which cannot be had on this node now: {reason}. Nothing was allocated. Create the "
        "pod again once this is cured.",
    )


# --- where it goes ---


def plan(case: Case, gpus: Sequence[GpuAccount]) -> Decision | Refused:
    """Place the container on one of `gpus` (`offer_accounts`) and choose the IDs of the offered resource."""
    if (refused := _invalid(case)) is not None:
        return refused
    policy, topology = case.policy, case.ledger.inventory.topology
    # Units have no cores and memory of their own to place: they are counted on each GPU.
    if case.kind.is_part:
        outcome = _plan_units(case, gpus)
    else:
        request = _plan_request(case)
        if isinstance(request, Refused):
            return request
        placed = place(request, gpus, topology, share_policy=policy.share_policy, names=policy.names)
        if not isinstance(placed, Refused):
            return _with_ids(case, placed)
        outcome = placed
    return outcome if isinstance(outcome, Decision) else _named(case, _with_unhealthy_gpus(outcome, case.ledger))


def _with_ids(case: Case, placed: Placed) -> Decision | Refused:
    """The ledger has a place. The kubelet may offer fewer of its IDs, if it counts containers that we do not."""
    ids, size, target = _choose(case, placed.gpus), case.asked.get(case.kind, 0), case.target
    if len(ids) >= size:
        return Decision(placed=placed, ids=ids)
    return Refused(
        RefusalReason.DEVICE_IN_USE,
        f"{target.pod.namespace}/{target.pod.name} container {target.container.name} asks for {size} {case.kind} units, but "
        f"only {len(ids)} of the {len(case.ids)} IDs that the kubelet offers are free: containers that still run have the "
        "others. Create the pod again once they have ended; if it persists, restart the kubelet of this node.",
    )


def _invalid(case: Case) -> Refused | None:
    """What is wrong with the container's limits, no matter what is free."""
    names = case.policy.names
    if problem := unusable_request(case.target.container, names):
        return Refused(RefusalReason.INVALID_REQUEST, f"{case}: {problem}.")
    # The rules of cores and memory do not apply to units.
    if case.part_kind is not None:
        return None
    refused = validate_request(case.request, names, share_mode=case.policy.share_mode)
    return _named(case, refused) if refused is not None else None


def unusable_request(container: ContainerSpec, names: ResourceNames) -> str:
    """Why no node could serve the container, with the remedy; empty if it asks for no parts of GPUs, or for one resource
    alone."""
    asked = [(name, kind.is_part) for name, kind in names.by_name.items() if container.requests.get(name)]
    units = [name for name, is_part in asked if is_part]
    if not units or len(asked) == 1:
        return ""
    together = " and ".join([*units, *(name for name, is_part in asked if not is_part)])
    return f"it asks for {together} together. Ask for one of them: {units[0]} comes with its memory, and is no share"


def _with_unhealthy_gpus(refused: Refused, ledger: Ledger) -> Refused:
    """Names the GPUs that were not counted, and says why."""
    unhealthy = sorted((gpu for gpu in ledger.inventory.gpus if not gpu.is_healthy), key=lambda gpu: gpu.index)
    # Another reason has nothing to do with GPUs that are out of service.
    if refused.reason not in _ABOUT_CAPACITY or not unhealthy:
        return refused
    named = "; ".join(
        f"GPU {gpu.label}: {gpu.unhealthy_reason[:_REASON_CHARS].rstrip('.') or 'no reason given'}"
        for gpu in unhealthy[:_GPUS_NAMED]
    )
    more = f"; and {len(unhealthy) - _GPUS_NAMED} more" if len(unhealthy) > _GPUS_NAMED else ""
    return replace(refused, detail=f"{refused.detail} Out of service, and not counted: {named}{more}.")


def _choose(case: Case, gpus: tuple[GpuUuid, ...]) -> tuple[DeviceId, ...]:
    """The IDs to prefer: those to include first, then the lowest free ones of the GPUs; for vmemory any will do."""
    chosen, size = dict.fromkeys(case.must_include), case.asked.get(case.kind, 0)
    units = {gpu.uuid: case.policy.names.units(gpu, case.kind) for gpu in case.ledger.inventory.gpus}
    for gpu in gpus:
        # By number, for as long as some are wanted: all IDs of all GPUs are offered.
        for number in range(units.get(gpu, 0) if len(chosen) < size else 0):
            if (device := device_id(gpu, number)) in case.free:
                chosen[device] = None
                if len(chosen) == size:
                    break
        if len(chosen) < size:  # some may be known under another text
            _fill(chosen, size, [device for device in case.free if device.startswith(f"{gpu}::")])
    # vmemory IDs are counters: those of another GPU's name will do where this one's are used up.
    if not case.kind.binds_gpu:
        _fill(chosen, size, case.free)
    return tuple(chosen)


def _fill(chosen: dict[DeviceId, None], size: int, ids: Collection[DeviceId]) -> None:
    if len(chosen) < size:
        for device in sorted(sorted(ids), key=len):  # by number: the IDs of one GPU differ in nothing else
            if len(chosen) >= size:
                return
            chosen[device] = None


def _named(case: Case, refused: Refused) -> Refused:
    """Placement knows numbers; the user knows the pod and the resources by name."""
    requested = case.asked
    if case.part_kind is None:  # a share is of both, also where one is missing
        requested = {ResourceKind.VCORE: 0, ResourceKind.VMEMORY: 0, **requested}
    names, container = case.policy.names, case.target.container
    asked = ", ".join(f"{count} {names.name_in(container, kind)}" for kind, count in requested.items())
    return Refused(refused.reason, f"{case} (asks for {asked}): {refused.detail}")


# --- what a plan must have room for ---


def _plan_request(case: Case) -> Request | Refused:
    """What must be free at the container's place, the GPUs that it cannot avoid, and those that an extender chose."""
    effective = effective_request(case.target.pod, case.target.container, case.policy.names)
    if isinstance(effective, Refused):
        return effective
    hint = hinted_gpus(case.target.pod.annotations, case.target.container, case.policy)
    return effective._replace(hint=hint, must_gpus=case.must_gpus)


def hinted_gpus(annotations: Mapping[str, str], container: ContainerSpec, policy: Policy) -> tuple[int, ...]:
    """The indexes of the GPUs that an extender chose for the container on this node; empty if none did or it is wrong.

    Any tenant can write these annotations, so they are bounded and checked here; placement checks that the GPUs exist
    and fit. gpu-admission names none for init containers and sidecars; our extender counts those within
    spec.initContainers. Formats: docs/reference/formats.md, predicate annotations of gpu-admission, and GPUShare's.
    """
    chosen_node = annotations.get(PREDICATE_NODE_ANNOTATION)
    if chosen_node in (None, policy.node_name):
        group = "" if container.kind is ContainerKind.MAIN else "init-"
        if predicted := _indexes(annotations.get(f"{PREDICATE_GPU_INDEX_PREFIX}{group}{container.position}", "")):
            return predicted
    if chosen_node == policy.node_name or not request_of(container, policy.names).units:
        # GPUShare's one index for a whole pod cannot say what our extender planned for its containers, and may be older
        # than its choice, or forged: it counts only where no extender has named this node.
        return ()
    gpushare = _indexes(annotations.get(GPUSHARE_INDEX_ANNOTATION, ""))
    # GPUShare's shares are on one GPU: several indexes are no value that its extender writes.
    return gpushare if len(gpushare) == 1 else ()


def _indexes(text: str) -> tuple[int, ...]:
    """GPU indexes between commas, empty where the text is anything else."""
    parts = [part.strip() for part in text[: MAX_HINT_CHARS + 1].split(",")]
    if len(text) > MAX_HINT_CHARS or not all(part.isascii() and part.isdigit() and len(part) <= 3 for part in parts):
        return ()
    indexes = tuple(int(part) for part in parts)
    return indexes if len(indexes) <= MAX_HINTED_GPUS and len(set(indexes)) == len(indexes) else ()


# --- the check of what the kubelet allocated ---


def check(case: Case, planned: tuple[GpuUuid, ...]) -> tuple[GpuUuid, ...] | Refused:
    """The GPUs to which the allocated IDs bind the container, or why they cannot be accepted.

    `planned` are the GPUs of the plan, needed where vmemory comes first and its IDs say nothing of the GPU.
    """
    refused = _check_ids(case) or _invalid(case)
    if refused is not None:
        return refused
    if case.kind.is_part:
        named = _check_units(case)
        return _named(case, named) if isinstance(named, Refused) else named
    gpus = planned  # memory first: its IDs are counters and name no GPU
    if case.kind.binds_gpu:
        known = case.ledger.inventory.by_uuid()
        gpus = tuple(sorted(set(named_gpus(case.ids)), key=lambda uuid: known[uuid].index))
    # The order of a container's resources is random (the kubelet ranges over a Go map).
    elif case.own is not None and case.own.bound_ids:
        gpus = case.own.gpus  # memory after cores: it is charged where those are, whatever was planned
    return _check_gpus(case, gpus) or gpus


def _check_ids(case: Case) -> Refused | None:
    ids, requested = case.ids, case.asked.get(case.kind, 0)
    # Not trusted: these IDs are what is counted and charged.
    if len(set(ids)) != len(ids) or len(ids) != requested:
        return Refused(
            RefusalReason.INVALID_REQUEST,
            f"{case} asks for {requested} {case.resource}, but {len(ids)} device IDs were "
            f"allocated ({len(set(ids))} distinct). Delete the pod and create it again.",
        )
    unknown = _unknown_unit(case) if case.kind.is_part else _unknown_id(case)
    if unknown is not None:
        return Refused(
            RefusalReason.UNKNOWN_DEVICE,
            f"{case}: device ID {unknown[:80]!r} of {case.resource} names no GPU of this "
            "node. The GPUs may have changed since they were reported to the kubelet; they are reported again now. "
            "Create the pod again.",
        )
    if taken := sorted(set(ids) - set(case.free)):
        return Refused(
            RefusalReason.DEVICE_IN_USE,
            f"{case}: the kubelet allocated {len(taken)} device ID(s) that another container still "
            f"has (first: {taken[0]}). Nothing was allocated twice. Create the pod again.",
        )
    return None


def _unknown_id(case: Case) -> str | None:
    counts = {gpu.uuid: case.policy.names.units(gpu, case.kind) for gpu in case.ledger.inventory.gpus}
    for device in case.ids:
        split = split_device_id(device)
        if split is None or split[1] >= counts.get(split[0], 0):
            return device
    return None


def _check_gpus(case: Case, gpus: tuple[GpuUuid, ...]) -> Refused | None:
    request = case.request
    asks = f"{case} asks for {describe_request(request, case.policy.names)}"
    requested_gpus = max(1, request.whole_gpus)
    # Without IDs that bind the GPU the plan has as many as it needs.
    if case.kind.binds_gpu and len(gpus) != requested_gpus:
        spread = ", ".join(f"{n} on {uuid}" for uuid, n in sorted(Counter(named_gpus(case.ids)).items()))
        return Refused(
            RefusalReason.WRONG_GPUS,
            f"{asks}, which must come from {requested_gpus} GPU(s), but the allocated IDs are on {len(gpus)}: "
            f"{spread}. The kubelet did not follow the preferred allocation (a reused init container's devices or the "
            "topology manager can cause this). Give init containers as much as the main container, or nothing.",
        )
    accounts = case.accounts(only=gpus)
    # Between preference and Allocate the driver was read again, and a GPU has gone.
    if not gpus or len(accounts) < len(gpus):
        return Refused(RefusalReason.NOT_READY, f"{case}: the GPUs changed during its admission. Create the pod again.")
    for account in accounts:
        lack = account.lack(WHOLE_GPU if request.whole_gpus else request)
        if lack is not None and lack.cause is Cause.UNHEALTHY:
            return Refused(
                lack.reason,
                f"{case}: GPU {account.label} ({account.uuid}) became unhealthy during the admission. Create "
                "the pod again: it will be placed elsewhere.",
            )
        if lack is not None:
            state = f"which GPU {account.label} cannot serve: {lack.of_gpu_in_detail()}"
            return Refused(lack.reason, f"{asks}, {state}. {lack.remedy}")
    lack = capacity_of(accounts).lack(request)  # the memory of whole GPUs together
    return Refused(lack.reason, f"{asks}: {lack.of_node()}. {lack.remedy}") if lack is not None else None


# --- units under NVIDIA's names ---


def _plan_units(case: Case, gpus: Sequence[GpuAccount]) -> Decision | Refused:
    layout, served = case.kind.layout(case.policy.names), case.served
    must, size = case.must_include, case.asked[case.kind]
    if (refused := _unlike(layout, case.ledger) or _several(layout, [*must, *case.free], size)) is not None:
        return refused
    usable = {gpu.uuid: gpu for gpu in gpus if gpu.is_healthy and gpu.is_accepted and gpu.uuid in served}
    by_gpu = _by_number(case.free, usable, without=must)
    has_instances = any(gpu.mig is not None and gpu.uuid in served for gpu in case.ledger.inventory.gpus)
    # Instances have no links of their own, and replicas of one GPU are alike: only whole GPUs are placed by links.
    if by_gpu and not has_instances and all(found.replicas.is_whole for found in served.values()):
        return _plan_whole(case, by_gpu, gpus)
    room = {uuid: account.free_part for uuid, account in usable.items() if not account.is_full}
    for uuid, part in parts_of(must).items():
        # What must be included takes room first; below 0 means that nothing more of this GPU is preferred.
        room[uuid] = room.get(uuid, Fraction(0)) - part
    # heapq gives the least first: packed, the GPU with the most allocated units has to be the least.
    chosen, sign = list(must), -1 if layout.is_packed else 1
    fitting = {uuid: ids[: max(0, int(room.get(uuid, 0) * replica_layout(ids[0]).of))] for uuid, ids in by_gpu.items()}
    queue = [
        (sign * (served[uuid].replicas.of - len(by_gpu[uuid])), usable[uuid].index, ids[::-1])
        for uuid, ids in fitting.items()
        if ids
    ]
    heapify(queue)
    while len(chosen) < size:
        if not queue:
            return _no_room(case, len(chosen), gpus)
        order, index, ids = queue[0]
        chosen.append(ids.pop())
        if ids:
            heapreplace(queue, (order + sign, index, ids))
        else:
            heappop(queue)
    having = set(named_gpus(chosen))
    named = sorted((gpu for gpu in gpus if gpu.uuid in having), key=lambda gpu: gpu.index)
    which = "fullest" if layout.is_packed else "emptiest"
    why = f"GPU {', '.join(gpu.label for gpu in named)}: replicas go to the {which} GPU with room"
    placed = Placed(gpus=tuple(gpu.uuid for gpu in named), policy="replicas", explanation=why)
    return Decision(placed=placed, ids=tuple(chosen))


def _plan_whole(
    case: Case, by_gpu: Mapping[GpuUuid, Sequence[DeviceId]], gpus: Sequence[GpuAccount]
) -> Decision | Refused:
    having, policy = set(named_gpus(case.must_include)), case.policy
    placed = place(
        Request(cores=CORES_PER_GPU * case.asked[case.kind], must_gpus=case.must_gpus),
        [gpu for gpu in gpus if by_gpu.get(gpu.uuid) or gpu.uuid in having],
        case.ledger.inventory.topology,
        share_policy=policy.share_policy,
        names=policy.names,
    )
    if isinstance(placed, Refused):
        return placed
    more = (by_gpu[uuid][0] for uuid in placed.gpus if uuid not in having)
    return Decision(placed=placed, ids=(*case.must_include, *more))


def _check_units(case: Case) -> tuple[GpuUuid, ...] | Refused:
    """The GPUs of these IDs, by index. The IDs are the node's and free. Refused if a GPU has no room for them."""
    layout = case.kind.layout(case.policy.names)
    if (refused := _unlike(layout, case.ledger) or _several(layout, case.ids, len(case.ids))) is not None:
        return refused
    parts = parts_of(case.ids)
    accounts = {account.uuid: account for account in case.accounts(only=parts)}
    for uuid, part in parts.items():
        if (lack := accounts[uuid].lack(Request(part=part))) is not None:
            return Refused(
                lack.reason,
                f"GPU {accounts[uuid].label} cannot serve what was allocated of it: {lack.of_gpu()}. Create the pod"
                " again: what has no room is reported to the kubelet as Unhealthy by now.",
            )
    return tuple(sorted(parts, key=lambda uuid: accounts[uuid].index))


def _unknown_unit(case: Case) -> str | None:
    """The first ID that is no unit of a GPU that serves the resource. Units of the former replica layout count: the kubelet
    may have begun the admission before it had the new list. So do those that a container of the pod has."""
    present, holders = case.ledger.inventory.by_uuid(), case.ledger.holders[case.kind]
    for device in case.ids:
        split = split_device_id(device)
        if split is None or split[0] not in present:
            return device
        # By its own replica layout, not by the present one: the kubelet may have offered it before it had the new list.
        if split[0] in case.served and split[1] < replica_layout(device).of:
            continue
        # A unit of a former layout that this pod's init container has is passed on by the kubelet.
        if all(key.pod_uid != case.target.pod.uid for key in holders.get(device, ())):
            return device
    return None


def _unlike(layout: UnitLayout, ledger: Ledger) -> Refused | None:
    why = layout.unlike(ledger.inventory.gpus)
    return Refused(RefusalReason.NO_HEALTHY_GPU, f"{why}.") if why else None


def _several(layout: UnitLayout, devices: Collection[DeviceId], size: int) -> Refused | None:
    """NVIDIA's failRequestsGreaterThanOne."""
    if size < 2 or not layout.refuses_several or all(replica_layout(device).is_whole for device in devices):
        return None
    return Refused(
        RefusalReason.INVALID_REQUEST,
        f"it asks for {size} replicas, and this node gives one to a container: several give no more compute"
        " (setting nvidia.refuse_several_replicas). Ask for 1.",
    )


def _by_number(
    free: Collection[DeviceId], gpus: Collection[GpuUuid], *, without: Collection[DeviceId]
) -> dict[GpuUuid, list[DeviceId]]:
    """The free units of these GPUs, each GPU's by number."""
    found: dict[GpuUuid, list[DeviceId]] = {}
    taken = set(without)
    for device, gpu in zip(free, named_gpus(free), strict=True):
        if gpu in gpus and device not in taken:
            found.setdefault(gpu, []).append(device)
    return {gpu: sorted(sorted(ids), key=len) for gpu, ids in found.items()}


def _no_room(case: Case, found: int, gpus: Sequence[GpuAccount]) -> Refused:
    served = case.served
    if not served:
        why = "no GPU of this node serves the resource any more. The pod can run on another node."
        return Refused(RefusalReason.NO_HEALTHY_GPU, why)
    free = ", ".join(
        f"GPU {gpu.label} {gpu.free_units_of(served[gpu.uuid].replicas.of)} of {served[gpu.uuid].replicas.of}"
        for gpu in gpus
        if gpu.uuid in served and gpu.is_healthy
    )
    return Refused(
        RefusalReason.NOT_ENOUGH_CORES,
        f"{case.asked[case.kind]} units wanted, {found} have room ({free or 'no GPU is healthy'}): other containers have the"
        " rest of the GPUs. Wait for pods on this node to end.",
    )


# --- every GPU with its verdict ---


def explain(case: Case, gpus: Sequence[GpuAccount], outcome: Decision | Refused) -> Decision:
    """The outcome with the verdict on each of `gpus`, in order of index; no verdicts if no GPU could serve such a
    request."""
    decision = Decision(refused=outcome) if isinstance(outcome, Refused) else outcome
    target, names, must = case.target, case.policy.names, case.must_gpus
    hint = hinted_gpus(target.pod.annotations, target.container, case.policy)
    memory_bytes = names.requested_mib(case.request) * MIB
    asked = Asked(cores=case.request.cores, memory_bytes=memory_bytes, hint=hint, must_gpus=must)
    if case.part_kind is None:
        request = _plan_request(case)
    else:
        request = Request(cores=CORES_PER_GPU * case.asked[case.part_kind], must_gpus=must)
    # No GPU could serve such a request: a verdict on each would only repeat the refusal.
    if isinstance(request, Refused) or (isinstance(outcome, Refused) and outcome.reason in _NEVER):
        return replace(decision, asked=asked)
    by_index = sorted(gpus, key=lambda gpu: gpu.index)
    verdicts = _verdicts(case, request, by_index, decision)
    candidates = []
    for gpu, verdict in zip(by_index, verdicts, strict=True):
        free_mib, total_mib = gpu.memory_mib_of(request)
        candidates.append(
            Candidate(
                index=gpu.index,
                label=gpu.label,
                uuid=gpu.uuid,
                is_healthy=gpu.is_healthy,
                free_cores=gpu.free_cores,
                free_memory_bytes=free_mib * MIB,
                total_memory_bytes=total_mib * MIB,
                is_chosen=verdict == CHOSEN,
                verdict=verdict,
            )
        )
    return replace(decision, asked=asked, candidates=tuple(candidates))


def _verdicts(case: Case, request: Request, gpus: Sequence[GpuAccount], decision: Decision) -> Iterator[str]:
    """The verdict on each GPU, in their order."""
    kind, served, inventory = case.part_kind, case.served, case.ledger.inventory
    of_node = capacity_of(gpus).lack(request) if request.whole_gpus and kind is None else None
    reasons = {gpu.uuid: gpu.unhealthy_reason for gpu in inventory.gpus}
    for gpu in gpus:
        lack = gpu.lack(Request(part=served[gpu.uuid].replicas.part) if gpu.uuid in served else request)
        if gpu.uuid in decision.gpus:
            yield CHOSEN
        elif kind is not None and gpu.is_healthy and gpu.uuid not in served:
            yield "serves another resource"
        elif lack is not None:
            yield lack.of_gpu(_unhealthy(reasons[gpu.uuid]))
        # There is nothing to compare with unless a GPU was chosen.
        elif decision.placed is not None:
            usable = [one for one in gpus if kind is None or one.uuid in served]
            yield why_not_chosen(gpu, request, decision.placed, usable, inventory.topology)
        elif (
            decision.refused
            and decision.refused.reason is RefusalReason.WRONG_GPUS
            and gpu.uuid not in request.must_gpus
        ):
            yield "fits, but the kubelet's IDs name another"
        else:
            yield f"entirely free; {of_node.of_node()}" if of_node is not None else "fits"


def _unhealthy(reason: str) -> str:
    reported = reason[:MAX_REASON_CHARS] or "no reason given"
    # A cordon is an operator's decision, and no fault of the GPU.
    return reported if reported.startswith("cordoned") else f"unhealthy: {reported}"
