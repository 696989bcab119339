"""Devices that exclude each other by the counters of their pool, as partitions of a GPU do."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.core.formats.mig_profiles import has_room, mig_profiles
from gpushare_agent.core.model.mig import MigProfile
from gpushare_agent.core.placement.first_fit import (
    Capacity,
    ClaimRequests,
    Constraint,
    Counter,
    Device,
    Option,
    Share,
    allocate,
)

H100 = mig_profiles("NVIDIA H100 80GB HBM3", 81559)
A30 = mig_profiles("NVIDIA A30", 24576)
RTX_PRO_6000 = mig_profiles("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887)
PARENT = "d/parent"
NAMES = ("memory_mib", "copy_engines", "decoders", "encoders", "jpeg_engines", "ofa_engines")


def partitions(profiles: Sequence[MigProfile], gpus: int = 1, *, is_shared: bool = False) -> list[Device]:
    """Every place of each GPU; the small ones from its end."""
    whole = max(profiles, key=lambda one: one.size)

    def consumed(gpu: int, profile: MigProfile, start: int) -> dict[Counter, tuple[int, int]]:
        counters = {f"slice-{at}": (1, 1) for at in range(start, start + profile.size)}
        counters |= {name: (getattr(profile.attributes, name), getattr(whole.attributes, name)) for name in NAMES}
        return {("d", "node", f"gpu-{gpu}", name): amounts for name, amounts in counters.items()}

    return [
        Device(
            key=("d", "node", f"gpu-{gpu}-{profile.id}-{start}"),
            attributes={PARENT: f"gpu-{gpu}", "d/profile": profile.name, "place": (gpu, profile, start)},
            capacity={"d/cores": Capacity(value=100, default=100, steps=(1, 100, 1))} if is_shared else {},
            is_shared=is_shared,
            consumes=consumed(gpu, profile, start),
        )
        for gpu in range(gpus)
        for profile in profiles
        for start in reversed(profile.starts)
    ]


def wants(*profiles: str, constraints: tuple[Constraint, ...] = (), cores: int | None = None) -> ClaimRequests:
    def option(name: str) -> Option:
        return Option(
            name=name,
            selects=lambda device: device.attributes["d/profile"] == name,
            asked={} if cores is None else {"cores": cores},
        )

    return ClaimRequests(requests=tuple((option(name),) for name in profiles), constraints=constraints)


def names(found: list[list[Share]] | None) -> list[str] | None:
    return None if found is None else [share.device.key[2] for shares in found for share in shares]


def used_by(*devices: str) -> dict[tuple[str, str, str], dict[str, int]]:
    return {("d", "node", name): {} for name in devices}


SAME_GPU = (Constraint(attribute=PARENT, is_distinct=False),)


@given(st.integers(0, 2**32), st.sampled_from([H100, A30, RTX_PRO_6000]))
def test_partitions_in_use_never_overlap(seed: int, profiles: Sequence[MigProfile]) -> None:
    """Whatever comes and goes: what is allocated has room by the driver's own rule, and nothing is refused that has."""
    rng, devices = random.Random(seed), partitions(profiles, 2)
    used: dict[tuple[str, str, str], dict[str, int]] = {}
    by_key = {device.key: device.attributes["place"] for device in devices}
    for _ in range(30):
        if used and rng.random() < 0.4:
            del used[rng.choice(sorted(used))]
            continue
        profile = rng.choice(profiles)
        placed = [place for place in map(by_key.__getitem__, used) if isinstance(place, tuple)]
        free = [
            (gpu, start)
            for gpu in range(2)
            for start in reversed(profile.starts)
            if has_room(profiles, [(one, at) for of, one, at in placed if of == gpu], profile, start)
        ]
        found = names(allocate([wants(profile.name)], devices, used))
        assert (found is not None) or not free
        if found is not None:
            gpu, one, start = next(place for key, place in by_key.items() if key[2] == found[0])
            assert (gpu, start) == free[0] and one == profile
            used["d", "node", found[0]] = {}


def test_a_claim_of_three_profiles_lies_on_one_gpu() -> None:
    """What was tried on the first GPU in vain consumes nothing of it afterwards."""
    devices, claim = partitions(H100, 2), wants("4g.40gb", "2g.20gb", "1g.10gb", constraints=SAME_GPU)
    assert names(allocate([claim], devices, {})) == ["gpu-0-5-0", "gpu-0-14-4", "gpu-0-19-6"]
    assert names(allocate([claim], devices, used_by("gpu-0-19-6"))) == ["gpu-1-5-0", "gpu-1-14-4", "gpu-1-19-6"]
    second = allocate([claim, wants("3g.40gb")], devices, used_by("gpu-0-19-6"))
    assert names(second) == ["gpu-1-5-0", "gpu-1-14-4", "gpu-1-19-6", "gpu-0-9-0"]
    assert allocate([claim], devices, used_by("gpu-0-19-6", "gpu-1-9-4")) is None


def test_one_place_is_left_for_a_3g() -> None:
    """A small profile from the end leaves the start free, and a choice that left nothing is taken back."""
    devices = partitions(H100)
    assert names(allocate([wants("1g.10gb", "3g.40gb")], devices, {})) == ["gpu-0-19-6", "gpu-0-9-0"]
    assert names(allocate([wants("3g.40gb", "4g.40gb")], devices, {})) == ["gpu-0-9-4", "gpu-0-5-0"]
    # First fit takes the end for the double 1g; the 3g that follows lies at the start.
    assert allocate([wants("3g.40gb", "3g.40gb", "1g.10gb")], devices, {}) is None


@pytest.mark.parametrize("cores", [None, 60])
def test_a_shared_partition_consumes_its_counters_once(cores: int | None) -> None:
    """Two shares of it, in one claim or after each other; then it is full, and its neighbours stay free or not as before."""
    devices = partitions(H100, is_shared=True)
    assert names(allocate([wants("7g.80gb", "7g.80gb", cores=40)], devices, {})) == ["gpu-0-0-0"] * 2
    # Three of seven decoders, once: four are left.
    claim = [wants("3g.40gb", "3g.40gb", cores=50), wants("4g.40gb", cores=100)]
    assert names(allocate(claim, devices, {})) == ["gpu-0-9-4", "gpu-0-9-4", "gpu-0-5-0"]
    used = {("d", "node", "gpu-0-0-0"): {"d/cores": 60}}
    assert names(allocate([wants("7g.80gb", cores=40)], devices, used)) == ["gpu-0-0-0"]
    assert allocate([wants("7g.80gb", cores=cores)], devices, used) is None
    assert allocate([wants("1g.10gb", cores=1)], devices, used) is None


def test_a_device_that_is_not_shared_has_one_user() -> None:
    """Without counters too; it consumes nothing of its capacity, and an amount above it does not fit."""
    device = Device(key=("d", "node", "one"), capacity={"d/memory": Capacity(value=8, default=8)}, is_shared=False)
    one = ClaimRequests(requests=((Option(name="a", asked={"memory": 8}),),))
    found = allocate([one], [device], {})
    assert found is not None and found[0][0].consumed == {}
    assert allocate([one, one], [device], {}) is None
    assert allocate([one], [device], used_by("one")) is None
    assert allocate([ClaimRequests(requests=((Option(name="a", asked={"memory": 9}),),))], [device], {}) is None
