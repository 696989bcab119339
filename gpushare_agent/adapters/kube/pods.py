"""A Pod from the API server's JSON, read once and never trusted.

Only what the agent needs is kept, bounded in size. Whatever is not what the Kubernetes API says it is raises Corrupt
with the pod, the container and the field: never AttributeError or TypeError. Format: Kubernetes core/v1 Pod.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from gpushare_agent.adapters.kube.quantities import whole_number
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod, PodPhase

MAX_ENTRIES = 1000
MAX_VALUE_CHARS = 4096
MAX_MESSAGE_CHARS = 2048
CUT = "…"
"""Ends what was cut, so that a cut value is never taken for a whole one."""


def parse_pod(raw: Mapping[str, Any], *, resources: Collection[str] | None = None) -> Pod:
    """`resources` limits whose limits are read; None reads those of every extended resource.

    Raises:
        Corrupt: a part that the agent needs is missing, of the wrong type, or no number where one belongs.
    """
    metadata = _mapping(raw, "metadata", "pod")
    namespace, name = _text(metadata, "namespace", "pod"), _text(metadata, "name", "pod")
    what = f"pod {namespace}/{name}"
    uid = _text(metadata, "uid", what)
    if not (uid and name and namespace):
        raise Corrupt(f"{what}: namespace, name or UID is missing")
    spec, status = _mapping(raw, "spec", what), _mapping(raw, "status", what)
    return Pod(
        uid=PodUid(uid),
        namespace=namespace,
        name=name,
        phase=_phase(status, what),
        containers=tuple(_containers(spec, what, resources)),
        annotations=_texts(metadata.get("annotations")),
        labels=_texts(metadata.get("labels")),
        resource_version=_text(metadata, "resourceVersion", what),
        node_name=_text(spec, "nodeName", what),
        is_deleting=metadata.get("deletionTimestamp") is not None,
        reason=_cut(_text(status, "reason", what), MAX_MESSAGE_CHARS),
        message=_cut(_text(status, "message", what), MAX_MESSAGE_CHARS),
        controller_kind=_controller_kind(metadata, what),
        has_started=any(_has_started(raw_status) for raw_status in _container_statuses(status, what)),
    )


def pod_uid(raw: Mapping[str, Any]) -> PodUid:
    """The UID alone, for events of which nothing else matters."""
    uid = _text(_mapping(raw, "metadata", "pod"), "uid", "pod")
    if not uid:
        raise Corrupt("pod: the UID is missing")
    return PodUid(uid)


def resource_version(raw: Mapping[str, Any]) -> str:
    """An object's or a bookmark's resourceVersion, empty where there is none."""
    return _text(_mapping(raw, "metadata", "object"), "resourceVersion", "object")


def _containers(spec: Mapping[str, Any], what: str, resources: Collection[str] | None) -> Iterator[ContainerSpec]:
    for field in ("initContainers", "containers"):
        for position, raw in enumerate(_items(spec, field, what)):
            kind = ContainerKind.MAIN
            if field == "initContainers":
                kind = ContainerKind.SIDECAR if raw.get("restartPolicy") == "Always" else ContainerKind.INIT
            name = _text(raw, "name", f"{what}, {field}[{position}]")
            if not name:
                raise Corrupt(f"{what}, {field}[{position}]: the container has no name")
            yield ContainerSpec(
                name=name,
                kind=kind,
                position=position,
                requests=_requests(raw, f"{what}, container {name}", resources),
                env=_literal_env(raw, f"{what}, container {name}"),
            )


def _requests(raw: Mapping[str, Any], what: str, resources: Collection[str] | None) -> dict[str, int]:
    limits = _mapping(_mapping(raw, "resources", what), "limits", what)
    wanted = sorted(name for name in limits if (_is_extended(name) if resources is None else name in resources))
    return {name: whole_number(limits[name], f"{what}, limit {_cut(name, 300)}") for name in wanted}


def _is_extended(name: str) -> bool:
    """Qualified by a domain that is not Kubernetes' own: cpu, hugepages-2Mi and the like are not."""
    return "/" in name and "kubernetes.io/" not in name


def _literal_env(raw: Mapping[str, Any], what: str) -> dict[str, str]:
    """Literal values by name; a later entry wins, as in the kubelet."""
    pairs = ((entry.get("name"), entry.get("value")) for entry in _items(raw, "env", what)[:MAX_ENTRIES])
    return {
        _cut(name, MAX_VALUE_CHARS): _cut(value, MAX_VALUE_CHARS)
        for name, value in pairs
        if isinstance(name, str) and isinstance(value, str)
    }


def _phase(status: Mapping[str, Any], what: str) -> PodPhase:
    phase = _text(status, "phase", what)
    try:
        return PodPhase(phase) if phase else PodPhase.PENDING
    except ValueError as e:
        raise Corrupt(f"{what}: status.phase {_cut(phase, 80)!r} is no pod phase") from e


def _controller_kind(metadata: Mapping[str, Any], what: str) -> str:
    owners = _items(metadata, "ownerReferences", what)
    return next((_text(owner, "kind", what) for owner in owners if owner.get("controller") is True), "")


def _container_statuses(status: Mapping[str, Any], what: str) -> Iterator[Mapping[str, Any]]:
    for field in ("initContainerStatuses", "containerStatuses"):
        yield from _items(status, field, what)


def _has_started(raw_status: Mapping[str, Any]) -> bool:
    """A container of an admitted pod has run, runs, or was restarted. A pod refused at admission has no statuses."""
    restarts = raw_status.get("restartCount")
    states = (raw_status.get("state"), raw_status.get("lastState"))
    return (isinstance(restarts, int) and restarts > 0) or any(
        isinstance(state, Mapping) and (state.get("running") is not None or state.get("terminated") is not None)
        for state in states
    )


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
    if len(value) > MAX_ENTRIES:
        raise Corrupt(f"{what}, {field}: more than {MAX_ENTRIES} entries")
    return list(value)


def _text(raw: Mapping[str, Any], field: str, what: str) -> str:
    value = raw.get(field)
    if value is None:
        return ""
    return value if isinstance(value, str) else _no(f"{what}, {field}", "text")


def _texts(value: Any) -> dict[str, str]:
    """Annotations or labels, the pairs of text among them, by name."""
    if not isinstance(value, Mapping):
        return {}
    names = sorted(name for name in value if isinstance(name, str) and isinstance(value[name], str))
    return {name: _cut(value[name], MAX_VALUE_CHARS) for name in names[:MAX_ENTRIES]}


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + CUT


def _no(what: str, wanted: str) -> Any:
    raise Corrupt(f"{_cut(what, 700)}: is not {wanted}")
