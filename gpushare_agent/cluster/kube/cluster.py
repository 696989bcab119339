"""What the scheduler extender asks of the API server beyond the agent: binds, labels of pods, leases.

Its lists come in pages small enough that reading one leaves the event loop to others. Errors and limits are those of
client.py. Formats: Kubernetes core/v1 Binding, coordination.k8s.io/v1 Lease.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Raw, Struct, field
from msgspec.json import Decoder

from gpushare_agent.cluster.kube.claims import ClaimTemplate
from gpushare_agent.cluster.kube.client import UNFINISHED, KubeApi, open_kube_session, pod_path, pods, segment
from gpushare_agent.cluster.kube.lists import KubeTimeouts, ListLimits, Watched
from gpushare_agent.cluster.kube.objects import ObjectMeta
from gpushare_agent.cluster.kube.session import Request
from gpushare_agent.kit.json_schema import NULL, decoded_or
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.names import PodUid

EXTENDER_RIGHTS = "check the extender's service account and its ClusterRole"
CONNECT_TIMEOUT_S = 5.0
LIST_TIMEOUT_S = 120.0
PAGE_SIZES = (200, 50, 5, 1)
"""200 pods of 6 KiB take about ten milliseconds to read, which is what a filter request may have to wait."""

LIVE_PODS = pods(fields=UNFINISHED)


def config_map(namespace: str, name: str) -> Watched:
    return Watched(
        what=f"ConfigMap {namespace}/{name}",
        path=f"/api/v1/namespaces/{segment(namespace)}/configmaps",
        fields=f"metadata.name={name}",
    )


class LeaseSpec(Struct, rename="camel"):
    """Times are RFC 3339 with microseconds."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(Struct, rename="camel"):
    """`metadata` is written as it was read: labels and annotations in it are others'."""

    metadata: Raw
    spec: LeaseSpec = field(default_factory=LeaseSpec)
    api_version: str = "coordination.k8s.io/v1"
    kind: str = "Lease"

    @property
    def uid(self) -> str:
        return decoded_or(_META, self.metadata, ObjectMeta).uid or ""


class _LeaseJson(Struct):
    metadata: Raw
    spec: Raw = NULL


_META, _LEASE, _LEASE_SPEC = Decoder(ObjectMeta), Decoder(_LeaseJson), Decoder(LeaseSpec)


@asynccontextmanager
async def open_cluster_api(*, kubeconfig: Path | None, request_s: float) -> AsyncIterator[ClusterApi]:
    """As open_kube_api. `request_s` bounds each request that is no list and no watch: a leader that has lost its lease must
    have no request under way any more when the next one begins."""
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

    async def bind_pod(self, namespace: str, name: str, uid: PodUid, node: str, resource_version: str) -> None:
        """Bind this very pod in this very version.

        Conflict where it is another one by now, or bound already. Unavailable leaves open whether it was bound.
        """
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": resource_version},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        path = f"{pod_path(namespace, name)}/binding"
        await self._send("POST", f"bind pod {namespace}/{name} to node {node}", path, body)

    async def get_claim_template(self, namespace: str, name: str) -> Raw:
        path = f"{_claim_templates(namespace)}/{segment(name)}"
        return await self._get(f"get ResourceClaimTemplate {namespace}/{name}", path)

    async def create_claim_template(self, namespace: str, made: ClaimTemplate) -> Raw:
        """Makes the template and returns it as it is then. Conflict where one of its name exists."""
        what = f"create a ResourceClaimTemplate in namespace {namespace}"
        return await self._send("POST", what, _claim_templates(namespace), made)

    async def get_lease(self, namespace: str, name: str) -> Lease:
        return await self._lease(
            Request(what=f"get lease {namespace}/{name}", method="GET", path=f"{_leases(namespace)}/{segment(name)}")
        )

    async def create_lease(self, namespace: str, lease: Lease) -> Lease:
        """Conflict where it exists."""
        return await self._lease(
            Request(what=f"create a lease in namespace {namespace}", method="POST", path=_leases(namespace), body=lease)
        )

    async def replace_lease(self, namespace: str, name: str, lease: Lease) -> Lease:
        """Conflict where it is not of the version that `lease` names."""
        if not decoded_or(_META, lease.metadata, ObjectMeta).version:
            raise Corrupt(f"cannot replace lease {namespace}/{name}: the one read has no resourceVersion")
        path = f"{_leases(namespace)}/{segment(name)}"
        return await self._lease(Request(what=f"replace lease {namespace}/{name}", method="PUT", path=path, body=lease))

    async def _lease(self, request: Request) -> Lease:
        raw = await self._session.fetch(request, _LEASE, timeout_s=self._timeouts.request_s)
        # One that another client filled with nonsense reads as empty: it ends, as every lease does.
        return Lease(metadata=raw.metadata, spec=decoded_or(_LEASE_SPEC, raw.spec, LeaseSpec))


def _claim_templates(namespace: str) -> str:
    return f"/apis/resource.k8s.io/v1/namespaces/{segment(namespace)}/resourceclaimtemplates"


def _leases(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{segment(namespace)}/leases"
