"""The short cuts of the simulation give what asking about every node each time would give."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.values import ClusterPolicy, Reservation
from gpushare_agent.simulation.schedulers import Candidates, ExtenderChooser, NoNode, Placed, Policy, nodes_per_try
from gpushare_agent.simulation.workload import PodMaker, Shape
from tests.simulation.support_simulation import NAMES, cluster_of, scheduler_of

SHAPES = [Shape(10, 8), Shape(50, 16), Shape(70, 40), Shape(100, 0), Shape(200, 0)]
STEPS = st.lists(st.tuples(st.sampled_from(SHAPES), st.booleans(), st.integers(0, 9)), max_size=40)


def test_each_try_goes_on_behind_the_last_one() -> None:
    """Four nodes by two: all of them come before one comes again."""
    candidates = Candidates("abcd")
    seen = []
    for _ in range(3):
        names = candidates.next(2)
        candidates.retain(names, names)
        seen.append(names)
    assert seen == [["a", "b"], ["c", "d"], ["a", "b"]]
    three = Candidates("abc")  # a part that reaches beyond the end goes on at the front
    three.retain(["a", "b"], three.next(2))
    assert three.next(2) == ["c", "a"]


def test_a_full_node_is_left_out_until_something_on_it_ends() -> None:
    """And stands at the end then; a node that is not eligible never comes in."""
    candidates = Candidates("abc")
    candidates.retain(candidates.next(2), ["b"])
    assert len(candidates) == 2
    candidates.add("a")
    candidates.add("a")
    candidates.add("z")
    assert sorted(candidates.next(9)) == ["a", "b", "c"]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans(), st.integers(1, 7)), max_size=60))
def test_no_node_with_room_is_ever_out_of_the_ring(steps: list[tuple[str, bool, int]]) -> None:
    """Nodes fill up and empty by chance; a search through the ring finds room exactly where there is some."""
    has_room = dict.fromkeys("abcdef", True)
    candidates = Candidates(has_room)
    for name, is_end, count in steps:
        if is_end:
            has_room[name] = True
            candidates.add(name)
        else:
            has_room[name] = False
        left, found = len(candidates), False
        while left > 0 and not found:
            names = candidates.next(count)
            left -= len(names)
            fitting = [one for one in names if has_room[one]]
            candidates.retain(names, fitting)
            found = bool(fitting)
        assert found == any(has_room.values())
        assert candidates.has_any(has_room.__getitem__) == any(has_room.values())


@settings(max_examples=50, deadline=None)
@given(STEPS, st.sampled_from([1, 2, 500]))
def test_no_node_means_that_the_extender_would_refuse_every_node(
    steps: Sequence[tuple[Shape, bool, int]], per_try: int
) -> None:
    """Played next to a cluster state of our own, which gets the same pods and is asked about all nodes."""
    cluster = cluster_of(1, 2, 2)
    scheduler, pods = scheduler_of(cluster, Policy.BINPACK, per_try=per_try), PodMaker(NAMES)
    state = ClusterState(policy=ClusterPolicy(names=NAMES))
    for node in cluster.nodes:
        state.put_node(node, 0.0)
    running: list[tuple[Placed, Shape]] = []
    for number, (shape, is_end, which) in enumerate(steps):
        if is_end and running:
            reservation, ended = running.pop(which % len(running))
            scheduler.end(reservation.pod_uid, ended, reservation.node)
            state.remove_pod(reservation.pod_uid)
            continue
        pod = pods.pod(f"p{number}", shape)
        fitting = state.filter(pod, None).fitting
        found = scheduler.place([(pod, shape)], 0.0)
        assert isinstance(found, NoNode) == (not fitting)
        if isinstance(found, list):
            (placed,) = found
            assert placed.node in fitting
            mirrored = state.reserve(pod, placed.node, 0.0)
            assert isinstance(mirrored, Reservation)
            assert state.gpus(placed.node) == scheduler.gpus(placed.node)
            running.append((placed, shape))


@settings(max_examples=50, deadline=None)
@given(STEPS)
def test_scores_that_were_kept_are_those_that_would_be_given_now(steps: Sequence[tuple[Shape, bool, int]]) -> None:
    """After any pods came and went, the best nodes are the best by a fresh answer."""
    cluster, pods = cluster_of(1, 2, 2, 4), PodMaker(NAMES)
    state = ClusterState(policy=ClusterPolicy(names=NAMES))
    for node in cluster.nodes:
        state.put_node(node, 0.0)
    chooser, names, running = ExtenderChooser(state), [node.name for node in cluster.nodes], []
    for number, (shape, is_end, which) in enumerate(steps):
        if is_end and running:
            uid, node_name = running.pop(which % len(running))
            state.remove_pod(uid)
            chooser.changed(node_name)
        pod = pods.pod(f"p{number}", shape)
        choice = chooser.choose(pod, shape, names)
        fitting = state.filter(pod, names).fitting
        scores = dict(state.prioritize(pod, fitting))
        assert list(choice.fitting) == fitting
        assert list(choice.best) == [name for name in fitting if scores[name] == max(scores.values())]
        if choice.best:
            state.reserve(pod, choice.best[0], 0.0)
            chooser.changed(choice.best[0])
            running.append((pod.uid, choice.best[0]))


def test_how_many_nodes_a_try_looks_at_is_kube_schedulers_rule() -> None:
    """All of up to 100; from half of them down to 5 % the more there are; or what is asked for, but 100."""
    assert [nodes_per_try(count) for count in (1, 100, 1_000, 5_000, 10_000, 20_000)] == [1, 100, 420, 500, 500, 1_000]
    assert nodes_per_try(10_000, 100) == 10_000
    assert nodes_per_try(1_000, 1) == 100
