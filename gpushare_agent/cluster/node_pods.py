"""The pods of this node: the handler that keeps the pod store as the informer has them, and the read of one pod now.

The only writer of the pod store. An admission cannot wait for the watch: `fetch` reads the pod by name and stores it, and
what the watch reports meanwhile wins. The mutable state is the pods of a list that is under way.

Static pods are the kubelet's: at their admission the API server has nothing of them, or an earlier one of that name. The
kubelet names them `<name>-<node>`, so only pods with such a name are searched in its own list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import structlog

from gpushare_agent.cluster.informer import Handler
from gpushare_agent.cluster.kube.client import KubeApi
from gpushare_agent.cluster.kube.pods import pod_of_node, pod_uid, static_pod
from gpushare_agent.cluster.pod_store import PodStore
from gpushare_agent.kit.report_once import ReportOnce
from gpushare_agent.model.errors import AgentError, Conflict, Corrupt, NotFound, Unavailable
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod

log = structlog.get_logger(__name__)

NO_STATIC_PODS = (
    "it may be a static pod, which the API server does not know at its admission: the agent finds these in the kubelet's "
    "own list of pods, where manifests/components/static-pods lets it"
)


class KubeletPods(Protocol):
    async def read(self, *, timeout_s: float) -> Sequence[dict[str, Any]]:
        """The kubelet's static pods as raw JSON. Raises Unavailable, Rejected, Corrupt."""


class NodePods(Handler):
    """`attach` when the API server can be reached; `fetch` at any time, it waits for that within its bound. `kubelet` is
    None where the kubelet's list of pods is not to be read."""

    def __init__(
        self,
        *,
        store: PodStore,
        node_name: str,
        resources: Collection[str] | None = None,
        kubelet: KubeletPods | None = None,
    ) -> None:
        self._store = store
        self._kubelet = kubelet
        self._unreadable = ReportOnce()
        self._node_name = node_name
        self._resources = resources
        self._api: KubeApi | None = None
        self._is_attached = asyncio.Event()
        self._listed: dict[str, Pod] | None = None
        """None: no list is under way."""

    def attach(self, api: KubeApi) -> None:
        self._api = api
        self._is_attached.set()

    def key(self, raw: dict[str, Any]) -> str:
        return pod_uid(raw)

    def put(self, raw: dict[str, Any]) -> bool:
        pod = pod_of_node(raw, resources=self._resources)
        if pod.node_name != self._node_name:
            return False
        if self._listed is not None:
            self._listed[pod_uid(raw)] = pod
        else:
            self._store.upsert(pod)
        return True

    def remove(self, key: str) -> None:
        self._store.remove(PodUid(key))

    def list_begins(self) -> None:
        self._listed = {}

    def list_ended(self, keys: Collection[str], missing: Collection[str], version: str) -> None:
        """One change of the store, which decides what of the `missing` is newer than the list."""
        listed, self._listed = self._listed or {}, None
        present = (listed.get(key) or self._store.get_object(PodUid(key)) for key in sorted(keys))
        self._store.replace_all([pod for pod in present if pod is not None], resource_version=version)

    async def fetch(self, namespace: str, name: str, *, timeout_s: float) -> Pod | None:
        """The pod as the kubelet or the API server has it now, also put into the store; None where this node has no such
        pod, and then the store forgets the pods that it knew by that name.

        Raises:
            NotFound: as None, but it may be a static pod; why that cannot be known.
            Unavailable: no answer within `timeout_s`, the text says why.
            Rejected: the API server does not let us read pods.
            Corrupt: the API server has the pod, but what it asks for cannot be read.
        """
        if not name.endswith(f"-{self._node_name.lower()}"):
            return await self._fetch_object(namespace, name, timeout_s)
        why_not = NO_STATIC_PODS
        if self._kubelet is not None:
            try:
                static, why_not = await self._read_static(self._kubelet, timeout_s / 2)
            except AgentError as e:
                why_not = str(e)
            else:
                found = next((p for p in static if (p.namespace, p.name) == (namespace, name)), None)
                if found is not None:
                    return found
        try:
            pod = await self._fetch_object(namespace, name, timeout_s / 2)
        except Unavailable as e:
            raise Unavailable(f"{e}; {why_not}" if why_not else str(e)) from e
        if why_not and (pod is None or pod.is_static):  # its file may have changed: this is the former one's mirror pod
            raise NotFound(f"pod {namespace}/{name}: {why_not}")
        return pod

    async def refresh_static(self, *, timeout_s: float) -> None:
        """Read the kubelet's static pods, where that can be done: for those without a mirror pod no event comes."""
        if self._kubelet is None:
            return
        try:
            _, problem = await self._read_static(self._kubelet, timeout_s)
        except AgentError as e:
            problem = str(e)
        if not problem:
            if self._unreadable.is_over():
                log.info("static_pods_readable")
        elif self._unreadable.is_new(problem):
            log.warning("static_pods_unreadable", error=problem, then="they stay as they were last seen")

    async def _read_static(self, kubelet: KubeletPods, timeout_s: float) -> tuple[list[Pod], str]:
        """As the store has them then, and why one of them cannot be read, empty where all can. Raises what
        `KubeletPods.read` raises."""
        found, problem = [], ""
        for raw in await kubelet.read(timeout_s=timeout_s):
            try:
                found.append(static_pod(raw, resources=self._resources))
            except Corrupt as e:
                problem = str(e)
        self._store.put_static(found)
        return [self._store.get(pod.uid) or pod for pod in found], problem

    async def _fetch_object(self, namespace: str, name: str, timeout_s: float) -> Pod | None:
        former = [
            p.object_uid
            for p in self._store.pods()
            if (p.namespace, p.name) == (namespace, name) and p.object_uid is not None
        ]
        try:
            async with asyncio.timeout(timeout_s):
                while self._api is None:
                    await self._is_attached.wait()
                raw_pod = await self._api.get_pod(namespace, name, timeout_s=timeout_s)
            pod = pod_of_node(raw_pod, resources=self._resources)
        except NotFound:
            for uid in former:  # known before the question: a pod that came after the answer is not among them
                self._store.remove(uid)
            return None
        except TimeoutError as e:
            raise Unavailable(
                f"cannot get pod {namespace}/{name}: no connection to the API server within {timeout_s:g} s"
            ) from e
        except Conflict as e:
            raise Unavailable(str(e)) from e
        if pod.node_name != self._node_name:
            return None
        self._store.upsert(pod)
        # The watch may have reported more meanwhile: a later state, or the pod's deletion.
        return self._store.get(pod.uid)
