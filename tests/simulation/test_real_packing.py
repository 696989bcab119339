"""bench/real_packing.py without its programs: the cluster that it makes, and what the agents' part does there."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, cast

from msgspec import Raw

from bench.inflation import Host
from bench.real_packing import TAINT, Cluster, Way, scaled
from gpushare_agent.agent.cluster.free_gpus_taint import EFFECT, KEY
from gpushare_agent.core.kube.session import KubeSession, Request
from gpushare_agent.core.model.names import GPU_MODEL_LABEL, VCORE_RESOURCE
from gpushare_agent.core.placement.fragmentation import PodKind

SMALL, LARGE, RARE = (
    Host("", 16_000, 65_536, 2, "T4"),
    Host("", 96_000, 524_288, 8, "G2"),
    Host("", 8_000, 32_768, 1, "P100"),
)


class Nodes:
    """Answers for the nodes' objects; `taints` by node, `patches` counts."""

    def __init__(self) -> None:
        self.taints: dict[str, list[dict[str, str]]] = {}
        self.patches = 0

    async def fetch_object(self, request: Request, **_: Any) -> Raw:
        name = request.path.rpartition("/")[2]
        body = cast("dict[str, Any]", request.body)
        if request.method == "POST":
            name = body["metadata"]["name"]
        if request.method != "GET":
            self.taints[name] = body["spec"]["taints"]
            self.patches += request.method == "PATCH"
        return Raw(json.dumps({"metadata": {"name": name}, "spec": {"taints": self.taints[name]}}))


def cluster(nodes: Nodes, way: Way, *hosts: Host) -> Cluster:
    return Cluster(cast("KubeSession", nodes), way, hosts)


def test_the_small_cluster_has_of_each_kind_its_part() -> None:
    """By largest remainders, so that their sum is what was asked for."""
    hosts = [SMALL] * 50 + [LARGE] * 47 + [RARE] * 3
    made = scaled(hosts, 10)
    assert Counter(host._replace(name="") for host in made) == {SMALL: 5, LARGE: 5}
    assert len({host.name for host in made}) == 10
    assert Counter(host._replace(name="") for host in scaled(hosts, 100)) == {SMALL: 50, LARGE: 47, RARE: 3}


async def test_the_agents_taint_follows_the_gpus_of_the_bound_pods() -> None:
    """There from the start, gone with the second GPU of two; a node without GPUs has none."""
    nodes = Nodes()
    one = cluster(nodes, Way("binpack", 0.5), SMALL._replace(name="a"), Host("cpu", 96_000, 524_288, 0, ""))
    await one.make_nodes()
    assert nodes.taints == {"a": [{"key": KEY, "effect": EFFECT}], "cpu": []}
    share = PodKind(cpu_milli=1000, memory_mib=1024, gpus=1, parts=50, models=())
    for index, is_tainted in ((0, True), (0, True), (1, False)):
        await one.bound("a", share, str(index))
        assert bool(nodes.taints["a"]) == is_tainted
    assert nodes.patches == 2


def test_a_reserved_node_has_the_taint_that_the_api_servers_plugin_tolerates() -> None:
    """It is the name of a resource that every pod with GPUs asks for. The model is the label that pods select."""
    one = cluster(Nodes(), Way("binpack", is_reserved=True), SMALL._replace(name="a"))
    node = one.node(SMALL._replace(name="a"))
    assert node["spec"]["taints"] == [TAINT]
    assert node["metadata"]["labels"][GPU_MODEL_LABEL] == "T4"
    asked = one.pod("p", PodKind(cpu_milli=1, memory_mib=1, gpus=2, parts=100, models=()), "s")["spec"]["containers"][0]
    assert asked["resources"]["limits"][TAINT["key"]] == "200" == asked["resources"]["limits"][VCORE_RESOURCE]
