"""The fake API server with the agents of its nodes, and what speaks to it: the extender in this process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
from msgspec import to_builtins
from msgspec.structs import replace

from gpushare_agent.core.kube.client import ALL_NODES, LIVE_PODS, ClusterApi, open_cluster_api
from gpushare_agent.core.kube.informer import Informer
from gpushare_agent.core.kube.pods import read_pod_json
from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.gpus import GpuReport, Link, LinkKind
from gpushare_agent.core.model.names import (
    PREDICATE_GPU_INDEX_PREFIX,
    PREDICATE_NODE_ANNOTATION,
    VCORE_RESOURCE,
    VMEMORY_RESOURCE,
    GpuUuid,
    PodUid,
)
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.node_report.annotations import ALLOCATIONS_ANNOTATION, GPUS_ANNOTATION
from gpushare_agent.core.placement import GpuAccount
from gpushare_agent.core.placement.topology import build_topology
from gpushare_agent.core.settings.sections import ExtenderSettings
from gpushare_agent.core.settings.settings import Settings
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
from gpushare_agent.extender.values import ClusterNode, ClusterPolicy
from tests.cluster.support_kube import FAST, kubeconfig_file, running
from tests.fakes.api_server import FakeApiServer, Raw
from tests.support_deadline import DEADLINE_S, poll_until
from tests.support_json import undecoded

MODEL_LABEL, POOL_LABEL = "gaia.tencent.com/gpu-model", "gaia.tencent.com/gpu-pool"

NAMES = ResourceNames()
BLOCKS = 96
"""Of a GPU of `cluster_node`."""
READ_NODE = partial(read_node, names=NAMES, model_label=MODEL_LABEL, pool_label=POOL_LABEL)


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
                GPUS_ANNOTATION: json.dumps({"schema": 1, "memory_block_mib": 256, "gpus": reported}),
                ALLOCATIONS_ANNOTATION: json.dumps({"schema": 1, "allocations": {}}),
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


def node_of(raw: Raw, names: ResourceNames = NAMES) -> ClusterNode:
    """As the extender reads it."""
    found = READ_NODE(undecoded(raw), names=names).node
    assert found is not None
    return found


def pod_of(raw: Raw, names: ResourceNames = NAMES) -> Pod:
    """As the extender keeps it."""
    return lean_pod(read_pod_json(undecoded(raw)), names)


def cluster_node(name: str = "a", gpus: int = 2, **changes: object) -> ClusterNode:
    """GPUs of 24 GiB, all PIX apart; its agent reports its allocations."""
    links = [[Link(kind=LinkKind.SELF if a == b else LinkKind.PIX) for b in range(gpus)] for a in range(gpus)]
    made = ClusterNode(
        name=name,
        gpus=tuple(GpuReport(index=i, uuid=GpuUuid(f"GPU-{name}-{i}"), memory_mib=BLOCKS * 256) for i in range(gpus)),
        topology=build_topology(links, [None] * gpus),
        allocated={},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


class FakeCluster(FakeApiServer):
    """A bound pod is given GPUs as the agent of its node would do it."""

    def __init__(self) -> None:
        super().__init__()
        self.admitted: dict[str, dict[str, dict[str, list[int]]]] = {}
        """By node and pod UID what its agent gave: GPU index -> [cores, blocks, units, is whole]."""
        self.rejected: list[str] = []
        """Pods that were bound to a node whose agent had no room for them."""

    def node_of(self, name: str, namespace: str = "default") -> str:
        node: str = self.pod(namespace, name)["spec"].get("nodeName", "")
        return node

    def bind_pod(self, namespace: str, name: str, node_name: str, **basis: Any) -> Raw:
        bound = super().bind_pod(namespace, name, node_name, **basis)
        self.admit(bound)
        return bound

    def admit(self, pod: Raw) -> None:
        """What the node's agent does once the pod is bound: it takes the GPUs of the annotations where they are free."""
        node, uid = pod["spec"]["nodeName"], pod["metadata"]["uid"]
        if not pod_of(pod).containers:
            return
        given = charges_by_annotation(pod) if predicted(pod).get(PREDICATE_NODE_ANNOTATION) == node else {}
        if not given or not self._fits(node, given):
            topology = node_of(self.objects["nodes"][node]).topology
            planned = plan_pod(pod_of(pod), self._accounts(node), topology, ClusterPolicy(names=NAMES))
            if isinstance(planned, Refused):
                self.rejected.append(f"{uid} on {node}: {planned.detail}")
                return
            given = {str(index): list(charge[:4]) for index, charge in planned.charges.items()}
        self.admitted.setdefault(node, {})[uid] = given

    def report_held(self, node: str) -> None:
        """The node's agent tells what its pods hold."""
        self._report(node, self.admitted.get(node, {}))

    def end_pod(self, key: str) -> None:
        """The pod is gone from its node, and from the API server."""
        pod = self.objects["pods"][key]
        self.admitted.get(pod["spec"].get("nodeName", ""), {}).pop(pod["metadata"]["uid"], None)
        self.remove("pods", key)

    def used(self, node: str) -> dict[str, list[int]]:
        """Of each GPU, by what the node's agent gave."""
        return summed(self.admitted.get(node, {}).values())

    def writes(self) -> list[str]:
        """The methods of the requests that are no reads."""
        return [method for method, _ in self.requests if method != "GET"]

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
        reported = json.loads(self.objects["nodes"][node]["metadata"]["annotations"][GPUS_ANNOTATION])["gpus"]
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

    def holds(self, node: str, *charges: tuple[str, int, int, int]) -> None:
        """The node's agent tells of pods: UID, GPU, cores, blocks."""
        self._report(node, {uid: {str(gpu): [cores, blocks, 0, 0]} for uid, gpu, cores, blocks in charges})

    def _report(self, node: str, held: Mapping[str, Any]) -> None:
        text = json.dumps({"schema": 1, "allocations": held})
        self.change("nodes", node, lambda raw: raw["metadata"]["annotations"].update({ALLOCATIONS_ANNOTATION: text}))

    def put_quota(self, quota: Any) -> None:
        text = quota if isinstance(quota, str) else json.dumps(quota)
        self.put(
            "configmaps", {"metadata": {"name": "gpuquota", "namespace": "kube-system"}, "data": {"gpu_quota": text}}
        )

    @asynccontextmanager
    async def opened_api(self, *, request_s: float = DEADLINE_S) -> AsyncIterator[ClusterApi]:
        with kubeconfig_file(self.url) as kubeconfig:
            async with open_cluster_api(kubeconfig=kubeconfig, request_s=request_s) as api:
                yield api


def summed(charges: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """By GPU."""
    sums: dict[str, list[int]] = {}
    for index, charge in (item for of_pod in charges for item in of_pod.items()):
        sums[index] = [a + b for a, b in zip(sums.get(index, [0, 0, 0, 0]), charge, strict=True)]
    return sums


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


@asynccontextmanager
async def fake_cluster(*nodes: Raw, pods: Sequence[Raw] = ()) -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster()
    for node in nodes:
        cluster.put("nodes", node)
    for pod in pods:
        cluster.put("pods", pod)
    async with cluster:
        yield cluster


class Asker:
    """What kube-scheduler does: POST, and read the answer."""

    def __init__(self, parts: ExtenderParts, session: aiohttp.ClientSession) -> None:
        self.parts = parts
        self._session = session

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.parts.web.bound_port}"

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
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
    async with cluster.opened_api(request_s=request_s) as api, aiohttp.ClientSession() as session:
        parts = build(Settings(extender=ExtenderSettings(**chosen)), api, clock=clock)
        parts.web.verbs.most_fitting = most_fitting
        async with serving_extender(parts):
            await eventually(lambda: not is_ready or parts.leadership.listed_in == parts.election.term)
            yield Asker(parts, session)


@asynccontextmanager
async def serving_extender(parts: ExtenderParts) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(parts, stop), name="extender")
        try:
            async with asyncio.timeout(DEADLINE_S):
                await parts.web.wait_listening()
            yield
        finally:
            stop.set()


async def eventually(condition: Callable[[], object]) -> None:
    await poll_until(condition, "what the test waits for")


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
        pods = PodsFeed(state=self.state)
        nodes = NodesFeed(state=self.state, read=READ_NODE, metrics=metrics, on_report=pods.drop_missing, clock=clock)
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
        return {
            node["name"]: summed(one["charges"] for one in node["reservations"]) for node in state_document(self.state)
        }


@asynccontextmanager
async def running_replica(
    cluster: FakeCluster, clock: Callable[[], float] = time.monotonic, *, bind_s: float = DEADLINE_S
) -> AsyncIterator[Replica]:
    """With informers that run, not leading yet. What the API server leaves unanswered it cuts off: no time need end."""
    async with cluster.opened_api() as api:
        replica = Replica(api, clock, bind_s)
        async with running(*(partial(informer.run, api) for informer in replica.informers)):
            yield replica
