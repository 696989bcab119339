"""The kinds of objects that are served, one row each. Store, routes, discovery, tables and checks read them."""

from __future__ import annotations

from msgspec import Struct


class Kind(Struct, frozen=True, kw_only=True):
    resource: str
    """Its name in paths: `pods`."""
    name: str
    """`Pod`."""
    group_version: str
    short_names: tuple[str, ...]
    marks: frozenset[str]

    @property
    def base_path(self) -> str:
        """The path of its group: `/api/v1`, `/apis/coordination.k8s.io/v1`."""
        return f"/apis/{self.group_version}" if "/" in self.group_version else f"/api/{self.group_version}"

    @property
    def is_namespaced(self) -> bool:
        return "cluster" not in self.marks


_ROWS = """\
Pod                     pods                     v1                     po      applied status all
DeviceClass             deviceclasses            resource.k8s.io/v1     -       applied claim cluster
ResourceClaim           resourceclaims           resource.k8s.io/v1     -       applied claim status
ResourceClaimTemplate   resourceclaimtemplates   resource.k8s.io/v1     -       applied claim
Deployment              deployments              apps/v1                deploy  applied status scale all
StatefulSet             statefulsets             apps/v1                sts     applied status scale all
Job                     jobs                     batch/v1               -       applied status all
Service                 services                 v1                     svc     applied all
ConfigMap               configmaps               v1                     cm      applied
Namespace               namespaces               v1                     ns      applied cluster
ResourceQuota           resourcequotas           v1                     quota   applied
HorizontalPodAutoscaler horizontalpodautoscalers autoscaling/v1         hpa     applied
Node                    nodes                    v1                     no      cluster status
Event                   events                   v1                     ev
Lease                   leases                   coordination.k8s.io/v1 -
ReplicaSet              replicasets              apps/v1                rs      status scale all
ResourceSlice           resourceslices           resource.k8s.io/v1     -       cluster
"""
"""`applied`: a person writes such objects; `claim`: they are of Dynamic Resource Allocation; `all`: `kubectl get all` has
them; `status`, `scale`: that is written at an address of its own."""


def _kind(name: str, resource: str, group_version: str, short_name: str, *marks: str) -> Kind:
    short_names = () if short_name == "-" else (short_name,)
    return Kind(
        resource=resource, name=name, group_version=group_version, short_names=short_names, marks=frozenset(marks)
    )


KINDS = {kind.resource: kind for kind in (_kind(*row.split()) for row in _ROWS.splitlines())}
APPLIED_KINDS = {kind.name: kind for kind in KINDS.values() if "applied" in kind.marks}
"""By name."""
