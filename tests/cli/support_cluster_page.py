"""The page of all nodes with its server, over a small cluster that speaks the API server's protocol."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from gpushare_agent.core.node_report.annotations import GPUS_ANNOTATION
from gpushare_agent.core.settings.settings import Settings
from gpushare_agent.kubectl.dashboard import ClusterPage
from tests.cluster.support_kube import running
from tests.extender.support_extender import NAMES, FakeCluster, eventually, fake_cluster, raw_node, raw_pod
from tests.fakes.api_server import Raw

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
MESSAGE = f"0/3 nodes are available: {HOSTILE} " + "x" * 5000


def out_of_service(node: Raw) -> Raw:
    """Its GPU 0 failed, its GPU 1 cordoned."""
    annotations = node["metadata"]["annotations"]
    reported = json.loads(annotations[GPUS_ANNOTATION])
    reported["gpus"][0] |= {"is_healthy": False, "reason": "Xid 79 (GPU has fallen off the bus)"}
    reported["gpus"][1]["cordoned"] = "fan is noisy"
    annotations[GPUS_ANNOTATION] = json.dumps(reported)
    return node


def waiting(name: str, *requests: tuple[int, int], namespace: str = "team-b") -> Raw:
    raw = raw_pod(name, *requests, namespace=namespace)
    raw["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": MESSAGE}]
    return raw


@asynccontextmanager
async def served_cluster() -> AsyncIterator[tuple[str, FakeCluster]]:
    """Three nodes, two pods of team-a on gpu-1, one of team-b on gpu-2, and two that wait."""
    nodes = [raw_node(f"gpu-{n}", gpus=8, memory_mib=16384, model="NVIDIA L4") for n in (1, 2)]
    pods = [
        raw_pod("one", (30, 8), namespace="team-a", node="gpu-1"),
        raw_pod("two", (50, 16), namespace="team-a", node="gpu-1"),
        raw_pod("three", (100, 0), namespace="team-b", node="gpu-2"),
        waiting("needs-nine", (900, 0)),
        waiting("needs-much", (20, 65)),
    ]
    async with fake_cluster(*nodes, out_of_service(raw_node("gpu-3")), pods=pods) as cluster:
        cluster.holds("gpu-1", ("uid-one", 0, 30, 8), ("uid-two", 0, 50, 16))
        async with cluster.opened_api() as api:
            page = ClusterPage(Settings(), replace(NAMES, gpu=("nvidia.com/gpu",)), port=0)
            ports: list[int] = []
            async with running(lambda: page.run(api, on_listening=ports.append)):
                await eventually(lambda: bool(ports))
                yield f"http://localhost:{ports[0]}/", cluster
