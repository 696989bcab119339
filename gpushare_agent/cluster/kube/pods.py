"""A Pod from the API server's JSON, read once and never trusted.

Only what the agent needs is kept, bounded in size: the store has every pod of the node. A pod is refused as Corrupt,
with the pod, the container and the field, only where its identity or what it asks for cannot be read; anything else that
is not as the Kubernetes API defines it, reads as absent. Format: Kubernetes core/v1 Pod.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from gpushare_agent.cluster.kube.quantities import whole_number
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.names import (
    ENV_GPU_MEMORY_LIMIT,
    ENV_GPU_MEMORY_REQUEST,
    ENV_HAMI_CORE_CACHE,
    ENV_HAMI_CORE_CORES,
    ENV_HAMI_CORE_DISABLE,
    ENV_HAMI_CORE_LIBRARY,
    ENV_HAMI_CORE_MEMORY,
    ENV_HAMI_CORE_POLICY,
    ENV_VISIBLE_DEVICES,
    GPUSHARE_ALLOCATION_ANNOTATION,
    GPUSHARE_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSUME_TIME_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    MAX_ANNOTATION_CHARS,
    RESIZE_ANNOTATION,
    RESIZE_STATUS_ANNOTATION,
    PodUid,
    is_container_id,
)
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod, PodPhase

KEPT_ANNOTATION_PREFIX = "tencent.com/"
PREDICATE_PREFIX = "tencent.com/predicate-"
KEPT_ANNOTATIONS = (
    "clusterName",
    RESIZE_ANNOTATION,
    RESIZE_STATUS_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    GPUSHARE_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSUME_TIME_ANNOTATION,
    GPUSHARE_ALLOCATION_ANNOTATION,
)
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
"""On a static pod's object: the UID that the kubelet has for the pod."""
_LIMITS = (
    *(ENV_GPU_MEMORY_LIMIT, ENV_GPU_MEMORY_REQUEST, ENV_HAMI_CORE_CACHE, ENV_HAMI_CORE_CORES),
    *(ENV_HAMI_CORE_LIBRARY, ENV_VISIBLE_DEVICES),  # whose functions are found, and to which GPUs the limits belong
    *(f"{name}_0" for name in (ENV_HAMI_CORE_MEMORY, ENV_HAMI_CORE_CORES)),  # a share is on one GPU
)
KEPT_ENV = ("compat32", "SUBMITTER", ENV_HAMI_CORE_DISABLE, ENV_HAMI_CORE_POLICY, *_LIMITS)
_STATIC_UID = re.compile(r"[0-9a-f]{32}")
"""The kubelet's hash of the file. Unlike every UID that the API server gives: no forged mirror pod names another's pod."""
EXTENDED_CLAIM = "extended-resources"
"""The name in the pod of the claim that the scheduler made for its extended resources."""
_EXTENDED_CLAIM_BESIDE = f"{EXTENDED_CLAIM}."
"""The same where the spec has a claim of that name: no claim of a spec can be named so."""
MAX_ANNOTATIONS = 64
MAX_CONTAINERS = 1000
"""Containers beyond this count only where they ask for something."""
MAX_NAME_CHARS = 320
"""Of an annotation: 253 of its prefix, a slash, 63 of its name."""
MAX_MESSAGE_CHARS = 2048
MAX_SCHEDULER_CHARS = 1000
CUT = "…"
"""Ends what was cut, so that a cut value is never taken for a whole one."""


def parse_pod(raw: Mapping[str, Any], *, resources: Collection[str] | None = None) -> Pod:
    """`resources` limits whose limits are read; None reads those of every extended resource.

    Raises:
        Corrupt: name, UID, node or what the containers ask for is missing, of the wrong type, or no number.
    """
    metadata = _mapping(raw, "metadata", "pod")
    namespace, name = _text(metadata, "namespace", "pod"), _text(metadata, "name", "pod")
    what = f"pod {namespace}/{name}"
    uid = _text(metadata, "uid", what)
    if not (uid and name and namespace):
        raise Corrupt(f"{what}: namespace, name or UID is missing")
    spec = _mapping(raw, "spec", what)
    status = mapping_or_empty(raw.get("status"))
    claims = _claims(spec, status)
    containers = tuple(_with_extended_claim(_containers(spec, what, resources), status, claims))
    is_mirror = MIRROR_ANNOTATION in mapping_or_empty(metadata.get("annotations"))
    statuses = items_or_none(status, "initContainerStatuses") + items_or_none(status, "containerStatuses")
    return Pod(
        uid=PodUid(uid),
        namespace=namespace,
        name=name,
        phase=_phase(status),
        containers=containers,
        annotations=_annotations(metadata.get("annotations")),
        resource_version=_text_or_empty(metadata, "resourceVersion"),
        node_name=_text(spec, "nodeName", what),
        is_deleting=metadata.get("deletionTimestamp") is not None,
        reason=_cut(_text_or_empty(status, "reason"), MAX_MESSAGE_CHARS),
        message=_cut(_text_or_empty(status, "message"), MAX_MESSAGE_CHARS),
        controller_kind=_controller_kind(metadata),
        is_static=is_mirror,
        mirror_uid=uid if is_mirror else "",
        has_started=any(_has_started(raw_status) for raw_status in statuses),
        running=frozenset(c.name for c in containers) & frozenset(name for name, _ in _running(statuses)),
        container_ids=_container_ids(containers, statuses),
        claims=claims,
    )


def pod_of_node(raw: Mapping[str, Any], *, resources: Collection[str] | None = None) -> Pod:
    """The pod as the node's own agent needs it: a mirror pod has the UID of the static pod that it shows. Raises Corrupt."""
    pod = parse_pod(raw, resources=resources)
    uid = mapping_or_empty(mapping_or_empty(raw.get("metadata")).get("annotations")).get(MIRROR_ANNOTATION)
    if not isinstance(uid, str) or not _STATIC_UID.fullmatch(uid):
        return pod
    return replace(pod, uid=PodUid(uid))


def static_pod(raw: Mapping[str, Any], *, resources: Collection[str] | None = None) -> Pod:
    """A static pod from the kubelet's own list of pods. Raises Corrupt, also for a file that sets metadata.uid."""
    pod = parse_pod(raw, resources=resources)
    if not _STATIC_UID.fullmatch(pod.uid):
        raise Corrupt(
            f"static pod {pod.namespace}/{pod.name}: its UID is not the kubelet's hash of its file; leave metadata.uid out"
        )
    return replace(pod, is_static=True, resource_version="")


def pod_uid(raw: Mapping[str, Any]) -> PodUid:
    """The UID alone, for events of which nothing else matters."""
    uid = _text(_mapping(raw, "metadata", "pod"), "uid", "pod")
    if not uid:
        raise Corrupt("pod: the UID is missing")
    return PodUid(uid)


def resource_version(raw: Mapping[str, Any]) -> str:
    """An object's or a bookmark's resourceVersion, empty where there is none."""
    return _text(_mapping(raw, "metadata", "object"), "resourceVersion", "object")


def object_name(raw: Mapping[str, Any], what: str) -> str:
    """An object's name. Raises Corrupt where there is none."""
    name = mapping_or_empty(raw.get("metadata")).get("name")
    if not isinstance(name, str) or not name:
        raise Corrupt(f"{what}: the name is missing")
    return name


def _containers(spec: Mapping[str, Any], what: str, resources: Collection[str] | None) -> Iterator[ContainerSpec]:
    for field in ("initContainers", "containers"):
        for position, raw in enumerate(_items(spec, field, what)):
            where = f"{what}, {field}[{position}]"
            name = _text_or_empty(raw, "name")
            requests = _requests(raw, f"{what}, container {name}" if name else where, resources)
            if not name and requests:
                raise Corrupt(f"{where}: the container has no name")
            if requests or (name and position < MAX_CONTAINERS):
                kind = _kind(raw, field)
                yield ContainerSpec(
                    name=name,
                    kind=kind,
                    position=position,
                    requests=requests,
                    env=_literal_env(raw),
                    claims=_container_claims(raw),
                )


def _kind(raw: Mapping[str, Any], field: str) -> ContainerKind:
    if field == "containers":
        return ContainerKind.MAIN
    return ContainerKind.SIDECAR if raw.get("restartPolicy") == "Always" else ContainerKind.INIT


def _requests(raw: Mapping[str, Any], what: str, resources: Collection[str] | None) -> dict[str, int]:
    limits = _mapping(_mapping(raw, "resources", what), "limits", what)
    wanted = sorted(name for name in limits if (_is_extended(name) if resources is None else name in resources))
    return {name: whole_number(limits[name], f"{what}, limit {_cut(name, 300)}") for name in wanted}


def _claims(spec: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, str]:
    """Claims that the spec names, and those made from templates or for extended resources, which the status names."""
    own = items_or_none(spec, "resourceClaims")
    found = [(raw.get("name"), raw.get("resourceClaimName")) for raw in own]
    extended = mapping_or_empty(status.get("extendedResourceClaimStatus")).get("resourceClaimName")
    if extended is not None:
        is_taken = any(raw.get("name") == EXTENDED_CLAIM for raw in own)
        found.append((_EXTENDED_CLAIM_BESIDE if is_taken else EXTENDED_CLAIM, extended))
    if not found:
        return {}
    found += [(raw.get("name"), raw.get("resourceClaimName")) for raw in items_or_none(status, "resourceClaimStatuses")]
    return {name: claim for name, claim in found if isinstance(name, str) and isinstance(claim, str)}


def _with_extended_claim(
    containers: Iterable[ContainerSpec], status: Mapping[str, Any], claims: Mapping[str, str]
) -> Iterator[ContainerSpec]:
    """The containers with the requests of the claim that the scheduler made for extended resources, where there is one."""
    extended = mapping_or_empty(status.get("extendedResourceClaimStatus"))
    name_in_pod = _EXTENDED_CLAIM_BESIDE if _EXTENDED_CLAIM_BESIDE in claims else EXTENDED_CLAIM
    if claims.get(name_in_pod) is None or claims[name_in_pod] != extended.get("resourceClaimName"):
        yield from containers
        return
    used: dict[str, list[tuple[str, str]]] = {}
    for raw in items_or_none(extended, "requestMappings"):
        name, request = raw.get("containerName"), raw.get("requestName")
        if isinstance(name, str) and isinstance(request, str):
            used.setdefault(name, []).append((name_in_pod, request))
    for container in containers:
        own = tuple(used.get(container.name, ()))
        yield replace(container, claims=container.claims + own) if own else container


def _container_claims(raw: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    claims = items_or_none(mapping_or_empty(raw.get("resources")), "claims")
    return tuple(
        (claim["name"], _text_or_empty(claim, "request")) for claim in claims if isinstance(claim.get("name"), str)
    )


def _is_extended(name: str) -> bool:
    """Qualified by a domain that is not Kubernetes' own: cpu, hugepages-2Mi and the like are not."""
    return "/" in name and "kubernetes.io/" not in name


def _literal_env(raw: Mapping[str, Any]) -> dict[str, str]:
    """The values that the agent reads, by name; a later entry wins, as in the kubelet. Only literal ones, but of what limits
    a share it matters that it is set at all: empty where the value is not literal."""
    pairs = ((entry.get("name"), entry.get("value")) for entry in items_or_none(raw, "env"))
    return {
        name: _cut(value, MAX_ANNOTATION_CHARS) if isinstance(value, str) else ""
        for name, value in pairs
        if isinstance(name, str) and name in KEPT_ENV and (isinstance(value, str) or name in _LIMITS)
    }


def _phase(status: Mapping[str, Any]) -> PodPhase:
    phase = status.get("phase")
    if not phase:
        return PodPhase.PENDING
    return next((known for known in PodPhase if known.value == phase), PodPhase.UNKNOWN)


def _controller_kind(metadata: Mapping[str, Any]) -> str:
    owners = items_or_none(metadata, "ownerReferences")
    kind = next((_text_or_empty(owner, "kind") for owner in owners if owner.get("controller") is True), "")
    return _cut(kind, MAX_NAME_CHARS)


def _running(statuses: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names and statuses of the containers that run."""
    for raw_status in statuses:
        name, state = raw_status.get("name"), raw_status.get("state")
        if isinstance(name, str) and isinstance(state, Mapping) and isinstance(state.get("running"), Mapping):
            yield name, raw_status


def _container_ids(containers: Iterable[ContainerSpec], statuses: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """`containerd://<ID>` without the runtime's name, of the containers that want something."""
    wanted = {c.name for c in containers if c.requests or c.claims}
    found = {name: _text_or_empty(status, "containerID") for name, status in _running(statuses) if name in wanted}
    bare = {name: text.rpartition("://")[2] for name, text in found.items()}
    return {name: container_id for name, container_id in sorted(bare.items()) if is_container_id(container_id)}


def _has_started(raw_status: Mapping[str, Any]) -> bool:
    """A container of an admitted pod has run, runs, or was restarted. A pod refused at admission has no statuses."""
    restarts = raw_status.get("restartCount")
    states = (raw_status.get("state"), raw_status.get("lastState"))
    return (isinstance(restarts, int) and restarts > 0) or any(
        isinstance(state, Mapping) and (state.get("running") is not None or state.get("terminated") is not None)
        for state in states
    )


def scheduler_message(raw: Mapping[str, Any]) -> str:
    """Why no node is chosen, by the condition PodScheduled; any tenant who may write the status may write it."""
    for condition in items_or_none(mapping_or_empty(raw.get("status")), "conditions"):
        if condition.get("type") == "PodScheduled" and isinstance(text := condition.get("message"), str):
            return text[:MAX_SCHEDULER_CHARS]
    return ""


def _mapping(raw: Any, field: str, what: str) -> Mapping[str, Any]:
    """The object in a field; absent and null read as empty, as the API server writes them."""
    value = raw.get(field) if isinstance(raw, Mapping) else _no(what, "an object")
    if value is None:
        return {}
    return value if isinstance(value, Mapping) else _no(f"{what}, {field}", "an object")


def _items(raw: Mapping[str, Any], field: str, what: str) -> list[Mapping[str, Any]]:
    value = raw.get(field)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        _no(f"{what}, {field}", "a list of objects")
    return value


def items_or_none(raw: Mapping[str, Any], field: str) -> list[Mapping[str, Any]]:
    """The objects of a list; whatever else stands there is passed over."""
    value = raw.get(field)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _text(raw: Mapping[str, Any], field: str, what: str) -> str:
    value = raw.get(field)
    if value is None:
        return ""
    return value if isinstance(value, str) else _no(f"{what}, {field}", "text")


def _text_or_empty(raw: Mapping[str, Any], field: str) -> str:
    value = raw.get(field)
    return value if isinstance(value, str) else ""


def mapping_or_empty(value: Any) -> Mapping[str, Any]:
    """The object, or an empty one in place of anything else."""
    return value if isinstance(value, Mapping) else {}


def _annotations(value: Any) -> dict[str, str]:
    """Those that the agent reads, the pairs of text among them, by name."""
    raw = mapping_or_empty(value)
    names = [name for name in raw if isinstance(name, str) and _is_kept(name) and isinstance(raw[name], str)]
    names.sort(key=lambda name: (not _is_guarded(name), name))
    return {name: _cut(raw[name], MAX_ANNOTATION_CHARS) for name in sorted(names[:MAX_ANNOTATIONS])}


def _is_guarded(name: str) -> bool:
    """Those that the extender writes, and that its admission policy lets nobody else write, come first: else a tenant could
    push them out by sixty-four names of its own."""
    return name.startswith(PREDICATE_PREFIX) or name in KEPT_ANNOTATIONS


def _is_kept(name: str) -> bool:
    return name in KEPT_ANNOTATIONS or (name.startswith(KEPT_ANNOTATION_PREFIX) and len(name) <= MAX_NAME_CHARS)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + CUT


def _no(what: str, wanted: str) -> Any:
    raise Corrupt(f"{_cut(what, 700)}: is not {wanted}")
