"""A cluster's API server on a real TCP port, with faults by script, and what speaks to it: the extender in this process.

`FakeCluster` keeps nodes, pods, config maps and leases with versions; lists come in pages, watches follow, patches and binds
check their preconditions as Kubernetes does. `faults` are taken one by each patch, bind and lease write.
"""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from msgspec import to_builtins

from gpushare_agent.cluster.informer import Informer
from gpushare_agent.cluster.kube.client import ALL_NODES, LIVE_PODS, ClusterApi, open_cluster_api
from gpushare_agent.cluster.kube.pods import read_pod_json
from gpushare_agent.cluster.node_annotations import ALLOCATIONS_ANNOTATION, GPUS_ANNOTATION
from gpushare_agent.extender.app import MOST_FITTING_NODES, ExtenderParts, build, serve
from gpushare_agent.extender.bind import Binder, BindTiming, PodWrites
from gpushare_agent.extender.cluster_feed import NodesFeed, PodsFeed
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.debug import node_document
from gpushare_agent.extender.decisions.pod_plan import plan_pod
from gpushare_agent.extender.decisions.quota import QuotaState
from gpushare_agent.extender.messages import BindArgs
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.objects import lean_pod, read_node
from gpushare_agent.extender.values import ClusterPolicy
from gpushare_agent.model.allocations import Charge
from gpushare_agent.model.errors import Refused
from gpushare_agent.model.gpus import Topology
from gpushare_agent.model.names import (
    PREDICATE_GPU_INDEX_PREFIX,
    PREDICATE_NODE_ANNOTATION,
    VCORE_RESOURCE,
    VMEMORY_RESOURCE,
    PodUid,
)
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.placement import GpuAccount
from gpushare_agent.settings.sections import ExtenderSettings
from gpushare_agent.settings.settings import Settings
from tests.cluster.support_kube import FAST, write_kubeconfig
from tests.support_deadline import DEADLINE_S, Changes
from tests.support_json import undecoded

GOOD = "good"
FAULTS = ("409", "429", "500", "500-done", "silent", "silent-done", "late")
"""Not carried out, but for -done; `late` is carried out, by `carry_out_late`, after the client was cut off."""
MODEL_LABEL, POOL_LABEL = "gaia.tencent.com/gpu-model", "gaia.tencent.com/gpu-pool"

NAMES = ResourceNames()

Raw = dict[str, Any]


def raw_node(name: str, *, gpus: int = 2, memory_mib: int = 4096, model: str = "", pool: str = "") -> Raw:
    """A node whose agent tells of its GPUs, and that nobody holds any."""
    reported = [
        {"index": i, "uuid": f"GPU-{name}-{i}", "name": model, "memory_mib": memory_mib, "is_healthy": True}
        for i in range(gpus)
    ]
    counts = {VCORE_RESOURCE: str(gpus * 100), VMEMORY_RESOURCE: str(gpus * memory_mib // 256)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {key: value for key, value in ((MODEL_LABEL, model), (POOL_LABEL, pool)) if value},
            "annotations": {
                GPUS_ANNOTATION: json.dumps({"schema": 1, "memory_block_mib": 256, "cards": reported}),
                ALLOCATIONS_ANNOTATION: json.dumps({"schema": 1, "held": {}}),
            },
        },
        "status": {"capacity": counts, "allocatable": counts},
    }


def raw_container(name: str, cores: int, blocks: int) -> Raw:
    limits = {VCORE_RESOURCE: str(cores), VMEMORY_RESOURCE: str(blocks)} if cores or blocks else {}
    return {"name": name, "image": "x", "resources": {"limits": limits, "requests": limits}}


def raw_pod(
    name: str,
    *requests: tuple[int, int],
    namespace: str = "default",
    node: str = "",
    annotations: Mapping[str, str] | None = None,
    phase: str = "Pending",
) -> Raw:
    """One main container for each (cores, blocks)."""
    spec: Raw = {"containers": [raw_container(f"c{i}", *request) for i, request in enumerate(requests)]}
    if node:
        spec["nodeName"] = node
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "annotations": dict(annotations or {}),
        },
        "spec": spec,
        "status": {"phase": phase},
    }


class FakeCluster:
    """`await start()`, `await stop()`; `seen` has method and path of each request. Objects by kind and "namespace/name"."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Raw]] = {
            "nodes": {},
            "pods": {},
            "configmaps": {},
            "leases": {},
            "events": {},
            "resourceclaimtemplates": {},
        }
        self.version = 100
        self.faults: list[str] = []
        self.seen: list[tuple[str, str]] = []
        self.is_down = False
        self.is_mute = False
        """Watches tell nothing, for now."""
        self.page = 2
        self.retry_after = "0"
        self._history: list[tuple[int, str, str, Raw]] = []
        self._first_version = 100
        self._changed = Changes()
        self._late: list[Callable[[], tuple[int, Raw]]] = []
        self._runner: web.AppRunner | None = None
        self._serving = 0
        self.port = 0
        self.admitted: dict[str, dict[str, dict[str, list[int]]]] = {}
        """By node and pod UID what its agent gave: GPU index -> [cores, blocks, units, is whole]."""
        self.rejected: list[str] = []
        """Pods that were bound to a node whose agent had no room for them."""

    # --- in process ---

    def put(self, kind: str, raw: Raw) -> Raw:
        metadata = raw["metadata"]
        key = _key(metadata)
        is_known = key in self.objects[kind]
        metadata["resourceVersion"] = self._next()
        self.objects[kind][key] = raw
        self._tell("MODIFIED" if is_known else "ADDED", kind, raw)
        return raw

    def change(self, kind: str, key: str, change: Callable[[Raw], None]) -> Raw:
        raw = json.loads(json.dumps(self.objects[kind][key]))
        change(raw)
        return self.put(kind, raw)

    def delete(self, kind: str, key: str) -> None:
        raw = json.loads(json.dumps(self.objects[kind].pop(key)))
        raw["metadata"]["resourceVersion"] = self._next()
        self._tell("DELETED", kind, raw)

    def pod(self, name: str, namespace: str = "default") -> Raw:
        return self.objects["pods"][f"{namespace}/{name}"]

    def node_of(self, name: str, namespace: str = "default") -> str:
        node: str = self.pod(name, namespace)["spec"].get("nodeName", "")
        return node

    def forget_history(self) -> None:
        """Watches from before now get 410."""
        self._history.clear()
        self._first_version = self.version + 1

    def mute(self, is_mute: bool) -> None:
        self.is_mute = is_mute
        self._changed.set()

    def carry_out_late(self) -> None:
        """What was cut off is done now, as far as its preconditions still hold."""
        late, self._late = self._late, []
        for act in late:
            act()

    def drop_late(self) -> None:
        self._late.clear()

    def admit(self, pod: Raw) -> None:
        """What the node's agent does once the pod is bound: it takes the GPUs of the annotations where they are free."""
        node, uid = pod["spec"]["nodeName"], pod["metadata"]["uid"]
        if not lean_pod(read_pod_json(undecoded(pod)), NAMES).containers:
            return
        given = charges_by_annotation(pod) if predicted(pod).get(PREDICATE_NODE_ANNOTATION) == node else {}
        if not given or not self._fits(node, given):
            planned = plan_pod(
                lean_pod(read_pod_json(undecoded(pod)), NAMES),
                self._accounts(node),
                self._topology(node),
                ClusterPolicy(names=NAMES),
            )
            if isinstance(planned, Refused):
                self.rejected.append(f"{uid} on {node}: {planned.detail}")
                return
            given = {str(index): list(charge[:4]) for index, charge in planned.charges.items()}
        self.admitted.setdefault(node, {})[uid] = given

    def report_held(self, node: str) -> None:
        """The node's agent tells what its pods hold."""
        text = json.dumps({"schema": 1, "held": self.admitted.get(node, {})})
        self.change("nodes", node, lambda raw: raw["metadata"]["annotations"].update({ALLOCATIONS_ANNOTATION: text}))

    def end_pod(self, key: str) -> None:
        """The pod is gone from its node, and from the API server."""
        pod = self.objects["pods"][key]
        self.admitted.get(pod["spec"].get("nodeName", ""), {}).pop(pod["metadata"]["uid"], None)
        self.delete("pods", key)

    def used(self, node: str) -> dict[str, list[int]]:
        """Of each GPU, by what the node's agent gave."""
        used: dict[str, list[int]] = {}
        for given in self.admitted.get(node, {}).values():
            for index, charge in given.items():
                used[index] = [a + b for a, b in zip(used.get(index, [0, 0, 0, 0]), charge, strict=True)]
        return used

    def _fits(self, node: str, given: Mapping[str, Sequence[int]]) -> bool:
        """Whether the GPUs of the annotations can still give so much."""
        gpus = {str(gpu.index): gpu for gpu in self._accounts(node)}
        for index, (cores, blocks, _, is_whole) in given.items():
            gpu = gpus.get(index)
            if gpu is None or gpu.free_cores < cores or gpu.free_blocks < blocks or (is_whole and not gpu.is_free):
                return False
        return True

    def _accounts(self, node: str) -> list[GpuAccount]:
        used = self.used(node)
        reported = json.loads(self.objects["nodes"][node]["metadata"]["annotations"][GPUS_ANNOTATION])["cards"]
        accounts = []
        for gpu in reported:
            cores, blocks, units, wholes = used.get(str(gpu["index"]), [0, 0, 0, 0])
            accounts.append(
                GpuAccount(
                    index=gpu["index"],
                    uuid=gpu["uuid"],
                    memory_mib=gpu["memory_mib"],
                    is_healthy=gpu["is_healthy"],
                    used=Charge(cores=cores, blocks=blocks, units=units, wholes=wholes),
                )
            )
        return accounts

    def _topology(self, node: str) -> Topology:
        found = read_node(
            undecoded(self.objects["nodes"][node]), NAMES, model_label=MODEL_LABEL, pool_label=POOL_LABEL
        ).node
        assert found is not None
        return found.topology

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Until it holds after some request or change."""
        await self._changed.until(condition)

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def stop(self) -> None:
        """What still watches is ended."""
        assert self._runner is not None
        self.is_down = True
        async with asyncio.timeout(DEADLINE_S):
            while self._serving:
                self._changed.set()
                await asyncio.sleep(0.001)
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # --- over HTTP ---

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self._serving += 1
        try:
            return await self._answer(request)
        finally:
            self._serving -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.method, request.path))
        self._changed.set()
        if self.is_down:
            return _cut(request)
        parts = [part for part in request.path.split("/") if part]
        kind = next((part for part in reversed(parts) if part in self.objects), "")
        if not kind:
            return _status(404, "no such path")
        at = parts.index(kind)
        namespace = parts[at - 1] if at >= 2 and parts[at - 2] == "namespaces" else ""
        rest = parts[at + 1 :]
        if request.method == "GET" and not rest:
            if request.query.get("watch") == "true":
                return await self._watch(request, kind, namespace)
            return self._list(request, kind, namespace)
        key = "/".join(filter(None, (namespace, rest[0] if rest else "")))
        if request.method == "GET":
            raw = self.objects[kind].get(key)
            return web.json_response(raw) if raw is not None else _status(404, f"{key} not found")
        body = await request.json()
        act = self._act(request.method, kind, namespace, key, rest, body)
        return self._with_fault(request, act)

    def _act(
        self, method: str, kind: str, namespace: str, key: str, rest: Sequence[str], body: Raw
    ) -> Callable[[], tuple[int, Raw]]:
        if method == "PATCH":
            return lambda: self._patch(kind, key, body)
        if method == "PUT":
            return lambda: self._replace(kind, key, body)
        if rest and rest[-1] == "binding":
            return lambda: self._bind(key, body)
        return lambda: self._create(kind, namespace, body)

    def _with_fault(self, request: web.Request, act: Callable[[], tuple[int, Raw]]) -> web.StreamResponse:
        fault = self.faults.pop(0) if self.faults else GOOD
        if fault in ("403", "409", "429", "500"):
            return _status(int(fault), "told to", {"Retry-After": self.retry_after})
        if fault == "silent":
            return _cut(request)
        if fault == "late":
            self._late.append(act)
            return _cut(request)
        status, raw = act()
        self._changed.set()
        if fault == "500-done":
            return _status(500, "told to")
        if fault == "silent-done":
            return _cut(request)
        return web.json_response(raw, status=status)

    def _patch(self, kind: str, key: str, body: Raw) -> tuple[int, Raw]:
        old = self.objects[kind].get(key)
        if old is None:
            return 404, _raw_status(404, f"{key} not found")
        wanted = body["metadata"]
        if "uid" in wanted and wanted["uid"] != old["metadata"]["uid"]:
            return 409, _raw_status(409, "the UID in the precondition differs")

        def merge(raw: Raw) -> None:
            annotations = raw["metadata"].setdefault("annotations", {})
            for name, value in wanted.get("annotations", {}).items():
                annotations.pop(name, None) if value is None else annotations.update({name: value})
            for name, value in wanted.get("labels", {}).items():
                labels = raw["metadata"].setdefault("labels", {})
                labels.pop(name, None) if value is None else labels.update({name: value})

        fresh = json.loads(json.dumps(old))
        merge(fresh)
        if fresh == old:
            return 200, old
        return 200, self.put(kind, fresh)

    def _replace(self, kind: str, key: str, body: Raw) -> tuple[int, Raw]:
        old = self.objects[kind].get(key)
        if old is None:
            return 404, _raw_status(404, f"{key} not found")
        if body["metadata"].get("resourceVersion") != old["metadata"]["resourceVersion"]:
            return 409, _raw_status(409, "the object has been modified")
        return 200, self.put(kind, body)

    def _bind(self, key: str, body: Raw) -> tuple[int, Raw]:
        old, metadata = self.objects["pods"].get(key), body["metadata"]
        if old is None:
            return 404, _raw_status(404, f"{key} not found")
        if metadata["uid"] != old["metadata"]["uid"]:
            return 409, _raw_status(409, "the UID in the precondition differs")
        if metadata.get("resourceVersion") not in (None, "", old["metadata"]["resourceVersion"]):
            return 409, _raw_status(409, "the version in the precondition differs")
        if old["spec"].get("nodeName"):
            return 409, _raw_status(409, f"pod {key} is already assigned to node {old['spec']['nodeName']}")

        def bound(raw: Raw) -> None:
            raw["spec"].update(nodeName=body["target"]["name"])
            # Those of the Binding become the pod's, as with a real one.
            if annotations := metadata.get("annotations"):
                raw["metadata"].setdefault("annotations", {}).update(annotations)

        self.admit(self.change("pods", key, bound))
        return 201, _raw_status(201, "bound")

    def _create(self, kind: str, namespace: str, body: Raw) -> tuple[int, Raw]:
        body["metadata"].setdefault("namespace", namespace)
        key = _key(body["metadata"])
        if key in self.objects[kind]:
            return 409, _raw_status(409, f"{key} exists")
        return 201, self.put(kind, body)

    def _list(self, request: web.Request, kind: str, namespace: str) -> web.Response:
        found = [raw for _, raw in sorted(self.objects[kind].items()) if self._is_asked(request, raw, namespace)]
        # every page is of the first one's version, as with a real one: what comes meanwhile is watched, not lost
        begin, version = map(int, request.query.get("continue", f"0/{self.version}").split("/"))
        size = min(int(request.query.get("limit", "500")), self.page)
        metadata = {"resourceVersion": str(version)}
        if begin + size < len(found):
            metadata["continue"] = f"{begin + size}/{version}"
        return web.json_response({"kind": "List", "metadata": metadata, "items": found[begin : begin + size]})

    def _is_asked(self, request: web.Request, raw: Raw, namespace: str) -> bool:
        if namespace and raw["metadata"].get("namespace") != namespace:
            return False
        labels = raw["metadata"].get("labels", {}).items()
        if not {tuple(one.split("=")) for one in request.query.get("labelSelector", "").split(",") if one} <= set(
            labels
        ):
            return False
        fields = request.query.get("fieldSelector", "")
        if fields.startswith("metadata.name="):
            return bool(raw["metadata"]["name"] == fields.partition("=")[2])
        return not fields or raw["status"]["phase"] not in ("Succeeded", "Failed")

    async def _watch(self, request: web.Request, kind: str, namespace: str) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if since < self._first_version - 1:
            return _status(410, "too old resource version")
        response = web.StreamResponse()
        await response.prepare(request)
        while not self.is_down:
            for version, what, its_kind, raw in [] if self.is_mute else list(self._history):
                if version <= since or its_kind != kind:
                    continue
                since = version
                if namespace and raw["metadata"].get("namespace") != namespace:
                    continue
                reported = what if self._is_asked(request, raw, namespace) else "DELETED"
                try:
                    await response.write(json.dumps({"type": reported, "object": raw}).encode() + b"\n")
                except ConnectionError:
                    return response
            news = self._changed
            news.clear()
            await asyncio.sleep(0)
            if self.is_mute or not any(one[0] > since and one[2] == kind for one in self._history):
                await news.wait()
        return response

    def _next(self) -> str:
        self.version += 1
        return str(self.version)

    def _tell(self, what: str, kind: str, raw: Raw) -> None:
        self._history.append((self.version, what, kind, raw))
        self._changed.set()


def holds(cluster: FakeCluster, node: str, *charges: tuple[str, int, int, int]) -> None:
    """The node's agent tells of pods: UID, GPU, cores, blocks."""
    held = {uid: {str(gpu): [cores, blocks, 0, 0]} for uid, gpu, cores, blocks in charges}
    text = json.dumps({"schema": 1, "held": held})
    cluster.change("nodes", node, lambda raw: raw["metadata"]["annotations"].update({ALLOCATIONS_ANNOTATION: text}))


def put_quota(cluster: FakeCluster, quota: Any) -> None:
    text = quota if isinstance(quota, str) else json.dumps(quota)
    cluster.put(
        "configmaps", {"metadata": {"name": "gpuquota", "namespace": "kube-system"}, "data": {"gpu_quota": text}}
    )


def foreign_lease(holder: str = "somebody") -> Raw:
    """The extender's, held by another for an hour."""
    return {
        "metadata": {"name": "gpushare-agent-extender", "namespace": "kube-system"},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": 3600, "renewTime": "x"},
    }


def charges_by_annotation(pod: Raw) -> dict[str, list[int]]:
    """GPU index -> [cores, blocks, units, is whole], as the agent that follows the annotations holds them."""
    held: dict[str, list[int]] = {}
    for position, container in enumerate(pod["spec"]["containers"]):
        limits = container["resources"]["limits"]
        text = pod["metadata"]["annotations"].get(f"{PREDICATE_GPU_INDEX_PREFIX}{position}", "")
        cores, blocks = int(limits.get(VCORE_RESOURCE, 0)), int(limits.get(VMEMORY_RESOURCE, 0))
        for index in filter(None, text.split(",")):
            one = held.setdefault(index, [0, 0, 0, 0])
            one[0] += min(cores, 100)
            one[1] += 0 if cores >= 100 else blocks
            one[3] = max(one[3], int(cores >= 100))
    return held


def predicted(pod: Raw) -> dict[str, str]:
    """The extender's annotations but the time."""
    return {
        name: value
        for name, value in sorted(pod["metadata"]["annotations"].items())
        if name == PREDICATE_NODE_ANNOTATION or name.startswith(PREDICATE_GPU_INDEX_PREFIX)
    }


def _key(metadata: Raw) -> str:
    return "/".join(filter(None, (metadata.get("namespace", ""), metadata["name"])))


def _raw_status(code: int, message: str) -> Raw:
    return {"kind": "Status", "apiVersion": "v1", "code": code, "message": message}


def _status(code: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response(_raw_status(code, message), status=code, headers=headers)


def _cut(request: web.Request) -> web.Response:
    """The connection ends without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@asynccontextmanager
async def fake_cluster(*nodes: Raw, pods: Sequence[Raw] = ()) -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster()
    for node in nodes:
        cluster.put("nodes", node)
    for pod in pods:
        cluster.put("pods", pod)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop()


@asynccontextmanager
async def opened_api(cluster: FakeCluster, *, request_s: float = DEADLINE_S) -> AsyncIterator[ClusterApi]:
    directory = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    try:
        kubeconfig = write_kubeconfig(directory, cluster.url, {"token": "secret"})
        async with open_cluster_api(kubeconfig=kubeconfig, request_s=request_s) as api:
            yield api
    finally:
        shutil.rmtree(directory)


class Asker:
    """What kube-scheduler does: POST, and read the answer."""

    def __init__(self, parts: ExtenderParts, session: aiohttp.ClientSession) -> None:
        self.parts = parts
        self._session = session

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.parts.web.bound_port}"

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes | io.BytesIO) else json.dumps(body).encode()
        async with asyncio.timeout(DEADLINE_S), self._session.post(f"{self.url}{path}", data=data) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text

    async def get(self, path: str) -> tuple[int, str]:
        async with asyncio.timeout(DEADLINE_S), self._session.get(f"{self.url}{path}") as answer:
            return answer.status, await answer.text()

    async def filter(self, pod: Raw, names: Sequence[str]) -> Raw:
        status, answer = await self.post("/scheduler/filter", {"Pod": pod, "Nodes": None, "NodeNames": list(names)})
        assert status == 200
        raw: Raw = answer
        return raw

    async def bind(self, pod: Raw, node: str) -> str:
        """The error, empty where it is bound."""
        metadata = pod["metadata"]
        args = {
            "PodName": metadata["name"],
            "PodNamespace": metadata["namespace"],
            "PodUID": metadata["uid"],
            "Node": node,
        }
        status, answer = await self.post("/scheduler/bind", args)
        assert status == 200
        error: str = answer["Error"]
        return error


@asynccontextmanager
async def running_extender(
    cluster: FakeCluster,
    *,
    is_ready: bool = True,
    request_s: float = DEADLINE_S,
    clock: Callable[[], float] = time.monotonic,
    most_fitting: int = MOST_FITTING_NODES,
    **settings: Any,
) -> AsyncIterator[Asker]:
    """The whole extender over HTTP, without election unless asked for."""
    chosen = {"port": 0, "leader_elect": False, **settings}
    async with opened_api(cluster, request_s=request_s) as api, aiohttp.ClientSession() as session:
        parts = build(Settings(extender=ExtenderSettings(**chosen)), api, clock=clock)
        parts.web.verbs.most_fitting = most_fitting
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(serve(parts, stop))
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await parts.web.wait_listening()
                    while is_ready and parts.leadership.listed_in != parts.election.term:
                        await asyncio.sleep(0.005)
                yield Asker(parts, session)
            finally:
                stop.set()


async def eventually(condition: Callable[[], bool], turn: Callable[[], Awaitable[object]] | None = None) -> None:
    """Waits, a few milliseconds at a time, for what nothing tells of."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            if turn is not None:
                await turn()
            await asyncio.sleep(0.005)


def state_document(state: ClusterState) -> list[Raw]:
    """Every node with what is allocated of it, sorted."""
    return [
        to_builtins(node_document(ledger))
        for name in state.node_names()
        if (ledger := state.node_ledger(name)) is not None
    ]


class Replica:
    """One extender without its HTTP server and election: `is_leading` is for the test to turn."""

    def __init__(self, api: ClusterApi, clock: Callable[[], float], bind_s: float) -> None:
        self.is_leading = False
        metrics, quota = ExtenderMetrics(), QuotaState(NAMES)
        self.metrics = metrics
        self.state = ClusterState(policy=ClusterPolicy(names=NAMES), quota=quota)
        pods = PodsFeed(state=self.state, names=NAMES)
        nodes = NodesFeed(
            state=self.state,
            read=lambda raw: read_node(raw, NAMES, model_label=MODEL_LABEL, pool_label=POOL_LABEL),
            metrics=metrics,
            on_report=pods.drop_missing,
            clock=clock,
        )
        self.binder = Binder(
            state=self.state,
            writes=PodWrites(api=api, names=NAMES, leads=lambda: self.is_leading),
            unscheduled=pods.unscheduled,
            metrics=metrics,
            timing=BindTiming(bind_s=bind_s, reconcile_s=3600.0, backoff=FAST, clock=clock),
        )
        self.informers = [
            Informer(kind="nodes", watched=ALL_NODES, handler=nodes, metrics=metrics, backoff=FAST),
            Informer(kind="pods", watched=LIVE_PODS, handler=pods, metrics=metrics, backoff=FAST),
        ]

    async def lead(self) -> None:
        """List everything, then decide."""
        async with asyncio.timeout(DEADLINE_S):
            for informer in self.informers:
                await informer.refresh()
        self.is_leading = True

    async def bind(self, pod: Raw, node: str) -> str:
        metadata = pod["metadata"]
        return await self.binder.bind(
            BindArgs(namespace=metadata["namespace"], pod=metadata["name"], uid=PodUid(metadata["uid"]), node=node)
        )

    def ledger(self) -> dict[str, dict[str, list[int]]]:
        """What is taken of each GPU by its picture, as `FakeCluster.used` has it."""
        found: dict[str, dict[str, list[int]]] = {}
        for node in state_document(self.state):
            used: dict[str, list[int]] = {}
            for reservation in node["reservations"]:
                for index, charge in reservation["charges"].items():
                    used[index] = [a + b for a, b in zip(used.get(index, [0, 0, 0, 0]), charge, strict=True)]
            found[node["name"]] = used
        return found


@asynccontextmanager
async def running_replica(
    cluster: FakeCluster, clock: Callable[[], float] = time.monotonic, *, bind_s: float = DEADLINE_S
) -> AsyncIterator[Replica]:
    """With informers that run, not leading yet. What the API server leaves unanswered it cuts off: no time need end."""
    async with opened_api(cluster) as api, asyncio.TaskGroup() as group:
        replica = Replica(api, clock, bind_s)
        tasks = [group.create_task(informer.run(api)) for informer in replica.informers]
        try:
            yield replica
        finally:
            for task in tasks:
                task.cancel()
