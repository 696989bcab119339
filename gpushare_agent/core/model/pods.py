"""Pods as the agent needs them, read once from the API server's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct, field

from gpushare_agent.core.model.names import PodUid


class ContainerKind(StrEnum):
    """How the kubelet treats a container's devices: an init container's are reused by later ones of its pod."""

    INIT = "init"
    SIDECAR = "sidecar"
    MAIN = "main"


class PodPhase(StrEnum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


class ContainerSpec(Struct, frozen=True, kw_only=True):
    """One container. `position` counts within spec.containers resp. spec.initContainers.

    `requests` holds the limits of extended resources (limits equal requests for them), by resource name, whole numbers.
    `env` holds only literal values, and the names of limits that are set in another way. `claims` are the pod's claims that
    the container uses, by their names in the pod, each with the request that it names in the claim; empty: all requests.
    `mounts` are those of its volumeMounts that touch a path of `LIMIT_PATHS`, sorted.
    """

    name: str
    kind: ContainerKind
    position: int
    requests: Mapping[str, int] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    claims: tuple[tuple[str, str], ...] = ()
    mounts: tuple[str, ...] = ()


class HostRequest(NamedTuple):
    """A pod's request to its node apart from GPUs: CPU in milli-CPUs and main memory in MiB, and the GPU models on which
    it may run, sorted; none: any."""

    cpu_milli: int = 0
    memory_mib: int = 0
    models: tuple[str, ...] = ()


class Rank(NamedTuple):
    """What decides whether a pod ends for another one: its priority, when the kubelet has seen it (RFC 3339, empty before),
    whether it may end others itself, and the node that others were ended on for it, empty where they were not."""

    priority: int = 0
    started_at: str = ""
    preempts: bool = True
    nominated_node: str = ""


class Pod(Struct, frozen=True, kw_only=True):
    """One pod of this node. `containers` are in the order in which the kubelet admits them: init containers first.

    `uid` is the kubelet's and the runtime's, by which cgroups and directories are named. A static pod's object in the API
    server, its mirror pod, comes after its admission and has a UID of its own.
    """

    uid: PodUid
    namespace: str
    name: str
    phase: PodPhase
    containers: tuple[ContainerSpec, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    resource_version: str = ""
    node_name: str = ""
    runtime_class: str = ""
    """The name of its RuntimeClass, empty for the node's own runtime."""
    is_deleting: bool = False
    reason: str = ""
    message: str = ""
    controller_kind: str = ""
    """Kind of the controlling owner reference, empty where there is none."""
    has_started: bool = False
    """A container status says running, or restarted at least once: its admission is over."""
    is_static: bool = False
    """The pod comes from a file on the node, not from the API server."""
    mirror_uid: str = ""
    """A static pod's UID in the API server, empty while it has none there."""
    running: frozenset[str] = frozenset()
    """Names of the containers that run now by their statuses: a call of the kubelet cannot be for one of them."""
    not_running: Mapping[str, str] = field(default_factory=dict)
    """Why a container waits or has ended, by name, in the kubelet's word: `CrashLoopBackOff`, `Completed`."""
    container_ids: Mapping[str, str] = field(default_factory=dict)
    """The runtime's IDs of the running containers by name, without the runtime's prefix; 64 hexadecimal digits each."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """The names of its existing ResourceClaims, by their names in the pod."""
    host_request: HostRequest = HostRequest()
    rank: Rank = Rank()
    """Both read by the extender alone."""

    @property
    def is_terminal(self) -> bool:
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    @property
    def object_uid(self) -> PodUid | None:
        """The UID in the API server; None for a static pod without a mirror pod."""
        return PodUid(self.mirror_uid) if self.mirror_uid else None if self.is_static else self.uid

    def requests_any(self, resource: str) -> bool:
        return any(c.requests.get(resource, 0) > 0 for c in self.containers)

    def used_claims(self, container: ContainerSpec) -> dict[str, set[str]]:
        """The claims that the container uses, by the claims' own names, each with the requests that it names; an empty one
        stands for all."""
        found: dict[str, set[str]] = {}
        for name, request in container.claims:
            if claim := self.claims.get(name):
                found.setdefault(claim, set()).add(request)
        return found

    def container(self, name: str) -> ContainerSpec | None:
        return next((c for c in self.containers if c.name == name), None)


ClaimUser = tuple[Pod, ContainerSpec]
"""A container that uses a ResourceClaim, with its pod."""


def version_number(text: str) -> int:
    """A resourceVersion as a number to compare by, 0 where it is none: opaque, or too long for the 64 bits of etcd."""
    # Kubernetes calls it opaque, and yet equal or newer is what a cache must know; etcd's are numbers that grow.
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else 0
