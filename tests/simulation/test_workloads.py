"""Made workloads keep what is documented; files are read strictly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bench.generator import MACHINES, SHARES, WHOLE_GPUS, generate_cluster, generate_workload, write_files
from gpushare_agent.core.model.errors import Corrupt, NotFound
from gpushare_agent.core.model.gpus import LinkKind
from gpushare_agent.simulation.traces import read_cluster, read_workload
from gpushare_agent.simulation.workload import Arrival, Shape, Size, at_load
from tests.simulation.support_simulation import arrival, cluster_of, workload_of

TRACES = Path(__file__).parents[1] / "data" / "traces"
POD_HEADER = "name,arrival_s,duration_s,cores,memory_mib\n"


def test_a_made_cluster_has_the_documented_parts() -> None:
    """Of 200 nodes so many hundredths are of each kind, and every GPU has an index and a UUID of its own."""
    cluster = generate_cluster(200, 7)
    models = Counter((node.model, len(node.gpus)) for node in cluster.nodes)
    assert models == {(model, gpus): 2 * weight for model, gpus, weight in MACHINES}
    uuids = [gpu.uuid for node in cluster.nodes for gpu in node.gpus]
    assert len(set(uuids)) == len(uuids) == cluster.number_of_gpus
    assert [node.name for node in cluster.nodes] == sorted(node.name for node in cluster.nodes)


def test_made_nodes_are_linked_as_such_machines_are() -> None:
    """NVLink between all H100; A10 in pairs below a switch, at two sockets."""
    by_model = {node.model: node for node in generate_cluster(50, 1).nodes}
    assert by_model["H100"].topology.link(0, 7).kind is LinkKind.NVLINK
    assert [by_model["A10"].topology.link(0, other).kind for other in (1, 2, 4)] == [
        LinkKind.PIX,
        LinkKind.PHB,
        LinkKind.SYS,
    ]


def test_made_pods_are_drawn_from_the_documented_distributions() -> None:
    """20,000 of them are within two hundredths of the table."""
    arrivals = generate_workload(20_000, 3, block_mib=256).arrivals
    wholes = Counter(one.shape.whole_gpus for one in arrivals)
    for gpus, percent in WHOLE_GPUS:
        assert wholes[gpus] / 20_000 == pytest.approx(percent / 100, abs=0.02)
    shares = [one.shape for one in arrivals if one.shape.size is Size.SHARE]
    for cores, memory_mib, percent in SHARES:
        assert shares.count(Shape(cores, memory_mib // 256)) / len(shares) == pytest.approx(percent / 100, abs=0.02)
    assert sorted(arrivals) == list(arrivals)


def test_the_same_seed_makes_the_same_and_another_seed_does_not() -> None:
    """For pods and for nodes."""
    assert generate_workload(50, 1, block_mib=256) == generate_workload(50, 1, block_mib=256)
    assert generate_workload(50, 1, block_mib=256) != generate_workload(50, 2, block_mib=256)
    assert generate_cluster(50, 1) == generate_cluster(50, 1)
    assert generate_cluster(50, 1) != generate_cluster(50, 2)


def test_the_files_that_are_written_are_read_as_they_were_made(tmp_path: Path) -> None:
    """The first pod comes at 0."""
    write_files(tmp_path, nodes=50, pods=200, seed=3)
    cluster, workload = read_cluster(tmp_path / "nodes.csv"), read_workload(tmp_path / "pods.csv", block_mib=256)
    made = generate_workload(200, 3, block_mib=256).arrivals
    assert cluster.nodes == generate_cluster(50, 3).nodes
    assert workload.arrivals == tuple(one._replace(at_s=one.at_s - made[0].at_s) for one in made)


def test_a_load_brings_arrivals_together_until_they_ask_for_that_part() -> None:
    """100 core-seconds per core within 100 s are load 1, within 50 s load 2."""
    workload = workload_of(arrival(10, 100, 100), arrival(1010, 100, 100))
    spread = at_load(workload, cluster_of(2), 1.0)
    assert [one.at_s for one in spread.arrivals] == [0, 100]
    assert [one.at_s for one in at_load(workload, cluster_of(2), 2.0).arrivals] == [0, 50]
    at_once = workload_of(arrival(0, 100, 5), arrival(0, 50, 5))
    assert at_load(at_once, cluster_of(1), 1.0) is at_once


def test_a_trace_of_nodes_is_read() -> None:
    """A node without GPUs is left out; a model that is a code name gets the assumed memory."""
    cluster = read_cluster(TRACES / "openb_node_list.csv")
    assert [(node.name, node.model, len(node.gpus), node.gpus[0].memory_mib) for node in cluster.nodes] == [
        ("node-a", "G2", 8, 32_768),
        ("node-b", "T4", 2, 15_360),
        ("node-d", "V100M32", 8, 32_510),
        ("node-e", "V100M16", 2, 16_160),
    ]


def test_a_trace_of_pods_is_read() -> None:
    """By arrival, from 0 on; thousandths of a GPU are rounded up, and a share has that part of the smallest GPU."""
    workload = read_workload(TRACES / "openb_pod_list.csv", block_mib=256)
    assert workload.arrivals == (
        Arrival(at_s=0.0, name="task-1", shape=Shape(46, 27, ("T4",)), duration_s=500.0),
        Arrival(at_s=1000.0, name="task-0", shape=Shape(100, 0), duration_s=4000.0),
        Arrival(at_s=2000.0, name="task-3", shape=Shape(800, 0, ("G2", "V100M32")), duration_s=9990.0),
        Arrival(at_s=2500.0, name="task-4", shape=Shape(5, 3), duration_s=20.0),
    )
    assert workload.skipped == {"asks for nothing of a GPU": 1, "ends before it begins": 1}


def test_files_of_the_own_format_are_read(tmp_path: Path) -> None:
    """Memory is rounded up to blocks; a cell of models or gang may be empty."""
    nodes, pods = tmp_path / "nodes.csv", tmp_path / "pods.csv"
    nodes.write_text("name,gpus,memory_mib,model\nb,2,1024,X\na,1,2048,\n")
    rows = "p,5.5,10,30,300,Y|X,\nq,5,1,100,0,,together\n"
    pods.write_text("name,arrival_s,duration_s,cores,memory_mib,models,gang\n" + rows)
    found = [(node.name, node.model, len(node.gpus)) for node in read_cluster(nodes).nodes]
    assert found == [("a", "", 1), ("b", "X", 2)]
    assert read_workload(pods, block_mib=256).arrivals == (
        Arrival(at_s=0.0, name="q", shape=Shape(100, 0), duration_s=1.0, gang="together"),
        Arrival(at_s=0.5, name="p", shape=Shape(30, 2, ("X", "Y")), duration_s=10.0),
    )


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("name,cores\n", "must name the columns name, arrival_s"),
        (POD_HEADER + "p,0,1,x,0\n", "line 2: cores is 'x', expected a whole number"),
        (POD_HEADER + "p,-1,1,10,256\n", "line 2: arrival_s is '-1', expected seconds"),
        (POD_HEADER + "p,0,nan,10,256\n", "line 2: duration_s is 'nan'"),
        (POD_HEADER + "p,0,inf,10,256\n", "line 2: duration_s is 'inf'"),
        (POD_HEADER + "p,0,1,10\n", "line 2: memory_mib is ''"),
        (POD_HEADER + "p,0,1,10,256\np,1,1,10,256\n", "line 3: pod p is listed twice"),
        (POD_HEADER + "\x07,0,1,10,256\n", "line 2: name is"),
        (POD_HEADER + "p,0,1,0,0\n", "no pod of it asks for a GPU"),
        (POD_HEADER + "p,0,1,99999999,0\n", "line 2: cores is '99999999'"),
        (POD_HEADER.replace("\n", ",gang\n") + "p,0,1,10,256,\x07\n", "line 2: gang is"),
    ],
)
def test_a_wrong_file_of_pods_is_reported_with_the_line_and_the_mistake(
    tmp_path: Path, text: str, reported: str
) -> None:
    """Nothing of it is replayed."""
    path = tmp_path / "pods.csv"
    path.write_text(text)
    with pytest.raises(Corrupt) as caught:
        read_workload(path, block_mib=256)
    assert str(path) in str(caught.value)
    assert reported in str(caught.value)


def test_wrong_files_of_nodes_are_reported(tmp_path: Path) -> None:
    """No GPUs at all, a name twice, no text, and no file."""
    path = tmp_path / "nodes.csv"
    path.write_text("name,gpus,memory_mib,model\na,0,1,X\n")
    with pytest.raises(Corrupt, match="no node of it has a GPU"):
        read_cluster(path)
    path.write_text("name,gpus,memory_mib,model\na,1,1,X\na,1,1,X\n")
    with pytest.raises(Corrupt, match="line 3: node a is listed twice"):
        read_cluster(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Corrupt, match="no CSV file"):
        read_cluster(path)
    with pytest.raises(NotFound, match="No such file"):
        read_cluster(tmp_path / "absent.csv")
