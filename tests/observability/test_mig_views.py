"""A node with MIG instances in every view: as many cores as it offers, and one name for each instance."""

from __future__ import annotations

from typing import Any, cast

import pytest
from msgspec import to_builtins
from msgspec.structs import replace
from rich.text import Text

from gpushare_agent.agent.admission.outcomes import in_short
from gpushare_agent.agent.cluster.node_facts import gpus_annotation
from gpushare_agent.agent.observability.display import graph_text
from gpushare_agent.agent.observability.metrics.node import gpu_series
from gpushare_agent.agent.observability.node_snapshot import NodeSnapshot, mig_gpus
from gpushare_agent.core.claims.mig_devices import room
from gpushare_agent.core.formats.mig_profiles import mig_profiles
from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.mig import MigGpuInstance, MigLayout
from gpushare_agent.core.model.names import CORES_PER_GPU, GpuUuid
from gpushare_agent.core.model.resources import Request, ResourceKind
from gpushare_agent.core.node_report.annotations import GPUS_ANNOTATION, parse_gpus
from gpushare_agent.core.node_report.documents import DecisionDocument, NodeDocument
from gpushare_agent.core.placement import Placed, place
from gpushare_agent.core.placement.gpu_account import account_of
from gpushare_agent.kubectl.cluster_nodes import read_report, report_document
from gpushare_agent.kubectl.explain import decision_parts
from gpushare_agent.kubectl.inspect import (
    InspectionDocument,
    inspection_document,
    inspection_tables,
    node_of_document,
)
from gpushare_agent.kubectl.render_top import heading, top_lines
from tests.cli.support_cli import candidate, decision
from tests.observability.support_usage import divided_node, on_demand_node
from tests.support_json import written_node


def document_of(node: NodeSnapshot) -> NodeDocument:
    raw: Any = written_node(node)
    return cast("NodeDocument", raw)


def rows_of(node: NodeSnapshot) -> dict[str, dict[str, float]]:
    """The series of the GPUs: values by labels."""
    lines = {series.name: "".join(series.lines).splitlines() for series in gpu_series(node)}
    rows = {name: [one.removeprefix(name).rpartition(" ") for one in found] for name, found in lines.items()}
    return {name: {labels[1:-1]: float(value) for labels, _, value in found} for name, found in rows.items()}


@pytest.mark.parametrize(("shares_in_mig", "allocated", "capacity"), [(False, 30, 100), (True, 130, 300)])
def test_every_view_has_the_cores_that_the_node_offers(*, shares_in_mig: bool, allocated: int, capacity: int) -> None:
    """An instance in which the isolation keeps no share has none, though one is given whole by NVIDIA's name."""
    node = divided_node(shares_in_mig=shares_in_mig)
    assert sum(node.names.units(gpu, ResourceKind.VCORE) for gpu in node.inventory.gpus) == capacity
    document = document_of(node)
    assert sum(gpu["cores"]["capacity"] for gpu in document["gpus"]) == capacity
    assert f"allocated {allocated}/{capacity} GPU cores" in heading(document)[1].plain
    totals = inspection_document([node_of_document(document)])["totals"]["cores"]
    assert totals == {"allocated": allocated, "capacity": capacity}
    ratios = {name: sum(rows.values()) for name, rows in rows_of(node).items()}
    assert ratios["gpushare_gpu_cores_capacity_ratio"] * CORES_PER_GPU == capacity
    assert ratios["gpushare_gpu_cores_allocated_ratio"] * CORES_PER_GPU == pytest.approx(allocated)
    words = graph_text(node).replace(",", " ").replace(")", " ").split()
    free = [int(words[at + 1]) for at, word in enumerate(words) if word == "allocatableCores:"]
    assert sum(free) == capacity - allocated


def test_every_view_has_nvidias_name_of_an_instance() -> None:
    """Also those that had the agent's own count of GPUs: decisions, refusals, Events and the topology."""
    node = divided_node(shares_in_mig=True)
    document = document_of(node)
    assert [line.cells["GPU / CONTAINER"].split()[0] for line in top_lines(document) if line.is_gpu] == [
        "0",
        "1:0",
        "1:1",
    ]
    tree = graph_text(node)
    assert "--GPU1:0 " in tree and "--GPU1:1 " in tree and "--GPU3" not in tree
    accounts = [account_of(gpu, node.names) for gpu in node.inventory.gpus]
    full = replace(accounts[0], used=Charge(cores=100))
    placed = place(Request(cores=30, blocks=4), [full, accounts[2]], node.inventory.topology, share_policy="binpack")
    assert isinstance(placed, Placed) and placed.explanation == "GPU 1:1: the only GPU that fits"
    used = [replace(accounts[1], used=Charge(cores=70)), replace(accounts[2], used=Charge(cores=50))]
    refused = place(Request(cores=60, blocks=4), used, node.inventory.topology, share_policy="binpack")
    assert isinstance(refused, Refused) and "GPU 1:1 comes closest" in refused.detail
    one = replace(candidate(3, is_chosen=True, verdict="chosen"), label="1:1")
    assert in_short([one], 100) == "GPU 1:1: chosen"
    raw_decision: Any = to_builtins(decision(1, gpus=(3,), labels=("1:1",), candidates=(one,)))
    title = decision_parts(cast("DecisionDocument", raw_decision), 120)[0]
    assert "got GPU 1:1 " in str(title)


@pytest.mark.parametrize(("shares_in_mig", "cores"), [(False, "whole"), (True, "0/100")])
def test_every_view_has_the_instances_in_the_place_of_their_gpu(*, shares_in_mig: bool, cores: str) -> None:
    """No tree has the GPU that MIG divides, which nothing lists; an instance without cores is given whole."""
    node = divided_node(shares_in_mig=shares_in_mig)
    document = document_of(node)
    assert [gpu["index"] for gpu in document["gpus"]] == document["topology"]["tree"]["gpus"] == [0, 2, 3]
    lines = [line.split("--")[1].lstrip("-").split()[0] for line in graph_text(node).splitlines() if "-GPU" in line]
    assert lines == ["GPU0", "GPU1:0", "GPU1:1"]
    assert [line.cells["GPU CORES"] for line in top_lines(document) if line.is_gpu][2] == cores


TEXTS = [
    "MIG on demand, with room for 1 of 2g.20gb, or 4 of 1g.10gb",
    "in use: 1g.10gb at 6",
    "idle, to be used again or replaced: 1g.10gb at 5",
    "not made by this agent, offered as it is: 1g.10gb at 4",
    "half made or half destroyed: 1g.10gb at 2",
    "blocked: instance 2 is half destroyed",
]


def lines_of(document: InspectionDocument) -> list[str]:
    return [part.plain for part in inspection_tables(document, with_details=False) if isinstance(part, Text)]


def test_every_view_has_a_gpu_of_instances_on_demand() -> None:
    """Also without any instance it is a GPU of the node, with what is made and what there is room for."""
    node = on_demand_node()
    document = document_of(node)
    [gpu] = document["mig_gpus"]
    assert [*gpu["fits"].items()] == [("7g.80gb", 0), ("3g.40gb", 0), ("2g.20gb", 1), ("1g.10gb", 4)]
    assert [(one["start"], one["state"]) for one in gpu["instances"]] == [
        (2, "broken"),
        (4, "foreign"),
        (5, "idle"),
        (6, "in-use"),
    ]
    assert gpu["texts"] == TEXTS
    shown = [line.cells["GPU / CONTAINER"].strip() for line in top_lines(document)]
    assert shown[-len(TEXTS) - 1 :] == [f"1 {gpu['name']}", *TEXTS]
    assert "  2 GPUs  " in heading(document)[0].plain
    inspected = inspection_document([node_of_document(document)])
    assert lines_of(inspected)[-1].startswith("2 GPUs of the node: ")
    assert f"n1 GPU 1 ({gpu['name']}, Healthy): {'; '.join(TEXTS)}" in lines_of(inspected)
    assert graph_text(node).splitlines()[-1].endswith(f"allocatableMemory: 0) {'; '.join(TEXTS)}")
    rows = rows_of(node)
    own = f'gpu="1",node="n1",uuid="{gpu["uuid"]}"'
    assert [*rows["gpushare_gpu_mig_room"].values()] == [0, 0, 1, 4]
    assert all(gpu["uuid"] in labels and 'profile="' in labels for labels in rows["gpushare_gpu_mig_room"])
    assert rows["gpushare_gpu_healthy"][own] == 1 and rows["gpushare_gpu_cordoned"][own] == 0
    assert own not in rows["gpushare_gpu_cores_capacity_ratio"]


def test_a_gpu_of_instances_on_demand_says_why_none_can_be_made() -> None:
    node = on_demand_node()
    [layout] = node.inventory.mig_layouts
    refused = replace(layout, instances=(), problem="this agent may make none: add the component mig-on-demand")
    node = replace(node, inventory=replace(node.inventory, mig_layouts=(refused,)), mig_blocked={})
    assert mig_gpus(node)[0]["texts"] == [refused.problem]


def test_the_cluster_is_told_of_a_gpu_of_instances_on_demand() -> None:
    """Its node may have no other GPU, and the extender none that it can give."""
    node = on_demand_node()
    [divided] = node.inventory.on_demand
    found = replace(node.inventory, gpus=())
    text = gpus_annotation(found, cordoned={divided.uuid: True}, memory_block_mib=256)
    assert parse_gpus(text).gpus == ()
    report = read_report({GPUS_ANNOTATION: text}, {}, node.names)
    assert report is not None
    document = inspection_document([report_document("n1", report, [])])
    assert document["totals"]["gpus"] == 0
    assert f"n1 GPU 1 ({divided.name}, Cordoned): MIG on demand" in lines_of(document)


@pytest.mark.parametrize(
    ("product", "memory_mib", "slices", "taken", "left"),
    [
        (
            "NVIDIA A30",
            24576,
            4,
            "1g.6gb+me",
            {"4g.24gb": 0, "2g.12gb": 1, "2g.12gb+me": 0, "1g.6gb": 3, "1g.6gb+me": 0},
        ),
        ("NVIDIA A30", 24576, 4, "", {"4g.24gb": 1, "2g.12gb": 2, "2g.12gb+me": 1, "1g.6gb": 4, "1g.6gb+me": 1}),
    ],
)
def test_room_is_what_the_counters_of_the_slices_leave(
    product: str, memory_mib: int, slices: int, taken: str, left: dict[str, int]
) -> None:
    """Engines too: one of `+me` leaves slices for another that cannot be made."""
    profiles = mig_profiles(product, memory_mib)
    layout = MigLayout(parent=GpuUuid("GPU-0"), slices=slices, profiles=profiles)
    has = tuple(MigGpuInstance(gi=1, profile=one.id, start=0, size=one.size) for one in profiles if one.name == taken)
    assert dict(room(layout, has, frozenset())) == left


def test_an_instance_of_an_unknown_profile_takes_its_slices() -> None:
    [layout] = on_demand_node().inventory.mig_layouts
    unknown = MigGpuInstance(gi=9, profile=999, start=0, size=4)
    assert room(layout, (unknown,), frozenset()) == {"7g.80gb": 0, "3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 3}
