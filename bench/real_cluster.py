"""A real cluster, named by KUBECONFIG, on which the agent is installed: pods one after the other, and a hundred at once.

What the kubelet waits for is read from the agent's own histograms (/metrics, through the API server's proxy of pods), what
a user waits for from a watch of the pods. Needs the rights to make a namespace and pods in it. Made by a run, and removed
at its end: that namespace.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec.json import Decoder
from prometheus_client.parser import text_string_to_metric_families

from bench.results import Row, row
from gpushare_agent.core.kube.client import open_kube_session
from gpushare_agent.core.kube.session import KubeSession, KubeTimeouts, Request
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.model.names import CORES_PER_GPU, VCORE_RESOURCE, VMEMORY_RESOURCE

AGENTS = "app.kubernetes.io/name=gpushare-agent"
_PORT = 5678
_POD_S, _BURST_S, _GONE_S, _CALL_S = 120.0, 600.0, 600.0, 120.0
_QUIET_S = 2.0
"""Before each part: what the part before has left over is done then."""
_GOAL_MS = {"PreStartContainer": 15.0}
_CALLS = (
    ("GetPreferredAllocation", VCORE_RESOURCE),
    ("GetPreferredAllocation", VMEMORY_RESOURCE),
    ("Allocate", VCORE_RESOURCE),
    ("Allocate", VMEMORY_RESOURCE),
    ("PreStartContainer", VCORE_RESOURCE),
)

Counts = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
"""The samples of one scrape, by name and labels."""


@dataclass(slots=True)
class _Made:
    """One pod: seconds of time.perf_counter, `failed` is why it was rejected."""

    posted_at: float
    ready_at: float = 0.0
    failed: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)


class RealCluster:
    """One node of the cluster, through the API server. `agent` is the pod of its agent."""

    def __init__(self, session: KubeSession, *, image: str, pods: int) -> None:
        self._session = session
        self._image = image
        self._namespace = f"gpushare-bench-{secrets.token_hex(3)}"
        self._most_pods = pods
        self._made: dict[str, _Made] = {}
        self.node = ""
        self._agent_path = ""
        self._limits: dict[str, str] = {}

    async def find(self, node: str | None) -> None:
        """The node with a ready agent: the named one, else the only one. Raises RuntimeError."""
        found = await self._get("list the agents", "/api/v1/pods", labelSelector=AGENTS)
        agents = {
            pod["spec"]["nodeName"]: pod["metadata"]
            for pod in found["items"]
            if _is_ready(pod) and node in (None, pod["spec"].get("nodeName"))
        }
        if len(agents) != 1:
            raise RuntimeError(f"ready agents on {sorted(agents) or 'no node'}: --node must name one of them")
        self.node, metadata = agents.popitem()
        self._agent_path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}:{_PORT}/proxy/metrics"
        status = (await self._get("get the node", f"/api/v1/nodes/{self.node}"))["status"]["allocatable"]
        gpus = int(status.get(VCORE_RESOURCE, "0")) // CORES_PER_GPU
        if not gpus:
            raise RuntimeError(f"node {self.node} offers no {VCORE_RESOURCE} now; see `gpushare-agent check` there")
        shares = -(-self._most_pods // gpus)
        self._limits = {
            VCORE_RESOURCE: str(max(1, CORES_PER_GPU // shares)),
            VMEMORY_RESOURCE: str(max(1, int(status[VMEMORY_RESOURCE]) // gpus // shares)),
        }

    @asynccontextmanager
    async def namespace(self) -> AsyncIterator[None]:
        """Made here with a watch of its pods, removed at the end."""
        raw = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self._namespace}}
        await self._send("make the namespace", "POST", "/api/v1/namespaces", raw)
        try:
            await self._wait_service_account()
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(), name="watch")
                yield
                watch.cancel()
        finally:
            path = f"/api/v1/namespaces/{self._namespace}"
            await self._send("remove the namespace", "DELETE", path)

    async def start(self, names: Sequence[str], timeout_s: float) -> list[_Made]:
        """Makes the pods at once; returns when each is ready or rejected. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            async with asyncio.TaskGroup() as group:
                for name in names:
                    self._made[name] = _Made(time.perf_counter())
                    what = f"make pod {name}"
                    group.create_task(self._send(what, "POST", self._pods_path, self._pod(name)), name=what)
            made = [self._made[name] for name in names]
            for one in made:
                await one.over.wait()
        return made

    async def remove_pods(self) -> None:
        """Returns when all are gone. Raises TimeoutError."""
        await self._send("remove the pods", "DELETE", self._pods_path, {"gracePeriodSeconds": 0})
        async with asyncio.timeout(_GONE_S):
            while (await self._get("list the pods", self._pods_path))["items"]:  # noqa: ASYNC110 - others' state
                await asyncio.sleep(0.5)
        await asyncio.sleep(_QUIET_S)

    async def counts(self) -> Counts:
        """What the agent has counted so far."""
        request = Request(what="read the agent's metrics", method="GET", path=self._agent_path)
        async with asyncio.timeout(_CALL_S), self._session.stream(request) as response:
            text = (await response.content.read()).decode()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    @property
    def _pods_path(self) -> str:
        return f"/api/v1/namespaces/{self._namespace}/pods"

    def _pod(self, name: str) -> dict[str, Any]:
        container = {
            "name": "main",
            "image": self._image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["sleep", "100000"],
            "resources": {"limits": self._limits},
        }
        spec = {
            "containers": [container],
            "nodeSelector": {"kubernetes.io/hostname": self.node},
            "tolerations": [{"operator": "Exists"}],
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
        }
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}

    async def _wait_service_account(self) -> None:
        """Pods are refused before the namespace has its default account."""
        async with asyncio.timeout(_CALL_S):
            path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts"
            while not (await self._get("list accounts", path))["items"]:  # noqa: ASYNC110 - others' state
                await asyncio.sleep(0.1)

    async def _watch(self) -> None:
        while True:
            query = (("watch", "true"), ("timeoutSeconds", "3600"))
            request = Request(what="watch the pods", method="GET", path=self._pods_path, query=query)
            async with self._session.stream(request) as response:
                async for line in response.content:
                    self._see(json.loads(line)["object"])

    def _see(self, pod: dict[str, Any]) -> None:
        made = self._made.get(pod["metadata"]["name"])
        if made is None or made.over.is_set():
            return
        if pod["status"].get("phase") == "Failed":
            made.failed = f"{pod['metadata']['name']}: {pod['status'].get('message', '')}"
        elif _is_ready(pod):
            made.ready_at = time.perf_counter()
        if made.failed or made.ready_at:
            made.over.set()

    async def _get(self, what: str, path: str, **query: str) -> dict[str, Any]:
        request = Request(what=what, method="GET", path=path, query=tuple(query.items()))
        return await self._session.fetch(request, _OBJECT, timeout_s=_CALL_S, limit_bytes=1 << 26)

    async def _send(self, what: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> None:
        request = Request(what=what, method=method, path=path, body=body)
        await self._session.fetch_object(request, timeout_s=_CALL_S, limit_bytes=1 << 26)


_OBJECT = Decoder(dict[str, Any])


async def cluster_rows(*, node: str | None, image: str, singles: int, burst: int) -> tuple[str, list[Row]]:
    """The node's name, and the rows. Raises RuntimeError: what the cluster lacks, or a pod that never became ready."""
    try:
        async with open_kube_session(None, KubeTimeouts(), "use an administrator's KUBECONFIG") as session:
            cluster = RealCluster(session, image=image, pods=burst)
            await cluster.find(node)
            async with cluster.namespace():
                rows = await _part(cluster, "one at a time", [[f"single-{n:03d}"] for n in range(singles)])
                rows += await _part(cluster, f"{burst} at once", [[f"burst-{n:03d}" for n in range(burst)]])
            return cluster.node, rows
    except AgentError as error:
        raise RuntimeError(str(error)) from error


async def _part(cluster: RealCluster, label: str, groups: Sequence[Sequence[str]]) -> list[Row]:
    """Starts one group of pods after the other, and removes them all."""
    await asyncio.sleep(_QUIET_S)
    before, made = await cluster.counts(), []
    for names in groups:
        made += await cluster.start(names, _POD_S if len(names) == 1 else _BURST_S)
    await asyncio.sleep(_QUIET_S)
    after = await cluster.counts()
    await cluster.remove_pods()
    ready = [(one.ready_at - one.posted_at) * 1000 for one in made if one.ready_at]
    failed = "; ".join(one.failed for one in made if one.failed)
    if not ready:
        raise RuntimeError(f"no pod became ready: {failed}")
    rows = [row(f"{label}: pod POST to Ready", ready, failed=failed)]
    if len(made) > len(groups):
        last = (max(one.ready_at for one in made) - min(one.posted_at for one in made)) * 1000
        rows.append(row(f"{label}: first POST to last Ready", [last]))
    for method, resource in _CALLS:
        if one := _call_row(label, method, resource, before, after):
            rows.append(one)
    processor = _difference("process_cpu_seconds_total", (), before, after)
    return [*rows, row(f"{label}: the agent's processor time for each pod", [processor * 1000 / len(made)])]


def _call_row(label: str, method: str, resource: str, before: Counts, after: Counts) -> Row | None:
    """Mean, and the upper bound of the bucket in which the 99th percentile lies; None where there was no such call."""
    labels = (("method", method), ("resource", resource))
    name = "gpushare_rpc_duration_seconds"
    calls = int(_difference(f"{name}_count", labels, before, after))
    if not calls:
        return None
    mean_ms = _difference(f"{name}_sum", labels, before, after) * 1000 / calls
    bounds = sorted(
        (float(dict(key[1])["le"]), _difference(key[0], key[1], before, after))
        for key in after
        if key[0] == f"{name}_bucket" and all(pair in key[1] for pair in labels)
    )
    p99_ms = next(bound for bound, count in bounds if count >= 0.99 * calls) * 1000
    return Row(
        name=f"{label}: {method}, {resource}",
        unit="ms",
        runs=calls,
        median=mean_ms,
        p99=p99_ms,
        target_median=_GOAL_MS.get(method),
        note="the mean instead of the median, and the upper bound of the histogram's bucket with the p99; by the agent's "
        "own clock, from the decoded request to the answer",
    )


def _difference(name: str, labels: tuple[tuple[str, str], ...], before: Counts, after: Counts) -> float:
    return after.get((name, labels), 0.0) - before.get((name, labels), 0.0)


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
