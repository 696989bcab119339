"""Which front end has a GPU: the setting, and what still uses it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.node import GpuSplit, gpu_split, plugins_devices, plugins_inventory
from gpushare_agent.core.model.allocations import Allocation, ClaimShare
from gpushare_agent.core.model.names import GpuUuid
from tests.dra.support_claims import ref_of
from tests.support_core import allocation, container, ids, inventory, mig_instance, pod

GPUS = inventory(4)


def by_plugin(gpu: int) -> Allocation:
    return allocation(pod("p", container("main", 10)), "main", ids(gpu, range(10)), [])


def by_claim(gpu: int) -> Allocation:
    share = ClaimShare(ref=ref_of(), shown_as="g", request="gpu", isolation="none")
    return replace(by_plugin(gpu), claim=share)


def claimable(found: GpuSplit) -> list[str]:
    return sorted(found.claimable)


def plugins(found: GpuSplit) -> list[str]:
    return sorted(gpu.uuid for gpu in plugins_devices(GPUS, found).gpus)


@pytest.mark.parametrize(
    ("chosen", "claimed"),
    [
        ((), []),
        (("all",), ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]),
        (("1", "GPU-3"), ["GPU-1", "GPU-3"]),
        (("Test",), ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]),
        (("7", "GPU-9"), []),
    ],
)
def test_a_gpu_is_one_front_ends(chosen: Sequence[str], claimed: list[str]) -> None:
    """By all, index, UUID or model."""
    found = gpu_split(chosen, GPUS.gpus, [])
    assert claimable(found) == claimed
    assert plugins(found) == sorted({"GPU-0", "GPU-1", "GPU-2", "GPU-3"} - set(claimed))


def test_a_gpu_in_use_is_offered_by_neither_until_it_is_free() -> None:
    """GPU 0 goes to claims and a plugin's container is on it; GPU 1 goes back and a claim is on it."""
    used = gpu_split(("0",), GPUS.gpus, [by_plugin(0), by_claim(1)])
    assert claimable(used) == [] and plugins(used) == ["GPU-2", "GPU-3"]
    free = gpu_split(("0",), GPUS.gpus, [])
    assert claimable(free) == ["GPU-0"] and plugins(free) == ["GPU-1", "GPU-2", "GPU-3"]


def test_claims_keep_their_gpus_when_the_setting_is_taken_away() -> None:
    assert plugins(gpu_split((), GPUS.gpus, [by_claim(2)])) == ["GPU-0", "GPU-1", "GPU-3"]


def test_admission_sees_every_gpu_in_its_place_with_the_reason() -> None:
    """The topology's rows are indexes."""
    seen = plugins_inventory(GPUS, gpu_split(("0",), GPUS.gpus, []))
    assert [gpu.is_healthy for gpu in seen.gpus] == [False, True, True, True]
    assert "dra.gpus" in seen.by_uuid()[GpuUuid("GPU-0")].unhealthy_reason


@pytest.mark.parametrize("excluded", ["2", "GPU-2", "Te*"])
def test_an_excluded_gpu_is_nobodys(excluded: str) -> None:
    """By index, UUID or model, also where the setting dra.gpus names it."""
    found = gpu_split(("all",), GPUS.gpus, [], (excluded,))
    assert "GPU-2" not in found.claimable and "GPU-2" not in plugins(found)
    assert "excluded_gpus" in dict(found.not_plugins)[GpuUuid("GPU-2")]


def test_mig_instances_follow_the_setting_as_gpus_do() -> None:
    """And all of a GPU on which instances are made on demand are claims'."""
    instance = mig_instance(4, 1, 0)
    assert claimable(gpu_split(("all",), [GPUS.gpus[0], instance], [])) == ["GPU-0", "MIG-4"]
    assert claimable(gpu_split((), [GPUS.gpus[0], instance], [])) == []
    found = gpu_split((), [GPUS.gpus[0], instance], [], on_demand=("all",))
    assert claimable(found) == ["MIG-4"]
    assert "mig.on_demand" in dict(found.not_plugins)[instance.uuid]
