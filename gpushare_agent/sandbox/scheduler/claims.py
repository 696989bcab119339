"""Pods' ResourceClaims: made from templates, allocated with the pod's node, released when their last pod has ended.

In a real cluster the resource claim controller makes and releases them, and the scheduler allocates. A claim that a pod's
template made goes with the pod, also when the pod has ended and its object stays. So does the claim that the scheduler
makes for extended resources, which a DeviceClass stands for on nodes that do not offer them. Devices are read as this
project's driver publishes them: in slices of one node, a capacity's policy a range. Admin access is refused with a
sentence. Format: resource.k8s.io/v1. State owned: none but the objects of the API server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpushare_agent.core.claims.claim import EXTENDED_RESOURCE_ANNOTATION, POD_CLAIM_ANNOTATION
from gpushare_agent.core.kube.claims import MAX_USERS
from gpushare_agent.core.model.errors import Rejected
from gpushare_agent.core.placement.first_fit import allocate
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.pod_manifest import RawObject, claim_names, is_terminal, owner_reference
from gpushare_agent.sandbox.scheduler.claim_objects import (
    allocation_of,
    extended_requests_of,
    node_of,
    read_devices,
    read_requests,
    used_of,
)

NO_FIT = "cannot allocate all claims"


class PodClaims:
    """Makes, allocates and releases the claims of pods."""

    def __init__(self, api: EmbeddedApiServer) -> None:
        self._api = api

    def reconcile(self) -> None:
        """Makes the claims that are missing, and releases those that nobody uses any more."""
        for pod in self._api.store.in_creation_order("pods"):
            if (
                pod["spec"].get("resourceClaims")
                and not is_terminal(pod)
                and "deletionTimestamp" not in pod["metadata"]
            ):
                self._make(pod)
        # After the pods: a claim that was just made is not taken for one that nobody uses.
        for claim in self._api.store.all("resourceclaims"):
            self._release(claim)

    def instead_of(self, requests: Iterable[str]) -> dict[str, dict[str, str]]:
        """The classes of the extended resources that a node does not offer itself, by node and resource."""
        # Of two classes with one name the newer counts, as in kube-scheduler.
        known = self._api.store.in_creation_order("deviceclasses")
        classes = {raw["spec"].get("extendedResourceName"): raw["metadata"]["name"] for raw in known}
        backed = {name: classes[name] for name in requests if name in classes}
        nodes = self._api.store.all("nodes") if backed else ()
        offers = {raw["metadata"]["name"]: (raw.get("status") or {}).get("allocatable") or {} for raw in nodes}
        return {
            node: {name: of for name, of in backed.items() if not int(offered.get(name, 0))}
            for node, offered in offers.items()
        }

    def place(
        self, pod: RawObject, nodes: Sequence[str], claimed: Mapping[str, Mapping[str, str]]
    ) -> tuple[str | None, list[str]]:
        """The first of the nodes on which the pod's claims are, or now have been, allocated; else a reason for each node.
        `claimed` is as `instead_of` has it."""
        # First node by name: what fits was decided before.
        if not pod["spec"].get("resourceClaims") and not any(claimed.values()):
            return (nodes[0] if nodes else None), []
        try:
            claims = self._claims_of(pod)
            # A claim that is allocated ties the pod to its node, whatever the others would like.
            allocated = {node_of(claim) for claim in claims if (claim.get("status") or {}).get("allocation")} - {None}
            for node in nodes:
                if allocated <= {node} and self._allocate(pod, claims, node, claimed.get(node) or {}):
                    return node, []
        # One reason for all nodes: a claim that is not there is on none.
        except Rejected as error:
            return None, [str(error)]
        return None, [NO_FIT for _ in nodes]

    def _claims_of(self, pod: RawObject) -> list[RawObject]:
        """Raises Rejected: one is not there, or not the pod's."""
        namespace, names, found = pod["metadata"]["namespace"], claim_names(pod), []
        for entry in pod["spec"].get("resourceClaims") or ():
            name = names.get(entry["name"])
            if name is None:
                raise Rejected(f"waiting for the claim of {entry['name']} to be created from its template")
            claim = self._api.store.find("resourceclaims", (namespace, name))
            if claim is None:
                raise Rejected(f'resourceclaim "{name}" not found')
            if "deletionTimestamp" in claim["metadata"]:
                raise Rejected(f'resourceclaim "{name}" is being deleted')
            # resource.k8s.io/v1 has no room for more.
            if len((claim.get("status") or {}).get("reservedFor") or ()) >= MAX_USERS:
                raise Rejected(f'resourceclaim "{name}" is in use by {MAX_USERS} pods, and more cannot use it')
            found.append(claim)
        return found

    def _allocate(self, pod: RawObject, claims: list[RawObject], node: str, instead_of: Mapping[str, str]) -> bool:
        """Whether all are allocated on the node and reserved for the pod now, and one for the resources that the classes
        stand for. Raises Rejected."""
        metadata, mappings = pod["metadata"], extended_requests_of(pod, instead_of)
        if mappings:
            requests = [request for _, request in mappings]
            own = {"generateName": f"{metadata['name']}-extended-resources-", "ownerReferences": [owner_reference(pod)],
                   "annotations": {EXTENDED_RESOURCE_ANNOTATION: "true"}, "uid": ""}  # fmt: skip
            claims = [*claims, {"metadata": own, "spec": {"devices": {"requests": requests}}}]
        classes = {raw["metadata"]["name"]: raw for raw in self._api.store.all("deviceclasses")}
        # A claim that other pods use is allocated already: this pod is only added to its users.
        pending = [claim for claim in claims if not (claim.get("status") or {}).get("allocation")]
        devices = read_devices(self._api.store.all("resourceslices"), node)
        requested = [read_requests(claim["spec"], classes) for claim in pending]
        shares = allocate(requested, devices, used_of(self._api.store.all("resourceclaims"))) if pending else []
        if shares is None:
            return False
        made = {
            claim["metadata"]["uid"]: allocation_of(claim, found, node, classes)
            for claim, found in zip(pending, shares, strict=True)
        }
        # Allocations were made before any status is written: all of a pod's claims, or none.
        user = {"resource": "pods", "name": metadata["name"], "uid": metadata["uid"]}
        for claim in claims:
            status = claim.get("status") or {}
            users = [one for one in status.get("reservedFor") or () if one["uid"] != user["uid"]]
            allocation = status.get("allocation") or made[claim["metadata"]["uid"]]
            if not claim["metadata"]["uid"]:
                claim = self._api.create("resourceclaims", claim, metadata["namespace"])
                said = {
                    "resourceClaimName": claim["metadata"]["name"],
                    "requestMappings": [named for named, _ in mappings],
                }
                self._api.set_pod_status(metadata["namespace"], metadata["name"], {"extendedResourceClaimStatus": said})
            self._set_status(claim, {**status, "allocation": allocation, "reservedFor": [*users, user]})
        return True

    def _make(self, pod: RawObject) -> None:
        """The claims of the pod's templates; the template may come later."""
        metadata, names = pod["metadata"], claim_names(pod)
        made = []
        for entry in pod["spec"]["resourceClaims"]:
            key = (metadata["namespace"], entry.get("resourceClaimTemplateName") or "")
            template = self._api.store.find("resourceclaimtemplates", key)
            # Made already, or the template comes later: a real controller tries again, too.
            if entry["name"] in names or template is None:
                continue
            given = template["spec"].get("metadata") or {}
            claim = self._api.create("resourceclaims", {
                "metadata": {
                    "generateName": f"{metadata['name']}-{entry['name']}-", "ownerReferences": [owner_reference(pod)],
                    "labels": given.get("labels") or {},
                    "annotations": {**(given.get("annotations") or {}), POD_CLAIM_ANNOTATION: entry["name"]},
                },
                "spec": template["spec"]["spec"],
            }, metadata["namespace"])  # fmt: skip
            made.append({"name": entry["name"], "resourceClaimName": claim["metadata"]["name"]})
        if made:
            known = pod["status"].get("resourceClaimStatuses") or []
            status = {"resourceClaimStatuses": [*known, *made]}
            self._api.set_pod_status(metadata["namespace"], metadata["name"], status, uid=metadata["uid"])

    def _release(self, claim: RawObject) -> None:
        status, metadata = claim.get("status") or {}, claim["metadata"]
        # A claim of a template goes with its pod; one that a person made stays.
        owners = [one for one in metadata.get("ownerReferences") or () if one.get("kind") == "Pod"]
        users = [one for one in status.get("reservedFor") or () if self._is_living(claim, one)]
        is_over = "deletionTimestamp" in metadata or (owners and not any(self._is_living(claim, one) for one in owners))
        # In use it stays, also where its object is being deleted: the pod still needs the allocation.
        if not users and is_over:
            self._api.store.remove("resourceclaims", (metadata["namespace"], metadata["name"]))
        elif users != (status.get("reservedFor") or []):
            remaining = {"reservedFor": users, "allocation": status["allocation"]} if users else {}
            self._set_status(claim, remaining)

    def _is_living(self, claim: RawObject, user: RawObject) -> bool:
        pod = self._api.find_pod(claim["metadata"]["namespace"], user["name"])
        return pod is not None and pod["metadata"]["uid"] == user["uid"] and not is_terminal(pod)

    def _set_status(self, claim: RawObject, status: RawObject) -> None:
        self._api.store.replace("resourceclaims", {**claim, "status": dict(status)})
