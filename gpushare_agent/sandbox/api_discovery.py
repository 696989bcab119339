"""Discovery documents of the embedded API server: what tells kubectl that there are pods, nodes and events, and no more.

Constant. Types: APIVersions, APIGroupList and APIResourceList of meta/v1.
"""

from __future__ import annotations

from gpushare_agent.sandbox.api_store import CLUSTER_WIDE, KINDS, RawObject

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_SHORT_NAMES = {"pods": ["po"], "nodes": ["no"], "events": ["ev"]}


def discovery(resources: tuple[str, ...]) -> dict[str, RawObject]:
    """By path. Older clients than aggregated discovery know these three; newer ones fall back to them."""
    return {
        "/api": {
            "kind": "APIVersions",
            "versions": ["v1"],
            "serverAddressByClientCIDRs": [],  # the address that the client used is the only one
        },
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        "/api/v1": {
            "kind": "APIResourceList",
            "groupVersion": "v1",
            "resources": [entry for name in sorted(resources) for entry in _entries(name)],
        },
    }


def _entries(name: str) -> list[RawObject]:
    common = {"singularName": "", "namespaced": name not in CLUSTER_WIDE, "kind": KINDS[name]}
    whole = {
        "name": name, **common, "singularName": KINDS[name].lower(), "verbs": _VERBS, "shortNames": _SHORT_NAMES[name],
    }  # fmt: skip
    if name == "events":
        return [whole]
    return [whole, {"name": f"{name}/status", **common, "verbs": ["patch", "update"]}]
