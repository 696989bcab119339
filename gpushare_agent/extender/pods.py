"""Reads pods as the extender keeps them, fifty thousand of them: their requests and their node.

Containers that ask for nothing of ours are left out (positions are kept), and so are all fields that a tenant can write
besides the requests. Equal containers are one object. No state but that cache of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from gpushare_agent.cluster.kube.pods import mapping_or_empty, parse_pod
from gpushare_agent.model.names import (
    PREDICATE_GPU_INDEX_PREFIX,
    PREDICATE_NODE_ANNOTATION,
)
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceNames

MAX_CONTAINERS = 256
"""Of a kind in a pod. Far more than a node runs; each takes 60 µs to read."""
_ALIKE_KEPT = 16384
_MAX_ANNOTATION_CHARS = 256


class _ContainerClaim(TypedDict, total=False):
    name: str
    request: str | None


class _Resources(TypedDict, total=False):
    limits: dict[str, str | int | float] | None
    requests: dict[str, str | int | float] | None
    claims: list[_ContainerClaim] | None


class _Container(TypedDict, total=False):
    name: str
    resources: _Resources | None
    restartPolicy: str | None


_Containers = Annotated[list[_Container], Meta(max_length=MAX_CONTAINERS)]


class _Metadata(TypedDict, total=False):
    namespace: str | None
    name: str | None
    uid: str | None
    resourceVersion: str | None
    deletionTimestamp: str | None
    annotations: dict[str, str] | None


class _PodClaim(TypedDict, total=False):
    name: str
    resourceClaimName: str | None
    resourceClaimTemplateName: str | None


class _Spec(TypedDict, total=False):
    nodeName: str | None
    containers: _Containers | None
    initContainers: _Containers | None
    resourceClaims: list[_PodClaim] | None


class PodJson(TypedDict, total=False):
    """What is read of a pod in a request to the extender or its webhook. Format: Kubernetes core/v1 Pod."""

    metadata: _Metadata | None
    spec: _Spec | None


def asks_for_ours(raw: Mapping[str, Any], names: ResourceNames) -> bool:
    """A quick check of a raw pod: most of a cluster's pods ask for nothing of ours. True where it cannot be read."""
    spec = raw.get("spec")
    if not isinstance(spec, dict):
        return True
    for field in ("containers", "initContainers"):
        raw_containers = spec.get(field) or ()
        if not isinstance(raw_containers, list):
            return True
        for container in raw_containers:
            resources = container.get("resources") if isinstance(container, dict) else None
            limits = resources.get("limits") if isinstance(resources, dict) else None
            if isinstance(limits, dict) and not limits.keys().isdisjoint(names.names):
                return True
    return False


def lean_pod(raw: Mapping[str, Any], names: ResourceNames) -> Pod:
    """Raises Corrupt as parse_pod does."""
    pod = parse_pod(raw, resources=names.names)
    return Pod(
        uid=pod.uid,
        namespace=pod.namespace,
        name=pod.name,
        phase=pod.phase,
        containers=tuple(
            _container(c.name, c.kind, c.position, tuple(sorted(c.requests.items())))
            for c in pod.containers
            if any(c.requests.values())
        ),
        resource_version=pod.resource_version,
        node_name=pod.node_name,
        is_deleting=pod.is_deleting,
        annotations=_NOTHING,
        labels=_NOTHING,
        container_ids=_NOTHING,
    )


def predicate_annotations(raw: Mapping[str, Any]) -> dict[str, str]:
    """The pod's annotations with an extender's choice: of the node, and of GPUs by container. Only to be compared: any
    tenant can write them."""
    annotations = mapping_or_empty(mapping_or_empty(raw.get("metadata")).get("annotations"))
    return {
        name: value[:_MAX_ANNOTATION_CHARS] if isinstance(value, str) else ""
        for name, value in annotations.items()
        if name == PREDICATE_NODE_ANNOTATION or str(name).startswith(PREDICATE_GPU_INDEX_PREFIX)
    }


@lru_cache(maxsize=_ALIKE_KEPT)
def _container(name: str, kind: ContainerKind, position: int, requests: tuple[tuple[str, int], ...]) -> ContainerSpec:
    return ContainerSpec(
        name=name, kind=kind, position=position, requests=MappingProxyType(dict(requests)), env=_NOTHING
    )


_NOTHING: Mapping[str, str] = MappingProxyType({})
