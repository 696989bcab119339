"""The ledger as one container sees it: the account of each GPU, and which offered IDs no other container has. Pure.

What the pod's own init containers have is reusable: the kubelet hands it on. The arithmetic is placement/gpu_account.py's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import cast

from msgspec import Struct

from gpushare_agent.admission.decisions.identity import Target, initial_allocations, initial_ids
from gpushare_agent.model.allocations import NO_CHARGE, Allocation, Charge, ContainerKey, add_charges, charges_of
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.isolation import Sharing
from gpushare_agent.model.names import CORES_PER_GPU, DeviceId, GpuUuid, split_device_id
from gpushare_agent.model.pods import ContainerKind, ContainerSpec
from gpushare_agent.model.resources import Measure, ResourceKind, ResourceNames
from gpushare_agent.placement.gpu_account import GpuAccount, account_of
from gpushare_agent.placement.gpu_choice import accepting, choice_of
from gpushare_agent.placement.place import SharePolicy


class Policy(Struct, frozen=True, kw_only=True):
    """The settings that bear on placement."""

    names: ResourceNames
    share_policy: SharePolicy = "binpack"
    share_mode: bool = True
    max_shares_of_gpu: int | None = None
    """Sharing containers that one GPU can serve: MPS has a bound on its clients."""
    node_name: str = ""
    """Where an extender has chosen this node for a pod, its choice of GPUs counts."""


class Ledger(Struct, frozen=True, kw_only=True):
    """What is allocated, as seen by one container: by others on each GPU, and the containers that have each ID."""

    inventory: GpuInventory
    charges: Mapping[GpuUuid, Charge]
    holders: Mapping[ResourceKind, Mapping[DeviceId, frozenset[ContainerKey]]]
    allocations: Mapping[ContainerKey, Allocation]


class Offer(Struct, frozen=True, kw_only=True):
    """What the kubelet offers in one GetPreferredAllocation. `available` is checked against the ledger."""

    kind: ResourceKind
    available: Sequence[str]
    must_include: Sequence[str]
    size: int


def gpu_accounts(
    target: Target | None,
    ledger: Ledger,
    policy: Policy,
    *,
    offered: Collection[DeviceId] | None = None,
    only: Collection[GpuUuid] | None = None,
) -> Sequence[GpuAccount]:
    """Each GPU as `target` may use it: what the pod's own init containers hold is reusable, and what its annotations leave
    out has nothing free. None: as everybody sees it.

    `offered`, where not None, are the vcore IDs that the kubelet can hand out: a GPU has no more free cores than that.
    `only`, where not None, are the GPUs that are asked about.
    """
    names = policy.names
    per_gpu = Counter(_gpus_of(offered)) if offered is not None else None
    handed_on = _handed_on(target, ledger) if target is not None else {}
    has_units_requested = target is not None and names.part_kind(target.container) is not None
    is_unlimited = target is not None and _is_unlimited(target.container, names)
    found = []
    for gpu in ledger.inventory.gpus:
        if only is not None and gpu.uuid not in only:
            continue
        charge, reusable = ledger.charges.get(gpu.uuid, NO_CHARGE), handed_on.get(gpu.uuid, NO_CHARGE)
        if has_units_requested:  # those that init containers hand on are free for it
            charge = charge.plus(Charge(part=reusable.part), -1)
        found.append(
            account_of(
                gpu,
                names,
                charge,
                reusable,
                # What asks for no share opens no client of MPS, so its number is no bound for it.
                max_shares=None if is_unlimited else policy.max_shares_of_gpu,
                offered_cores=CORES_PER_GPU if per_gpu is None else per_gpu[gpu.uuid],
            )
        )
    return found if target is None else accepting(choice_of(target.pod.annotations), found)


def _is_unlimited(container: ContainerSpec, names: ResourceNames) -> bool:
    """It asks for what is no sharing container of the isolation's."""
    kind = names.part_kind(container)
    if kind is not None:
        return kind.layout(names).sharing is Sharing.TIME_SLICING
    return names.requested(container, ResourceKind.VCORE) >= CORES_PER_GPU


def offer_accounts(
    target: Target, offer: Offer, free: Collection[DeviceId], ledger: Ledger, policy: Policy
) -> Sequence[GpuAccount]:
    """Each GPU as `target` may use it in this call; `free` are the offer's IDs that nobody else has."""
    return gpu_accounts(target, ledger, policy, offered=free if offer.kind.measure is Measure.CORES else None)


def free_ids(target: Target, kind: ResourceKind, available: Sequence[str], ledger: Ledger) -> list[DeviceId]:
    """The offered IDs that no other container has by our ledger.

    The rest of the offer is allocated: the kubelet forgot a container, which is the fault that this check exists to catch.
    """
    holders = ledger.holders[kind]
    offered = cast(Sequence[DeviceId], available)
    # The usual case, in one step of C: thousands of IDs are offered in each call.
    if holders.keys().isdisjoint(offered):
        return list(offered)
    return [d for d in offered if d not in holders or may_take_over(target, holders[d], ledger)]


def must_gpus(target: Target, offer: Offer, ledger: Ledger, names: ResourceNames) -> tuple[GpuUuid, ...]:
    """GPUs that the container cannot avoid: of the IDs to include, and of what init containers leave to it."""
    kind = names.binding(target.container)
    ids: set[str] = set()
    if offer.kind is kind:
        ids.update(offer.must_include)
    own = ledger.allocations.get(target.key)
    if own is not None:
        ids |= own.ids_of(kind)
    # The kubelet passes an init container's IDs on to this container before new ones, though it has not said so yet.
    if not ids and target.container.kind is not ContainerKind.INIT:
        holders = ledger.holders[kind]
        ids |= {
            device
            for device in initial_ids(target.pod, kind, ledger.allocations)
            if may_take_over(target, holders.get(device, frozenset()), ledger)
        }
    known = ledger.inventory.by_uuid()
    found = {split[0] for device in ids if (split := split_device_id(device)) is not None and split[0] in known}
    return tuple(sorted(found, key=lambda uuid: known[uuid].index))


def _handed_on(target: Target, ledger: Ledger) -> dict[GpuUuid, Charge]:
    """What only the pod's init containers have, `target` aside: the kubelet hands it on."""
    inits = {one.key for one in initial_allocations(target.pod, ledger.allocations)} - {target.key}
    # Most pods have no init container with a GPU: the sums below are needed for those that have.
    if not inits:
        return {}
    others = [one for key, one in ledger.allocations.items() if key.pod_uid == target.pod.uid and key != target.key]
    found = charges_of(others)
    add_charges(found, charges_of(one for one in others if one.key not in inits), -1)
    return found


def _gpus_of(devices: Collection[DeviceId]) -> list[GpuUuid]:
    """The GPU of each ID. A call has thousands: no function is called for one, hence cast."""
    return [cast(GpuUuid, device.partition("::")[0]) for device in devices]


def may_take_over(target: Target, keys: frozenset[ContainerKey], ledger: Ledger) -> bool:
    """The containers are the target itself or init containers of its pod, whose IDs the kubelet hands on."""
    return all(
        key == target.key
        or (
            key.pod_uid == target.pod.uid
            and (allocation := ledger.allocations.get(key)) is not None
            and allocation.kind is ContainerKind.INIT
        )
        for key in keys
    )
