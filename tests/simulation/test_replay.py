"""A replay's rules, on clusters so small that every time can be worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_agent.core.model.errors import RefusalReason
from gpushare_agent.simulation.schedulers import NoNode, Policy
from gpushare_agent.simulation.workload import Arrival, Shape, Size, Workload
from tests.simulation.support_simulation import GPU_BLOCKS, arrival, cluster_of, replay, waited, workload_of

KNOWING_GPUS = [Policy.BINPACK, Policy.SPREAD, Policy.DRA]
HALVES = (arrival(0, 50, 100, name="a"), arrival(0, 50, 100, name="b"))


@pytest.mark.parametrize("policy", list(Policy))
def test_who_finds_room_starts_at_once(policy: Policy) -> None:
    """No waiting, no refusal, and all is over with the last pod's end."""
    result = replay(cluster_of(2), workload_of(arrival(0, 100, 10), arrival(5, 100, 10)), policy)
    assert waited(result) == [0, 0]
    assert result.took_s == 15
    assert not result.tally.no_node
    assert not result.tally.refusals


@pytest.mark.parametrize("policy", KNOWING_GPUS)
def test_with_the_extender_or_by_a_claim_a_whole_gpu_waits_for_two_halves(policy: Policy) -> None:
    """50 free on each of two GPUs: the pod starts when they end, and nobody is refused."""
    result = replay(cluster_of(2), workload_of(*HALVES, arrival(1, 100, 10)), policy, share_policy="spread")
    assert waited(result) == [0, 0, 99]
    assert result.tally.no_node == {NoNode.FRAGMENTED: 1}
    assert not result.tally.refusals


def test_without_the_extender_the_agent_refuses_it_and_its_job_tries_again() -> None:
    """Refused at 1, 11, 31 and 71 s; the next of its pods comes at 151 s and runs."""
    result = replay(cluster_of(2), workload_of(*HALVES, arrival(1, 100, 10)), Policy.AGENT_ONLY, share_policy="spread")
    assert waited(result) == [0, 0, 150]
    assert result.tally.refusals == {RefusalReason.FRAGMENTED: 4}
    assert result.tally.refused_pods == 1
    assert result.tally.gave_up == 0


@pytest.mark.parametrize("other", ["x", "a-1"])
def test_the_next_pod_of_a_job_is_none_of_the_file_whatever_that_is_called(other: str) -> None:
    """It is tried at 11, 31 and 71 s, while two pods leave 40 cores on each GPU, and starts at the fourth time."""
    pods = arrival(0, 60, 100, name=other), arrival(0, 60, 100, name="y"), arrival(1, 60, 10, name="a")
    result = replay(cluster_of(2), workload_of(*pods), Policy.AGENT_ONLY)
    assert waited(result) == [0, 0, 150]
    assert result.tally.refusals == {RefusalReason.FRAGMENTED: 4}


def test_a_job_whose_pods_are_always_refused_gives_up() -> None:
    """More memory than a GPU has, less than the node: kube-scheduler binds it each time."""
    share = arrival(0, 50, 10, blocks=GPU_BLOCKS + 1)
    result = replay(cluster_of(2), workload_of(share), Policy.AGENT_ONLY)
    assert result.ran == 0
    assert result.tally.gave_up == 1
    assert result.tally.refusals == {RefusalReason.NOT_ENOUGH_MEMORY: 7}


@pytest.mark.parametrize("policy", KNOWING_GPUS)
def test_what_no_node_could_ever_serve_is_reported_so_and_holds_nobody_up(policy: Policy) -> None:
    """More GPUs than a node has, a number of cores that is none of GPUs, and a share larger than every GPU."""
    impossible = [arrival(0, 300, 10), arrival(0, 150, 10), arrival(0, 50, 10, blocks=GPU_BLOCKS + 1)]
    result = replay(cluster_of(2), workload_of(*impossible, arrival(1, 100, 10)), policy)
    assert result.tally.no_node == {NoNode.NEVER: 3}
    assert waited(result) == [0]


@pytest.mark.parametrize("policy", list(Policy))
def test_a_full_cluster_lets_pods_wait_in_the_order_of_their_arrival(policy: Policy) -> None:
    """One GPU, four pods of 10 s each: they run one after the other."""
    pods = [arrival(at_s, 100, 10) for at_s in (0, 1, 2, 3)]
    result = replay(cluster_of(1), workload_of(*pods), policy)
    assert waited(result) == [0, 9, 18, 27]
    assert result.tally.no_node == {NoNode.FULL: 3}


def test_a_pod_is_not_tried_again_before_its_back_off_is_over() -> None:
    """The GPU is free 0.5 s after the try that failed; the pod gets it 1 s after that try."""
    result = replay(cluster_of(1), workload_of(arrival(0, 100, 10), arrival(9.5, 100, 1)), Policy.BINPACK)
    assert waited(result) == [0, 1]


def test_a_small_pod_goes_past_a_large_one() -> None:
    """kube-scheduler holds nobody back for a pod that cannot run yet."""
    pods = [arrival(0, 50, 20), arrival(1, 100, 5), arrival(2, 50, 5)]
    result = replay(cluster_of(1), workload_of(*pods), Policy.BINPACK)
    assert result.tally.waited_s[Size.SHARE] == [0, 0]
    assert result.tally.waited_s[Size.ONE_GPU] == [19]


def test_a_pod_runs_only_on_a_model_that_it_names() -> None:
    """The other node is free, and of no use to it."""
    wanting = Arrival(at_s=0, name="w", shape=Shape(100, 0, ("H100",)), duration_s=1)
    result = replay(cluster_of(1, model="T4"), workload_of(wanting), Policy.BINPACK)
    assert result.tally.no_node == {NoNode.NEVER: 1}
    result = replay(cluster_of(1, model="H100"), workload_of(wanting), Policy.BINPACK)
    assert waited(result) == [0]


def test_utilisation_is_a_mean_over_the_time_of_arrivals() -> None:
    """One of two GPUs for the whole time, the other for half of it; what runs on after the last arrival does not count."""
    pods = [arrival(0, 100, 1000), arrival(0, 100, 50, name="half"), arrival(100, 10, 1)]
    measured = replay(cluster_of(2), workload_of(*pods), Policy.BINPACK).measured
    assert measured.cores_part == pytest.approx(0.75)
    assert measured.memory_part == pytest.approx(0.75)
    assert measured.highest_cores_part == 1.0


SHAPES = st.sampled_from([(10, 8), (50, 16), (70, 40), (100, 0), (200, 0), (400, 0), (30, GPU_BLOCKS), (150, 0)])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), SHAPES, st.integers(0, 40)), max_size=40),
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4),
    st.sampled_from(list(Policy)),
    st.sampled_from([1, 2, 500]),
)
def test_every_pod_is_accounted_for_and_everything_is_given_back(
    pods: list[tuple[int, tuple[int, int], int]], gpus: list[int], policy: Policy, per_try: int
) -> None:
    """Each runs, is impossible, or is given up; nothing is ever in use beyond what there is, and nothing is at the end."""
    arrivals = [
        Arrival(at_s=float(at), name=f"p{number}", shape=Shape(*shape), duration_s=float(length))
        for number, (at, shape, length) in enumerate(pods)
    ]
    result = replay(cluster_of(*gpus), workload_of(*arrivals), policy, per_try=per_try)
    assert result.ran + result.tally.no_node[NoNode.NEVER] + result.tally.gave_up == len(arrivals)
    for sample in result.measured.samples:
        assert 0 <= sample.cores <= 1
        assert 0 <= sample.memory <= 1
        assert 0 <= sample.fragmentation <= 1 - sample.cores + 1e-9
    if policy is not Policy.AGENT_ONLY:
        assert not result.tally.refusals


def test_an_empty_workload_is_a_result_too() -> None:
    """Zeros, and no division by them."""
    result = replay(cluster_of(1), Workload(source="none", arrivals=()), Policy.BINPACK)
    assert result.ran == 0
    assert result.measured.cores_part == 0
    assert result.waits().p95_s == 0
