"""How full the public trace's cluster gets with the real kube-scheduler and the real extender, by what keeps pods without
GPUs off nodes with free GPUs: nothing, the agents' taint of free GPUs, or a NoSchedule taint on every node with GPUs.

The trace's cluster, as many nodes of each kind as their part of it, and its pods in the order of bench/inflation.py: one
after the other until all GPUs have been asked for, none ends, none is tried again. Nodes are objects of which no kubelet
knows; their labels, annotations and taints are made by the agent's own functions, from the GPUs that the extender wrote on
the pods that are bound there. An agent writes a taint at most once a minute; here the minutes between pods take no time.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from msgspec import Raw, Struct

from bench.inflation import Host, read_hosts, read_kinds, shuffled_pods
from bench.real_scheduler import Programs
from gpushare_agent.agent.cluster.free_gpus_taint import plan_taint_patch
from gpushare_agent.agent.cluster.node_facts import gpus_annotation, node_facts, plan_facts_patch
from gpushare_agent.core.kube.client import open_kube_session
from gpushare_agent.core.kube.objects import read_node_json
from gpushare_agent.core.kube.session import MERGE_PATCH, KubeSession, KubeTimeouts, Request
from gpushare_agent.core.model.allocations import NO_CHARGE, Charge
from gpushare_agent.core.model.gpus import Gpu, GpuInventory
from gpushare_agent.core.model.names import (
    CORES_PER_GPU,
    GPU_MODEL_LABEL,
    PREDICATE_GPU_INDEX_PREFIX,
    VCORE_RESOURCE,
    VMEMORY_RESOURCE,
    GpuUuid,
)
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.placement.fragmentation import WHOLE, PodKind
from gpushare_agent.core.placement.free_gpus import free_gpus
from gpushare_agent.simulation.workload import Machine

NODES = 40
CPU_NODES = 10
"""The trace has 310 nodes without GPUs next to its 1,213, of 96 CPUs and 512 GiB most of them."""
TAINT = {"key": VCORE_RESOURCE, "effect": "NoSchedule"}
_NAMESPACE = "bench"
_CALL_S, _POD_S, _AT_ONCE = 60.0, 60.0, 16
_NAMES = ResourceNames()


class Way(NamedTuple):
    """`policy` is extender.node_policy; empty: kube-scheduler alone, and each pod gets whole GPUs, as without sharing."""

    policy: str
    taint_above: float = 1.0
    is_reserved: bool = False
    """The nodes with GPUs have `TAINT`; the API server's plugin ExtendedResourceToleration adds the tolerations."""
    cpu_nodes: int = 0


WAYS = tuple(
    Way(policy, taint_above, is_reserved, cpu_nodes)
    for cpu_nodes in (0, CPU_NODES)
    for policy, taint_above, is_reserved in (
        ("", 1.0, False),
        ("binpack", 1.0, False),
        ("binpack", 0.5, False),
        ("binpack", 1.0, True),
        ("fgd", 0.5, False),
    )
)


class Filled(Struct, frozen=True, kw_only=True):
    """One run: percent of the GPUs that were allocated when all had been asked for, percent of the pods without GPUs that
    got a node, and how often an agent wrote its taint."""

    policy: str
    taint_above: float
    is_reserved: bool
    cpu_nodes: int
    seed: int
    allocated: float
    cpu_pods: float
    patches: int

    @property
    def way(self) -> Way:
        return Way(self.policy, self.taint_above, self.is_reserved, self.cpu_nodes)


def scaled(hosts: Sequence[Host], count: int) -> list[Host]:
    """`count` nodes: of each kind its part, by largest remainders."""
    kinds = Counter(host._replace(name="") for host in hosts)
    exact = {kind: number * count / len(hosts) for kind, number in kinds.items()}
    whole = {kind: int(number) for kind, number in exact.items()}
    rest = count - sum(whole.values())
    for kind in sorted(exact, key=lambda kind: (whole[kind] - exact[kind], kind))[:rest]:
        whole[kind] += 1
    made = [kind for kind, number in sorted(whole.items()) for _ in range(number)]
    return [kind._replace(name=f"node-{number:03}") for number, kind in enumerate(made)]


async def fill_clusters(
    programs: Path, state: Path, folder: Path, wanted: Sequence[tuple[Way, int]]
) -> AsyncIterator[Filled]:
    """One run for each way and seed. `programs` as for `scheduler_rows`; `folder` has the trace. Raises RuntimeError where a
    program does not start, AgentError where the API server refuses something, TimeoutError where a pod is not decided."""
    hosts = scaled(read_hosts(folder / "openb_node_list_gpu_node.csv"), NODES)
    kinds = read_kinds(folder / "openb_pod_list_default.csv")
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir(parents=True)
    running = Programs(programs, state)
    try:
        await running.start_cluster("--enable-admission-plugins=ExtendedResourceToleration")
        async with open_kube_session(running.kubeconfig, KubeTimeouts(), "the benchmark's own") as session:
            await _send(session, "POST", "/api/v1/namespaces", {"metadata": {"name": _NAMESPACE}})
            for way, seed in wanted:
                cluster = Cluster(session, way, [*hosts, *_cpu_hosts(way.cpu_nodes)])
                await cluster.make_nodes()
                port = await running.start_extender(("--extender.node-policy", way.policy)) if way.policy else None
                configuration = running.configuration(port, {})
                await running.start_scheduler(configuration)
                pods = shuffled_pods(kinds, WHOLE * sum(host.gpus for host in hosts), Random(seed))
                yield await cluster.fill(pods, seed, configuration["profiles"][0]["schedulerName"])
                await running.stop("kube-scheduler", "extender")
                await cluster.remove()
    finally:
        await running.stop()


def _cpu_hosts(count: int) -> Iterator[Host]:
    return (Host(f"cpu-{number:03}", 96_000, 524_288, 0, "") for number in range(count))


class Cluster:
    """The nodes and pods of one run. State owned: what the pods that are bound have of each node's GPUs."""

    def __init__(self, session: KubeSession, way: Way, hosts: Sequence[Host]) -> None:
        self._session = session
        self._way = way
        self._hosts = hosts
        self._inventories = {host.name: _inventory(host) for host in hosts}
        self._charges: dict[str, dict[GpuUuid, Charge]] = {host.name: {} for host in hosts}
        self._patches = 0

    async def make_nodes(self) -> None:
        free = asyncio.Semaphore(_AT_ONCE)

        async def make(host: Host) -> None:
            async with free:
                await _send(self._session, "POST", "/api/v1/nodes", self.node(host))
                await self._keep_taint(host.name)

        async with asyncio.TaskGroup() as group:
            for host in self._hosts:
                group.create_task(make(host), name=host.name)

    async def remove(self) -> None:
        for path in (f"/api/v1/namespaces/{_NAMESPACE}/pods", "/api/v1/nodes"):
            await _send(self._session, "DELETE", path, {"gracePeriodSeconds": 0})

    async def fill(self, pods: Sequence[PodKind], seed: int, scheduler: str) -> Filled:
        all_parts = WHOLE * sum(host.gpus for host in self._hosts)
        asked = allocated = cpu_pods = cpu_placed = 0
        written = self._patches
        # From what the API server's cache has: just started, it has not caught up with its own writes.
        query = (("watch", "true"), ("timeoutSeconds", "3600"), ("resourceVersion", "0"))
        path = f"/api/v1/namespaces/{_NAMESPACE}/pods"
        request = Request(what="watch the pods", method="GET", path=path, query=query)
        async with self._session.stream(request) as response:
            for number, kind in enumerate(pods):
                if asked >= all_parts:
                    break
                pod = self.pod(f"pod-{number:04}", kind, scheduler)
                await _send(self._session, "POST", path, pod)
                async with asyncio.timeout(_POD_S):
                    decided = await _decision(response.content, pod["metadata"]["name"])
                node = decided["spec"].get("nodeName", "")
                asked += kind.gpus * kind.parts
                allocated += kind.gpus * kind.parts if node else 0
                cpu_pods += not kind.gpus
                cpu_placed += bool(node) and not kind.gpus
                if not node:
                    # None is tried again, as in the paper.
                    await _send(self._session, "DELETE", f"{path}/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})
                elif kind.gpus and self._way.policy:
                    await self.bound(node, kind, decided["metadata"]["annotations"][f"{PREDICATE_GPU_INDEX_PREFIX}0"])
        return Filled(
            **self._way._asdict(),
            seed=seed,
            allocated=round(100 * allocated / all_parts, 2),
            cpu_pods=round(100 * cpu_placed / max(1, cpu_pods), 2),
            patches=self._patches - written,
        )

    async def bound(self, node: str, kind: PodKind, indexes: str) -> None:
        """The part of the node's agent, which follows the extender's choice."""
        one = Charge(cores=kind.parts, blocks=kind.parts) if kind.is_share else Charge(cores=CORES_PER_GPU, wholes=1)
        charges, gpus = self._charges[node], self._inventories[node].gpus
        for index in map(int, indexes.split(",")):
            charges[gpus[index].uuid] = charges.get(gpus[index].uuid, NO_CHARGE).plus(one)
        await self._keep_taint(node)

    async def _keep_taint(self, name: str) -> None:
        gpus = self._inventories[name].gpus
        path = f"/api/v1/nodes/{name}"
        raw = await self._session.fetch_object(Request(what=f"get {name}", method="GET", path=path), timeout_s=_CALL_S)
        desired = free_gpus(gpus, self._charges[name], _NAMES, self._way.taint_above)
        patch = plan_taint_patch(read_node_json(raw), desired)
        if patch.body:
            self._patches += 1
            await _send(self._session, "PATCH", path, patch.body)

    def node(self, host: Host) -> dict[str, Any]:
        offered = {VCORE_RESOURCE: str(CORES_PER_GPU * host.gpus), VMEMORY_RESOURCE: str(CORES_PER_GPU * host.gpus)}
        size = {"cpu": f"{host.cpu_milli}m", "memory": f"{host.memory_mib}Mi", "pods": "250"}
        capacity = size | (offered if host.gpus else {})
        ready = [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]
        metadata: dict[str, Any] = {"name": host.name, "labels": {"kubernetes.io/hostname": host.name}}
        if host.gpus:
            inventory = self._inventories[host.name]
            report = gpus_annotation(inventory, cordoned={}, memory_block_mib=_NAMES.memory_block_mib)
            facts = node_facts(inventory, report, label_prefix="gpushare-agent", node_labels={})
            seen = read_node_json(Raw(json.dumps({"metadata": metadata})))
            patch: Any = plan_facts_patch(seen, facts).body["metadata"]
            metadata |= {"labels": metadata["labels"] | patch["labels"], "annotations": patch["annotations"]}
        return {
            "metadata": metadata,
            "spec": {"taints": [TAINT] if host.gpus and self._way.is_reserved else []},
            "status": {"capacity": capacity, "allocatable": capacity, "conditions": ready},
        }

    def pod(self, name: str, kind: PodKind, scheduler: str) -> dict[str, Any]:
        cores = kind.gpus * (kind.parts if self._way.policy else WHOLE)
        asked = {"cpu": f"{kind.cpu_milli}m", "memory": f"{kind.memory_mib}Mi"}
        if cores:
            asked[VCORE_RESOURCE] = str(cores)
        # The trace says nothing of the GPUs' memory: a share asks for the same part of it.
        if 0 < cores < CORES_PER_GPU:
            asked[VMEMORY_RESOURCE] = str(cores)
        container = {"name": "main", "image": "none", "resources": {"limits": asked, "requests": asked}}
        spec: dict[str, Any] = {"containers": [container], "schedulerName": scheduler}
        if kind.models:
            terms = [{"matchExpressions": [{"key": GPU_MODEL_LABEL, "operator": "In", "values": list(kind.models)}]}]
            required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
            spec["affinity"] = {"nodeAffinity": required}
        return {"metadata": {"name": name, "namespace": _NAMESPACE}, "spec": spec}


def _inventory(host: Host) -> GpuInventory:
    memory_mib = CORES_PER_GPU * _NAMES.memory_block_mib
    node = Machine(model=host.model, gpus=host.gpus, memory_mib=memory_mib).node(host.name)
    gpus = (
        Gpu(index=one.index, minor=one.index, uuid=one.uuid, bus_id="", name=host.model, memory_mib=memory_mib)
        for one in node.gpus
    )
    return GpuInventory(gpus=tuple(gpus), topology=node.topology)


async def _decision(lines: AsyncIterable[bytes], name: str) -> dict[str, Any]:
    """The pod once it has a node, or once kube-scheduler said that none fits. An error of the scheduler's it tries again."""
    async for line in lines:
        pod: dict[str, Any] = json.loads(line)["object"]
        if pod["kind"] == "Status":
            raise RuntimeError(f"the watch of the pods: {pod}")
        if pod["metadata"]["name"] != name:
            continue
        conditions = pod["status"].get("conditions", ())
        if pod["spec"].get("nodeName") or any(one.get("reason") == "Unschedulable" for one in conditions):
            return pod
    raise RuntimeError("the watch of the pods ended")


async def _send(session: KubeSession, method: str, path: str, body: Mapping[str, object]) -> None:
    content_type = MERGE_PATCH if method == "PATCH" else "application/json"
    request = Request(what=f"{method} {path}", method=method, path=path, body=body, content_type=content_type)
    await session.fetch_object(request, timeout_s=_CALL_S, limit_bytes=1 << 28)
