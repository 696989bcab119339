"""Reading a Node for the scheduler extender: what the agent writes comes back, and anything else does no harm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.cluster.node_facts import gpus_annotation
from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.gpus import Gpu, GpuInventory, Health, Link, LinkKind
from gpushare_agent.core.model.names import VCORE_RESOURCE, VMEMORY_RESOURCE, GpuUuid
from gpushare_agent.core.model.resources import Request, ResourceNames
from gpushare_agent.core.node_report.annotations import ALLOCATIONS_ANNOTATION, GPUS_ANNOTATION
from gpushare_agent.core.placement import Placed, place
from gpushare_agent.core.placement.topology import build_topology, parse_topology
from gpushare_agent.extender.decisions.ledger import NodeLedger
from gpushare_agent.extender.objects import MAX_GPUS, NodeReading
from gpushare_agent.extender.values import ClusterNode
from tests.extender.support_extender import MODEL_LABEL, POOL_LABEL, READ_NODE
from tests.gpus.support_gpus import TOPOLOGY_NAMES, topology_text
from tests.support_core import GPU_MEM_NAMES, NAMES, mig_instance
from tests.support_json import any_json, undecoded

COUNTS = {VCORE_RESOURCE: "400", VMEMORY_RESOURCE: "384"}
LINKS = [["X", "PIX"], ["PIX", "X"]]


def raw_gpu(index: int, /, **fields: Any) -> dict[str, Any]:
    reported = {"index": index, "uuid": f"GPU-{index}", "name": "M40", "memory_mib": 24576, "is_healthy": True}
    return {**reported, "numa": 0, "links": LINKS[index] if index < len(LINKS) else [], **fields}


def gpus_text(*gpus: Any, **fields: Any) -> str:
    return json.dumps({"schema": 1, "memory_block_mib": 256, "gpus": list(gpus), **fields})


def held_text(held: Any, **fields: Any) -> str:
    return json.dumps({"schema": 1, "allocations": held, **fields})


def raw_node(
    gpus: object = None,
    held: object = None,
    *,
    allocatable: Mapping[str, Any] | None = None,
    labels: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    reported = {GPUS_ANNOTATION: gpus, ALLOCATIONS_ANNOTATION: held}
    return {
        "metadata": {
            "name": "n1",
            "labels": labels if labels is not None else {MODEL_LABEL: "M40", POOL_LABEL: "public"},
            "annotations": {name: text for name, text in reported.items() if text is not None},
        },
        "status": {"capacity": COUNTS, "allocatable": COUNTS if allocatable is None else allocatable},
    }


def read(raw: Mapping[str, Any], names: ResourceNames = NAMES) -> NodeReading:
    return READ_NODE(undecoded(raw), names=names)


def node_of(raw: Mapping[str, Any], names: ResourceNames = NAMES) -> ClusterNode:
    reading = read(raw, names)
    assert reading.node is not None
    assert reading.problem == ""
    return reading.node


def inventory(name: str) -> GpuInventory:
    """The GPUs of a machine whose topology text is a sample."""
    parsed = parse_topology(topology_text(name))
    gpus = tuple(
        Gpu(index=i, minor=i, uuid=GpuUuid(f"GPU-{i}"), bus_id="", name="M40", memory_mib=24576, numa_node=numa)
        for i, numa in enumerate(parsed.numa)
    )
    return GpuInventory(gpus=gpus, topology=build_topology(parsed.links, parsed.numa))


# --- what the agent reports ---


@pytest.mark.parametrize("name", TOPOLOGY_NAMES)
def test_the_gpus_and_links_that_the_agent_writes_are_read_back(name: str) -> None:
    """Writer and reader agree, the tree over the links too: placement walks it."""
    found = inventory(name)
    node = node_of(raw_node(gpus_annotation(found, cordoned={}, memory_block_mib=256)))
    assert [(c.index, c.uuid, c.memory_mib, c.is_healthy) for c in node.gpus] == [
        (c.index, c.uuid, c.memory_mib, True) for c in found.gpus
    ]
    assert node.topology == found.topology
    assert (node.name, node.model, node.pool, node.is_exact, node.allocated) == ("n1", "M40", "public", True, None)


@pytest.mark.parametrize("takes_shares", [True, False])
def test_mig_instances_are_no_whole_gpus(takes_shares: bool) -> None:
    """They take no share at all where the node's isolation keeps none there."""
    found = replace(inventory(TOPOLOGY_NAMES[0]), gpus=(mig_instance(0, 9, 0), mig_instance(1, 9, 1)))
    text = gpus_annotation(found, cordoned={}, memory_block_mib=256, shares_in_mig=takes_shares)
    gpus = NodeLedger(node_of(raw_node(text)), NAMES).gpus
    topology = build_topology([[Link(kind=LinkKind.SELF)] * 2] * 2, [None, None])
    share, whole = (
        place(Request(cores=cores, blocks=1), gpus, topology, share_policy="binpack") for cores in (30, 100)
    )
    assert isinstance(share, Placed) == takes_shares
    assert isinstance(whole, Refused)


def test_unhealthy_and_cordoned_gpus_are_not_healthy() -> None:
    """Neither takes new pods; both keep their place."""
    text = gpus_text(raw_gpu(0, is_healthy=False), raw_gpu(1, cordoned=True))
    assert [gpu.is_healthy for gpu in node_of(raw_node(text)).gpus] == [False, False]


def test_gpus_are_sorted_by_index_and_links_follow_the_list() -> None:
    """Whatever order the list has; a gap in the indexes is far from all."""
    text = gpus_text(
        raw_gpu(2, links=["X", "NV2"], numa=1), raw_gpu(0, links=["NV2", "X"], numa=1), memory_block_mib=256
    )
    node = node_of(raw_node(text))
    assert [gpu.index for gpu in node.gpus] == [0, 2]
    assert (node.topology.link(0, 2).kind, node.topology.link(0, 2).nvlinks) == (LinkKind.NVLINK, 2)
    assert node.topology.link(0, 1).kind is LinkKind.SYS
    assert len(node.topology.links) == 3


def test_nodes_of_one_build_share_their_topology() -> None:
    """Thousands of nodes are alike."""
    first = node_of(raw_node(gpus_text(raw_gpu(0), raw_gpu(1))))
    second = node_of(raw_node(gpus_text(raw_gpu(0, uuid="GPU-a"), raw_gpu(1, uuid="GPU-b"))))
    assert first.topology is second.topology


def test_a_gpu_without_a_uuid_gets_one_of_its_own() -> None:
    """Placement distinguishes GPUs by it; one that fell off before it was named has none."""
    gpus = node_of(raw_node(gpus_text(raw_gpu(0, uuid=""), raw_gpu(1, uuid="")))).gpus
    assert len({gpu.uuid for gpu in gpus}) == 2


def test_the_gpus_of_a_node_that_offers_nothing_now_take_no_pod() -> None:
    """The agent is away, or the kubelet has just started: whoever is bound there is rejected. What is held stays."""
    raw = raw_node(
        gpus_text(raw_gpu(0), raw_gpu(1)), held_text({"u": {"1": [30]}}), allocatable={**COUNTS, VCORE_RESOURCE: "0"}
    )
    node = node_of(raw)
    assert [gpu.is_healthy for gpu in node.gpus] == [False, False]
    assert node.allocated == {"u": {1: Charge(cores=30)}}
    assert {gpu.unhealthy_reason for gpu in node.gpus} == {
        "the kubelet offers no GPU of this node now: does its agent run?"
    }


def test_why_a_gpu_is_unhealthy_is_read_back() -> None:
    """Of GPUs with something wrong themselves: a cordon is no such reason. It is cut, and a healthy GPU has none."""
    found = inventory(TOPOLOGY_NAMES[0])
    first, second, *others = found.gpus
    ill = replace(
        found, gpus=(replace(first, health=Health.UNHEALTHY), replace(second, health=Health.UNHEALTHY), *others)
    )
    text = gpus_annotation(
        ill, cordoned={second.uuid: True}, memory_block_mib=256, unhealthy={first.uuid: "Xid 79 " + "x" * 500}
    )
    gpus = node_of(raw_node(text)).gpus
    assert [gpu.unhealthy_reason for gpu in gpus[:3]] == ["Xid 79 " + "x" * 249, "", ""]
    for odd in (raw_gpu(0, reason=["x"], is_healthy=False), raw_gpu(0, reason="of before")):
        assert node_of(raw_node(gpus_text(odd, raw_gpu(1)))).gpus[0].unhealthy_reason == ""


@pytest.mark.parametrize(
    ("spec", "conditions", "is_cordoned", "is_ready"),
    [
        ({}, [], False, True),
        ({"unschedulable": True}, [{"type": "Ready", "status": "True"}], True, True),
        ({"unschedulable": "yes"}, [{"type": "Ready", "status": "Unknown"}, 3], False, False),
        (None, {"type": "Ready", "status": "False"}, False, True),
    ],
)
def test_a_nodes_cordon_and_readiness(spec: object, conditions: object, *, is_cordoned: bool, is_ready: bool) -> None:
    """As kubectl shows them; garbage says nothing. Also of a node that does not report its GPUs."""
    for text in (gpus_text(raw_gpu(0), raw_gpu(1)), None):
        raw = raw_node(text)
        raw |= {"spec": spec}
        raw["status"] = {**raw["status"], "conditions": conditions}
        node = node_of(raw)
        assert (node.is_cordoned, node.is_ready) == (is_cordoned, is_ready)


@pytest.mark.parametrize("key", ["gpus", "other"])
def test_a_node_that_never_offered_anything_of_ours_is_left_out(key: str) -> None:
    """Also where an annotation outlived the agent."""
    raw = raw_node(gpus_text(raw_gpu(0, links=["X"])) if key == "gpus" else None)
    raw["status"] = {"capacity": {"cpu": "8"}, "allocatable": {"cpu": "8"}}
    assert read(raw) == NodeReading(node=None)


# --- what is held ---


def test_zeros_at_the_end_are_left_out() -> None:
    """Cores, blocks, units, whole; a pod that holds no GPU holds nothing."""
    text = held_text({"b": {"1": [30, 16], "0": [100, 0, 0, 1]}, "c": {"0": [0, 0, 6]}, "d": {}, "a": {"0": []}})
    assert node_of(raw_node(gpus_text(raw_gpu(0), raw_gpu(1)), text)).allocated == {
        "a": {0: Charge()},
        "b": {0: Charge(cores=100, wholes=1), 1: Charge(cores=30, blocks=16)},
        "c": {0: Charge(units=6)},
        "d": {},
    }


def test_a_list_of_pods_that_the_agent_had_to_cut_is_taken_as_it_is() -> None:
    """Those that it does not name are charged by what they ask for."""
    text = held_text({"u": {"0": [30]}}, truncated=True)
    assert node_of(raw_node(gpus_text(raw_gpu(0), raw_gpu(1)), text)).allocated == {"u": {0: Charge(cores=30)}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        (" " * 300_000, "more than 262144"),
        ('{"allocations": {}}', "missing required field `schema`"),
        (held_text({}, schema=2), "at `$.schema`"),
        (held_text({f"u{n}": {} for n in range(513)}), "Expected `object` of length <= 512 - at `$.allocations`"),
        (held_text({"": {}}), "Expected `str` of length >= 1 - at `key` in `$.allocations`"),
        (held_text({"u" * 129: {}}), "Expected `str` of length <= 128 - at `key` in `$.allocations`"),
        (held_text({"u": {"2": [30]}}), "pod u has something of GPU '2', which the node does not have"),
        (held_text({"u": {"01": [30]}}), "GPU '01'"),
        (held_text({"u": {"٠": [30]}}), "which the node does not have"),
        (held_text({"u": {"0": 30}}), "Expected `array`, got `int` - at `$.allocations[...][...]`"),
        (held_text({"u": {"0": [1, 2, 3, 1, 0]}}), "Expected `array` of length <= 4"),
        (held_text({"u": {"0": [-1]}}), "Expected `int` >= 0"),
        (held_text({"u": {"0": [1, 1 << 31]}}), "Expected `int` <= 1073741824"),
        (held_text({"u": {"0": [101]}}), "is more than a GPU"),
        (held_text({"u": {"0": [100, 0, 0, 2]}}), "is more than a GPU"),
        (held_text({"good": {"0": [30]}, "u": {"0": [101]}}), "what pod u has of GPU 0"),
    ],
    ids=range(18),
)
def test_one_bad_part_makes_what_is_held_unknown(text: object, said: str) -> None:
    """Half of it would set the other half free. The GPUs count all the same."""
    reading = read(raw_node(gpus_text(raw_gpu(0), raw_gpu(1)), text))
    assert reading.node is not None
    assert reading.node.allocated is None
    assert (reading.node.is_exact, len(reading.node.gpus)) == (True, 2)
    assert said in reading.problem
    assert reading.problem.startswith(f"node n1: the annotation {ALLOCATIONS_ANNOTATION} cannot be used")
    assert len(reading.problem) < 1000


# --- what cannot be used ---


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is no JSON"),
        ("9" * 5_000, "it is no JSON"),
        (gpus_text(schema=2), "at `$.schema`"),
        (gpus_text(), "it lists no GPUs"),
        (gpus_text(7), "Expected `object`, got `int` - at `$.gpus[0]`"),
        (gpus_text(raw_gpu(0), raw_gpu(1, index=0)), "two GPUs have the same index"),
        (gpus_text(raw_gpu(0), raw_gpu(1, uuid="GPU-0")), "two GPUs have the same UUID"),
        (gpus_text(raw_gpu(MAX_GPUS)), f"it has a GPU {MAX_GPUS}"),
        (gpus_text(raw_gpu(10_001)), "Expected `int` <= 10000 - at `$.gpus[0].index`"),
        (gpus_text(raw_gpu(0), raw_gpu(1, memory_mib=-1)), "Expected `int` >= 0 - at `$.gpus[1].memory_mib`"),
        (gpus_text(memory_block_mib=0), "Expected `int` >= 1 - at `$.memory_block_mib`"),
        (gpus_text(raw_gpu(0, links=["X"]), memory_block_mib=512), "of 512 MiB, here they are of 256"),
        (gpus_text(raw_gpu(0, links=["X", "PIX"])), "not one text for each GPU"),
        (gpus_text(raw_gpu(0, links=["X", 7]), raw_gpu(1)), "not one text for each GPU"),
        (gpus_text(raw_gpu(0, links=["X", "WIRE"]), raw_gpu(1)), "the link of GPUs 0 and 1 is 'WIRE'"),
        (gpus_text(raw_gpu(0, links=["PIX", "PIX"]), raw_gpu(1)), "the link of GPUs 0 and 0 is 'PIX'"),
        (gpus_text(raw_gpu(0, links=["X", "X"]), raw_gpu(1)), "the link of GPUs 0 and 1 is 'X'"),
        (gpus_text(raw_gpu(0, links=["X", "SYS"]), raw_gpu(1)), "GPUs 0 and 1 to each other differ"),
        (gpus_text(*[raw_gpu(0)] * 257), "Expected `array` of length <= 256 - at `$.gpus`"),
    ],
    ids=range(19),
)
def test_gpus_that_cannot_be_used_leave_the_capacity_divided_evenly(text: object, said: str) -> None:
    """And nothing that the agent says it holds: its indexes may be others."""
    reading = read(raw_node(text, held_text({"u": {"0": [30]}})))
    assert reading.node is not None
    assert [(c.index, c.memory_mib, c.is_healthy) for c in reading.node.gpus] == [(n, 24576, True) for n in range(4)]
    assert (reading.node.is_exact, reading.node.allocated) == (False, None)
    assert reading.problem.startswith(f"node n1: the annotation {GPUS_ANNOTATION} cannot be used")
    assert said in reading.problem
    assert len(reading.problem) < 1000


def test_a_node_of_gpu_manager_has_equal_gpus() -> None:
    """It has no annotation: that is no problem. Its GPUs are far from each other."""
    node = node_of(raw_node())
    assert [gpu.memory_mib for gpu in node.gpus] == [24576] * 4
    assert len({gpu.uuid for gpu in node.gpus}) == 4
    assert (node.is_exact, node.model, node.pool) == (False, "M40", "public")
    assert node.topology.link(0, 3).kind is LinkKind.SYS


def test_what_can_be_given_out_counts_before_the_capacity() -> None:
    """The devices of unhealthy GPUs are in the capacity alone."""
    assert len(node_of(raw_node(allocatable={VCORE_RESOURCE: "300", VMEMORY_RESOURCE: "288"})).gpus) == 3
    raw = raw_node()
    del raw["status"]["allocatable"]
    assert len(node_of(raw).gpus) == 4


@pytest.mark.parametrize("cores", ["0", "99", "-100", "many", 150.5, "0.5", [], True])
def test_less_than_a_gpu_is_no_node_of_ours(cores: object) -> None:
    """Nothing could be placed there."""
    assert read(raw_node(allocatable={VCORE_RESOURCE: cores, VMEMORY_RESOURCE: "96"})) == NodeReading(node=None)


def test_a_huge_capacity_is_bounded() -> None:
    """Whoever may patch a node's status could make any number of GPUs."""
    node = node_of(raw_node(allocatable={VCORE_RESOURCE: 2**62, VMEMORY_RESOURCE: str(2**62)}))
    assert len(node.gpus) == MAX_GPUS


def test_gpushares_resource_tells_the_memory_too() -> None:
    """Where the node offers it, and no blocks."""
    counts = {VCORE_RESOURCE: "200", VMEMORY_RESOURCE: "0", GPU_MEM_NAMES.gpu_mem: "48"}
    node = node_of(raw_node(allocatable=counts), GPU_MEM_NAMES)
    assert [gpu.memory_mib for gpu in node.gpus] == [24576, 24576]


@pytest.mark.parametrize("labels", [{}, {MODEL_LABEL: 7, POOL_LABEL: ["x"]}, {MODEL_LABEL: "x" * 64, POOL_LABEL: None}])
def test_labels_that_are_none_read_as_empty(labels: dict[str, Any]) -> None:
    """The quota then knows neither model nor pool."""
    node = node_of(raw_node(labels=labels))
    assert (node.model, node.pool) == ("", "")


@pytest.mark.parametrize("raw", [{}, {"metadata": None}, {"metadata": {"name": 7}}, {"metadata": {"name": ""}}])
def test_an_object_without_a_name_is_left_out_and_reported(raw: dict[str, Any]) -> None:
    """It cannot be named to the scheduler."""
    assert read(raw) == NodeReading(node=None, problem="a node without a name is left out")


_JSON = any_json(
    *("schema", "gpus", "allocations", "index", "uuid", "name", "memory_mib", "is_healthy", "cordoned", "numa"),
    *("links", "memory_block_mib", "0", "1", "u"),
    leaves=["X", "PIX", "NV2"],
)
_GPU = st.fixed_dictionaries(
    {
        "index": st.integers(min_value=0, max_value=3) | _JSON,
        "uuid": st.sampled_from(["", "GPU-0", "GPU-1", "gpu-0"]),
        "name": st.just("M40"),
        "memory_mib": st.integers(min_value=0, max_value=1 << 31),
        "is_healthy": st.booleans(),
    },
    optional={
        "links": st.lists(st.sampled_from(["X", "PIX", "NV2", "SYS", "no"]), max_size=3) | _JSON,
        "numa": st.integers() | _JSON,
        "cordoned": _JSON,
    },
)
_GPUS_TEXT = st.lists(_GPU, max_size=3).map(lambda gpus: gpus_text(*gpus))
_COUNTS = st.lists(st.integers(min_value=-1, max_value=101), max_size=5)
_HELD_TEXT = st.dictionaries(
    st.sampled_from(["u", "v", ""]), st.dictionaries(st.sampled_from(["0", "1", "00"]), _COUNTS | _JSON) | _JSON
).map(held_text)
_ANY_TEXT = _JSON.map(json.dumps) | st.text(max_size=50) | st.none()


@given(_GPUS_TEXT | _ANY_TEXT, _HELD_TEXT | _ANY_TEXT)
def test_no_annotation_is_too_odd(gpus: object, held: object) -> None:
    """A node comes out whose parts fit each other, and a problem wherever something was not taken."""
    reading = read(raw_node(gpus, held))
    node = reading.node
    assert node is not None
    indexes = [gpu.index for gpu in node.gpus]
    assert indexes == sorted(set(indexes))
    assert len({gpu.uuid for gpu in node.gpus}) == len(indexes) > 0
    assert len(node.topology.links) == max(indexes) + 1
    for charges in (node.allocated or {}).values():
        assert list(charges) == sorted(charges)
        assert all(index in indexes and 0 <= charge.cores <= 100 for index, charge in charges.items())
    if gpus is not None and not node.is_exact:
        assert GPUS_ANNOTATION in reading.problem
    if held is not None and node.is_exact and node.allocated is None:
        assert ALLOCATIONS_ANNOTATION in reading.problem


@given(
    st.dictionaries(
        st.sampled_from(["metadata", "status"]),
        _JSON | st.dictionaries(
            st.sampled_from(["name", "labels", "annotations", "capacity", "allocatable"]),
            _JSON | st.dictionaries(st.sampled_from([VCORE_RESOURCE, VMEMORY_RESOURCE, GPUS_ANNOTATION]), _JSON),
        ),
    )
)  # fmt: skip
def test_no_object_is_too_odd(raw: dict[str, Any]) -> None:
    """A reading comes out, whatever the API server says."""
    assert isinstance(read(raw), NodeReading)
