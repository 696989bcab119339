"""The answers for kubectl only: discovery documents, which name only the resources, and the rows that it prints.

Pure. Types: APIVersions, APIGroupList and APIResourceList of meta/v1, Table of meta.k8s.io/v1. Source of columns and
words: pkg/printers/internalversion of Kubernetes 1.36.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from gpushare_agent.sandbox.api.kinds import KINDS, Kind
from gpushare_agent.sandbox.pod_manifest import RawObject, at

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_OF_PODS = ("attach", "exec", "log", "portforward", "proxy")
"""Further addresses of a pod; server.py has which of them are served."""


def discovery() -> dict[str, RawObject]:
    """The documents by path. Older clients than aggregated discovery know the first three; newer ones fall back to
    them."""
    paths = {kind.base_path: kind.group_version for kind in KINDS.values()}
    # Without this group `kubectl drain` deletes where it would evict.
    groups = sorted({"policy/v1", *paths.values()} - {"v1"})
    return {
        # No addresses: the one that the client used is the only one.
        "/api": {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(group) for group in groups]},
        **{path: _resources(group) for path, group in {"/apis/policy/v1": "policy/v1", **paths}.items()},
        "/openapi/v3": {"paths": {path[1:]: {"serverRelativeURL": f"/openapi/v3{path}"} for path in sorted(paths)}},
        **{f"/openapi/v3{path}": _openapi(path) for path in paths},
    }


def _openapi(path: str) -> RawObject:
    """No schemas: kubectl asks only whether the server checks fields. It does not merge by this document, then, but by the
    types that it has itself."""
    kinds = [kind for kind in KINDS.values() if kind.base_path == path]
    return {
        "openapi": "3.0.0",
        "info": {"title": "gpushare-agent sandbox", "version": "1"},
        # Without this, `kubectl explain` ends in a template's error; with it, it says that the kind is not here.
        "components": {"schemas": {}},
        "paths": {f"{path}/{kind.resource}/{{name}}": {"patch": _patch(kind)} for kind in kinds},
    }


def _patch(kind: Kind) -> RawObject:
    group, _, version = kind.group_version.rpartition("/")
    return {
        "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
        "requestBody": {"content": {"application/merge-patch+json": {"schema": {"type": "object"}}}},
        "responses": {"200": {"description": "OK"}},
        "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind.name},
    }


def _group(group: str) -> RawObject:
    name, _, version = group.partition("/")
    preferred = {"groupVersion": group, "version": version}
    return {"name": name, "versions": [preferred], "preferredVersion": preferred}


def _resources(group: str) -> RawObject:
    kinds = sorted((kind for kind in KINDS.values() if kind.group_version == group), key=lambda kind: kind.resource)
    entries = [entry for kind in kinds for entry in _entries(kind)]
    return {"kind": "APIResourceList", "groupVersion": group, "resources": entries}


def _entries(kind: Kind) -> Iterator[RawObject]:
    name, common = kind.resource, {"singularName": "", "namespaced": kind.is_namespaced, "kind": kind.name}
    yield {
        **common, "name": name, "singularName": kind.name.lower(), "verbs": _VERBS, "shortNames": list(kind.short_names),
        **({"categories": ["all"]} if "all" in kind.marks else {}),
    }  # fmt: skip
    if "status" in kind.marks:
        yield {**common, "name": f"{name}/status", "verbs": ["patch", "update"]}
    if "scale" in kind.marks:
        scale = {"kind": "Scale", "group": "autoscaling", "version": "v1", "verbs": ["get", "patch", "update"]}
        yield {**common, "name": f"{name}/scale", **scale}
    if name == "pods":
        for part in _OF_PODS:
            yield {**common, "name": f"pods/{part}", "verbs": ["create", "get"]}
        eviction = {"kind": "Eviction", "group": "policy", "version": "v1", "verbs": ["create"]}
        yield {**common, "name": "pods/eviction", **eviction}


# --- tables ---

NONE, UNKNOWN = "<none>", "<unknown>"
Reader = str | tuple[str, Any] | Callable[[RawObject], Any]
"""The cell of a column: the path of a field, also with the text shown if it is missing, or a function."""


def table(resource: str, objects: Iterable[RawObject], version: str, include: str) -> RawObject:
    """`include` is what comes with each row: None, Metadata or Object."""
    columns = _COLUMNS.get(resource, _NAME | _AGE)
    return {
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": {"resourceVersion": version},
        "columnDefinitions": [
            {"name": name.removeprefix("+"), "type": "integer" if name == "+Count" else "string", "description": "",
             "format": "name" if name.endswith("Name") else "", "priority": int(name.startswith("+"))} for name in columns
        ],
        "rows": [
            {"cells": [_cell(raw, reader) for reader in columns.values()], "object": _shown(raw, include)}
            for raw in objects
        ],
    }  # fmt: skip


def _cell(raw: RawObject, reader: Reader) -> Any:
    if callable(reader):
        return reader(raw)
    return at(raw, reader, NONE) if isinstance(reader, str) else at(raw, *reader)


def _shown(raw: RawObject, include: str) -> RawObject | None:
    partial = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": raw["metadata"]}
    return {"None": None, "Object": raw}.get(include, partial)


def duration_text(seconds: float) -> str:
    """An age as `kubectl` prints it: at most two units, and two only where the first is small."""
    s = int(seconds)
    if s < 0:
        return "<invalid>"
    for size, limit, unit, next_size, next_unit, short in _AGES:
        # The steps are those of HumanDuration in k8s.io/apimachinery.
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


def _age(raw: RawObject) -> str:
    return _since(raw["metadata"].get("creationTimestamp"))


# --- pods ---


def _statuses(raw: RawObject, kind: str) -> list[Mapping[str, Any]]:
    return list(at(raw, f"status.{kind}", []))


def _pod_ready(raw: RawObject) -> str:
    sidecars = {c["name"] for c in raw["spec"].get("initContainers") or () if c.get("restartPolicy") == "Always"}
    inits = [s for s in _statuses(raw, "initContainerStatuses") if s["name"] in sidecars]
    ready = sum(bool(s.get("ready")) for s in (*inits, *_statuses(raw, "containerStatuses")))
    return f"{ready}/{len(raw['spec']['containers']) + len(sidecars)}"


def _pod_restarts(raw: RawObject) -> int:
    return sum(s.get("restartCount", 0) for s in _statuses(raw, "containerStatuses"))


def _pod_status(raw: RawObject) -> str:
    """The first init container that has not ended well, else the name of the newest problem of a main container."""
    # A pod that was rejected or evicted has its reason in the status itself.
    text = str(at(raw, "status.reason", at(raw, "status.phase", UNKNOWN)))
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
            reason = at(state, "waiting.reason", "PodInitializing")
            text = f"Init:{reason}" if reason != "PodInitializing" else f"Init:{index}/{total}"
        is_starting = True
        break
    if not is_starting:
        text = _main_status(raw, text)
    return "Terminating" if raw["metadata"].get("deletionTimestamp") else text


def _main_status(raw: RawObject, text: str) -> str:
    has_running = False
    # Backwards, so that what is wrong with the first container remains, as kubectl has it.
    for status in reversed(_statuses(raw, "containerStatuses")):
        state = status.get("state") or {}
        if reason := at(state, "waiting.reason", ""):
            text = reason
        elif "terminated" in state:
            text = state["terminated"].get("reason") or f"ExitCode:{state['terminated'].get('exitCode')}"
        elif status.get("ready") and "running" in state:
            has_running = True
    # One of several containers has ended well: the pod is not over.
    return "Running" if text == "Completed" and has_running else text


# --- the others ---


def _node_status(raw: RawObject) -> str:
    ready = [c.get("status", "") for c in at(raw, "status.conditions", []) if c["type"] == "Ready"]
    text = {"True": "Ready", "False": "NotReady"}.get("".join(ready), "Unknown")
    return text + (",SchedulingDisabled" if at(raw, "spec.unschedulable", False) else "")


def _node_roles(raw: RawObject) -> str:
    prefix = "node-role.kubernetes.io/"
    roles = sorted(k.removeprefix(prefix) for k in at(raw, "metadata.labels", {}) if k.startswith(prefix))
    return ",".join(roles) or NONE


def _address(kind: str) -> Reader:
    return lambda raw: next(
        (a.get("address", NONE) for a in at(raw, "status.addresses", []) if a.get("type") == kind), NONE
    )


def _event_object(raw: RawObject) -> str:
    about = raw.get("involvedObject") or {}
    return f"{str(about.get('kind', '')).lower()}/{about.get('name', '')}"


def _event_age(field: str) -> Reader:
    return lambda raw: _since(raw.get(field) or raw.get("eventTime") or raw["metadata"]["creationTimestamp"])


def _each(path: str, field: str) -> Reader:
    """One field of each item of a list, joined by commas."""
    return lambda raw: ",".join(str(one.get(field, "")) for one in at(raw, path, [])) or NONE


def _selector(raw: RawObject) -> str:
    return ",".join(f"{k}={v}" for k, v in sorted(at(raw, "spec.selector.matchLabels", {}).items())) or NONE


def _claim_state(raw: RawObject) -> str:
    states = {
        "deleted": raw["metadata"].get("deletionTimestamp"),
        "allocated": at(raw, "status.allocation", None),
        "reserved": at(raw, "status.reservedFor", None),
    }
    return ",".join(name for name, is_so in states.items() if is_so) or "pending"


def _job_status(raw: RawObject) -> str:
    met = {c["type"] for c in at(raw, "status.conditions", []) if c.get("status") == "True"}
    return next((kind for kind in ("Complete", "Failed", "Suspended") if kind in met), "Running")


def _job_duration(raw: RawObject) -> str:
    started = at(raw, "status.startTime", None)
    return _since(started, at(raw, "status.completionTime", None)) if started else ""


def _of(part: str, whole: str, usual: int = 0) -> Reader:
    return lambda raw: f"{at(raw, part, 0)}/{at(raw, whole, usual)}"


_READY = _of("status.readyReplicas", "spec.replicas")
_NAME: dict[str, Reader] = {"Name": "metadata.name"}
_AGE: dict[str, Reader] = {"Age": _age}
_OF_TEMPLATE: dict[str, Reader] = {
    "+Containers": _each("spec.template.spec.containers", "name"),
    "+Images": _each("spec.template.spec.containers", "image"),
    "+Selector": _selector,
}
_COLUMNS: dict[str, dict[str, Reader]] = {
    "pods": {
        **_NAME, "Ready": _pod_ready, "Status": _pod_status, "Restarts": _pod_restarts, **_AGE,
        "+IP": "status.podIP", "+Node": "spec.nodeName", "+Nominated Node": "status.nominatedNodeName",
        "+Readiness Gates": lambda _: NONE,
    },
    "nodes": {
        **_NAME, "Status": _node_status, "Roles": _node_roles, **_AGE, "Version": "status.nodeInfo.kubeletVersion",
        "+Internal-IP": _address("InternalIP"), "+External-IP": _address("ExternalIP"),
        "+OS-Image": ("status.nodeInfo.osImage", UNKNOWN), "+Kernel-Version": ("status.nodeInfo.kernelVersion", UNKNOWN),
        "+Container-Runtime": ("status.nodeInfo.containerRuntimeVersion", UNKNOWN),
    },
    "events": {
        "Last Seen": _event_age("lastTimestamp"), "Type": ("type", ""), "Reason": ("reason", ""),
        "Object": _event_object, "+Subobject": ("involvedObject.fieldPath", ""), "+Source": ("source.component", ""),
        "Message": lambda raw: str(raw.get("message", "")).strip(), "+First Seen": _event_age("firstTimestamp"),
        "+Count": ("count", 1), "+Name": "metadata.name",
    },
    "namespaces": {**_NAME, "Status": ("status.phase", "Active"), **_AGE},
    "configmaps": {**_NAME, "Data": lambda raw: len(at(raw, "data", {})) + len(at(raw, "binaryData", {})), **_AGE},
    "deployments": {
        **_NAME, "Ready": _READY, "Up-to-date": ("status.updatedReplicas", 0),
        "Available": ("status.availableReplicas", 0), **_AGE, **_OF_TEMPLATE,
    },
    "replicasets": {
        **_NAME, "Desired": ("spec.replicas", 0), "Current": ("status.replicas", 0),
        "Ready": ("status.readyReplicas", 0), **_AGE, **_OF_TEMPLATE,
    },
    "statefulsets": {**_NAME, "Ready": _READY, **_AGE, **_OF_TEMPLATE},
    "services": {**_NAME, "Type": ("spec.type", "ClusterIP"), "Cluster-IP": "spec.clusterIP", **_AGE},
    "jobs": {
        **_NAME, "Status": _job_status, "Completions": _of("status.succeeded", "spec.completions", 1),
        "Duration": _job_duration, **_AGE, **_OF_TEMPLATE,
    },
    "resourceclaims": {**_NAME, "State": _claim_state, **_AGE},
    "resourceslices": {**_NAME, "Node": "spec.nodeName", "Driver": "spec.driver", "Pool": "spec.pool.name", **_AGE},
}  # fmt: skip
"""A name that begins with + is shown by `-o wide` alone."""
