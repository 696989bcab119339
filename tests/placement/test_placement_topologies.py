"""Whole GPUs on the known machines."""

from __future__ import annotations

import random

import pytest

from gpushare_agent.core.model.gpus import Link, LinkKind
from gpushare_agent.core.model.resources import Request
from gpushare_agent.core.placement import Placed, place
from gpushare_agent.core.placement.place import choose_linked, link_cost
from tests.gpus.support_gpus import BLOCKS, TOPOLOGY_NAMES, gpu, indexes_of, node, read_topology, set_cost


@pytest.mark.parametrize(
    ("name", "count", "used", "expected"),
    [
        # By switch: of three, then of four. One GPU is of the branch with the fewest free ones.
        ("p40-x7-two-switches", 3, (), (0, 1, 2)),
        ("p40-x7-two-switches", 4, (), (3, 4, 5, 6)),
        ("p40-x7-two-switches", 2, (3, 4), (5, 6)),
        ("p40-x7-two-switches", 1, (), (0,)),
        ("p40-x7-two-switches", 1, (0,), (1,)),
        ("p40-x7-two-switches", 1, (3,), (0,)),
        ("p40-x7-two-switches", 1, (3, 4), (5,)),
        ("p40-x7-two-switches", 1, (0, 1, 2, 3), (4,)),
        # Pairs with two NVLinks, and the two sets of four that have no pair which SYS joins alone.
        ("v100-x8-cube-mesh", 2, (), (0, 3)),
        ("v100-x8-cube-mesh", 2, (0,), (1, 2)),
        ("v100-x8-cube-mesh", 4, (0,), (4, 5, 6, 7)),
        # Bridged pairs, then by socket.
        ("a100-pcie-x8-nvlink-pairs", 2, (0,), (2, 3)),
        ("a100-pcie-x8-nvlink-pairs", 4, (0,), (4, 5, 6, 7)),
        ("a100-pcie-x8-nvlink-pairs", 1, (4, 5, 6), (7,)),
        # All pairs cost the same; one is still of the socket with fewer left.
        ("h100-x8-nvswitch", 4, (1, 4), (0, 2, 3, 5)),
        ("h100-x8-nvswitch", 1, (4,), (5,)),
        ("t4-x4-two-sockets", 2, (0,), (2, 3)),
        # Two are a PIX pair, first that of the socket of two; four are the socket.
        ("six-cards-pix-phb-soc", 2, (), (4, 5)),
        ("six-cards-pix-phb-soc", 2, (1, 4), (2, 3)),
        ("six-cards-pix-phb-soc", 4, (), (0, 1, 2, 3)),
        ("single-card", 1, (), (0,)),
        # Two are a PIX pair, four a PXB quad, eight a socket; one is of the most broken pair, level by level.
        ("a10-x16-deep-tree", 2, (0,), (2, 3)),
        ("a10-x16-deep-tree", 4, (0, 5), (8, 9, 10, 11)),
        ("a10-x16-deep-tree", 8, (3,), tuple(range(8, 16))),
        ("a10-x16-deep-tree", 1, (0, 8, 9, 12), (10,)),
        ("a10-x16-deep-tree", 1, (0, 8, 9, 10, 12), (11,)),
    ],
    ids=str,
)
def test_whole_gpus_of_known_machines(name: str, count: int, used: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Of all machines and sets: test_placement_properties.py."""
    topology = read_topology(name)
    answer = place(Request(cores=100 * count), node(topology, used=used), topology, share_policy="binpack")
    assert isinstance(answer, Placed) and indexes_of(answer.gpus) == expected


def test_link_costs_are_in_the_documented_order() -> None:
    """More NVLinks are cheaper, any NVLink is cheaper than PIX, and so on outwards."""
    costs = [link_cost(Link(kind=LinkKind.NVLINK, nvlinks=count)) for count in range(36, 0, -1)]
    costs += [link_cost(Link(kind=kind)) for kind in LinkKind if kind > LinkKind.NVLINK]
    assert costs == sorted(set(costs))
    assert costs[0] > 0


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
