"""The page of all nodes with its server, over a small cluster that speaks the API server's protocol."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from gpushare_agent.core.node_report.annotations import GPUS_ANNOTATION
from gpushare_agent.core.settings.settings import Settings
from gpushare_agent.kubectl.dashboard import ClusterPage
from gpushare_agent.sandbox.api.pod_subresources import AgentServer
from tests.cli.support_cluster_view import extender as extender  # noqa: PLC0414 - of this page too
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
    """For two hours and a half."""
    raw = raw_pod(name, *requests, namespace=namespace)
    since = datetime.now(UTC) - timedelta(hours=2.5)
    raw["metadata"]["creationTimestamp"] = since.strftime("%Y-%m-%dT%H:%M:%SZ")
    raw["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": MESSAGE}]
    return raw


@asynccontextmanager
async def served_cluster(
    nodes: Sequence[Raw] | None = None, pods: Sequence[Raw] | None = None, **answers: Any
) -> AsyncIterator[tuple[str, FakeCluster]]:
    """Three nodes, two pods of team-a on gpu-1, one of team-b on gpu-2, an extender, and two pods that wait; or those.
    `answers` are what the API server says instead, by path."""
    is_given = nodes is not None
    nodes = nodes or [
        *(raw_node(f"gpu-{n}", gpus=8, memory_mib=16384, model="NVIDIA L4") for n in (1, 2)),
        out_of_service(raw_node("gpu-3")),
    ]
    pods = pods or [
        raw_pod("one", (30, 8), namespace="team-a", node="gpu-1"),
        raw_pod("two", (50, 16), namespace="team-a", node="gpu-1"),
        raw_pod("three", (100, 0), namespace="team-b", node="gpu-2"),
        extender(),
        waiting("needs-nine", (900, 0)),
        waiting("needs-much", (20, 65)),
    ]
    async with fake_cluster(*nodes, pods=pods) as cluster:
        cluster.page = 500
        cluster.script.answers |= answers
        if not is_given:
            cluster.holds("gpu-1", ("uid-one", 0, 30, 8), ("uid-two", 0, 50, 16))
        async with cluster.opened_api() as api:
            page = ClusterPage(Settings(), replace(NAMES, gpu=("nvidia.com/gpu",)), port=0)
            ports: list[int] = []
            async with running(lambda: page.run(api, on_listening=ports.append)):
                await eventually(lambda: bool(ports))
                yield f"http://localhost:{ports[0]}/", cluster


class Agents:
    """The agents' servers of a cluster: what each says of its node, by the node's name; who is not there answers nothing."""

    def __init__(self) -> None:
        self.documents: dict[str, Any] = {}
        self.asked: list[str] = []
        self.open = self.most = 0
        """So many are asked now, and were at once."""
        self.answer = asyncio.Event()
        self.answer.set()
        self.silent: Collection[str] | None = None
        """Those that wait for `answer`; None: all."""

    async def show(self, request: web.Request) -> web.StreamResponse:
        node = request.match_info["node"]
        self.asked.append(node)
        self.open += 1
        self.most = max(self.most, self.open)
        if self.silent is None or node in self.silent:
            await self.answer.wait()
        self.open -= 1
        if node not in self.documents:
            return web.Response(status=503, text="the agent does not answer at the moment")
        return web.json_response({"at": time.time(), "agent": {"sampled_at": time.time()}, **self.documents[node]})


def uses(node: str, gpus: Mapping[int, float], **of_namespaces: float | None) -> Raw:
    """An agent's document of a node: the use of each GPU, and what each namespace uses of GPU 0."""
    return {
        "gpus": [
            {
                "uuid": f"GPU-{node}-{index}",
                "memory": {"capacity_bytes": 16 << 30},
                "usage": {"sm_ratio": ratio, "memory_used_bytes": int(ratio * (16 << 30))},
            }
            for index, ratio in gpus.items()
        ],
        "containers": [
            {
                "namespace": namespace.replace("_", "-"),
                "gpus": [{"uuid": f"GPU-{node}-0", "usage": {"sm_ratio": ratio, "memory_bytes": 1 << 30}}],
            }
            for namespace, ratio in of_namespaces.items()
        ],
    }


@asynccontextmanager
async def answering_agents(cluster: FakeCluster, *nodes: str) -> AsyncIterator[Agents]:
    """An agent on each of these nodes, behind the API server's proxy."""
    agents, app = Agents(), web.Application()
    app.router.add_get("/{node}/api/v1/node", agents.show)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        for node in nodes:
            # Without a port in the pod's spec that differs by node: the address's path says which agent is asked.
            cluster.add_agent(node, AgentServer(url=f"http://127.0.0.1:{port}/{node}", log=Path("/dev/null")))
        yield agents
    finally:
        agents.answer.set()
        await runner.cleanup()
