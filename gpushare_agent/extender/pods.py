"""Reads pods as the extender keeps them, fifty thousand of them: their requests and their node.

Containers that ask for nothing of ours are left out (positions are kept), and so are all fields that a tenant can write
besides the requests. Equal containers are one object. No state but that cache of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from gpushare_agent.cluster.kube.pods import PodJson, parse_pod
from gpushare_agent.model.names import (
    PREDICATE_GPU_INDEX_PREFIX,
    PREDICATE_NODE_ANNOTATION,
)
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceNames

_ALIKE_KEPT = 16384
_MAX_ANNOTATION_CHARS = 256


def asks_for_ours(pod: PodJson, names: ResourceNames) -> bool:
    """A quick check: most of a cluster's pods ask for nothing of ours."""
    containers = (*(pod.spec.containers or ()), *(pod.spec.init_containers or ()))
    return any(not one.limits.keys().isdisjoint(names.names) for one in containers)


def lean_pod(read: PodJson, names: ResourceNames) -> Pod:
    """Raises Corrupt as parse_pod does."""
    pod = parse_pod(read, resources=names.names)
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


def predicate_annotations(pod: PodJson) -> dict[str, str]:
    """The pod's annotations with an extender's choice: of the node, and of GPUs by container. Only to be compared: any
    tenant can write them."""
    return {
        name: value[:_MAX_ANNOTATION_CHARS]
        for name, value in pod.meta.annotations.items()
        if name == PREDICATE_NODE_ANNOTATION or name.startswith(PREDICATE_GPU_INDEX_PREFIX)
    }


@lru_cache(maxsize=_ALIKE_KEPT)
def _container(name: str, kind: ContainerKind, position: int, requests: tuple[tuple[str, int], ...]) -> ContainerSpec:
    return ContainerSpec(
        name=name, kind=kind, position=position, requests=MappingProxyType(dict(requests)), env=_NOTHING
    )


_NOTHING: Mapping[str, str] = MappingProxyType({})
