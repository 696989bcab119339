"""Plans and checks containers that ask for units under NVIDIA's names: whole GPUs, or replicas of GPUs. Pure.

Whole GPUs are placed by their links, as those of 100 cores and more. Replicas, and MIG instances, are taken one after the
other from the GPU with the fewest or the most allocated ones (setting nvidia.replica_policy; greedyAlloc in
internal/rm/allocate.go of k8s-device-plugin v0.20.0 counts alike), as far as the GPU's other users leave room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heapreplace

from gpushare_agent.admission.decisions.identity import Target
from gpushare_agent.admission.decisions.ledger import Ledger, Offer, Policy, gpu_accounts, must_gpus
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.names import CORES_PER_GPU, DeviceId, GpuUuid, gpu_of, split_device_id
from gpushare_agent.model.pods import ContainerSpec
from gpushare_agent.model.requests import Request
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.model.units import ServedUnits, UnitLayout, parts_of, terms_of
from gpushare_agent.placement import GpuAccount, Placed, place


def unusable_request(container: ContainerSpec, names: ResourceNames) -> str:
    """Why no node could serve what the container asks for, with the cure; empty where no parts of GPUs are asked for, or
    one resource alone is."""
    asked = [
        (kind, name) for kind in names.asked(container) for name in kind.names(names) if container.requests.get(name)
    ]
    units, others = ([name for kind, name in asked if kind.is_part is of_parts] for of_parts in (True, False))
    if not units or len(asked) == 1:
        return ""
    together = " and ".join([*units, *others])
    return f"it asks for {together} together. Ask for one of them: {units[0]} comes with its memory, and is no share"


def plan_units(
    target: Target, offer: Offer, free: Sequence[DeviceId], ledger: Ledger, policy: Policy, gpus: Sequence[GpuAccount]
) -> tuple[Placed, tuple[DeviceId, ...]] | Refused:
    """The GPUs, and the IDs to prefer."""
    layout, served = offer.kind.layout(policy.names), served_units(target, offer.kind, ledger, policy.names)
    must = [DeviceId(device) for device in offer.must_include]
    if (refused := _unlike(layout, ledger) or _several(layout, must + list(free), offer.size)) is not None:
        return refused
    usable = {gpu.uuid: gpu for gpu in gpus if gpu.is_healthy and gpu.uuid in served}
    by_gpu = _by_number(free, usable, without=must)
    has_instances = any(gpu.mig is not None and gpu.uuid in served for gpu in ledger.inventory.gpus)
    if by_gpu and not has_instances and all(found.terms.is_whole for found in served.values()):
        return _plan_whole(offer, by_gpu, ledger, policy, gpus, must_gpus(target, offer, ledger, policy.names), must)
    room = {uuid: account.free_part for uuid, account in usable.items() if not account.is_full}
    for uuid, part in parts_of(must).items():
        room[uuid] = room.get(uuid, Fraction(0)) - part
    chosen, sign = list(must), -1 if layout.is_packed else 1
    fitting = {uuid: ids[: max(0, int(room.get(uuid, 0) * terms_of(ids[0]).of))] for uuid, ids in by_gpu.items()}
    queue = [
        (sign * (served[uuid].terms.of - len(by_gpu[uuid])), usable[uuid].index, ids[::-1])
        for uuid, ids in fitting.items()
        if ids
    ]
    heapify(queue)
    while len(chosen) < offer.size:
        if not queue:
            return _no_room(offer.size, len(chosen), served, gpus)
        order, index, ids = queue[0]
        chosen.append(ids.pop())
        if ids:
            heapreplace(queue, (order + sign, index, ids))
        else:
            heappop(queue)
    having = {gpu_of(device) for device in chosen}
    named = sorted((gpu for gpu in gpus if gpu.uuid in having), key=lambda gpu: gpu.index)
    which = "fullest" if layout.is_packed else "emptiest"
    why = f"GPU {', '.join(gpu.label for gpu in named)}: replicas go to the {which} GPU with room"
    return Placed(gpus=tuple(gpu.uuid for gpu in named), policy="replicas", explanation=why), tuple(chosen)


def check_units(
    target: Target, kind: ResourceKind, ids: Sequence[str], ledger: Ledger, policy: Policy
) -> tuple[GpuUuid, ...] | Refused:
    """The GPUs of these IDs, which are the node's and free, by index; refused where they have no room for them."""
    devices, layout = [DeviceId(device) for device in ids], kind.layout(policy.names)
    if (refused := _unlike(layout, ledger) or _several(layout, devices, len(devices))) is not None:
        return refused
    accounts = {account.uuid: account for account in gpu_accounts(target, ledger, policy)}
    parts = parts_of(devices)
    for uuid, part in parts.items():
        lack = accounts[uuid].lack(Request(part=part))
        if lack is not None:
            return Refused(
                reason=lack.reason,
                detail=f"GPU {accounts[uuid].label} cannot serve what was allocated of it: {lack.of_gpu()}. Create the pod"
                " again: what has no room is reported to the kubelet as Unhealthy by now.",
            )
    return tuple(sorted(parts, key=lambda uuid: accounts[uuid].index))


def unknown_unit(
    target: Target, kind: ResourceKind, ids: Sequence[str], ledger: Ledger, names: ResourceNames
) -> str | None:
    """The first that is no unit of a GPU that serves the resource, be it on the terms of before: the kubelet may have begun
    the admission before it had the new list. What a container of the pod has is one."""
    served = served_units(target, kind, ledger, names)
    present, holders = ledger.inventory.by_uuid(), ledger.holders[kind]
    for device in ids:
        split = split_device_id(device)
        if split is None or split[0] not in present:
            return device
        if split[0] in served and split[1] < terms_of(device).of:
            continue
        if all(key.pod_uid != target.pod.uid for key in holders.get(DeviceId(device), ())):
            return device
    return None


def served_units(
    target: Target, kind: ResourceKind, ledger: Ledger, names: ResourceNames
) -> dict[GpuUuid, ServedUnits]:
    """The GPUs that serve the resource by which the container asks for units."""
    resource, layout = names.name_in(target.container, kind), kind.layout(names)
    found = ((gpu.uuid, layout.served(gpu)) for gpu in ledger.inventory.gpus)
    return {uuid: served for uuid, served in found if served is not None and served.resource == resource}


def _plan_whole(
    offer: Offer,
    by_gpu: Mapping[GpuUuid, Sequence[DeviceId]],
    ledger: Ledger,
    policy: Policy,
    gpus: Sequence[GpuAccount],
    must: tuple[GpuUuid, ...],
    chosen: Sequence[DeviceId],
) -> tuple[Placed, tuple[DeviceId, ...]] | Refused:
    having = {gpu_of(device) for device in chosen}
    placed = place(
        Request(cores=CORES_PER_GPU * offer.size, must_gpus=must),
        [gpu for gpu in gpus if by_gpu.get(gpu.uuid) or gpu.uuid in having],
        ledger.inventory.topology,
        share_policy=policy.share_policy,
        names=policy.names,
    )
    if isinstance(placed, Refused):
        return placed
    return placed, (*chosen, *(by_gpu[uuid][0] for uuid in placed.gpus if uuid not in having))


def _unlike(layout: UnitLayout, ledger: Ledger) -> Refused | None:
    why = layout.unlike(ledger.inventory.gpus)
    return Refused(reason=RefusalReason.NO_HEALTHY_GPU, detail=f"{why}.") if why else None


def _several(layout: UnitLayout, devices: Collection[DeviceId], size: int) -> Refused | None:
    """NVIDIA's failRequestsGreaterThanOne."""
    if size < 2 or not layout.refuses_several or all(terms_of(device).is_whole for device in devices):
        return None
    return Refused(
        reason=RefusalReason.INVALID_REQUEST,
        detail=f"it asks for {size} replicas, and this node gives one to a container, for several give no more compute"
        " (setting nvidia.refuse_several_replicas). Ask for 1.",
    )


def _by_number(
    free: Sequence[DeviceId], gpus: Collection[GpuUuid], *, without: Collection[DeviceId]
) -> dict[GpuUuid, list[DeviceId]]:
    """The free units of these GPUs, each GPU's by number."""
    found: dict[GpuUuid, list[DeviceId]] = {}
    taken = set(without)
    for device in free:
        if (gpu := gpu_of(device)) in gpus and device not in taken:
            found.setdefault(gpu, []).append(device)
    return {gpu: sorted(sorted(ids), key=len) for gpu, ids in found.items()}


def _no_room(size: int, found: int, served: Mapping[GpuUuid, ServedUnits], gpus: Sequence[GpuAccount]) -> Refused:
    if not served:
        return Refused(
            reason=RefusalReason.NO_HEALTHY_GPU,
            detail="no GPU of this node serves the resource any more. The pod can run on another node.",
        )
    free = ", ".join(
        f"GPU {gpu.label} {gpu.free_units_of(served[gpu.uuid].terms.of)} of {served[gpu.uuid].terms.of}"
        for gpu in gpus
        if gpu.uuid in served and gpu.is_healthy
    )
    return Refused(
        reason=RefusalReason.NOT_ENOUGH_CORES,
        detail=f"{size} units wanted, {found} have room ({free or 'no GPU is healthy'}): other containers have the rest of"
        " the GPUs. Wait for pods on this node to end.",
    )
