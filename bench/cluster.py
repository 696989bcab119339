"""A large made cluster, and an API server that has it: for measuring the scheduler extender, which speaks to it over TCP.

5,000 nodes with 8 GPUs each, whose agents report their GPUs and their allocations, and 50,000 pods in four mixtures. The
API server answers at once, so that what is measured is the extender. State owned: what was bound, the open watches.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from gpushare_agent.core.model.names import VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.core.node_report.annotations import ALLOCATIONS_ANNOTATION, GPUS_ANNOTATION

GPUS, MEMORY_MIB, BLOCKS = 8, 24_576, 96
MIXTURES: tuple[tuple[tuple[int, int, tuple[int, ...]], ...], ...] = (
    ((200, 0, (0, 1)), *((50, 40, (gpu,)) for gpu in (2, 2, 3, 3, 4, 4, 5, 5)), (30, 20, (6,))),
    (*((100, 0, (gpu,)) for gpu in range(7)), (30, 20, (7,)), (30, 20, (7,)), (30, 20, (7,))),
    (*((70, 60, (gpu,)) for gpu in range(8)), (30, 20, (0,)), (30, 20, (1,))),
    ((400, 0, (0, 1, 2, 3)), (100, 0, (4,)), *((10, 8, (5,)) for _ in range(8))),
)
"""Cores, blocks and GPUs of each pod of a node; the nodes have the mixtures in turn."""
PODS_PER_NODE = len(MIXTURES[0])
CPUS = (1, 2, 4, 8, 12, 16, 6)
"""CPUs that the pods request, in turn: policy fgd tells pods apart by them."""
_NVLINK_PAIRS = [[("X" if a == b else "NV4" if a // 2 == b // 2 else "SYS") for b in range(GPUS)] for a in range(GPUS)]


@dataclass(slots=True, kw_only=True)
class SampleCluster:
    """`names` of the nodes; every object's JSON, made beforehand. `bound` has the pods that were bound, by UID."""

    nodes: int
    names: list[str] = field(default_factory=list)
    bound: dict[str, str] = field(default_factory=dict)
    nodes_json: list[bytes] = field(default_factory=list)
    pods_json: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = [f"gpu-node-{number:05}" for number in range(self.nodes)]
        self.nodes_json = [json.dumps(self.raw_node(number)).encode() for number in range(self.nodes)]
        self.pods_json = [json.dumps(self.raw_bound_pod(number)).encode() for number in range(self.pods)]

    @property
    def pods(self) -> int:
        return self.nodes * PODS_PER_NODE

    def roomy_for_two_gpus(self) -> set[str]:
        """The nodes with two free GPUs, before anything is bound."""
        return {name for number, name in enumerate(self.names) if number % len(MIXTURES) == 3}

    def raw_node(self, number: int) -> dict[str, Any]:
        name = self.names[number]
        gpus = [
            {"index": i, "uuid": f"GPU-{name}-{i}", "name": "NVIDIA A10", "memory_mib": MEMORY_MIB, "is_healthy": True,
             "links": _NVLINK_PAIRS[i]}
            for i in range(GPUS)
        ]  # fmt: skip
        allocated = {}
        for which, (cores, blocks, taken) in enumerate(MIXTURES[number % len(MIXTURES)]):
            whole = cores >= 100
            counts = [100, 0, 0, 1] if whole else [cores, blocks]
            allocated[_uid(name, which)] = {str(gpu): counts for gpu in taken}
        offered = {VCORE_RESOURCE: str(100 * GPUS), VMEMORY_RESOURCE: str(BLOCKS * GPUS)}
        capacity = {**offered, "cpu": "128", "memory": "1056763060Ki"}
        annotations = {
            GPUS_ANNOTATION: json.dumps({"schema": 1, "memory_block_mib": 256, "gpus": gpus}),
            ALLOCATIONS_ANNOTATION: json.dumps({"schema": 1, "allocations": allocated}),
        }
        metadata = {"name": name, "uid": name, "resourceVersion": "1", "labels": {}, "annotations": annotations}
        return {"metadata": metadata, "status": {"capacity": capacity, "allocatable": capacity}}

    def raw_bound_pod(self, number: int) -> dict[str, Any]:
        node, which = self.names[number // PODS_PER_NODE], number % PODS_PER_NODE
        cores, blocks, _ = MIXTURES[number // PODS_PER_NODE % len(MIXTURES)][which]
        return raw_pod(f"{node}-{which}", cores, blocks, uid=_uid(node, which), node=node, cpu=CPUS[number % len(CPUS)])


def raw_pod(name: str, cores: int, blocks: int, *, uid: str = "", node: str = "", cpu: int = 4) -> dict[str, Any]:
    """As long as such pods are: about three kibibytes, with what controllers, volumes and statuses bring along."""
    limits = {VCORE_RESOURCE: str(cores), **({VMEMORY_RESOURCE: str(blocks)} if blocks else {})}
    container = {
        "name": "main",
        "image": "registry.example/team/training:2025.11",
        "env": [{"name": f"SETTING_{number}", "value": "x" * 40} for number in range(12)],
        "resources": {
            "limits": {**limits, "cpu": str(cpu), "memory": "16Gi"},
            "requests": {**limits, "cpu": str(cpu), "memory": "8Gi"},
        },
        "volumeMounts": [{"name": f"v{number}", "mountPath": f"/data/{number}"} for number in range(4)],
    }
    spec = {
        "containers": [container],
        "volumes": [{"name": f"v{number}", "emptyDir": {}} for number in range(4)],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "serviceAccountName": "default",
        **({"nodeName": node} if node else {}),
    }
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": "2025-11-21T08:00:00Z"}
        for kind in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
    ]
    metadata = {
        "name": name, "namespace": "bench", "uid": uid or f"uid-{name}", "resourceVersion": "1",
        "labels": {"app": "training", "team": "bench"},
        "managedFields": [{"manager": "kubelet", "fieldsV1": {f"f:{number}": {} for number in range(40)}}],
    }  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": spec,
        "status": {"phase": "Running" if node else "Pending", "conditions": conditions},
    }


def _uid(node: str, which: int) -> str:
    return f"{node}-{which}-0000-0000-000000000000"


class ClusterServer:
    """Lists in pages, watches, patches and binds. `relist` makes every watcher list again; `watches` counts by path."""

    def __init__(self, cluster: SampleCluster) -> None:
        self._cluster = cluster
        self._version = 1
        self._pending: dict[str, dict[str, Any]] = {}
        self._watchers: dict[str, set[asyncio.Queue[bytes]]] = {}
        self.watches: dict[str, int] = {}
        self._has_begun = asyncio.Condition()
        self.port = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application()
        pod = "/api/v1/namespaces/{namespace}/pods/{name}"
        app.add_routes(
            [
                web.get("/api/v1/nodes", self._nodes),
                web.get("/api/v1/pods", self._pods),
                web.get("/api/v1/namespaces/{namespace}/configmaps", self._nothing),
                web.get(pod, self._get),
                web.patch(pod, self._patch),
                web.post(f"{pod}/binding", self._bind),
                web.post("/api/v1/namespaces/{namespace}/events", self._event),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            yield
        finally:
            for queues in self._watchers.values():
                for queue in queues:
                    queue.put_nowait(b"")
            await runner.cleanup()

    async def watched(self, paths: Sequence[str]) -> None:
        """Returns once each of them was watched."""
        async with self._has_begun:
            await self._has_begun.wait_for(lambda: all(path in self.watches for path in paths))

    def add(self, pod: dict[str, Any]) -> None:
        """A new pod without a node, sent to every watch."""
        self._pending[pod["metadata"]["name"]] = pod
        self._send("ADDED", pod)

    def relist(self) -> None:
        """Ends every watch, as an API server does that has forgotten the watcher's version."""
        status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        line = json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"
        for queues in self._watchers.values():
            for queue in queues:
                queue.put_nowait(line)

    async def _nodes(self, request: web.Request) -> web.StreamResponse:
        return await self._collection(request, self._cluster.nodes_json)

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        more = [json.dumps(pod).encode() for pod in self._pending.values()]
        return await self._collection(request, self._cluster.pods_json, more)

    async def _nothing(self, request: web.Request) -> web.StreamResponse:
        return await self._collection(request, [])

    async def _collection(
        self, request: web.Request, items: Sequence[bytes], more: Sequence[bytes] = ()
    ) -> web.StreamResponse:
        """`more` comes with the last page."""
        if request.query.get("watch"):
            return await self._watch(request)
        begin = int(request.query.get("continue") or 0)
        end = min(len(items), begin + int(request.query.get("limit") or len(items)))
        page = [*items[begin:end], *(more if end == len(items) else ())]
        metadata = {"resourceVersion": str(self._version), **({"continue": str(end)} if end < len(items) else {})}
        body = b'{"metadata": %s, "items": [%s]}' % (json.dumps(metadata).encode(), b",".join(page))
        return web.Response(body=body, content_type="application/json")

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        queues = self._watchers.setdefault(request.path, set())
        queues.add(queue)
        self.watches[request.path] = self.watches.get(request.path, 0) + 1
        async with self._has_begun:
            self._has_begun.notify_all()
        try:
            await response.prepare(request)
            while line := await queue.get():
                await response.write(line)
                if b'"ERROR"' in line[:20]:
                    break
        except ConnectionError:
            pass  # the extender has ended
        finally:
            queues.discard(queue)
        return response

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self._pending[request.match_info["name"]])

    async def _patch(self, request: web.Request) -> web.Response:
        pod = self._pending[request.match_info["name"]]
        body = await request.json()
        pod["metadata"].setdefault("annotations", {}).update(body["metadata"]["annotations"])
        self._send("MODIFIED", pod)
        return web.json_response(pod)

    async def _bind(self, request: web.Request) -> web.Response:
        body = await request.json()
        pod = self._pending[request.match_info["name"]]
        pod["metadata"].setdefault("annotations", {}).update(body["metadata"].get("annotations") or {})
        pod["spec"]["nodeName"] = self._cluster.bound[pod["metadata"]["uid"]] = body["target"]["name"]
        self._send("MODIFIED", pod)
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)

    async def _event(self, request: web.Request) -> web.Response:
        return web.json_response(await request.json(), status=201)

    def _send(self, kind: str, pod: dict[str, Any]) -> None:
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        line = json.dumps({"type": kind, "object": pod}).encode() + b"\n"
        for queue in self._watchers.get("/api/v1/pods", ()):
            queue.put_nowait(line)


def filter_args(pod: dict[str, Any], names: Sequence[str]) -> bytes:
    """ExtenderArgs of a scheduler that keeps the nodes itself (nodeCacheCapable)."""
    return json.dumps({"Pod": pod, "Nodes": None, "NodeNames": list(names)}).encode()
