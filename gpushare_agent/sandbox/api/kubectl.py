"""What kubectl alone asks for: discovery documents, which name the resources and no more, and the rows that it prints.

Pure. Types: APIVersions, APIGroupList and APIResourceList of meta/v1, Table of meta.k8s.io/v1. Source of columns and
words: pkg/printers/internalversion of Kubernetes 1.36.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from gpushare_agent.sandbox.api.store import (
    CLUSTER_WIDE,
    GROUPS,
    KINDS,
    SCALABLE,
    WITH_STATUS,
    base_path,
    group_version,
)
from gpushare_agent.sandbox.pod_manifest import RawObject

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_SHORT_NAMES = {"pods": ["po"], "nodes": ["no"], "events": ["ev"], "configmaps": ["cm"], "namespaces": ["ns"],
                "deployments": ["deploy"], "replicasets": ["rs"], "statefulsets": ["sts"], "services": ["svc"],
                "resourcequotas": ["quota"], "horizontalpodautoscalers": ["hpa"]}  # fmt: skip
_IN_ALL = frozenset({"pods", "services", "deployments", "replicasets", "statefulsets", "jobs"})
"""Those of `kubectl get all`."""
_OF_PODS = ("attach", "exec", "log", "portforward", "proxy")
"""Further addresses of a pod; server.py has which of them are served."""


def discovery(resources: tuple[str, ...]) -> dict[str, RawObject]:
    """The documents by path. Older clients than aggregated discovery know the first three; newer ones fall back to
    them."""
    paths = sorted({base_path(name) for name in resources})
    return {
        "/api": {
            "kind": "APIVersions",
            "versions": ["v1"],
            "serverAddressByClientCIDRs": [],  # the address that the client used is the only one
        },
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                _group(group) for group in sorted({"policy/v1", *(GROUPS[n] for n in resources if n in GROUPS)})
            ],
        },
        # Without this group `kubectl drain` deletes where it would evict.
        "/apis/policy/v1": _resources("policy/v1", resources),
        **{base_path(name): _resources(group_version(name), resources) for name in resources},
        "/openapi/v3": {"paths": {path[1:]: {"serverRelativeURL": f"/openapi/v3{path}"} for path in paths}},
        **{f"/openapi/v3{path}": _openapi(path, resources) for path in paths},
    }


def _openapi(path: str, resources: tuple[str, ...]) -> RawObject:
    """No schemas: kubectl asks only whether the server checks fields. It does not merge by this document, then, but by the
    types that it has itself."""
    return {
        "openapi": "3.0.0",
        "info": {"title": "gpushare-agent sandbox", "version": "1"},
        # Without this, `kubectl explain` ends in a template's error; with it, it says that the kind is not here.
        "components": {"schemas": {}},
        "paths": {f"{path}/{name}/{{name}}": {"patch": _patch(name)} for name in resources if base_path(name) == path},
    }


def _patch(name: str) -> RawObject:
    group, _, version = group_version(name).rpartition("/")
    return {
        "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
        "requestBody": {"content": {"application/merge-patch+json": {"schema": {"type": "object"}}}},
        "responses": {"200": {"description": "OK"}},
        "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": KINDS[name]},
    }


def _group(group: str) -> RawObject:
    name, _, version = group.partition("/")
    preferred = {"groupVersion": group, "version": version}
    return {"name": name, "versions": [preferred], "preferredVersion": preferred}


def _resources(group: str, resources: tuple[str, ...]) -> RawObject:
    return {
        "kind": "APIResourceList",
        "groupVersion": group,
        "resources": [entry for name in sorted(resources) if group_version(name) == group for entry in _entries(name)],
    }


def _entries(name: str) -> list[RawObject]:
    common = {"singularName": "", "namespaced": name not in CLUSTER_WIDE, "kind": KINDS[name]}
    whole = {
        "name": name, **common, "singularName": KINDS[name].lower(), "verbs": _VERBS,
        "shortNames": _SHORT_NAMES.get(name, []), **({"categories": ["all"]} if name in _IN_ALL else {}),
    }  # fmt: skip
    status = [{"name": f"{name}/status", **common, "verbs": ["patch", "update"]}] if name in WITH_STATUS else []
    scale = {"kind": "Scale", "group": "autoscaling", "version": "v1", "verbs": ["get", "patch", "update"]}
    scales = [{"name": f"{name}/scale", **common, **scale}] if name in SCALABLE else []
    inside = [{"name": f"pods/{part}", **common, "verbs": ["create", "get"]} for part in _OF_PODS if name == "pods"]
    eviction = {
        "name": "pods/eviction",
        **common,
        "kind": "Eviction",
        "group": "policy",
        "version": "v1",
        "verbs": ["create"],
    }
    return [whole, *status, *scales, *inside, *([eviction] if name == "pods" else [])]


NONE, UNKNOWN = "<none>", "<unknown>"


class Column(Struct, frozen=True, kw_only=True):
    """One with `is_wide` is shown by `-o wide` alone."""

    name: str
    read: Callable[[RawObject], Any]
    is_wide: bool = False
    kind: str = "string"


def table(resource: str, objects: Iterable[RawObject], version: str, include: str) -> RawObject:
    """`include` is what comes with each row: None, Metadata or Object."""
    columns = _COLUMNS.get(resource, _DEFAULT)
    return {
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": {"resourceVersion": version},
        "columnDefinitions": [
            {"name": c.name, "type": c.kind, "format": "name" if c.name == "Name" else "", "description": "",
             "priority": int(c.is_wide)} for c in columns
        ],
        "rows": [{"cells": [c.read(raw) for c in columns], "object": _shown(raw, include)} for raw in objects],
    }  # fmt: skip


def _shown(raw: RawObject, include: str) -> RawObject | None:
    if include == "None":
        return None
    if include == "Object":
        return raw
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": raw["metadata"]}


def duration_text(seconds: float) -> str:
    """An age as `kubectl` prints it: at most two units, and two only where the first is small."""
    s = int(seconds)
    if s < 0:
        return "<invalid>"
    for size, limit, unit, next_size, next_unit, short in _AGES:
        # As in k8s.io/apimachinery's HumanDuration, whose steps these are.
        if s < limit:
            count, rest = s // size, s % size // next_size if s < short else 0
            return f"{count}{unit}" + (f"{rest}{next_unit}" if rest else "")
    return f"{s // _YEAR}y"


_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86400, 365 * 86400
_AGES = (
    (1, 2 * _MINUTE, "s", 1, "", 0),
    (_MINUTE, 3 * _HOUR, "m", 1, "s", 10 * _MINUTE),
    (_HOUR, 2 * _DAY, "h", _MINUTE, "m", 8 * _HOUR),
    (_DAY, 2 * _YEAR, "d", _HOUR, "h", 8 * _DAY),
)
"""Seconds of the unit, up to which age, its letter; the second unit, and up to which age it is shown."""


def _since(text: object, until: object = None) -> str:
    if not isinstance(text, str):
        return UNKNOWN
    # A Job's duration ends with it; ages end now.
    end = datetime.fromisoformat(until) if isinstance(until, str) else datetime.now(UTC)
    return duration_text((end - datetime.fromisoformat(text)).total_seconds())


def _at(raw: Mapping[str, Any], path: str, default: Any = NONE) -> Any:
    value: Any = raw
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return default if value is None or value == "" else value


def _field(path: str, default: Any = NONE) -> Callable[[RawObject], Any]:
    return lambda raw: _at(raw, path, default)


# --- pods ---


def _statuses(raw: RawObject, kind: str) -> list[Mapping[str, Any]]:
    return list(_at(raw, f"status.{kind}", []))


def _pod_ready(raw: RawObject) -> str:
    sidecars = {c["name"] for c in raw["spec"].get("initContainers") or () if c.get("restartPolicy") == "Always"}
    inits = [s for s in _statuses(raw, "initContainerStatuses") if s["name"] in sidecars]
    ready = sum(bool(s.get("ready")) for s in (*inits, *_statuses(raw, "containerStatuses")))
    return f"{ready}/{len(raw['spec']['containers']) + len(sidecars)}"


def _pod_restarts(raw: RawObject) -> int:
    return sum(s.get("restartCount", 0) for s in _statuses(raw, "containerStatuses"))


def _pod_status(raw: RawObject) -> str:
    """The first init container that has not ended well, else what the newest trouble of a main container is called."""
    # A pod that was rejected or evicted has its reason in the status itself.
    text = str(_at(raw, "status.reason", _at(raw, "status.phase", UNKNOWN)))
    total = len(raw["spec"].get("initContainers") or ())
    is_starting = False
    for index, status in enumerate(_statuses(raw, "initContainerStatuses")):
        state = status.get("state") or {}
        # A sidecar that runs: the start goes on behind it.
        if "running" in state and status.get("started"):
            continue
        if "terminated" in state and state["terminated"].get("exitCode") == 0:
            continue
        if "terminated" in state:
            text = f"Init:{state['terminated'].get('reason') or 'Error'}"
        else:
            reason = _at(state, "waiting.reason", "PodInitializing")
            text = f"Init:{reason}" if reason != "PodInitializing" else f"Init:{index}/{total}"
        is_starting = True
        break
    if not is_starting:
        text = _main_status(raw, text)
    return "Terminating" if raw["metadata"].get("deletionTimestamp") else text


def _main_status(raw: RawObject, text: str) -> str:
    has_running = False
    # Backwards, so that the first container's trouble is what remains, as kubectl has it.
    for status in reversed(_statuses(raw, "containerStatuses")):
        state = status.get("state") or {}
        if reason := _at(state, "waiting.reason", ""):
            text = reason
        elif "terminated" in state:
            text = state["terminated"].get("reason") or f"ExitCode:{state['terminated'].get('exitCode')}"
        elif status.get("ready") and "running" in state:
            has_running = True
    # One of several containers has ended well: the pod is not over.
    return "Running" if text == "Completed" and has_running else text


# --- the others ---


def _node_status(raw: RawObject) -> str:
    ready = [c.get("status", "") for c in _at(raw, "status.conditions", []) if c["type"] == "Ready"]
    text = {"True": "Ready", "False": "NotReady"}.get("".join(ready), "Unknown")
    return text + (",SchedulingDisabled" if _at(raw, "spec.unschedulable", False) else "")


def _node_roles(raw: RawObject) -> str:
    prefix = "node-role.kubernetes.io/"
    return (
        ",".join(sorted(k.removeprefix(prefix) for k in _at(raw, "metadata.labels", {}) if k.startswith(prefix)))
        or NONE
    )


def _address(kind: str) -> Callable[[RawObject], str]:
    def read(raw: RawObject) -> str:
        return next((a.get("address", NONE) for a in _at(raw, "status.addresses", []) if a.get("type") == kind), NONE)

    return read


def _event_object(raw: RawObject) -> str:
    about = raw.get("involvedObject") or {}
    return f"{str(about.get('kind', '')).lower()}/{about.get('name', '')}"


def _event_age(field: str) -> Callable[[RawObject], str]:
    return lambda raw: _since(
        _at(raw, field, None) or _at(raw, "eventTime", None) or raw["metadata"]["creationTimestamp"]
    )


def _each(path: str, field: str) -> Callable[[RawObject], str]:
    """One field of each item of a list, joined by commas."""
    return lambda raw: ",".join(str(one.get(field, "")) for one in _at(raw, path, [])) or NONE


def _selector(raw: RawObject) -> str:
    return ",".join(f"{k}={v}" for k, v in sorted(_at(raw, "spec.selector.matchLabels", {}).items())) or NONE


def _claim_state(raw: RawObject) -> str:
    states = ["allocated"] if _at(raw, "status.allocation", None) else []
    states += ["reserved"] if _at(raw, "status.reservedFor", None) else []
    return ",".join(["deleted", *states] if raw["metadata"].get("deletionTimestamp") else states) or "pending"


def _scale_target(raw: RawObject) -> str:
    return f"{_at(raw, 'spec.scaleTargetRef.kind', UNKNOWN)}/{_at(raw, 'spec.scaleTargetRef.name', UNKNOWN)}"


def _quota(*, is_limit: bool) -> Callable[[RawObject], str]:
    """Nothing counts here what is used."""
    return lambda raw: ", ".join(
        f"{name}: {UNKNOWN}/{most}"
        for name, most in sorted(_at(raw, "spec.hard", {}).items())
        if name.startswith("limits.") is is_limit
    )


def _job_status(raw: RawObject) -> str:
    met = {c["type"] for c in _at(raw, "status.conditions", []) if c.get("status") == "True"}
    return next((kind for kind in ("Complete", "Failed", "Suspended") if kind in met), "Running")


def _job_duration(raw: RawObject) -> str:
    started = _at(raw, "status.startTime", None)
    return _since(started, _at(raw, "status.completionTime", None)) if started else ""


def _columns(*given: tuple[str, Callable[[RawObject], Any]], wide: Sequence[tuple[str, Callable[[RawObject], Any]]] = (),
             has_age: bool = True) -> tuple[Column, ...]:  # fmt: skip
    shown = (("Name", _field("metadata.name")), *given, *([("Age", _age)] if has_age else ()))
    return (
        *(Column(name=name, read=read) for name, read in shown),
        *(Column(name=name, read=read, is_wide=True) for name, read in wide),
    )


def _age(raw: RawObject) -> str:
    return _since(raw["metadata"].get("creationTimestamp"))


_DEFAULT = _columns()
_TEMPLATE = (
    ("Containers", _each("spec.template.spec.containers", "name")),
    ("Images", _each("spec.template.spec.containers", "image")),
    ("Selector", _selector),
)
_COLUMNS: dict[str, tuple[Column, ...]] = {
    "pods": _columns(
        ("Ready", _pod_ready), ("Status", _pod_status), ("Restarts", _pod_restarts),
        wide=(
            ("IP", _field("status.podIP")), ("Node", _field("spec.nodeName")),
            ("Nominated Node", _field("status.nominatedNodeName")), ("Readiness Gates", lambda _: NONE),
        ),
    ),
    "nodes": _columns(
        ("Status", _node_status), ("Roles", _node_roles), ("Age", _age),
        ("Version", _field("status.nodeInfo.kubeletVersion")),
        wide=(
            ("Internal-IP", _address("InternalIP")), ("External-IP", _address("ExternalIP")),
            ("OS-Image", _field("status.nodeInfo.osImage", UNKNOWN)),
            ("Kernel-Version", _field("status.nodeInfo.kernelVersion", UNKNOWN)),
            ("Container-Runtime", _field("status.nodeInfo.containerRuntimeVersion", UNKNOWN)),
        ),
        has_age=False,
    ),
    "events": (
        Column(name="Last Seen", read=_event_age("lastTimestamp")), Column(name="Type", read=_field("type", "")),
        Column(name="Reason", read=_field("reason", "")), Column(name="Object", read=_event_object),
        Column(name="Subobject", read=_field("involvedObject.fieldPath", ""), is_wide=True),
        Column(name="Source", read=_field("source.component", ""), is_wide=True),
        Column(name="Message", read=lambda raw: str(raw.get("message", "")).strip()),
        Column(name="First Seen", read=_event_age("firstTimestamp"), is_wide=True),
        Column(name="Count", read=_field("count", 1), is_wide=True, kind="integer"),
        Column(name="Name", read=_field("metadata.name"), is_wide=True),
    ),
    "namespaces": _columns(("Status", _field("status.phase", "Active"))),
    "configmaps": _columns(("Data", lambda raw: len(raw.get("data") or {}) + len(raw.get("binaryData") or {}))),
    "leases": _columns(("Holder", _field("spec.holderIdentity", ""))),
    "deployments": _columns(
        ("Ready", lambda raw: f"{_at(raw, 'status.readyReplicas', 0)}/{_at(raw, 'spec.replicas', 0)}"),
        ("Up-to-date", _field("status.updatedReplicas", 0)), ("Available", _field("status.availableReplicas", 0)),
        wide=_TEMPLATE,
    ),
    "replicasets": _columns(
        ("Desired", _field("spec.replicas", 0)), ("Current", _field("status.replicas", 0)),
        ("Ready", _field("status.readyReplicas", 0)),
        wide=_TEMPLATE,
    ),
    "statefulsets": _columns(
        ("Ready", lambda raw: f"{_at(raw, 'status.readyReplicas', 0)}/{_at(raw, 'spec.replicas', 0)}"), wide=_TEMPLATE
    ),
    "services": _columns(("Type", _field("spec.type", "ClusterIP")), ("Cluster-IP", _field("spec.clusterIP", NONE))),
    "resourcequotas": _columns(("Request", _quota(is_limit=False)), ("Limit", _quota(is_limit=True))),
    "horizontalpodautoscalers": _columns(
        ("Reference", _scale_target),
        ("Targets", lambda raw: f"cpu: {UNKNOWN}/{_at(raw, 'spec.targetCPUUtilizationPercentage', 80)}%"),
        ("MinPods", _field("spec.minReplicas", 1)), ("MaxPods", _field("spec.maxReplicas")), ("Replicas", lambda _: 0),
    ),
    "jobs": _columns(
        ("Status", _job_status),
        ("Completions", lambda raw: f"{_at(raw, 'status.succeeded', 0)}/{_at(raw, 'spec.completions', 1)}"),
        ("Duration", _job_duration),
        wide=_TEMPLATE,
    ),
    "resourceclaims": _columns(("State", _claim_state)),
    "resourceslices": _columns(
        ("Node", _field("spec.nodeName")), ("Driver", _field("spec.driver")), ("Pool", _field("spec.pool.name"))
    ),
}  # fmt: skip
