"""Requests of the agent and the extender about single objects, answered as undecoded JSON. Lists: session.py.

All methods raise Unavailable (try again), NotFound, Conflict (read again), Rejected (do not retry) or TooLong. All are
bounded in time and size, and may be cancelled at any await. `KubeApi` is what the agent may do; `ClusterApi` adds what only
the extender does: binds, labels of pods, leases, ResourceClaimTemplates. Formats: Kubernetes core/v1 Binding,
coordination.k8s.io/v1 Lease.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from msgspec import Raw, Struct
from msgspec.json import Decoder

from gpushare_agent.core.kit.json_schema import decoded_or
from gpushare_agent.core.kube.claims import ResourceSlice
from gpushare_agent.core.kube.configuration import find_configuration
from gpushare_agent.core.kube.session import (
    AGENT_RIGHTS,
    MERGE_PATCH,
    KubeLists,
    KubeSession,
    KubeTimeouts,
    ListLimits,
    NotServed,
    Request,
    TooLong,
    Watched,
)
from gpushare_agent.core.model.errors import Corrupt, NotFound, Rejected, Unavailable
from gpushare_agent.core.model.names import PodUid

ALL_NODES = Watched(what="the nodes", path="/api/v1/nodes")
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
UNFINISHED = "status.phase!=Succeeded,status.phase!=Failed"
"""A field selector of pods. A pod that ends is DELETED for a watch with it."""
EXTENDER_RIGHTS = "check the extender's service account and its ClusterRole"
CONNECT_TIMEOUT_S = 5.0
LIST_TIMEOUT_S = 120.0
_CLAIM_TIMEOUT_S = 5.0
PAGE_SIZES = (200, 50, 5, 1)
"""200 pods of 6 KiB take about ten milliseconds to read, which is what a filter request may have to wait."""


def node_named(name: str) -> Watched:
    """One node alone, for its own agent."""
    return Watched(what=f"node {name}", path=ALL_NODES.path, fields=f"metadata.name={name}", from_cache=True)


def pods_of_node(node_name: str) -> Watched:
    return Watched(
        what=f"the pods of node {node_name}", path="/api/v1/pods", fields=f"spec.nodeName={node_name}", from_cache=True
    )


def pods(namespace: str = "", *, labels: str = "", fields: str = "") -> Watched:
    """The pods of a namespace, empty: of all, that the selectors choose."""
    place = f"namespace {namespace}" if namespace else "all namespaces"
    labelled = f" with the labels {labels}" if labels else ""
    path = f"/api/v1/namespaces/{segment(namespace)}/pods" if namespace else "/api/v1/pods"
    return Watched(what=f"the pods of {place}{labelled}", path=path, labels=labels, fields=fields)


def config_map(namespace: str, name: str) -> Watched:
    return Watched(
        what=f"ConfigMap {namespace}/{name}",
        path=f"/api/v1/namespaces/{segment(namespace)}/configmaps",
        fields=f"metadata.name={name}",
    )


def slices_of_node(node_name: str, driver: str) -> Watched:
    return Watched(
        what=f"the ResourceSlices of node {node_name} and driver {driver}",
        path=SLICES,
        fields=f"spec.nodeName={node_name},spec.driver={driver}",
    )


LIVE_PODS = pods(fields=UNFINISHED)


@asynccontextmanager
async def open_kube_api(
    *,
    kubeconfig: Path | None,
    context: str = "",
    timeouts: KubeTimeouts | None = None,
    limits: ListLimits | None = None,
    advice: str = AGENT_RIGHTS,
) -> AsyncIterator[KubeApi]:
    """The API server named by the kubeconfig, else the pod's own cluster, else $KUBECONFIG. Connects on first use. `advice`
    ends the message where the credentials are not accepted or do not suffice.

    Entering raises StartupError where there is no usable configuration, Unavailable where credentials are not there yet.
    """
    timeouts = timeouts or KubeTimeouts()
    async with open_kube_session(kubeconfig, timeouts, advice, context) as session:
        yield KubeApi(session, timeouts, limits or ListLimits())


@asynccontextmanager
async def open_kube_session(
    kubeconfig: Path | None, timeouts: KubeTimeouts, advice: str, context: str = ""
) -> AsyncIterator[KubeSession]:
    """Opens the session of a client of the API server. Raises as `open_kube_api`."""
    # Before anything is opened: a wrong configuration is an error of the start, not of the first request.
    source = find_configuration(kubeconfig, os.environ, context)
    session = KubeSession(source, connect_s=timeouts.connect_s, advice=advice)
    try:
        await session.open()
        yield session
    finally:
        # Also where `open` failed halfway.
        await session.close()


class _Verdict(Struct, frozen=True):
    allowed: bool = False


class _Review(Struct, frozen=True):
    """The fields that are read from a SelfSubjectAccessReview."""

    status: _Verdict = _Verdict()


_REVIEW = Decoder(_Review)


class KubeApi(KubeLists):
    """The API server. No state of its own: any number of calls may run at once."""

    async def get_pod(self, namespace: str, name: str, *, timeout_s: float | None = None) -> Raw:
        """A consistent read."""
        return await self._get(f"get pod {namespace}/{name}", pod_path(namespace, name), timeout_s=timeout_s)

    async def check_answers(self, *, timeout_s: float) -> None:
        """Raises Unavailable: the API server does not answer in time. Any answer of an API server is one."""
        with suppress(Rejected, NotFound, TooLong):
            await self._get("ask the API server for its version", "/version", timeout_s=timeout_s)

    async def get_node(self, name: str) -> Raw:
        return await self._get(f"get node {name}", f"/api/v1/nodes/{segment(name)}")

    async def get_claim(self, namespace: str, name: str) -> Raw:
        """A ResourceClaim, as a consistent read."""
        path = f"/apis/resource.k8s.io/v1/namespaces/{segment(namespace)}/resourceclaims/{segment(name)}"
        return await self._get(f"get ResourceClaim {namespace}/{name}", path, timeout_s=_CLAIM_TIMEOUT_S)

    async def get_runtime_class(self, name: str, *, timeout_s: float) -> Raw:
        path = f"/apis/node.k8s.io/v1/runtimeclasses/{segment(name)}"
        return await self._get(f"get RuntimeClass {name}", path, timeout_s=timeout_s)

    async def create_slice(self, made: ResourceSlice, *, is_tried: bool = False) -> Raw:
        """Create a ResourceSlice, or only try it; as it is then. Conflict where one of its name exists."""
        return await self._send("POST", "create a ResourceSlice", SLICES, made, is_tried=is_tried)

    async def replace_slice(self, name: str, made: ResourceSlice) -> Raw:
        """Conflict where it is not of the resourceVersion in `made`."""
        return await self._send("PUT", f"replace ResourceSlice {name}", f"{SLICES}/{segment(name)}", made)

    async def delete_slice(self, name: str) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions"}
        await self._send("DELETE", f"delete ResourceSlice {name}", f"{SLICES}/{segment(name)}", body)

    async def get_through_pod(self, namespace: str, name: str, port: int, path: str, query: Mapping[str, str]) -> Raw:
        """The JSON object that a pod's HTTP server answers at `path`, by way of the API server. Needs the right to get
        pods/proxy."""
        request = Request(
            what=f"read {path} of pod {namespace}/{name} through the API server",
            method="GET",
            # Scheme, name and port are one element of the proxy's path.
            path=f"/api/v1/namespaces/{segment(namespace)}/pods/http:{segment(name)}:{port}/proxy{path}",
            query=tuple(sorted(query.items())),
        )
        return await self._session.fetch_object(
            request, timeout_s=self._timeouts.request_s, limit_bytes=self._limits.list_bytes
        )

    async def patch_pod_annotations(
        self, namespace: str, name: str, uid: PodUid, annotations: Mapping[str, str | None], *, is_tried: bool = False
    ) -> Raw:
        """Set the annotations, remove those that are None, or only try it; the pod as it is then. Conflict where another
        pod has the name now."""
        # With the UID the API server answers 409 where another pod has the name by now.
        metadata = {"uid": uid, "annotations": dict(sorted(annotations.items()))}
        what = f"patch the annotations of pod {namespace}/{name}"
        return await self._send("PATCH", what, pod_path(namespace, name), {"metadata": metadata}, is_tried=is_tried)

    async def patch_node(self, name: str, what: str, patch: Mapping[str, object], *, subresource: str = "") -> Raw:
        """Set what the patch has, remove what it has as None, leave all else; the node as it is then. Conflict where it has
        another resourceVersion: a list cannot be patched by entry, and somebody else's entry of meanwhile would be lost."""
        path = "/".join(filter(None, (f"/api/v1/nodes/{segment(name)}", subresource)))
        return await self._send("PATCH", f"patch the {what} of node {name}", path, patch)

    async def delete_pod(self, namespace: str, name: str, uid: PodUid) -> None:
        """Delete this very pod. Conflict where another pod has the name now."""
        # The UID is a precondition: a new pod of the same name stays.
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        await self._send("DELETE", f"delete pod {namespace}/{name}", pod_path(namespace, name), body)

    async def create_event(self, namespace: str, event: Mapping[str, object]) -> None:
        path = f"/api/v1/namespaces/{segment(namespace)}/events"
        await self._send("POST", f"create an Event in namespace {namespace}", path, event)

    async def can_i(self, verb: str, resource: str) -> bool:
        """Whether our credentials allow this in all namespaces; `resource` may be "pods", "pods/status" or
        "runtimeclasses.node.k8s.io"."""
        # The review has a field for each; "pods/status" as a resource is never allowed.
        full_name, _, subresource = resource.partition("/")
        resource_name, _, group = full_name.partition(".")
        attributes = {"verb": verb, "resource": resource_name, "group": group, "subresource": subresource}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        raw_review = await self._send("POST", f"ask whether we may {verb} {resource}", path, review)
        return decoded_or(_REVIEW, raw_review, _Review).status.allowed

    async def _get(self, what: str, path: str, *, timeout_s: float | None = None) -> Raw:
        return await self._object(Request(what=what, method="GET", path=path), timeout_s)

    async def _send(self, method: str, what: str, path: str, body: object, *, is_tried: bool = False) -> Raw:
        # A merge patch: None removes a key, and what is not named stays.
        content_type = MERGE_PATCH if method == "PATCH" else "application/json"
        query = (("dryRun", "All"),) if is_tried else ()
        return await self._object(
            Request(what=what, method=method, path=path, query=query, body=body, content_type=content_type)
        )

    async def _object(self, request: Request, timeout_s: float | None = None) -> Raw:
        try:
            return await self._session.fetch_object(request, timeout_s=timeout_s or self._timeouts.request_s)
        except TooLong:
            raise
        # Half an answer, or a load balancer's with no API server behind it: a claim would be refused for good, a pod that
        # runs forgotten, a bind taken for failed.
        except (Corrupt, NotServed) as e:
            raise Unavailable(str(e)) from e


def pod_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{segment(namespace)}/pods/{segment(name)}"


def segment(name: str) -> str:
    """One element of a path. Empty, "." and ".." would name another thing than meant."""
    if not name or name in (".", "..") or len(name) > 253:
        raise Rejected(f"cannot ask the API server about {name[:300]!r}: it is no object's name")
    # A slash in a name, from a tenant's object say, would be another path.
    return quote(name, safe="")


# --- the extender ---


@asynccontextmanager
async def open_cluster_api(*, kubeconfig: Path | None, request_s: float) -> AsyncIterator[ClusterApi]:
    """The extender's client, otherwise as open_kube_api. `request_s` bounds each request that is no list and no watch: a
    leader that has lost its lease must have no request under way any more when the next one begins."""
    # Longer lists than the agent's: fifty thousand pods in pages of 200.
    timeouts = KubeTimeouts(list_s=LIST_TIMEOUT_S, request_s=request_s, connect_s=min(CONNECT_TIMEOUT_S, request_s))
    async with open_kube_session(kubeconfig, timeouts, EXTENDER_RIGHTS) as session:
        yield ClusterApi(session, timeouts, ListLimits(page_sizes=PAGE_SIZES))


class ClusterApi(KubeApi):
    """The API server as the extender sees it."""

    async def patch_pod_labels(self, namespace: str, name: str, uid: PodUid, labels: Mapping[str, str | None]) -> Raw:
        """Patches labels as `patch_pod_annotations` does annotations."""
        metadata = {"uid": uid, "labels": dict(sorted(labels.items()))}
        what = f"patch the labels of pod {namespace}/{name}"
        return await self._send("PATCH", what, pod_path(namespace, name), {"metadata": metadata})

    async def bind_pod(
        self,
        namespace: str,
        name: str,
        uid: PodUid,
        node: str,
        resource_version: str,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """Bind this very pod in this very version. The annotations become the pod's with the bind, or not at all.

        Conflict where it is another one by now, or bound already. Unavailable leaves open whether it was bound.
        """
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            # With the version the API server refuses the bind once anything has changed the pod, a later patch of ours
            # above all.
            "metadata": {
                "name": name,
                "namespace": namespace,
                "uid": uid,
                "resourceVersion": resource_version,
                "annotations": annotations or {},
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        path = f"{pod_path(namespace, name)}/binding"
        await self._send("POST", f"bind pod {namespace}/{name} to node {node}", path, body)

    async def nominate_pod(
        self, namespace: str, name: str, uid: PodUid, node: str, annotations: Mapping[str, str] | None = None
    ) -> None:
        """Note on the pod the node where the scheduler is to try it first; set the annotations with it."""
        body = {"metadata": {"uid": uid, "annotations": annotations or {}}, "status": {"nominatedNodeName": node}}
        await self._send("PATCH", f"nominate pod {namespace}/{name}", f"{pod_path(namespace, name)}/status", body)

    async def evict_pod(self, namespace: str, name: str, uid: PodUid, *, is_tried: bool) -> None:
        """End this very pod, or only try whether that is allowed. Throttled where a PodDisruptionBudget forbids it."""
        options = {"preconditions": {"uid": uid}, **({"dryRun": ["All"]} if is_tried else {})}
        metadata = {"name": name, "namespace": namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata, "deleteOptions": options}
        await self._send("POST", f"evict pod {namespace}/{name}", f"{pod_path(namespace, name)}/eviction", body)

    async def get_claim_template(self, namespace: str, name: str) -> Raw:
        path = f"{_claim_templates(namespace)}/{segment(name)}"
        return await self._get(f"get ResourceClaimTemplate {namespace}/{name}", path)

    async def create_claim_template(self, namespace: str, made: Mapping[str, object]) -> Raw:
        """Makes the template and returns it as it is then. Conflict where one of its name exists."""
        what = f"create a ResourceClaimTemplate in namespace {namespace}"
        return await self._send("POST", what, _claim_templates(namespace), made)

    async def get_lease(self, namespace: str, name: str) -> Raw:
        return await self._get(f"get lease {namespace}/{name}", f"{_leases(namespace)}/{segment(name)}")

    async def create_lease(self, namespace: str, lease: object) -> Raw:
        """Conflict where it exists."""
        return await self._send("POST", f"create a lease in namespace {namespace}", _leases(namespace), lease)

    async def replace_lease(self, namespace: str, name: str, lease: object) -> Raw:
        """Conflict where it is not of the version that `lease` names."""
        return await self._send(
            "PUT", f"replace lease {namespace}/{name}", f"{_leases(namespace)}/{segment(name)}", lease
        )


def _claim_templates(namespace: str) -> str:
    return f"/apis/resource.k8s.io/v1/namespaces/{segment(namespace)}/resourceclaimtemplates"


def _leases(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{segment(namespace)}/leases"
