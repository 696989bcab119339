"""Pods' ResourceClaims: made from templates, allocated with the pod's node, released when their last pod has ended.

In a real cluster the resource claim controller makes and releases them, and the scheduler allocates. A claim that a pod's
template made goes with the pod, also when the pod has ended and its object stays. Devices are read as this project's
driver publishes them: in slices of one node, each shareable, a capacity's policy a range. Admin access is refused with a
sentence. Format: resource.k8s.io/v1. State owned: none but the objects of the API server.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial

from msgspec import Struct, ValidationError, convert, field, to_builtins

from gpushare_agent.cluster.kube.claims import DeviceResult
from gpushare_agent.cluster.kube.objects import Quantity, whole_number
from gpushare_agent.dra.decisions.claim import MAX_RESULTS, MAX_USERS, POD_CLAIM_ANNOTATION
from gpushare_agent.model.errors import Corrupt, Rejected
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.pod_manifest import RawObject, is_terminal, timestamp
from gpushare_agent.sandbox.scheduler.allocation import (
    AttributeValue,
    Capacity,
    ClaimRequests,
    Constraint,
    Device,
    DeviceKey,
    DeviceView,
    Option,
    SelectorFailed,
    Share,
    Taint,
    Toleration,
    Version,
    allocate,
    parse_selector,
    version,
)

_UNITS = ("", "Ki", "Mi", "Gi", "Ti", "Pi")


class _Range(Struct):
    min: Quantity | None = None
    max: Quantity | None = None
    step: Quantity | None = None


class _Policy(Struct, rename="camel"):
    default: Quantity | None = None
    valid_range: _Range | None = None


class _Capacity(Struct, rename="camel"):
    value: Quantity
    request_policy: _Policy | None = None


class _Device(Struct):
    name: str
    attributes: Mapping[str, Mapping[str, AttributeValue]] | None = None
    """By name, the value by its kind: string, int, bool or version."""
    capacity: Mapping[str, _Capacity] | None = None
    taints: Sequence[Taint] | None = None


class _Pool(Struct, rename="camel"):
    name: str
    generation: int = 0
    resource_slice_count: int = 1


class _Slice(Struct, rename="camel"):
    driver: str
    pool: _Pool
    node_name: str | None = None
    devices: Sequence[_Device] | None = None


def read_devices(slices: Iterable[RawObject], node: str) -> list[Device]:
    """The devices of one node, in the scheduler's order; none of a pool that is not complete."""
    pools: dict[tuple[str, str], list[_Slice]] = {}
    # By name: first fit goes through slices in this order, which is how a driver influences the choice.
    for raw in sorted(slices, key=lambda one: str(one["metadata"].get("name"))):
        try:
            one = convert(raw["spec"], _Slice)
        except ValidationError:  # a real API server has none such
            continue
        if one.node_name == node:
            pools.setdefault((one.driver, one.pool.name), []).append(one)
    found: list[Device] = []
    for driver, pool in sorted(pools):
        # A driver replaces slices one by one: those of an older generation are void.
        newest = max(one.pool.generation for one in pools[driver, pool])
        members = [one for one in pools[driver, pool] if one.pool.generation == newest]
        # A pool that lacks a slice is left out as a whole, as in kube-scheduler: half of it would show wrong devices.
        if len(members) == members[0].pool.resource_slice_count:
            found += [_device(device, driver, pool) for one in members for device in one.devices or ()]
    return found


def _device(one: _Device, driver: str, pool: str) -> Device:
    capacity = {_full(name, driver): _capacity(amount) for name, amount in (one.capacity or {}).items()}
    values = {_full(name, driver): _attribute(value) for name, value in (one.attributes or {}).items()}
    sizes = {name: Fraction(amount.value) for name, amount in capacity.items()}
    return Device(
        key=(driver, pool, one.name),
        view=DeviceView(driver=driver, attributes=values, capacity=sizes),
        capacity=capacity,
        taints=tuple(one.taints or ()),
    )


def _full(name: str, driver: str) -> str:
    return name if "/" in name else f"{driver}/{name}"


def _attribute(value: Mapping[str, AttributeValue]) -> AttributeValue | Version:
    # An attribute has one value, under the name of its type.
    kind, found = next(iter(value.items()))
    return version(str(found)) if kind == "version" else found


def _capacity(one: _Capacity) -> Capacity:
    value, policy = _number(one.value), one.request_policy or _Policy()
    steps, limits = None, policy.valid_range
    if limits is not None:
        # What a range does not say: from nothing to the whole, in steps of 1.
        given = ((limits.min, 0), (limits.max, value), (limits.step, 1))
        least, most, step = (usual if number is None else _number(number) for number, usual in given)
        steps = least, most, step
    return Capacity(
        value=value,
        default=value if policy.default is None else _number(policy.default),
        steps=steps,
        # Results are written in the units of the slice.
        is_binary=str(one.value).endswith("i"),
    )


def _number(quantity: Quantity) -> int:
    """Raises Rejected."""
    try:
        return whole_number(quantity, "a quantity")
    except Corrupt as error:
        raise Rejected(str(error)) from error


class _Cel(Struct):
    expression: str = ""


class _Selector(Struct):
    cel: _Cel = field(default_factory=_Cel)


class _Asked(Struct):
    requests: Mapping[str, Quantity] | None = None


class _Exactly(Struct, rename="camel", kw_only=True):
    """What a request, or one alternative of it, asks for. `name` is an alternative's."""

    name: str = ""
    device_class_name: str
    selectors: Sequence[_Selector] | None = None
    allocation_mode: str | None = None
    count: int | None = None
    admin_access: bool | None = None
    capacity: _Asked | None = None
    tolerations: Sequence[Toleration] | None = None


class _Request(Struct, rename="camel"):
    name: str
    exactly: _Exactly | None = None
    first_available: Sequence[_Exactly] | None = None

    @property
    def options(self) -> list[tuple[str, _Exactly]]:
        """The options with their names, of which an alternative's has the request's before it."""
        if self.exactly is not None:
            return [(self.name, self.exactly)]
        return [(f"{self.name}/{one.name}", one) for one in self.first_available or ()]


class _Constraint(Struct, rename="camel"):
    requests: Sequence[str] | None = None
    match_attribute: str | None = None
    distinct_attribute: str | None = None


class _Devices(Struct):
    requests: Sequence[_Request] | None = None
    constraints: Sequence[_Constraint] | None = None
    config: Sequence[Mapping[str, object]] | None = None
    """Passed on as it is."""


class _ClaimSpec(Struct):
    devices: _Devices = field(default_factory=_Devices)


class _Class(Struct):
    selectors: Sequence[_Selector] | None = None
    config: Sequence[Mapping[str, object]] | None = None


def read_requests(spec: Mapping[str, object], classes: Mapping[str, RawObject]) -> ClaimRequests:
    """Raises Rejected: a class that does not exist, or what the sandbox's scheduler does not know. Raises ValidationError:
    a real API server refuses such a claim."""
    devices = convert(spec, _ClaimSpec).devices
    return ClaimRequests(
        requests=tuple(
            tuple(_option(name, option, classes) for name, option in one.options) for one in devices.requests or ()
        ),
        constraints=tuple(
            Constraint(
                attribute=one.distinct_attribute or one.match_attribute or "",
                is_distinct=bool(one.distinct_attribute),
                requests=frozenset(one.requests or ()),
            )
            for one in devices.constraints or ()
        ),
    )


def _option(name: str, one: _Exactly, classes: Mapping[str, RawObject]) -> Option:
    # A real scheduler waits for the class, with this reason.
    if one.device_class_name not in classes:
        raise Rejected(f"request {name}: device class {one.device_class_name} does not exist")
    # It would give a device that others have: nothing here shows what that means.
    if one.admin_access:
        raise Rejected(f"request {name}: the sandbox's scheduler gives no admin access")
    own = convert(classes[one.device_class_name]["spec"], _Class)
    # The class's selectors first: its text names it, where both fail.
    parsed = [
        (f"{where}selector #{number}", parse_selector(selector.cel.expression))
        for where, selectors in ((f"class {one.device_class_name}: ", own.selectors), ("", one.selectors))
        for number, selector in enumerate(selectors or ())
    ]
    count = one.count or 1
    # resource.k8s.io/v1 has no more results in one claim.
    if not 0 < count <= MAX_RESULTS:
        raise Rejected(f"request {name}: count must be from 1 to {MAX_RESULTS}")
    asked = (one.capacity.requests if one.capacity is not None else None) or {}
    return Option(
        name=name,
        selects=partial(_selects, parsed),
        count=None if one.allocation_mode == "All" else count,
        asked={capacity: _number(amount) for capacity, amount in asked.items()},
        tolerations=tuple(one.tolerations or ()),
    )


def _selects(selectors: Sequence[tuple[str, Callable[[DeviceView], bool]]], device: Device) -> bool:
    for where, selector in selectors:
        try:
            # The first that says no decides; later ones may not even have a value for this device.
            if not selector(device.view):
                return False
        except SelectorFailed as error:
            raise SelectorFailed(f"{where}: CEL runtime error: {error}") from error
    return True


def used_of(claims: Iterable[RawObject]) -> dict[DeviceKey, dict[str, int]]:
    """What the allocated claims consume; the names of the capacities as in `Device`."""
    used: dict[DeviceKey, dict[str, int]] = {}
    for claim in claims:
        for one in results_of(claim):
            device = used.setdefault((one.driver, one.pool, one.device), {})
            # Of consumedCapacity and never of the request: it was rounded.
            for name, amount in (one.consumed_capacity or {}).items():
                full = _full(name, one.driver)
                device[full] = device.get(full, 0) + _number(amount)
    return used


def results_of(claim: RawObject) -> Sequence[DeviceResult]:
    raw = ((claim.get("status") or {}).get("allocation") or {}).get("devices") or {}
    return convert(raw.get("results") or [], list[DeviceResult])


def node_of(claim: RawObject) -> str | None:
    """The only node on which an allocated claim can be used."""
    selector = ((claim.get("status") or {}).get("allocation") or {}).get("nodeSelector")
    return None if selector is None else str(selector["nodeSelectorTerms"][0]["matchFields"][0]["values"][0])


def allocation_of(claim: RawObject, shares: Sequence[Share], node: str, classes: Mapping[str, RawObject]) -> RawObject:
    """status.allocation."""
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    devices = convert(claim["spec"], _ClaimSpec).devices
    config = [*_class_config(devices, shares, classes)]
    # After the class's: a driver lets the claim's own win.
    config += [{"source": "FromClaim", **one} for one in devices.config or ()]
    return {
        "allocationTimestamp": timestamp(),
        "devices": {"results": [_result(share) for share in shares], **({"config": config} if config else {})},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
    }


def _class_config(
    devices: _Devices, shares: Sequence[Share], classes: Mapping[str, RawObject]
) -> Iterable[Mapping[str, object]]:
    chosen = {share.request for share in shares}
    options = [option for request in devices.requests or () for option in request.options]
    for name, option in options:
        # The class of an alternative that was not taken has no say.
        if name in chosen:
            for one in convert(classes[option.device_class_name]["spec"], _Class).config or ():
                yield {"source": "FromClass", "requests": [name], **one}


def _result(share: Share) -> RawObject:
    driver, pool, device = share.device.key
    result: RawObject = {"request": share.request, "driver": driver, "pool": pool, "device": device}
    if share.tolerations:
        result["tolerations"] = [to_builtins(one) for one in share.tolerations]
    amounts = {
        name.removeprefix(f"{driver}/"): _quantity(amount, is_binary=share.device.capacity[name].is_binary)
        for name, amount in share.consumed.items()
    }
    return {**result, "shareID": str(uuid.uuid4()), "consumedCapacity": amounts}


def _quantity(number: int, *, is_binary: bool) -> str:
    """The quantity in its canonical form: the greatest unit of which it is a multiple."""
    power = 0
    # As Kubernetes writes quantities: the greatest unit that leaves a whole number.
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
        # After the pods: a claim that was just made is not taken for one that nobody uses.
        for claim in self._api.store.all("resourceclaims"):
            self._release(claim)

    def place(self, pod: RawObject, nodes: Sequence[str]) -> tuple[str | None, list[str]]:
        """The first of the nodes on which the pod's claims are, or now have been, allocated; else a reason for each
        node."""
        # First node by name: what fits was decided before.
        if not pod["spec"].get("resourceClaims"):
            return (nodes[0] if nodes else None), []
        try:
            claims = self._claims_of(pod)
            # A claim that is allocated ties the pod to its node, whatever the others would like.
            allocated = {node_of(claim) for claim in claims if (claim.get("status") or {}).get("allocation")} - {None}
            for node in nodes:
                if allocated <= {node} and self._allocate(pod, claims, node):
                    return node, []
        # One reason for all nodes: a claim that is not there is on none.
        except Rejected as error:
            return None, [str(error)]
        return None, [NO_FIT for _ in nodes]

    def remedy(self, pod: RawObject) -> str:
        """How to start a sandbox that offers GPUs by claims, where the pod has claims and nobody does; else empty."""
        text = self._api.claims_remedy("pods", pod)
        return text and f" {text}"

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
            # resource.k8s.io/v1 has no room for more.
            if len((claim.get("status") or {}).get("reservedFor") or ()) >= MAX_USERS:
                raise Rejected(f'resourceclaim "{name}" is in use by {MAX_USERS} pods, and more cannot use it')
            found.append(claim)
        return found

    def _allocate(self, pod: RawObject, claims: Iterable[RawObject], node: str) -> bool:
        """Whether all are allocated on the node and reserved for the pod now. Raises Rejected."""
        classes = {raw["metadata"]["name"]: raw for raw in self._api.store.all("deviceclasses")}
        # A claim that other pods use is allocated already: this pod is only added to its users.
        pending = [claim for claim in claims if not (claim.get("status") or {}).get("allocation")]
        devices = read_devices(self._api.store.all("resourceslices"), node)
        try:
            requested = [read_requests(claim["spec"], classes) for claim in pending]
        except ValidationError as e:  # a real API server refuses such a claim
            raise Rejected(f"a ResourceClaim is not of resource.k8s.io/v1: {e!r}") from e
        shares = allocate(requested, devices, used_of(self._api.store.all("resourceclaims"))) if pending else []
        if shares is None:
            return False
        made = {
            claim["metadata"]["uid"]: allocation_of(claim, found, node, classes)
            for claim, found in zip(pending, shares, strict=True)
        }
        # Allocations were made before any status is written: all of a pod's claims, or none.
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
            # Made already, or the template comes later: a real controller tries again, too.
            if entry["name"] in names or template is None:
                continue
            claim = self._api.store.add("resourceclaims", self._from_template(template, metadata, entry["name"]))
            made.append({"name": entry["name"], "resourceClaimName": claim["metadata"]["name"]})
        if made:
            known = pod["status"].get("resourceClaimStatuses") or []
            status = {"resourceClaimStatuses": [*known, *made]}
            self._api.set_pod_status(metadata["namespace"], metadata["name"], status, uid=metadata["uid"])

    def _from_template(self, template: RawObject, pod: RawObject, name: str) -> RawObject:
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
