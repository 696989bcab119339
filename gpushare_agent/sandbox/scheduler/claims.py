"""Pods' ResourceClaims: made from templates, allocated with the pod's node, released when their last pod has ended.

In a real cluster the resource claim controller makes and releases them, and the scheduler allocates. A claim that a pod's
template made goes with the pod, also when the pod has ended and its object stays. Devices are read as this project's driver
publishes them: in slices of one node, each shareable, a capacity's policy a range. Admin access is refused with a sentence.
Format: resource.k8s.io/v1. State owned: none but the objects of the API server.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from gpushare_agent.cluster.kube.quantities import whole_number
from gpushare_agent.dra.decisions.claim import MAX_RESULTS, MAX_USERS, POD_CLAIM_ANNOTATION
from gpushare_agent.model.errors import Corrupt, Rejected
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.pod_manifest import RawObject, is_terminal, timestamp
from gpushare_agent.sandbox.scheduler.allocation import (
    Capacity,
    ClaimRequests,
    Constraint,
    Device,
    DeviceKey,
    Option,
    Share,
    allocate,
)
from gpushare_agent.sandbox.scheduler.selectors import DeviceView, SelectorFailed, parse_selector, version

_UNITS = ("", "Ki", "Mi", "Gi", "Ti", "Pi")


def read_devices(slices: Iterable[RawObject], node: str) -> list[Device]:
    """Those of one node, in the scheduler's order; none of a pool that is not complete."""
    pools: dict[tuple[str, str], list[RawObject]] = {}
    for raw in slices:
        spec = raw["spec"]
        if spec.get("nodeName") == node:
            pools.setdefault((spec["driver"], spec["pool"]["name"]), []).append(raw)
    found: list[Device] = []
    for key in sorted(pools):
        newest = max(raw["spec"]["pool"].get("generation", 0) for raw in pools[key])
        members = [raw for raw in pools[key] if raw["spec"]["pool"].get("generation", 0) == newest]
        if len(members) == members[0]["spec"]["pool"].get("resourceSliceCount", 1):
            for raw in sorted(members, key=lambda one: str(one["metadata"]["name"])):
                found += [_device(device, *key) for device in raw["spec"].get("devices") or ()]
    return found


def _device(raw: Mapping[str, Any], driver: str, pool: str) -> Device:
    capacity = {_full(name, driver): _capacity(one) for name, one in (raw.get("capacity") or {}).items()}
    attributes = {_full(name, driver): _attribute(one) for name, one in (raw.get("attributes") or {}).items()}
    sizes = {name: Fraction(one.value) for name, one in capacity.items()}
    return Device(
        key=(driver, pool, raw["name"]),
        view=DeviceView(driver=driver, attributes=attributes, capacity=sizes),
        capacity=capacity,
        taints=tuple(raw.get("taints") or ()),
    )


def _full(name: str, driver: str) -> str:
    return name if "/" in name else f"{driver}/{name}"


def _attribute(raw: Mapping[str, Any]) -> Any:
    kind, value = next(iter(raw.items()))
    return version(value) if kind == "version" else value


def _capacity(raw: Mapping[str, Any]) -> Capacity:
    value, policy = _number(raw["value"]), raw.get("requestPolicy") or {}
    steps, limits = None, policy.get("validRange")
    if limits:
        steps = _number(limits.get("min", 0)), _number(limits.get("max", value)), _number(limits.get("step", 1))
    return Capacity(
        value=value,
        default=_number(policy.get("default", value)),
        steps=steps,
        is_binary=str(raw["value"]).endswith("i"),
    )


def _number(raw: Any) -> int:
    """Raises Rejected."""
    try:
        return whole_number(raw, "a quantity")
    except Corrupt as error:
        raise Rejected(str(error)) from error


def read_requests(spec: Mapping[str, Any], classes: Mapping[str, RawObject]) -> ClaimRequests:
    """Raises Rejected: a class that does not exist, or what the sandbox's scheduler does not know."""
    devices = spec.get("devices") or {}
    return ClaimRequests(
        requests=tuple(tuple(_options(one, classes)) for one in devices.get("requests") or ()),
        constraints=tuple(map(_constraint, devices.get("constraints") or ())),
    )


def _options(raw: Mapping[str, Any], classes: Mapping[str, RawObject]) -> Iterable[Option]:
    if "exactly" in raw:
        yield _option(raw["name"], raw["exactly"], classes)
        return
    for one in raw.get("firstAvailable") or ():
        yield _option(f"{raw['name']}/{one['name']}", one, classes)


def _option(name: str, raw: Mapping[str, Any], classes: Mapping[str, RawObject]) -> Option:
    class_name = str(raw.get("deviceClassName"))
    if class_name not in classes:
        raise Rejected(f"request {name}: device class {class_name} does not exist")
    if raw.get("adminAccess"):
        raise Rejected(f"request {name}: the sandbox's scheduler gives no admin access")
    parsed = [
        (f"{where}selector #{number}", parse_selector(str((one.get("cel") or {}).get("expression", ""))))
        for where, spec in ((f"class {class_name}: ", classes[class_name]["spec"]), ("", raw))
        for number, one in enumerate(spec.get("selectors") or ())
    ]
    count = int(raw.get("count") or 1)
    if not 0 < count <= MAX_RESULTS:
        raise Rejected(f"request {name}: count must be from 1 to {MAX_RESULTS}")
    asked = (raw.get("capacity") or {}).get("requests") or {}
    return Option(
        name=name,
        selects=partial(_selects, parsed),
        count=None if raw.get("allocationMode") == "All" else count,
        asked={capacity: _number(amount) for capacity, amount in asked.items()},
        tolerations=tuple(raw.get("tolerations") or ()),
    )


def _selects(selectors: Sequence[tuple[str, Callable[[DeviceView], bool]]], device: Device) -> bool:
    for where, selector in selectors:
        try:
            if not selector(device.view):
                return False
        except SelectorFailed as error:
            raise SelectorFailed(f"{where}: CEL runtime error: {error}") from error
    return True


def _constraint(raw: Mapping[str, Any]) -> Constraint:
    distinct = raw.get("distinctAttribute")
    return Constraint(
        attribute=distinct or raw.get("matchAttribute") or "",
        is_distinct=bool(distinct),
        requests=frozenset(raw.get("requests") or ()),
    )


def used_of(claims: Iterable[RawObject]) -> dict[DeviceKey, dict[str, int]]:
    """What the allocated claims consume; the names of the capacities as in `Device`."""
    used: dict[DeviceKey, dict[str, int]] = {}
    for claim in claims:
        for one in results_of(claim):
            device = used.setdefault((one["driver"], one["pool"], one["device"]), {})
            for name, amount in (one.get("consumedCapacity") or {}).items():
                full = _full(name, one["driver"])
                device[full] = device.get(full, 0) + _number(amount)
    return used


def results_of(claim: RawObject) -> list[Mapping[str, Any]]:
    allocation = (claim.get("status") or {}).get("allocation") or {}
    results: list[Mapping[str, Any]] = (allocation.get("devices") or {}).get("results") or []
    return results


def node_of(claim: RawObject) -> str | None:
    """The only node on which an allocated claim can be used."""
    selector = ((claim.get("status") or {}).get("allocation") or {}).get("nodeSelector")
    return None if selector is None else str(selector["nodeSelectorTerms"][0]["matchFields"][0]["values"][0])


def allocation_of(
    claim: RawObject, shares: Sequence[Share], node: str, classes: Mapping[str, RawObject]
) -> dict[str, Any]:
    """status.allocation."""
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    config = [*_class_config(claim, shares, classes)]
    config += [{"source": "FromClaim", **one} for one in claim["spec"].get("devices", {}).get("config") or ()]
    return {
        "allocationTimestamp": timestamp(),
        "devices": {"results": [_result(share) for share in shares], **({"config": config} if config else {})},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
    }


def _class_config(
    claim: RawObject, shares: Sequence[Share], classes: Mapping[str, RawObject]
) -> Iterable[dict[str, Any]]:
    chosen = {share.request for share in shares}
    for request in claim["spec"].get("devices", {}).get("requests") or ():
        options = [(request["name"], request["exactly"])] if "exactly" in request else [
            (f"{request['name']}/{one['name']}", one) for one in request.get("firstAvailable") or ()]  # fmt: skip
        for name, option in options:
            if name in chosen:
                for one in classes[option["deviceClassName"]]["spec"].get("config") or ():
                    yield {"source": "FromClass", "requests": [name], **one}


def _result(share: Share) -> dict[str, Any]:
    driver, pool, device = share.device.key
    result: dict[str, Any] = {"request": share.request, "driver": driver, "pool": pool, "device": device}
    if share.tolerations:
        result["tolerations"] = list(share.tolerations)
    amounts = {
        name.removeprefix(f"{driver}/"): _quantity(amount, is_binary=share.device.capacity[name].is_binary)
        for name, amount in share.consumed.items()
    }
    return {**result, "shareID": str(uuid.uuid4()), "consumedCapacity": amounts}


def _quantity(number: int, *, is_binary: bool) -> str:
    """The quantity in its canonical form: the greatest unit of which it is a multiple."""
    power = 0
    while is_binary and number and number % 1024 == 0 and power < len(_UNITS) - 1:
        number, power = number // 1024, power + 1
    return f"{number}{_UNITS[power]}"


NO_FIT = "cannot allocate all claims"
_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


def claim_names(pod: RawObject) -> dict[str, str]:
    """The ResourceClaim's name by the claim's name in the pod; without those that are not made yet."""
    made = {one["name"]: one.get("resourceClaimName") for one in pod["status"].get("resourceClaimStatuses") or ()}
    names = {
        one["name"]: one.get("resourceClaimName") or made.get(one["name"])
        for one in pod["spec"].get("resourceClaims") or ()
    }
    return {name: claim for name, claim in names.items() if claim}


class PodClaims:
    """Makes, allocates and releases the claims of pods."""

    def __init__(self, api: EmbeddedApiServer, *, seed: int = 0) -> None:
        self._api = api
        self._rng = random.Random(seed)

    def reconcile(self) -> None:
        """Makes the claims that are missing, and releases those that nobody uses any more."""
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
            requested = [read_requests(claim["spec"], classes) for claim in pending]
        except (AttributeError, KeyError, TypeError, ValueError) as e:  # a real API server refuses such a claim
            raise Rejected(f"a ResourceClaim is not of resource.k8s.io/v1: {e!r}") from e
        shares = allocate(requested, devices, used_of(self._api.store.all("resourceclaims"))) if pending else []
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
