"""Discovery documents of the embedded API server: the resources, for kubectl, and no more.

Constant. Types: APIVersions, APIGroupList and APIResourceList of meta/v1.
"""

from __future__ import annotations

from gpushare_agent.sandbox.api.store import CLUSTER_WIDE, GROUPS, KINDS, base_path, group_version
from gpushare_agent.sandbox.pod_manifest import RawObject

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_SHORT_NAMES = {"pods": ["po"], "nodes": ["no"], "events": ["ev"], "configmaps": ["cm"]}
_WITH_STATUS = frozenset({"pods", "nodes", "resourceclaims"})


def discovery(resources: tuple[str, ...]) -> dict[str, RawObject]:
    """By path. Older clients than aggregated discovery know these three; newer ones fall back to them."""
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
        "shortNames": _SHORT_NAMES.get(name, []),
    }  # fmt: skip
    if name not in _WITH_STATUS:
        return [whole]
    return [whole, {"name": f"{name}/status", **common, "verbs": ["patch", "update"]}]
