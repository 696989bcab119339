"""Whole-card placement on the known machines."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations

import pytest

from gpushare_agent.core.model.gpus import Link, LinkKind, Topology
from gpushare_agent.core.model.resources import Request
from gpushare_agent.core.placement import Placed, place
from gpushare_agent.core.placement.place import choose_linked, link_cost
from tests.gpus.support_gpus import BLOCKS, TOPOLOGY_NAMES, gpu, indexes_of, node, read_topology, set_cost


def whole(topology: Topology, cores: int, *, used: tuple[int, ...] = ()) -> tuple[int, ...]:
    answer = place(Request(cores=cores, blocks=0), node(topology, used=used), topology, share_policy="binpack")
    assert isinstance(answer, Placed), answer
    return indexes_of(answer.gpus)


def test_link_costs_are_in_the_documented_order() -> None:
    """More NVLinks are cheaper, any NVLink is cheaper than PIX, and so on outwards."""
    costs = [link_cost(Link(kind=LinkKind.NVLINK, nvlinks=count)) for count in range(36, 0, -1)]
    costs += [link_cost(Link(kind=kind)) for kind in LinkKind if kind > LinkKind.NVLINK]
    assert costs == sorted(set(costs))
    assert costs[0] > 0


def test_the_seven_p40_gpus_are_given_switch_by_switch() -> None:
    """300 cores take the switch of three; 400 then take the switch of four whole."""
    p40 = read_topology("p40-x7-two-switches")
    assert whole(p40, 300) == (0, 1, 2)
    assert whole(p40, 400, used=(0, 1, 2)) == (3, 4, 5, 6)
    assert whole(p40, 400) == (3, 4, 5, 6)
    assert whole(p40, 100) == (0,)
    assert whole(p40, 700) == tuple(range(7))


def test_v100_gpus_are_pairs_with_two_nvlinks_and_fully_linked_quads() -> None:
    """0 and 3 are the lowest pair with NV2; with 0 gone it is 1 and 2. Of all sets of four only two have no pair that SYS
    joins alone."""
    v100 = read_topology("v100-x8-cube-mesh")
    assert whole(v100, 200) == (0, 3)
    assert v100.link(0, 3) == Link(kind=LinkKind.NVLINK, nvlinks=2)
    assert whole(v100, 200, used=(0,)) == (1, 2)
    assert whole(v100, 400) == (0, 1, 2, 3)
    assert whole(v100, 400, used=(0,)) == (4, 5, 6, 7)


def test_a100_gpus_are_given_by_bridged_pairs_and_then_by_socket() -> None:
    """A pair is a bridged one; a single GPU comes from the pair that is broken up already."""
    a100 = read_topology("a100-pcie-x8-nvlink-pairs")
    assert whole(a100, 200, used=(0,)) == (2, 3)
    assert whole(a100, 400, used=(0,)) == (4, 5, 6, 7)
    assert whole(a100, 100, used=(4, 5, 6)) == (7,)
    assert whole(a100, 100, used=(0,)) == (1,)


def test_behind_an_nvswitch_the_lowest_free_gpus_are_as_good_as_any() -> None:
    """All pairs cost the same; a single GPU still comes from the socket with fewer left."""
    h100 = read_topology("h100-x8-nvswitch")
    assert whole(h100, 400, used=(1, 4)) == (0, 2, 3, 5)
    assert whole(h100, 100, used=(4,)) == (5,)


def test_t4_gpus_of_one_socket_stay_together() -> None:
    """NODE is cheaper than SYS."""
    t4 = read_topology("t4-x4-two-sockets")
    assert whole(t4, 200, used=(0,)) == (2, 3)
    assert whole(t4, 100, used=(0,)) == (1,)


def test_six_gpus_fill_the_socket_of_four_or_that_of_two() -> None:
    """Two GPUs are a PIX pair, first that of the socket of two; four are the socket; one comes from that of two."""
    six = read_topology("six-cards-pix-phb-soc")
    assert whole(six, 200) == (4, 5)
    assert whole(six, 200, used=(4,)) == (0, 1)
    assert whole(six, 200, used=(1, 4)) == (2, 3)
    assert whole(six, 400) == (0, 1, 2, 3)
    assert whole(six, 100) == (4,)


def test_of_equally_cheap_sets_the_branch_that_is_broken_up_is_taken() -> None:
    """Seven P40 at switches of three and four, with 3 and 4 in use: two GPUs leave the three, and the next three are one
    switch (6,000) and not spread over both (18,000)."""
    p40 = read_topology("p40-x7-two-switches")
    assert whole(p40, 200, used=(3, 4)) == (5, 6)
    assert whole(p40, 300, used=(3, 4, 5, 6)) == (0, 1, 2)
    assert set_cost(p40.links, (0, 1, 2)) == 6_000
    assert whole(p40, 200, used=(0,)) == (1, 2)


def test_fewer_pods_of_a_random_queue_are_spread_over_switches() -> None:
    """Pods of one to three P40 that come and go; beside ties that go to the lowest indexes."""
    p40 = read_topology("p40-x7-two-switches")

    def lowest(count: int, used: tuple[int, ...]) -> tuple[int, ...]:
        free = [index for index in range(7) if index not in used]
        return min(combinations(free, count), key=lambda one: (set_cost(p40.links, one), one))

    ours = spread_of_queue(lambda count, used: whole(p40, count * 100, used=used))
    assert ours < 0.85 * spread_of_queue(lowest)


def spread_of_queue(choose: Callable[[int, tuple[int, ...]], tuple[int, ...]]) -> int:
    chance, running, spread = random.Random(42), list[tuple[int, ...]](), 0
    for _ in range(2_000):
        count, used = chance.choice((2, 3)), tuple(index for gpus in running for index in gpus)
        if 7 - len(used) >= count:
            running.append(choose(count, used))
            spread += len({index < 3 for index in running[-1]}) == 2
        if running and (chance.random() < 0.5 or 7 - len(used) < count):
            running.pop(chance.randrange(len(running)))
    return spread


def test_a_single_gpu_can_be_given() -> None:
    """The smallest tree."""
    assert whole(read_topology("single-card"), 100) == (0,)


def test_a10_gpus_follow_the_deep_tree() -> None:
    """Two are a PIX pair, four a PXB quad, eight a socket; one comes from the most broken pair, level by level."""
    a10 = read_topology("a10-x16-deep-tree")
    assert whole(a10, 200, used=(0,)) == (2, 3)
    assert whole(a10, 400, used=(0, 5)) == (8, 9, 10, 11)
    assert whole(a10, 800, used=(3,)) == tuple(range(8, 16))
    assert whole(a10, 100, used=(13,)) == (12,)
    assert whole(a10, 100, used=(0, 8, 9, 12)) == (10,)
    assert whole(a10, 100, used=(0, 8, 9, 10, 12)) == (11,)


def test_of_equally_cheap_sets_the_lowest_indexes_win_also_against_the_greedy_start() -> None:
    """Here the greedy set (0,2,3,5,6), with which the search begins, costs as little as (0,1,3,5,6)."""
    rows = ["X BBBBAA", "BX CAABA", "BC XBAAA", "BABX ABB", "BAAAX CC", "ABABCX A", "AAABCAX "]
    kinds = {"A": LinkKind.PIX, "B": LinkKind.PXB, "C": LinkKind.PHB, "X": LinkKind.SELF}
    links = [[Link(kind=kinds[letter]) for letter in row.replace(" ", "")] for row in rows]
    found = choose_linked(links, [gpu(index, total=1, blocks=1) for index in range(7)], 5, must=frozenset())
    assert found is not None
    assert set_cost(links, (0, 2, 3, 5, 6)) == found.cost
    assert found.gpus == (0, 1, 3, 5, 6)


@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_every_request_on_every_machine_is_decided_exactly_in_few_steps(name: str) -> None:
    """All sizes, fresh and with random occupancy, tight on memory and not: exact, and within 600 steps of the search.

    A step takes some ten to twenty microseconds, so 600 of them are far below 50 ms; steps can be tested, times cannot.
    """
    topology = read_topology(name)
    size, choice = len(topology.links), random.Random(name)
    for free in [range(size), *(sorted(choice.sample(range(size), choice.randint(1, size))) for _ in range(60))]:
        gpus = [gpu(index, total=choice.choice([60, BLOCKS, 160])) for index in free]
        for count in range(1, len(free) + 1):
            most = sum(sorted(account.total_blocks for account in gpus)[-count:])
            for blocks in (0, most - 40, most):
                found = choose_linked(topology.links, gpus, count, blocks=blocks, must=frozenset())
                assert found is not None
                assert found.is_exact
                assert found.steps <= 600


def test_above_sixteen_free_gpus_a_set_is_still_found_in_bounded_steps() -> None:
    """64 GPUs in switches of eight: eight GPUs are one switch, and twenty are a set of twenty that fits."""
    pix, far, same = Link(kind=LinkKind.PIX), Link(kind=LinkKind.SYS), Link(kind=LinkKind.SELF)
    links = [[same if a == b else pix if a // 8 == b // 8 else far for b in range(64)] for a in range(64)]
    gpus = [gpu(index, total=60 if index < 40 else 96) for index in range(64)]
    eight = choose_linked(links, gpus, 8, must=frozenset({12}))
    assert eight is not None
    assert eight.gpus == tuple(range(8, 16))
    twenty = choose_linked(links, gpus, 20, blocks=20 * 96, must=frozenset())
    assert twenty is not None
    assert len(set(twenty.gpus)) == 20
    assert min(twenty.gpus) >= 40
    assert twenty.steps <= 1_000
