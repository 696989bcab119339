"""The pods of this node: the handler that keeps the pod store as the informer has them, and the read of one pod now.

The only writer of the pod store. An admission cannot wait for the watch: `fetch` reads the pod by name and stores it, and
what the watch reports meanwhile wins. The mutable state is the pods of a list that is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from gpushare_agent.cluster.informer import Handler
from gpushare_agent.cluster.kube.client import KubeApi
from gpushare_agent.cluster.kube.pods import parse_pod, pod_uid
from gpushare_agent.cluster.pod_store import PodStore
from gpushare_agent.model.errors import Conflict, NotFound, Unavailable
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod


class NodePods(Handler):
    """`attach` when the API server can be reached; `fetch` at any time, it waits for that within its bound."""

    def __init__(self, *, store: PodStore, node_name: str, resources: Collection[str] | None = None) -> None:
        self._store = store
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
        pod = parse_pod(raw, resources=self._resources)
        if pod.node_name != self._node_name:
            return False
        if self._listed is not None:
            self._listed[pod.uid] = pod
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
        present = (listed.get(key) or self._store.get(PodUid(key)) for key in sorted(keys))
        self._store.replace_all([pod for pod in present if pod is not None], resource_version=version)

    async def fetch(self, namespace: str, name: str, *, timeout_s: float) -> Pod | None:
        """The pod as the API server has it now, also put into the store; None where this node has no such pod, and then
        the store forgets the pods that it knew by that name.

        Raises:
            Unavailable: no answer within `timeout_s`, the text says why.
            Rejected: the API server does not let us read pods.
            Corrupt: the API server has the pod, but what it asks for cannot be read.
        """
        former = [p.uid for p in self._store.pods() if (p.namespace, p.name) == (namespace, name)]
        try:
            async with asyncio.timeout(timeout_s):
                while self._api is None:
                    await self._is_attached.wait()
                raw_pod = await self._api.get_pod(namespace, name, timeout_s=timeout_s)
            pod = parse_pod(raw_pod, resources=self._resources)
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
