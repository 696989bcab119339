"""The profile tables of products with MIG: against NVIDIA's names, against each other, and against what a GPU has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from gpushare_agent.agent.gpus.nvml.mig import profile_name
from gpushare_agent.core.formats.mig_profiles import has_room, mig_profiles, numbered_profiles
from gpushare_agent.core.model.mig import MigProfile
from tests.gpus.test_nvml_mig import PROFILES

MEMORY = {model: mib for model, (mib, _, _) in PROFILES.items()} | {
    "NVIDIA A100 80GB PCIe": 81920,
    "NVIDIA A800-SXM4-80GB": 81920,
    "NVIDIA H100 PCIe": 81559,
    "NVIDIA H200 NVL": 143771,
    "NVIDIA GH200 480GB": 97871,
}
Placed = tuple[MigProfile, int]


def engines(profile: MigProfile) -> tuple[int, ...]:
    """Memory, multiprocessors and media engines; the slices are in the placement."""
    memory, _, _, *rest = astuple(profile.attributes)
    return (memory, *rest)


def largest(profiles: Sequence[MigProfile]) -> MigProfile:
    return max(profiles, key=lambda one: one.size)


def placed_sets(
    profiles: Sequence[MigProfile], *, of: tuple[Placed, ...] = (), free_from: int = 0
) -> Iterator[tuple[Placed, ...]]:
    """Every set of disjoint placements that no profile is in more often than it can be."""
    yield of
    for profile in profiles:
        if sum(one is profile for one, _ in of) < profile.most:
            for start in profile.starts:
                if start >= free_from:
                    yield from placed_sets(profiles, of=(*of, (profile, start)), free_from=start + profile.size)


def is_within(sums: Sequence[int], whole: Sequence[int]) -> bool:
    return all(used <= there for used, there in zip(sums, whole, strict=True))


def fits(placed: tuple[Placed, ...], whole: MigProfile) -> bool:
    sums = [sum(values) for values in zip(*(engines(one) for one, _ in placed), strict=True)]
    return not sums or is_within(sums, engines(whole))


@pytest.mark.parametrize("model", PROFILES)
def test_profiles_have_nvidias_names(model: str) -> None:
    """Those that mig-parted and the user guide have, and those that the NVML driver makes of slices and memory: also with
    the driver's own part of the memory missing, whatever it is. Users ask for these names, and another one stays Pending."""
    memory_mib, names, slices = PROFILES[model]
    profiles = mig_profiles(model, memory_mib)
    by_name = {one.name: one for one in profiles}
    assert set(names.values()) <= by_name.keys()
    assert largest(profiles).size % slices == 0
    for own_slices, name in names.items():
        for missing in (0.0, 0.003, 0.02, 0.1):
            own = replace(by_name[name].attributes, memory_mib=int(memory_mib * own_slices / slices * (1 - missing)))
            assert profile_name(None, own, memory_mib) == name
    for one in profiles:
        assert one.name.replace(profile_name(None, one.attributes, memory_mib), "", 1) in (
            "", "+me", "+gfx", "-me", "+me.all"
        ), one.name  # fmt: skip


@pytest.mark.parametrize("model", MEMORY)
def test_a_table_contradicts_nothing(model: str) -> None:
    """IDs, names and numbers are unique; the numbers are those of nvidia-ml-py; no placement leaves the GPU."""
    numbered = numbered_profiles(model, MEMORY[model])
    profiles = mig_profiles(model, MEMORY[model])
    assert len({one.id for one in profiles}) == len({one.name for one in profiles}) == len(profiles)
    whole = largest(profiles)
    assert (whole.starts, whole.most) == ((0,), 1)
    assert whole.attributes.memory_mib < MEMORY[model]
    for number, one in numbered.items():
        assert number < pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT
        assert 0 < one.most <= len(one.starts)
        assert all(0 <= start <= whole.size - one.size for start in one.starts)
        assert is_within(engines(one), engines(whole)), one.name
    of_slices = {pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE: 1, pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE: 2}
    for number, computing in of_slices.items():
        assert numbered[number].attributes.gi_slices == computing
        assert numbered[number].name.startswith(f"{computing}g.")
    assert numbered[pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1].name.endswith("+me")
    # Every way of `most` exists.
    for one in profiles:
        assert any(len(placed) == one.most for placed in placed_sets([one])), one.name


@pytest.mark.parametrize("model", [model for model in MEMORY if model != "NVIDIA A30" and "RTX" not in model])
def test_with_seven_slices_a_free_place_has_its_engines(model: str) -> None:
    """Every set of placements that do not overlap fits: slices and counts say all."""
    profiles = mig_profiles(model, MEMORY[model])
    sets = list(placed_sets(profiles))
    assert len(sets) > 1000
    assert [placed for placed in sets if not fits(placed, largest(profiles))] == []


@pytest.mark.parametrize("model", ["NVIDIA A30", "NVIDIA RTX PRO 6000 Blackwell Server Edition"])
def test_with_four_slices_engines_run_out_first(model: str) -> None:
    """A `+me` of each size needs the one OFA twice: free memory slices are not enough there."""
    profiles = mig_profiles(model, MEMORY[model])
    refused = [placed for placed in placed_sets(profiles) if not fits(placed, largest(profiles))]
    assert refused
    assert all(any("me" in one.name for one, _ in placed) for placed in refused)


@given(name=st.text(max_size=20), memory_mib=st.integers(1, 4_194_304))
def test_an_unknown_product_is_scaled(name: str, memory_mib: int) -> None:
    """Whatever its size is; the instances have no more memory than the GPU, except where it has next to none."""
    profiles = mig_profiles(f"Some {name}", memory_mib)
    assert [one.id for one in profiles] == [19, 20, 15, 14, 9, 5, 0]
    assert all(1 <= one.attributes.memory_mib <= memory_mib for one in profiles)


def test_a_product_with_less_memory_than_it_has_is_scaled() -> None:
    """A setting that contradicts its name gives no instance with more memory than the GPU."""
    assert largest(mig_profiles("NVIDIA H100 80GB HBM3", 24576)).name == "7g.24gb"


@pytest.mark.parametrize("model", ["NVIDIA A30", "NVIDIA RTX PRO 6000 Blackwell Server Edition"])
def test_room_is_where_the_whole_set_fits(model: str) -> None:
    """From each set that fits, exactly the sets with one more are reached."""
    profiles = mig_profiles(model, MEMORY[model])
    sets = {frozenset((one.id, at) for one, at in placed): placed for placed in placed_sets(profiles)}
    fitting = {key for key, placed in sets.items() if fits(placed, largest(profiles))}
    for key in fitting:
        for one in profiles:
            for at in one.starts:
                is_new = (one.id, at) not in key
                assert has_room(profiles, sets[key], one, at) == (is_new and key | {(one.id, at)} in fitting)
