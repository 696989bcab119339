"""The taint on a node with free GPUs: when it comes and goes, and what becomes of others' taints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.cluster.free_gpus_taint import EFFECT, KEY, plan_taint_patch
from gpushare_agent.agent.cluster.part import desired_free_gpus
from gpushare_agent.core.kube.objects import NodeJson, read_node_json
from gpushare_agent.core.model.allocations import Charge, ClaimShare
from gpushare_agent.core.model.gpus import Gpu, Health
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.placement.free_gpus import HYSTERESIS, FreeGpus, free_gpus
from gpushare_agent.core.settings.settings import Settings
from tests.dra.support_claims import ref_of
from tests.support_core import allocation, inventory, pod
from tests.support_json import undecoded
from tests.support_node import node_of

OURS = {"key": KEY, "effect": EFFECT}
OTHERS = {"key": "example.com/maintenance", "effect": "NoSchedule", "value": "x", "timeAdded": "2026-01-01T00:00:00Z"}


FIRST, SECOND = inventory(2, memory_mib=16384).gpus
FAILED = replace(FIRST, health=Health.UNHEALTHY)


def part_of(charges: Mapping[int, Charge], *gpus: Gpu) -> float:
    by_uuid = {GpuUuid(f"GPU-{index}"): charge for index, charge in charges.items()}
    return free_gpus(gpus, by_uuid, ResourceNames(), 0.5).part


def node(*taints: Mapping[str, object]) -> NodeJson:
    return read_node_json(undecoded({"spec": {"taints": taints}}))


def planned(node: NodeJson, part: float, above: float = 0.5) -> Any:
    return plan_taint_patch(node, FreeGpus(part=part, taint_above=above)).shown.get("taints")


@pytest.mark.parametrize(
    ("charges", "part"),
    [
        ({}, 1.0),
        ({0: Charge(cores=30, blocks=4)}, 0.85),
        ({0: Charge(cores=30, blocks=48)}, 0.625),
        ({0: Charge(cores=100, wholes=1)}, 0.5),
        ({0: Charge(units=16)}, 0.5),
    ],
)
def test_the_free_part_is_what_a_pod_can_have_of_cores_and_memory(charges: Mapping[int, Charge], part: float) -> None:
    assert part_of(charges, FIRST, SECOND) == pytest.approx(part)


def test_gpus_that_are_unhealthy_are_neither_free_nor_there() -> None:
    """A node of which all GPUs have failed has none to keep free."""
    assert part_of({1: Charge(cores=50)}, FAILED, SECOND) == 0.5
    assert part_of({}, FAILED) == 0.0


def test_it_follows_the_claims_and_leaves_out_gpus_that_nobody_may_use() -> None:
    """A node that serves claims alone: what claims have is in use. An excluded GPU is never in use, and not free."""
    gpus = inventory(3, memory_mib=16384)
    cache = AllocationCache()
    by_claim = ClaimShare(ref=ref_of(), shown_as="g", request="gpu", isolation="none")
    chosen = Settings(excluded_gpus=("2",), dra={"gpus": ("all",)}, facts={"taint_above": 0.25})
    node = node_of(gpus, settings=chosen, cache=cache)
    node.pods.replace_all([])
    assert desired_free_gpus(node) == FreeGpus(part=1.0, taint_above=0.25)
    used = replace(allocation(pod("p"), "main", [], []), charge=Charge(cores=100, wholes=1), claim=by_claim)
    cache.put(replace(used, gpus=tuple(gpu.uuid for gpu in gpus.gpus[:2])))
    assert desired_free_gpus(node) == FreeGpus(part=0.0, taint_above=0.25)


def test_the_taint_comes_above_the_threshold_and_goes_a_tenth_below_it() -> None:
    """Between them it stays as it is: a pod that ends and the next one write nothing."""
    assert planned(node(), 0.5) is None
    assert planned(node(), 0.51) == [OURS]
    assert planned(node(OURS), 0.41) is None
    assert planned(node(OURS), 0.4) == []


def test_at_0_any_free_core_keeps_it_and_at_1_it_is_taken_away() -> None:
    """Switched off, what an earlier setting left goes."""
    assert (planned(node(), 0.01, 0.0), planned(node(OURS), 0.0, 0.0)) == ([OURS], [])
    assert (planned(node(), 1.0, 1.0), planned(node(OURS), 1.0, 1.0)) == (None, [])


@given(part=st.floats(0, 1), above=st.floats(0, 1), has_ours=st.booleans())
def test_others_taints_stay_with_all_their_fields_and_a_second_look_changes_nothing(
    part: float, above: float, has_ours: bool
) -> None:
    before = [OTHERS, OURS] if has_ours else [OTHERS]
    after = planned(node(*before), part, above)
    taints = before if after is None else after
    assert taints[0] == OTHERS
    assert planned(node(*taints), part, above) is None
    if abs(part - above) > HYSTERESIS:
        assert (OURS in taints) == (part > above)


def test_taints_that_cannot_be_read_are_not_replaced() -> None:
    assert planned(read_node_json(undecoded({"spec": {"taints": "many"}})), 1.0) is None
