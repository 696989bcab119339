"""The extender's plan of a pod is what the node's agent does with it, container by container."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.pods import ContainerKind, HostRequest, Pod
from gpushare_agent.core.placement.fragmentation import PodKind
from gpushare_agent.extender.decisions.pod_plan import (
    MAX_SCORE,
    SCORE_OF_NEXT,
    kind_of,
    plan_annotations,
    plan_pod,
    scores_of,
    signature_of,
)
from gpushare_agent.extender.values import ClusterPolicy, PodPlan
from tests.placement.support_placement import accounts
from tests.support_core import NAMES, container, inventory, pod

POLICY = ClusterPolicy(names=NAMES)


@given(st.lists(st.none() | st.floats(-1, 1), max_size=200))
def test_scores_are_ranks(costs: list[float | None]) -> None:
    """The cheapest nodes are far above all others; those keep their order in four steps."""
    scores = scores_of(costs)
    by_cost = sorted((cost, score) for cost, score in zip(costs, scores, strict=True) if cost is not None)
    assert all(score == 0 for cost, score in zip(costs, scores, strict=True) if cost is None)
    assert [score for _, score in by_cost] == sorted((score for _, score in by_cost), reverse=True)
    for cost, score in by_cost:
        assert (score == MAX_SCORE) if cost == by_cost[0][0] else (0 <= score <= SCORE_OF_NEXT)
    assert all(score == 0 for cost, score in by_cost[64:] if cost != by_cost[63][0])


def test_the_best_node_wins_over_three_criteria_of_the_scheduler() -> None:
    """NodeResourcesFit, NodeResourcesBalancedAllocation and ImageLocality give 100 each, the extender 10 times its score
    and its weight in manifests/extender."""
    weights = {
        extender["weight"]
        for path in (Path(__file__).parents[2] / "manifests/extender").glob("*/scheduler.yaml")
        for extender in yaml.safe_load(path.read_text(encoding="utf-8"))["extenders"]
    }
    best, second = scores_of([0.1, 0.2])
    assert weights and min(weights) * 10 * (best - second) > 3 * 100


def test_pods_of_about_a_size_are_of_a_kind() -> None:
    """Of several containers the one with the most GPUs counts. Whole GPUs have their memory, whatever they ask for
    together."""
    asked = signature_of(pod("p", container("a", 30, 10), container("b", 200, 150)), NAMES)
    kind = kind_of(asked, HostRequest(3900, 9000, ("T4",)), NAMES)
    assert kind == PodKind(cpu_milli=4096, memory_mib=10240, gpus=2, parts=100, models=("T4",))
    assert kind == kind_of(asked, HostRequest(3600, 8200, ("T4",)), NAMES)
    share = kind_of(signature_of(pod("p", container("a", 30, 40)), NAMES), HostRequest(), NAMES)
    assert share == PodKind(cpu_milli=0, memory_mib=0, gpus=1, parts=30, gpu_memory_mib=40 * 256)
    assert [share.parts_of(gpu_mib) for gpu_mib in (0, 81920, 24576, 8192)] == [30, 30, 42, 125]


def planned(owner: Pod, found: GpuInventory | None = None, policy: ClusterPolicy = POLICY) -> PodPlan | Refused:
    found = found or inventory()
    return plan_pod(owner, accounts(found), found.topology, policy)


def test_containers_that_fit_alone_may_not_fit_together() -> None:
    """Three shares of 60 cores need three GPUs."""
    owner = pod("p", *(container(f"c{i}", 60, 10, position=i) for i in range(3)))
    outcome = planned(owner)
    assert isinstance(outcome, Refused) and outcome.reason is RefusalReason.FRAGMENTED
    assert outcome.detail.startswith("container c2: ")
    three = planned(owner, inventory(3))
    assert isinstance(three, PodPlan) and [c.gpus for c in three.containers] == [(0,), (1,), (2,)]


def test_containers_with_gpus_are_reported_to_the_agent_by_their_position() -> None:
    """The names of main containers are gpu-admission's, by position in spec.containers."""
    init, plain = container("init", 30, 10, ContainerKind.INIT), container("plain", position=0)
    outcome = planned(pod("p", init, plain, container("pair", 200, 0, position=1)))
    assert isinstance(outcome, PodPlan)
    assert plan_annotations(outcome, "x-") == {"x-init-0": "0", "x-1": "0,1"}


@pytest.mark.parametrize(("cores", "blocks"), [(150, 0), (0, 5), (30, 0)])
def test_a_request_that_no_node_can_serve_is_invalid(cores: int, blocks: int) -> None:
    """The agent would refuse it with the same reason."""
    outcome = planned(pod("p", container(cores=cores, blocks=blocks)))
    assert isinstance(outcome, Refused) and outcome.reason is RefusalReason.INVALID_REQUEST
