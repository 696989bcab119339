"""The places for MIG instances as devices that consume counters, and the division of a pool into slices. Pure.

A GPU has a counter set: a counter for each memory slice, for each kind of engine, and for each profile that the driver
admits less often than the memory slices would. Two places can be had at once exactly where the counters allow it.

A place stays published while it cannot be had, with a taint: the scheduler takes what a claim uses of the counters from its
device in the slice, and would give the slices of a device that is missing away (kubernetes #140802).

Source: resource.k8s.io/v1; its limits hold for each slice and device.
"""

from __future__ import annotations

from collections import Counter as Amounts
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from typing import TypeVar

from msgspec.structs import replace

from gpushare_agent.core.claims.devices import (
    ENGINES,
    DevicePolicy,
    attributes_of,
    capacity_of,
    device_name,
    placement_device_name,
    taint_value,
    taints_of,
)
from gpushare_agent.core.kube.claims import (
    Counter,
    CounterConsumption,
    CounterSet,
    Device,
    DeviceCapacity,
    SliceContent,
)
from gpushare_agent.core.model.gpus import Gpu, GpuInventory, Health
from gpushare_agent.core.model.mig import MigGpuInstance, MigLayout, MigPlace, MigPlacement, MigProfile
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.taints import Taint
from gpushare_agent.core.placement.topology import build_topology

CONFLICT_TAINT = "gpushare-agent/mig-conflict"
MAX_DEVICES = 64
"""Of a slice in which a device has taints or consumes counters."""
MAX_COUNTER_SETS = 8
T = TypeVar("T")


def pool_slices(
    devices: Sequence[Device],
    inventory: GpuInventory,
    cordoned: Mapping[GpuUuid, str],
    policy: DevicePolicy,
    *,
    instances: Mapping[str, Gpu],
    blocked: Mapping[MigPlacement, str],
) -> list[SliceContent]:
    """The slices in the order in which the scheduler is to try them: `devices`, then the places of the inventory's layouts,
    GPU by GPU. The devices of a GPU are in slices of their own, so that a change of it writes no others.

    `instances` are those that lie at places, by the names of these; `blocked` says why a place cannot be had."""
    parents = {gpu.uuid: gpu for gpu in inventory.mig_partitioned}
    layouts = sorted(
        (one for one in inventory.mig_layouts if one.profiles and one.parent in parents),
        key=lambda one: parents[one.parent].index,
    )
    groups = [devices]
    for layout in layouts:
        parent = parents[layout.parent]
        places = _places(
            replace(layout, instances=(), problem=""),
            replace(parent, health=Health.HEALTHY, unhealthy_reason="", is_withheld=False),
            (inventory.driver_version, inventory.cuda_version),
            policy,
        )
        groups.append(
            [
                _tainted(
                    device,
                    *taints_of(instances.get(device.name, parent), cordoned, policy),
                    *_conflict(layout.problem or blocked.get(place, "")),
                )
                for place, device in places
            ]
        )
    sets = [CounterSet(device_name(one.parent), _totals(one)) for one in layouts]
    found = [SliceContent(devices=part) for devices in groups for part in _parts(devices, MAX_DEVICES)]
    return found + [SliceContent(shared_counters=part) for part in _parts(sets, MAX_COUNTER_SETS)]


@lru_cache(maxsize=64)
def _places(
    layout: MigLayout, parent: Gpu, versions: tuple[str, str], policy: DevicePolicy
) -> list[tuple[MigPlacement, Device]]:
    """The places of a GPU in order, without taints. Remembered: all that changes as a rule are these, and sixteen GPUs would
    hold up the loop for a tenth of a second at each allocation. `versions` are those of GpuInventory."""
    nothing = GpuInventory(
        gpus=(), topology=build_topology((), ()), driver_version=versions[0], cuda_version=versions[1]
    )
    return [
        (
            place,
            Device(
                name=placement_device_name(place, profile.name),
                allow_multiple_allocations=not policy.nvidia_names,
                attributes=attributes_of(gpu, nothing, {}, policy),
                capacity=_capacity_of(gpu, policy),
                consumes_counters=[CounterConsumption(device_name(parent.uuid), _used(layout, profile, place.start))],
            ),
        )
        for place, profile in _in_order(layout)
        if (gpu := _at(parent, profile, place)).memory_mib >= policy.block_mib
    ]


def _tainted(device: Device, *taints: Taint) -> Device:
    return replace(device, taints=[*taints]) if taints else device


def _in_order(layout: MigLayout) -> list[tuple[MigPlacement, MigProfile]]:
    """From the end of the GPU, where small instances leave the large ones their places; at one place the small ones first,
    and those with special engines last."""
    found = layout.placements.items()
    return sorted(found, key=lambda one: (-one[0].start, one[1].size, not one[1].name.endswith("gb"), one[1].id))


def _capacity_of(gpu: Gpu, policy: DevicePolicy) -> dict[str, DeviceCapacity]:
    """By NVIDIA's names a place is given whole, as its driver gives it. Within a claim the scheduler of 1.36.3 gives no
    counters of a shareable device back (kubernetes #140436): there a claim of several instances waits unless the order has
    places for them at the first try."""
    found = capacity_of(gpu, policy)
    return {name: DeviceCapacity(one.value) for name, one in found.items()} if policy.nvidia_names else found


def _at(parent: Gpu, profile: MigProfile, place: MigPlacement) -> Gpu:
    """An instance at a place as far as it is known before it is made."""
    mig = MigPlace(
        profile=profile.name, profile_id=profile.id, attributes=profile.attributes, start=place.start, parent=parent.uuid,
        parent_index=parent.index, number=-1, gi=-1, ci=-1,
    )  # fmt: skip
    return replace(parent, uuid=GpuUuid(""), memory_mib=profile.attributes.memory_mib, mig=mig)


def _conflict(reason: str) -> list[Taint]:
    # NoSchedule whatever the setting is: who has the place keeps it.
    return [Taint(CONFLICT_TAINT, "NoSchedule", taint_value(reason))] if reason else []


def _totals(layout: MigLayout) -> dict[str, Counter]:
    limited = {f"profile-{one.id}": one.most for one in layout.profiles if _is_limited(one)}
    return _counters(range(layout.slices), _all_engines(layout) | limited)


def _used(layout: MigLayout, profile: MigProfile, start: int) -> dict[str, Counter]:
    engines = {field: getattr(profile.attributes, field) for field in _all_engines(layout)}
    limited = {f"profile-{profile.id}": 1} if _is_limited(profile) else {}
    return _counters(range(start, start + profile.size), engines | limited)


def _counters(slices: range, counts: dict[str, int]) -> dict[str, Counter]:
    """By names that are DNS labels."""
    named = {**{f"memory-slice-{number}": 1 for number in slices}, **counts}
    return {name.replace("_", "-"): Counter(str(count)) for name, count in named.items() if count}


def _all_engines(layout: MigLayout) -> dict[str, int]:
    """The engines of the GPU, which its largest profile has; but none of a kind that instances share by what the driver
    says: it admits more of a profile than there would be engines."""
    counts = {field: [getattr(one.attributes, field) for one in layout.profiles] for field in ENGINES.values()}
    return {
        field: max(found)
        for field, found in counts.items()
        if all(one.most * count <= max(found) for one, count in zip(layout.profiles, found, strict=True))
    }


def _is_limited(profile: MigProfile) -> bool:
    """There can be fewer than the memory slices admit."""
    fitting, end = 0, 0
    for start in sorted(profile.starts):
        if start >= end:
            fitting, end = fitting + 1, start + profile.size
    return profile.most < fitting


def _parts(items: Sequence[T], most: int) -> list[Sequence[T]]:
    return [items[at : at + most] for at in range(0, len(items), most)]


@lru_cache(maxsize=64)
def room(layout: MigLayout, taken: tuple[MigGpuInstance, ...], blocked: Set[MigPlacement]) -> Mapping[str, int]:
    """How many more instances of each profile alone could be made next to those `taken`, none at a place that is `blocked`;
    the largest profile first. Remembered: it takes a millisecond, and changes seldom."""
    left = _amounts(_totals(layout))
    for one in taken:
        known = layout.profile(one.profile)
        has = _used(layout, known, one.start) if known else _counters(range(one.start, one.start + one.size), {})
        left.subtract(_amounts(has))
    found = {}
    for profile in sorted(layout.profiles, key=lambda one: (-one.attributes.gi_slices, -one.size, one.name)):
        rest, found[profile.name] = left.copy(), 0
        for start in sorted(profile.starts):
            needs = _amounts(_used(layout, profile, start))
            is_free = all(rest[name] >= amount for name, amount in needs.items())
            if is_free and MigPlacement(layout.parent, profile.id, start) not in blocked:
                rest.subtract(needs)
                found[profile.name] += 1
    return found


def _amounts(counters: Mapping[str, Counter]) -> Amounts[str]:
    return Amounts({name: int(one.value) for name, one in counters.items()})
