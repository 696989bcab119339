"""The topology tree as gpu-manager's tools read it (observability/display.py)."""

from __future__ import annotations

import re

from msgspec.structs import replace

from gpushare_agent.agent.observability.display import graph_text
from gpushare_agent.core.model.names import MIB
from tests.gpus.support_gpus import read_topology
from tests.observability.support_usage import UUIDS, allocation, facts, inventory, key_of, snapshot

LINE = re.compile(
    r"(?:\|   )*\|---(\w+) \((?:aval: (\d+), )?pids: \[[\d ]*\], usedMemory: \d+, totalMemory: (\d+), "
    r"allocatableCores: (\d+), allocatableMemory: \d+\)(?: cost: (\d+))?"
)
"""printNode of gpu-manager's pkg/device/nvidia/tree.go; `cost` is ours."""


def test_each_branch_of_the_graph_has_how_many_of_its_gpus_are_free() -> None:
    """gpu-manager's `aval`, and its number behind ROOT: a GPU that is cordoned is no whole one for a pod."""
    nothing = snapshot()
    count = len(nothing.inventory.gpus)
    cordoned = snapshot(cordoned={UUIDS[0]: "repair"})
    taken = snapshot(facts(allocation(key_of(1), (1,), cores=30, blocks=4)))
    for seen, free in ((nothing, count), (cordoned, count - 1), (taken, count - 1)):
        first, second, *_ = graph_text(seen).splitlines()
        assert first == f"ROOT:{free}" and f"(aval: {free}, " in second


def test_each_branch_of_the_graph_has_the_cost_of_its_dearest_pair() -> None:
    """The seven P40 that the tree was first drawn of: two switches below a host bridge. What can be allocated
    stands with the GPUs, for programs that add up all lines."""
    seven = replace(inventory(7), topology=read_topology("p40-x7-two-switches"))
    root, *lines = graph_text(snapshot(gpus=seven)).splitlines()
    found = [LINE.fullmatch(line) for line in lines]
    assert root == "ROOT:7" and None not in found
    rows = [match.groups() for match in found if match]
    memory = seven.gpus[0].memory_mib * MIB
    switches = [row for row in rows if row[0] == "PIX"]
    assert rows[0] == ("PHB", "7", str(7 * memory), "0", "8000")
    assert switches == [("PIX", "3", str(3 * memory), "0", "2000"), ("PIX", "4", str(4 * memory), "0", "2000")]
    assert [row for row in rows if row[0].startswith("GPU")] == [
        (f"GPU{index}", None, str(memory), "100", None) for index in range(7)
    ]


def test_a_branch_whose_gpus_have_nvlinks_costs_what_placement_counts() -> None:
    """Of the eight V100 the four of a quad are behind one host bridge or NUMA node, and all pairs in it have NVLinks."""
    mesh = replace(inventory(8), topology=read_topology("v100-x8-cube-mesh"))
    costs = [
        int(match[5])
        for line in graph_text(snapshot(gpus=mesh)).splitlines()
        if (match := LINE.fullmatch(line)) and match[5]
    ]
    assert costs[0] == 32_000 and min(costs) < 2_000
