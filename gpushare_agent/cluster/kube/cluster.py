"""What the scheduler extender asks of the API server beyond the agent: everything of a kind, binds, leases.

Lists are consistent reads (no resourceVersion), in pages small enough that reading one leaves the event loop to others.
Errors and limits are those of client.py. Formats: Kubernetes core/v1 Binding, coordination.k8s.io/v1 Lease.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpushare_agent.cluster.kube.client import (
    KubeApi,
    KubeTimeouts,
    ListLimits,
    open_kube_session,
    pod_path,
    segment,
)
from gpushare_agent.cluster.kube.session import MERGE_PATCH, Request
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.names import PodUid

EXTENDER_RIGHTS = "check the extender's service account and its ClusterRole"
LIST_TIMEOUT_S = 120.0
PAGE_SIZES = (200, 50, 5, 1)
"""200 pods of 6 KiB take about ten milliseconds to read, which is what a filter request may have to wait."""
_NOT_OVER = "status.phase!=Succeeded,status.phase!=Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A kind of objects, or some of them: `what` completes "list …" and "watch …", `fields` and `labels` are selectors."""

    what: str
    path: str
    fields: str = ""
    labels: str = ""


ALL_NODES = Watched(what="the nodes", path="/api/v1/nodes")
LIVE_PODS = Watched(what="the pods of all namespaces", path="/api/v1/pods", fields=_NOT_OVER)
"""A pod that ends is told as DELETED to who watches these."""


def config_map(namespace: str, name: str) -> Watched:
    return Watched(
        what=f"ConfigMap {namespace}/{name}",
        path=f"/api/v1/namespaces/{segment(namespace)}/configmaps",
        fields=f"metadata.name={name}",
    )


def labelled_pods(namespace: str, labels: Mapping[str, str]) -> Watched:
    selector = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    return Watched(
        what=f"the pods of namespace {namespace} with the labels {selector}",
        path=f"/api/v1/namespaces/{segment(namespace)}/pods",
        labels=selector,
    )


def open_cluster_api(
    *, kubeconfig: Path | None, request_s: float, connect_s: float = 5.0
) -> AbstractAsyncContextManager[ClusterApi]:
    """As open_kube_api. `request_s` bounds each request that is no list and no watch: a leader that has lost its lease must
    have no request under way any more when the next one begins."""
    timeouts = KubeTimeouts(list_s=LIST_TIMEOUT_S, request_s=request_s, connect_s=min(connect_s, request_s))
    return _open_cluster_api(kubeconfig, timeouts)


@asynccontextmanager
async def _open_cluster_api(kubeconfig: Path | None, timeouts: KubeTimeouts) -> AsyncIterator[ClusterApi]:
    limits = ListLimits(page_sizes=PAGE_SIZES)
    async with open_kube_session(kubeconfig, timeouts, EXTENDER_RIGHTS) as session:
        yield ClusterApi(session, timeouts, limits)


class ClusterApi(KubeApi):
    """The API server as the extender sees it."""

    async def list_all(self, watched: Watched, read: Callable[[dict[str, Any]], str]) -> tuple[list[str], str]:
        """Every object goes through `read` as its page comes; what it returned for each, and the version to watch from.

        Where the server cannot go on with a list it begins anew: `read` may see an object twice.
        """
        request = Request(what=f"list {watched.what}", method="GET", path=watched.path, query=_selector(watched))
        return await self._list_paged(request, read)

    def watch_all(
        self, watched: Watched, resource_version: str
    ) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        """As `watch_pods`."""
        request = Request(what=f"watch {watched.what}", method="GET", path=watched.path, query=_selector(watched))
        return self._watch(request, resource_version)

    async def annotate_pod(
        self, namespace: str, name: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> dict[str, Any]:
        """As `patch_pod_annotations`; the pod as it is after that."""
        return await self._patch_pod(namespace, name, uid, "annotations", annotations)

    async def label_pod(
        self, namespace: str, name: str, uid: PodUid, labels: Mapping[str, str | None]
    ) -> dict[str, Any]:
        """As `annotate_pod`."""
        return await self._patch_pod(namespace, name, uid, "labels", labels)

    async def bind_pod(self, namespace: str, name: str, uid: PodUid, node: str, resource_version: str) -> None:
        """Bind this very pod in this very version.

        Conflict where it is another one by now, or bound already. Unavailable leaves open whether it was bound.
        """
        request = Request(
            what=f"bind pod {namespace}/{name} to node {node}",
            method="POST",
            path=f"{pod_path(namespace, name)}/binding",
            body={
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": resource_version},
                "target": {"apiVersion": "v1", "kind": "Node", "name": node},
            },
        )
        await self._session.fetch_json(request, timeout_s=self._timeouts.request_s)

    async def get_pod_now(self, namespace: str, name: str) -> dict[str, Any]:
        """A consistent read."""
        return await self.get_pod(namespace, name, timeout_s=self._timeouts.request_s)

    async def _patch_pod(
        self, namespace: str, name: str, uid: PodUid, field: str, values: Mapping[str, str | None]
    ) -> dict[str, Any]:
        request = Request(
            what=f"patch the {field} of pod {namespace}/{name}",
            method="PATCH",
            path=pod_path(namespace, name),
            body={"metadata": {"uid": uid, field: dict(sorted(values.items()))}},
            content_type=MERGE_PATCH,
        )
        return await self._session.fetch_json(request, timeout_s=self._timeouts.request_s)

    async def get_lease(self, namespace: str, name: str) -> dict[str, Any]:
        request = Request(what=f"get lease {namespace}/{name}", method="GET", path=_lease_path(namespace, name))
        return await self._session.fetch_json(request, timeout_s=self._timeouts.request_s)

    async def create_lease(self, namespace: str, raw_lease: Mapping[str, Any]) -> dict[str, Any]:
        """Conflict where it exists."""
        request = Request(
            what=f"create a lease in namespace {namespace}",
            method="POST",
            path=_lease_path(namespace, ""),
            body=raw_lease,
        )
        return await self._session.fetch_json(request, timeout_s=self._timeouts.request_s)

    async def replace_lease(self, namespace: str, name: str, raw_lease: Mapping[str, Any]) -> dict[str, Any]:
        """Conflict where it is not of the version that `raw_lease` names."""
        version = raw_lease.get("metadata", {}).get("resourceVersion")
        if not isinstance(version, str) or not version:
            raise Corrupt(f"cannot replace lease {namespace}/{name}: the one read has no resourceVersion")
        request = Request(
            what=f"replace lease {namespace}/{name}",
            method="PUT",
            path=_lease_path(namespace, name),
            body=raw_lease,
        )
        return await self._session.fetch_json(request, timeout_s=self._timeouts.request_s)


def _selector(watched: Watched) -> tuple[tuple[str, str], ...]:
    selectors = (("fieldSelector", watched.fields), ("labelSelector", watched.labels))
    return tuple((name, value) for name, value in selectors if value)


def _lease_path(namespace: str, name: str) -> str:
    base = f"/apis/coordination.k8s.io/v1/namespaces/{segment(namespace)}/leases"
    return f"{base}/{segment(name)}" if name else base
