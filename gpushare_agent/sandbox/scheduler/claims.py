"""Pods' ResourceClaims: made from templates, allocated with the pod's node, released when their last pod has ended.

In a real cluster the resource claim controller makes and releases them, and the scheduler allocates. A claim that a pod's
template made goes with the pod, also when the pod has ended and its object stays. State owned: none but the objects of
the API server.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpushare_agent.dra.decisions.claim import MAX_USERS, POD_CLAIM_ANNOTATION
from gpushare_agent.model.errors import Rejected
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.pod_manifest import RawObject, is_terminal, timestamp
from gpushare_agent.sandbox.scheduler.allocation import allocate
from gpushare_agent.sandbox.scheduler.claim_objects import (
    allocation_of,
    node_of,
    read_devices,
    read_wanted,
    used_of,
)

NO_FIT = "cannot allocate all claims"
_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


def claim_names(pod: RawObject) -> dict[str, str]:
    """By the claim's name in the pod, the name of its ResourceClaim; without those that are not made yet."""
    made = {one["name"]: one.get("resourceClaimName") for one in pod["status"].get("resourceClaimStatuses") or ()}
    names = {
        one["name"]: one.get("resourceClaimName") or made.get(one["name"])
        for one in pod["spec"].get("resourceClaims") or ()
    }
    return {name: claim for name, claim in names.items() if claim}


class PodClaims:
    def __init__(self, api: EmbeddedApiServer, *, seed: int = 0) -> None:
        self._api = api
        self._rng = random.Random(seed)

    def reconcile(self) -> None:
        """Claims that are missing, and those that nobody uses any more."""
        for pod in self._api.store.in_creation_order("pods"):
            if (
                pod["spec"].get("resourceClaims")
                and not is_terminal(pod)
                and "deletionTimestamp" not in pod["metadata"]
            ):
                self._make(pod)
        for claim in self._api.store.all("resourceclaims"):
            self._release(claim)

    def place(self, pod: RawObject, nodes: Sequence[str]) -> tuple[str | None, list[str]]:
        """The first of the nodes on which the pod's claims are, or now have been, allocated; else a reason for each node."""
        if not pod["spec"].get("resourceClaims"):
            return (nodes[0] if nodes else None), []
        try:
            claims = self._claims_of(pod)
            allocated = {node_of(claim) for claim in claims if (claim.get("status") or {}).get("allocation")} - {None}
            for node in nodes:
                if allocated <= {node} and self._allocate(pod, claims, node):
                    return node, []
        except Rejected as error:
            return None, [str(error)]
        return None, [NO_FIT for _ in nodes]

    def _claims_of(self, pod: RawObject) -> list[RawObject]:
        """Raises Rejected: one is not there, or not the pod's."""
        namespace, names, found = pod["metadata"]["namespace"], claim_names(pod), []
        for entry in pod["spec"]["resourceClaims"]:
            name = names.get(entry["name"])
            if name is None:
                raise Rejected(f"waiting for the claim of {entry['name']} to be created from its template")
            claim = self._api.store.find("resourceclaims", (namespace, name))
            if claim is None:
                raise Rejected(f'resourceclaim "{name}" not found')
            if "deletionTimestamp" in claim["metadata"]:
                raise Rejected(f'resourceclaim "{name}" is being deleted')
            if len((claim.get("status") or {}).get("reservedFor") or ()) >= MAX_USERS:
                raise Rejected(f'resourceclaim "{name}" is in use by {MAX_USERS} pods, and more cannot use it')
            found.append(claim)
        return found

    def _allocate(self, pod: RawObject, claims: Iterable[RawObject], node: str) -> bool:
        """Whether all are allocated on the node and reserved for the pod now. Raises Rejected."""
        classes = {raw["metadata"]["name"]: raw for raw in self._api.store.all("deviceclasses")}
        pending = [claim for claim in claims if not (claim.get("status") or {}).get("allocation")]
        devices = read_devices(self._api.store.all("resourceslices"), node)
        try:
            wanted = [read_wanted(claim["spec"], classes) for claim in pending]
        except (AttributeError, KeyError, TypeError, ValueError) as e:  # a real API server refuses such a claim
            raise Rejected(f"a ResourceClaim is not of resource.k8s.io/v1: {e!r}") from e
        shares = allocate(wanted, devices, used_of(self._api.store.all("resourceclaims"))) if pending else []
        if shares is None:
            return False
        made = {
            claim["metadata"]["uid"]: allocation_of(claim, found, node, classes)
            for claim, found in zip(pending, shares, strict=True)
        }
        user = {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        for claim in claims:
            status = claim.get("status") or {}
            users = [one for one in status.get("reservedFor") or () if one["uid"] != user["uid"]]
            allocation = status.get("allocation") or made[claim["metadata"]["uid"]]
            self._set_status(claim, {**status, "allocation": allocation, "reservedFor": [*users, user]})
        return True

    def _make(self, pod: RawObject) -> None:
        """The claims of the pod's templates; the template may come later."""
        metadata, names = pod["metadata"], claim_names(pod)
        made = []
        for entry in pod["spec"]["resourceClaims"]:
            key = (metadata["namespace"], entry.get("resourceClaimTemplateName") or "")
            template = self._api.store.find("resourceclaimtemplates", key)
            if entry["name"] in names or template is None:
                continue
            claim = self._api.store.add("resourceclaims", self._from_template(template, metadata, entry["name"]))
            made.append({"name": entry["name"], "resourceClaimName": claim["metadata"]["name"]})
        if made:
            known = pod["status"].get("resourceClaimStatuses") or []
            status = {"resourceClaimStatuses": [*known, *made]}
            self._api.set_pod_status(metadata["namespace"], metadata["name"], status, uid=metadata["uid"])

    def _from_template(self, template: RawObject, pod: Mapping[str, Any], name: str) -> RawObject:
        given = template["spec"].get("metadata") or {}
        owner = {
            "apiVersion": "v1", "kind": "Pod", "name": pod["name"], "uid": pod["uid"], "controller": True,
            "blockOwnerDeletion": True,
        }  # fmt: skip
        full = f"{pod['name']}-{name}-{''.join(self._rng.choices(_SUFFIX_LETTERS, k=5))}"
        return {
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {
                "name": full, "generateName": f"{pod['name']}-{name}-", "namespace": pod["namespace"],
                "uid": str(uuid.uuid4()), "creationTimestamp": timestamp(), "ownerReferences": [owner],
                "labels": given.get("labels") or {},
                "annotations": {**(given.get("annotations") or {}), POD_CLAIM_ANNOTATION: name},
            },
            "spec": template["spec"]["spec"], "status": {},
        }  # fmt: skip

    def _release(self, claim: RawObject) -> None:
        status, metadata = claim.get("status") or {}, claim["metadata"]
        owners = [one for one in metadata.get("ownerReferences") or () if one.get("kind") == "Pod"]
        users = [one for one in status.get("reservedFor") or () if self._is_living(claim, one)]
        is_over = "deletionTimestamp" in metadata or (owners and not any(self._is_living(claim, one) for one in owners))
        if not users and is_over:
            self._api.store.remove("resourceclaims", (metadata["namespace"], metadata["name"]))
        elif users != (status.get("reservedFor") or []):
            kept = {"reservedFor": users, "allocation": status["allocation"]} if users else {}
            self._set_status(claim, kept)

    def _is_living(self, claim: RawObject, user: Mapping[str, Any]) -> bool:
        pod = self._api.find_pod(claim["metadata"]["namespace"], user["name"])
        return pod is not None and pod["metadata"]["uid"] == user["uid"] and not is_terminal(pod)

    def _set_status(self, claim: RawObject, status: Mapping[str, Any]) -> None:
        self._api.store.replace("resourceclaims", {**claim, "status": dict(status)})
