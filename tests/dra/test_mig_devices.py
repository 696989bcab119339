"""MIG instances and the places for them in the slices: names, sizes, counters, taints, order, and the API's limits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gpushare_agent.core.claims.devices import (
    DevicePolicy,
    device_name,
    is_device_name,
    placement_device_name,
    slice_devices,
)
from gpushare_agent.core.claims.mig_devices import pool_slices
from gpushare_agent.core.formats.mig_profiles import has_room, mig_profiles
from gpushare_agent.core.kube.claims import Device, SliceContent
from gpushare_agent.core.model.gpus import Gpu, GpuInventory, Health
from gpushare_agent.core.model.mig import MigAttributes, MigLayout, MigPlacement, MigProfile
from gpushare_agent.core.model.names import GpuUuid
from tests.support_core import inventory, mig_instance

POLICY = DevicePolicy(
    block_mib=256,
    order="binpack",
    taint_effect="NoExecute",
    isolation="gpushare",
    memory_by="gpushare",
    compute_by="gpushare",
)
PRODUCTS = (
    ("NVIDIA A30", 24_576),
    ("NVIDIA A100-SXM4-40GB", 40_960),
    ("NVIDIA H100 80GB HBM3", 81_559),
    ("NVIDIA B200", 183_359),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887),
)


def uuid_of(index: int) -> GpuUuid:
    return GpuUuid(f"GPU-8f3e2b1c-0000-4000-8000-{index:012d}")


def on_demand(gpus: int = 1, product: str = "NVIDIA H100 80GB HBM3", memory_mib: int = 81_559) -> GpuInventory:
    """GPUs in MIG mode without instances, of which everything is known."""
    profiles = mig_profiles(product, memory_mib)
    [any_gpu] = inventory(1).gpus
    parents = tuple(
        replace(
            any_gpu,
            index=index,
            minor=index,
            uuid=uuid_of(index),
            name=product,
            memory_mib=memory_mib,
            compute_capability=(9, 0),
            brand="Nvidia",
            numa_node=0,
            pcie_root="pci0000:00",
            mig_mode=True,
        )
        for index in range(gpus)
    )
    slices = max(one.size for one in profiles)
    layouts = tuple(MigLayout(parent=one.uuid, slices=slices, profiles=profiles) for one in parents)
    return replace(
        inventory(0), driver_version="580.65.06", cuda_version="13.0", mig_partitioned=parents, mig_layouts=layouts
    )


def published(found: GpuInventory, devices: Sequence[Device] = (), **changes: Any) -> list[SliceContent]:
    given = {"cordoned": {}, "policy": POLICY, "instances": {}, "blocked": {}, **changes}
    return pool_slices(devices, found, **given)


def places(contents: Sequence[SliceContent]) -> list[Device]:
    return [device for one in contents for device in one.devices]


def static(found: GpuInventory, *gpus: Gpu, **changes: object) -> list[Device]:
    return slice_devices(gpus, found, {}, {}, replace(POLICY, **changes))  # type: ignore[arg-type]


def known_instance() -> Gpu:
    gpu = mig_instance(3, 0, 1)
    assert gpu.mig is not None
    attributes = MigAttributes(memory_mib=9856, gi_slices=1, ci_slices=1, multiprocessors=16, copy_engines=1)
    mig = replace(gpu.mig, attributes=attributes, profile_id=19, start=6)
    parent = on_demand().mig_partitioned[0]
    return replace(parent, index=3, uuid=GpuUuid("MIG-8f3e2b1c-0000-4000-8000-00000000000a"), memory_mib=9856, mig=mig)


def test_an_instance_is_a_device_by_its_uuid() -> None:
    """Links are its GPU's, which instances do not have."""
    [device] = static(replace(on_demand(), topology=inventory(4).topology), known_instance())
    assert device.name == "mig-8f3e2b1c-0000-4000-8000-00000000000a" and device.allow_multiple_allocations
    shown = {name: value.text or value.number for name, value in device.attributes.items()}
    assert shown["type"] == "mig" and shown["profile"] == "1g.10gb" and shown["parentUUID"] == "GPU-0"
    assert shown["start"] == 6 and shown["profileId"] == 19 and shown["uuid"].startswith("MIG-")  # type: ignore[union-attr]
    assert not any("Group" in name for name in shown)


@pytest.mark.parametrize("uuid", ["MIG-GPU-1/0", "MIG-A", "mig-x", "MIG-" + "0" * 80, "MIG-a_b"])
def test_an_odd_uuid_gives_a_label_all_the_same(uuid: str) -> None:
    assert is_device_name(device_name(GpuUuid(uuid)))
    assert device_name(GpuUuid(uuid)) != device_name(GpuUuid(uuid.lower().replace("mig-", "MIG-")) + "x")


def test_exactly_a_profiles_memory_can_be_asked_for() -> None:
    """38.5 blocks: rounded down to blocks, what the user reads in nvidia-smi would never fit."""
    memory = static(on_demand(), known_instance())[0].capacity["memory"]
    policy = memory.request_policy
    assert memory.value == policy.default == "9856Mi" and policy.valid_range is not None
    assert policy.valid_range.step == "1Mi" and policy.valid_range.min == "256Mi"


def test_engines_are_for_selectors_also_those_that_are_missing() -> None:
    """A claim that named none would take all of them without a policy, and a second share would not fit."""
    for nvidia_names, prefix in ((False, ""), (True, "gpu.nvidia.com/")):
        capacity = static(on_demand(), known_instance(), nvidia_names=nvidia_names)[0].capacity
        counts = {name.removeprefix(prefix): one for name, one in capacity.items() if one.request_policy.valid_values}
        assert {name: one.value for name, one in counts.items()} == {
            "multiprocessors": "16",
            "copyEngines": "1",
            "decoders": "0",
            "encoders": "0",
            "jpegEngines": "0",
            "ofaEngines": "0",
        }
        assert all(
            msgspec.to_builtins(one.request_policy) == {"default": "0", "validValues": ["0"]} for one in counts.values()
        )


def test_by_nvidias_names_an_instance_has_what_its_specs_select_by() -> None:
    device = static(on_demand(), known_instance(), nvidia_names=True)[0]
    theirs = {name.removeprefix("gpu.nvidia.com/") for name in device.attributes if name.startswith("gpu.nvidia.com/")}
    names = "type uuid parentUUID profile productName architecture brand driverVersion cudaDriverVersion"
    assert theirs == {*names.split(), "cudaComputeCapability"}
    assert device.capacity["gpu.nvidia.com/memory"].value == "9856Mi"


@pytest.mark.parametrize("shares", ["memory", "4"])
def test_no_device_has_more_than_the_api_allows(shares: str) -> None:
    for nvidia_names in (False, True):
        policy = replace(POLICY, nvidia_names=nvidia_names, shares=shares)
        devices = slice_devices([known_instance()], on_demand(), {}, {}, policy)
        for device in [*devices, *places(published(on_demand(), policy=policy))]:
            assert len(device.attributes) + len(device.capacity) <= 32, device.name


@pytest.mark.parametrize(("product", "memory_mib"), PRODUCTS)
def test_slices_keep_to_the_apis_limits(product: str, memory_mib: int) -> None:
    contents = published(on_demand(16, product, memory_mib))
    names = [one.name for one in places(contents)]
    assert len(set(names)) == len(names) and all(map(is_device_name, names))
    sets = [found for one in contents for found in one.shared_counters]
    assert len(sets) == 16 and [len(one.shared_counters) for one in contents if one.shared_counters] == [8, 8]
    totals = {one.name: one.counters for one in sets}
    for one in contents:
        assert len(one.devices) <= 64 and not (one.devices and one.shared_counters)
        assert len({device.attributes["parentUUID"].text for device in one.devices}) <= 1
        for device in one.devices:
            [use] = device.consumes_counters
            assert use.counters.keys() <= totals[use.counter_set].keys() and len(totals[use.counter_set]) <= 32
            assert all(is_device_name(name) for name in use.counters)
            assert "taints" not in msgspec.to_builtins(device), "the API server returns no empty list"


def admitted(totals: Mapping[str, int], taken: Sequence[Mapping[str, int]]) -> bool:
    return all(sum(one.get(name, 0) for one in taken) <= most for name, most in totals.items())


def counted(found: GpuInventory) -> tuple[dict[str, int], dict[tuple[int, int], dict[str, int]]]:
    """The counters of the only GPU, and what each place takes of them."""
    contents = published(found)
    [of_gpu] = [one for content in contents for one in content.shared_counters]
    takes = {}
    for device in places(contents):
        profile, start = device.attributes["profileId"].number, device.attributes["start"].number
        assert profile is not None and start is not None
        takes[profile, start] = {name: int(one.value) for name, one in device.consumes_counters[0].counters.items()}
    return {name: int(one.value) for name, one in of_gpu.counters.items()}, takes


@pytest.mark.parametrize(("product", "memory_mib"), PRODUCTS)
def test_counters_say_exactly_what_can_be_had_together(product: str, memory_mib: int) -> None:
    """Every pair, and instances at random until nothing fits."""
    found = on_demand(1, product, memory_mib)
    [layout] = found.mig_layouts
    profiles = {one.id: one for one in layout.profiles}
    totals, takes = counted(found)
    assert takes.keys() == {(one.profile, one.start) for one in layout.placements}
    for (a, at_a), (b, at_b) in combinations(takes, 2):
        fits = has_room(layout.profiles, [(profiles[a], at_a)], profiles[b], at_b)
        assert admitted(totals, [takes[a, at_a], takes[b, at_b]]) == fits, (a, at_a, b, at_b)
    for seed in range(60):
        order = random.Random(seed).sample(sorted(takes), len(takes))
        placed: list[tuple[int, int]] = []
        for place in order:
            fits = has_room(layout.profiles, [(profiles[one], at) for one, at in placed], profiles[place[0]], place[1])
            assert admitted(totals, [takes[one] for one in (*placed, place)]) == fits, (placed, place)
            placed += [place] * fits


def test_more_than_the_memory_slices_admit_is_not_given_of_a_profile() -> None:
    """No engine shows why the driver admits two of four."""
    attributes = MigAttributes(memory_mib=4096, gi_slices=1, ci_slices=1)
    profile = MigProfile(id=70, name="1g.4gb+new", size=1, starts=(0, 1, 2, 3), most=2, attributes=attributes)
    found = on_demand()
    layout = replace(found.mig_layouts[0], slices=4, profiles=(profile,))
    totals, takes = counted(replace(found, mig_layouts=(layout,)))
    assert admitted(totals, [takes[70, 0], takes[70, 3]])
    assert not admitted(totals, [takes[70, 0], takes[70, 3], takes[70, 1]])


def test_static_devices_come_first_then_places_from_the_end_of_each_gpu() -> None:
    """The scheduler takes the first that fits: a small instance at the end leaves the large ones their places."""
    found = on_demand(2)
    contents = published(found, static(found, known_instance()))
    names = [one.name for one in places(contents)]
    assert names[0].startswith("mig-") and [len(one.devices) for one in contents] == [1, 25, 25, 0]
    assert contents[-1].shared_counters[0].name == device_name(uuid_of(0))
    of_first = [(one.attributes["profile"].text, one.attributes["start"].number) for one in contents[1].devices]
    assert [at for _, at in of_first] == sorted((at for _, at in of_first), reverse=True)
    assert of_first[:3] == [("1g.10gb", 6), ("1g.10gb+me", 6), ("1g.20gb", 6)] and of_first[-1] == ("7g.80gb", 0)
    assert {one.attributes["parentUUID"].text for one in contents[2].devices} == {uuid_of(1)}


@pytest.mark.parametrize("nvidia_names", [False, True])
def test_by_nvidias_names_a_place_is_given_whole(nvidia_names: bool) -> None:
    """The API server admits request policies for shareable devices alone."""
    for device in places(published(on_demand(), policy=replace(POLICY, nvidia_names=nvidia_names))):
        assert device.allow_multiple_allocations is not nvidia_names
        assert {one.request_policy is None for one in device.capacity.values()} == {nvidia_names}
        assert b"null" not in msgspec.json.encode(device)


def test_a_place_that_cannot_be_had_says_why_and_keeps_its_counters() -> None:
    """Without its device the scheduler would take the slices of who has it for free."""
    found = on_demand()
    profile = found.mig_layouts[0].profiles[0]
    place = MigPlacement(uuid_of(0), profile.id, 6)
    devices = places(published(found, blocked={place: "instance 0:2 (1g.10gb) of somebody else lies there"}))
    tainted = {one.name: one.taints for one in devices if one.taints}
    assert tainted.keys() == {placement_device_name(place, profile.name)}
    [taint] = tainted[placement_device_name(place, profile.name)]
    assert taint.key == "gpushare-agent/mig-conflict" and taint.effect == "NoSchedule"
    assert taint.value.startswith("instance-0-2-1g.10gb-of-somebody-else")
    layout = replace(found.mig_layouts[0], problem="the agent has not the right to make instances")
    refused = places(published(replace(found, mig_layouts=(layout,))))
    assert len(refused) == len(devices) and all(one.taints and one.consumes_counters for one in refused)


def test_places_have_the_health_of_their_instance_or_their_gpu() -> None:
    found = on_demand()
    profile = found.mig_layouts[0].profiles[0]
    name = placement_device_name(MigPlacement(uuid_of(0), profile.id, 6), profile.name)
    ill = replace(known_instance(), health=Health.UNHEALTHY, unhealthy_reason="Xid 94")
    of_one = [one for one in places(published(found, instances={name: ill})) if one.taints]
    assert [(one.name, one.taints[0].value) for one in of_one] == [(name, "Xid-94")]
    of_gpu = places(published(found, cordoned={uuid_of(0): "fan"}))
    assert {one.taints[0].key for one in of_gpu} == {"gpushare-agent/cordoned"}
    assert {one.taints[0].effect for one in of_gpu} == {"NoExecute"}


def test_a_gpu_without_places_has_no_slice() -> None:
    """What the driver does not tell, or tells of a GPU that is not in MIG mode any more."""
    found = on_demand(2)
    layouts = (replace(found.mig_layouts[0], profiles=()), replace(found.mig_layouts[1], parent=GpuUuid("GPU-x")))
    assert published(replace(found, mig_layouts=layouts)) == []


def test_places_are_made_once_and_their_taints_each_time() -> None:
    """Slices are compared at each allocation: of sixteen GPUs they would hold up the loop for a tenth of a second."""
    found = on_demand(2)
    first = [device for one in published(found) for device in one.devices]
    layout, place = found.mig_layouts[0], [*found.mig_layouts[0].placements][3]
    sick = replace(found.mig_partitioned[1], health=Health.UNHEALTHY, unhealthy_reason="Xid 79")
    changed = replace(
        found,
        mig_partitioned=(found.mig_partitioned[0], sick),
        mig_layouts=(replace(layout, problem="no"), found.mig_layouts[1]),
    )
    tainted = [device for one in published(changed, blocked={place: "no"}) for device in one.devices]
    assert all(device.taints for device in tainted)
    again = [device for one in published(found) for device in one.devices]
    assert [replace(device, taints=()) for device in tainted] == again
    assert all(one is other for one, other in zip(first, again, strict=True))
    newer = [device for one in published(replace(found, driver_version="590.1.0")) for device in one.devices]
    assert all(one.attributes != other.attributes for one, other in zip(first, newer, strict=True))
