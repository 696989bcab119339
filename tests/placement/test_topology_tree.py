"""The topology tree: its shape on known machines, and what holds for every matrix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from gpushare_agent.core.model.gpus import Branch, Link, LinkKind, Topology
from gpushare_agent.core.placement.topology import build_topology, infer_pcie_kinds
from tests.gpus.support_gpus import TOPOLOGY_NAMES, read_topology, shape
from tests.placement.support_placement import random_topologies

TREES = {
    "p40-x7-two-switches": "PHB[PIX(0,1,2) PIX(3,4,5,6)]",
    "six-cards-pix-phb-soc": "SYS[PHB[PIX(0,1) PIX(2,3)] PIX(4,5)]",
    "t4-x4-two-sockets": "SYS[NODE(0,1) NODE(2,3)]",
    "single-card": "SELF(0)",
    "a100-pcie-x8-nvlink-pairs": "SYS[PHB[NVLINK(0,1) NVLINK(2,3)] PHB[NVLINK(4,5) NVLINK(6,7)]]",
    "v100-x8-cube-mesh": "SYS[NODE(0,1,2,3) NODE(4,5,6,7)]",
    "h100-x8-nvswitch": "SYS[NODE(0,1,2,3) NODE(4,5,6,7)]",
    "a10-x16-deep-tree": (
        "SYS[NODE[PXB[PIX(0,1) PIX(2,3)] PXB[PIX(4,5) PIX(6,7)]]"
        " NODE[PXB[PIX(8,9) PIX(10,11)] PXB[PIX(12,13) PIX(14,15)]]]"
    ),
}


def branches(branch: Branch) -> Iterator[Branch]:
    yield branch
    for child in branch.children:
        yield from branches(child)


@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_each_known_machine_has_its_tree(name: str) -> None:
    """Levels with a single branch are skipped; NVLink pairs are a level, an NVLink mesh is none."""
    assert shape(read_topology(name).root) == TREES[name]


def test_no_gpus_have_an_empty_tree() -> None:
    """A node whose driver shows nothing."""
    topology = build_topology((), ())
    assert topology.root.gpus == ()


def test_a_hidden_pcie_kind_is_that_of_the_best_path() -> None:
    """On the A100 machine NVLink hides the pair's PCIe kind; over either neighbour it is PHB."""
    links = read_topology("a100-pcie-x8-nvlink-pairs").links
    assert infer_pcie_kinds(links, [0] * 4 + [1] * 4)[0][1] is LinkKind.PHB


def test_a_hidden_pcie_kind_without_a_path_follows_numa() -> None:
    """Behind an NVSwitch every pair is hidden: one NUMA node is NODE, two are SYS, unknown ones are NODE."""
    links = read_topology("h100-x8-nvswitch").links
    kinds = infer_pcie_kinds(links, [0, 0, 1, 1, None, None, None, None])
    assert (kinds[0][1], kinds[0][2], kinds[4][5]) == (LinkKind.NODE, LinkKind.SYS, LinkKind.NODE)


def test_numa_narrows_what_a_path_says() -> None:
    """In the V100 mesh every path goes over SYS, but two GPUs of one node cannot be farther apart than NODE."""
    links = read_topology("v100-x8-cube-mesh").links
    assert infer_pcie_kinds(links, [0] * 4 + [1] * 4)[0][1] is LinkKind.NODE
    assert infer_pcie_kinds(links, [None] * 8)[0][1] is LinkKind.SYS


def test_a_given_pcie_matrix_is_used_instead_of_guessing() -> None:
    """NVML reports the PCIe kind besides NVLink; then two bridged GPUs of one switch stay in its branch."""
    pix, nvlink, same = LinkKind.PIX, Link(kind=LinkKind.NVLINK, nvlinks=2), Link(kind=LinkKind.SELF)
    far = Link(kind=LinkKind.SYS)
    links = [[same, nvlink, far], [nvlink, same, far], [far, far, same]]
    pcie = [
        [LinkKind.SELF, pix, LinkKind.SYS],
        [pix, LinkKind.SELF, LinkKind.SYS],
        [LinkKind.SYS] * 2 + [LinkKind.SELF],
    ]
    assert shape(build_topology(links, [None] * 3, pcie=pcie).root) == "SYS[NVLINK(0,1) SELF(2)]"


@given(random_topologies())
def test_every_tree_divides_its_gpus_into_finer_branches(topology: Topology) -> None:
    """Also for matrices that no machine has: children part their branch's GPUs, are at least two, and are closer."""
    assert topology.root.gpus == tuple(range(len(topology.links)))
    for branch in branches(topology.root):
        assert (branch.kind is LinkKind.SELF) == (len(branch.gpus) == 1)
        if branch.children:
            assert len(branch.children) >= 2
            assert sorted(gpu for child in branch.children for gpu in child.gpus) == list(branch.gpus)
            assert all(child.kind < branch.kind for child in branch.children)
            assert [child.gpus[0] for child in branch.children] == sorted(child.gpus[0] for child in branch.children)
