"""What holds for every placement, checked against counting through all possibilities."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.resources import Request
from gpushare_agent.core.placement import GpuAccount, Placed, place
from gpushare_agent.core.placement.place import SharePolicy, broken_first
from tests.gpus.support_gpus import gpu, indexes_of, set_cost, uuid_of
from tests.placement.support_placement import Machine, topologies

POLICIES = st.sampled_from(["binpack", "spread"])


@st.composite
def states(draw: st.DrawFn, index: int) -> GpuAccount:
    total = draw(st.sampled_from([8, 8, 16]))
    is_free = draw(st.booleans())
    return gpu(
        index,
        healthy=draw(st.sampled_from([True, True, True, False])),
        cores=100 if is_free else draw(st.sampled_from([0, 10, 50, 100])),
        blocks=total if is_free else draw(st.integers(0, total)),
        total=total,
    )


@st.composite
def nodes(draw: st.DrawFn) -> Machine:
    """A machine with some occupancy; now and then a GPU is missing from the list."""
    topology = draw(topologies)
    gpus = [draw(states(index)) for index in range(len(topology.links))]
    return topology, draw(st.sampled_from([gpus, gpus, gpus[1:]]))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Valid ones."""
    cores = draw(st.one_of(st.sampled_from([1, 10, 50, 99]), st.integers(1, 5).map(lambda count: count * 100)))
    blocks = [1, 4, 8, 9, 16, 20, 40]
    return Request(
        cores=cores,
        blocks=draw(st.sampled_from(blocks if cores < 100 else [0, *blocks])),
        hint=draw(st.one_of(st.just(()), st.lists(st.integers(-1, 8), max_size=4).map(tuple))),
        must_gpus=draw(st.one_of(st.just(()), st.lists(st.integers(0, 8).map(uuid_of), max_size=2).map(tuple))),
    )


def feasible_sets(request: Request, gpus: list[GpuAccount]) -> list[tuple[GpuAccount, ...]]:
    """All sets of GPUs that could be given, written down straight from the rules."""
    if request.cores < 100:
        sets = [
            (c,) for c in gpus if c.is_healthy and c.free_cores >= request.cores and c.free_blocks >= request.blocks
        ]
    else:
        free = [c for c in gpus if c.is_healthy and c.free_cores == 100 and c.free_blocks == c.total_blocks]
        free.sort(key=lambda c: c.index)
        sets = [
            chosen
            for chosen in combinations(free, request.cores // 100)
            if sum(c.total_blocks for c in chosen) >= request.blocks
        ]
    return [chosen for chosen in sets if set(request.must_gpus) <= {c.uuid for c in chosen}]


@given(nodes(), requests(), POLICIES)
def test_what_is_placed_is_feasible_and_what_is_refused_is_not(
    machine: Machine, request: Request, share_policy: SharePolicy
) -> None:
    """Never an unhealthy GPU, never more than is free, never a refusal while anything would fit."""
    topology, gpus = machine
    feasible = [tuple(c.uuid for c in chosen) for chosen in feasible_sets(request, gpus)]
    answer = place(request, gpus, topology, share_policy=share_policy)
    if isinstance(answer, Placed):
        assert answer.gpus in feasible
    else:
        assert feasible == []


@given(nodes(), requests(), POLICIES, st.randoms(use_true_random=False))
def test_the_order_of_the_gpus_changes_nothing(
    machine: Machine, request: Request, share_policy: SharePolicy, choice: object
) -> None:
    """The same GPUs in any order, asked twice, give the same answer to the letter."""
    topology, gpus = machine
    shuffled = list(gpus)
    choice.shuffle(shuffled)  # type: ignore[attr-defined]
    first = place(request, gpus, topology, share_policy=share_policy)
    assert place(request, shuffled, topology, share_policy=share_policy) == first
    assert place(request, gpus, topology, share_policy=share_policy) == first


@given(nodes(), requests())
def test_several_whole_gpus_have_the_least_total_cost(machine: Machine, request: Request) -> None:
    """No feasible set is cheaper, and of the cheapest it is the one whose branches are broken up most."""
    topology, gpus = machine
    order = [gpu.index for gpu in broken_first(topology.root, gpus, [gpu for gpu in gpus if gpu.is_free])]
    answer = place(request, gpus, topology, share_policy="binpack")
    if not isinstance(answer, Placed) or answer.policy not in ("link", "must-include") or request.cores < 200:
        return
    every = [tuple(c.index for c in chosen) for chosen in feasible_sets(request, gpus)]
    least = min(every, key=lambda one: (set_cost(topology.links, one), sorted(map(order.index, one))))
    assert indexes_of(answer.gpus) == least


@given(nodes(), requests(), POLICIES)
def test_a_share_follows_its_policy(machine: Machine, request: Request, share_policy: SharePolicy) -> None:
    """Binpack takes the fullest GPU that fits and spread the emptiest: by cores, then by memory, then the lowest index."""
    topology, gpus = machine
    answer = place(request, gpus, topology, share_policy=share_policy)
    if not isinstance(answer, Placed) or answer.policy != "share":
        return
    sign = 1 if share_policy == "binpack" else -1
    fitting = [one for (one,) in feasible_sets(request, gpus)]
    assert answer.gpus == (min(fitting, key=lambda c: (sign * c.free_cores, sign * c.free_blocks, c.index)).uuid,)


@given(nodes(), requests())
def test_a_hint_is_followed_exactly_when_it_is_feasible(machine: Machine, request: Request) -> None:
    """Feasible hints decide (must-include of a share decides before); others leave the answer as without any."""
    topology, gpus = machine
    if request.cores < 100 and request.must_gpus:
        return
    answer = place(request, gpus, topology, share_policy="binpack")
    every = [tuple(c.index for c in chosen) for chosen in feasible_sets(request, gpus)]
    if len(set(request.hint)) == len(request.hint) and tuple(sorted(request.hint)) in every:
        assert isinstance(answer, Placed)
        assert indexes_of(answer.gpus) == tuple(sorted(request.hint))
    else:
        plain = Request(cores=request.cores, blocks=request.blocks, must_gpus=request.must_gpus)
        assert answer == place(plain, gpus, topology, share_policy="binpack")


@given(nodes(), requests())
def test_fragmented_is_said_only_where_the_sum_would_do(machine: Machine, request: Request) -> None:
    """A user who reads Fragmented knows that repacking would help."""
    topology, gpus = machine
    answer = place(request, gpus, topology, share_policy="binpack")
    if isinstance(answer, Refused) and answer.reason is RefusalReason.FRAGMENTED:
        assert sum(c.free_cores for c in gpus if c.is_healthy) >= request.cores
