"""Discovery documents of the embedded API server: the resources, for kubectl, and no more.

Constant. Types: APIVersions, APIGroupList and APIResourceList of meta/v1.
"""

from __future__ import annotations

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
                "deployments": ["deploy"], "replicasets": ["rs"]}  # fmt: skip
_IN_ALL = frozenset({"pods", "deployments", "replicasets", "jobs"})
"""Those of `kubectl get all`."""
_OF_PODS = ("attach", "exec", "log", "portforward", "proxy")
"""Further addresses of a pod; handlers.py has which of them are served."""


def discovery(resources: tuple[str, ...]) -> dict[str, RawObject]:
    """By path. Older clients than aggregated discovery know the first three; newer ones fall back to them."""
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
            "groups": [_group(group) for group in sorted({GROUPS[name] for name in resources if name in GROUPS})],
        },
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
    return [whole, *status, *scales, *inside]
