"""Reads devices and requests from ResourceSlices and ResourceClaims, and writes allocations.

Pools go by driver and name, slices by name, devices as they stand: first fit (placement/first_fit.py) takes them in this
order. Format: resource.k8s.io/v1. No state.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec import convert

from gpushare_agent.core.kube.claims import MAX_RESULTS, DeviceResult
from gpushare_agent.core.kube.objects import binary_quantity
from gpushare_agent.core.model.errors import Rejected
from gpushare_agent.core.model.taints import Taint, Toleration
from gpushare_agent.core.placement.first_fit import (
    Capacity,
    ClaimRequests,
    Constraint,
    Counter,
    Device,
    DeviceKey,
    Option,
    Share,
)
from gpushare_agent.sandbox.pod_manifest import RawObject, extended_requests, raw_containers, timestamp
from gpushare_agent.sandbox.scheduler.cel import (
    AttributeValue,
    SelectorFailed,
    Version,
    parse_selector,
    version,
    whole,
)

_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""The errors from reading an object that a real API server would have refused."""


def read_devices(slices: Iterable[RawObject], node: str) -> list[Device]:
    """The devices of one node, in the scheduler's order; none of a pool that is not complete, or has a name twice."""
    pools: dict[tuple[str, str], list[tuple[int, int, RawObject]]] = {}
    # By name: first fit goes through slices in this order, which is how a driver influences the choice.
    for raw in sorted(slices, key=lambda one: str(one["metadata"].get("name"))):
        with suppress(*_MALFORMED):
            spec = raw["spec"]
            driver, pool = spec["driver"], spec["pool"]
            if spec.get("nodeName") == node:
                counts = pool.get("generation", 0), pool.get("resourceSliceCount", 1)
                pools.setdefault((driver, pool["name"]), []).append((*counts, spec))
    found: list[Device] = []
    for (driver, name), members in sorted(pools.items(), key=lambda item: item[0]):
        # A driver replaces slices one by one: those of an older generation are void.
        newest = max(generation for generation, _, _ in members)
        current = [(count, spec) for generation, count, spec in members if generation == newest]
        # A pool that lacks a slice is left out as a whole, as in kube-scheduler: half of it would show wrong devices.
        if len(current) == current[0][0]:
            with suppress(*_MALFORMED):
                devices = _devices([spec for _, spec in current], driver, name)
                found += devices if len({device.key for device in devices}) == len(devices) else []
    return found


def _devices(specs: Sequence[RawObject], driver: str, pool: str) -> list[Device]:
    # The counters of a pool are in slices of their own.
    counters = {
        (driver, pool, one["name"], name): whole(counter["value"])
        for spec in specs
        for one in spec.get("sharedCounters") or ()
        for name, counter in one["counters"].items()
    }
    return [_device(one, driver, pool, counters) for spec in specs for one in spec.get("devices") or ()]


def _device(raw: RawObject, driver: str, pool: str, counters: Mapping[Counter, int]) -> Device:
    consumed = {
        (driver, pool, one["counterSet"], name): whole(counter["value"])
        for one in raw.get("consumesCounters") or ()
        for name, counter in one["counters"].items()
    }
    return Device(
        key=(driver, pool, raw["name"]),
        capacity={_full(name, driver): _capacity(amount) for name, amount in (raw.get("capacity") or {}).items()},
        attributes={_full(name, driver): _attribute(value) for name, value in (raw.get("attributes") or {}).items()},
        taints=tuple(convert(one, Taint) for one in raw.get("taints") or ()),
        is_shared=bool(raw.get("allowMultipleAllocations")),
        consumes={name: (amount, counters[name]) for name, amount in consumed.items() if name in counters},
    )


def _full(name: str, driver: str) -> str:
    return name if "/" in name else f"{driver}/{name}"


def _attribute(value: Mapping[str, AttributeValue]) -> AttributeValue | Version:
    # An attribute has one value, under the name of its type.
    ((kind, found),) = value.items()
    return version(str(found)) if kind == "version" else found


def _capacity(raw: RawObject) -> Capacity:
    value, policy = whole(raw["value"]), raw.get("requestPolicy") or {}
    limits = policy.get("validRange")
    # What a range does not say: from nothing to the whole, in steps of 1.
    usual = {"min": 0, "max": value, "step": 1}
    least, most, step = (whole((limits or {}).get(name, number)) for name, number in usual.items())
    return Capacity(
        value=value,
        default=whole(policy.get("default", value)),
        steps=None if limits is None else (least, most, step),
        # Results are written in the units of the slice.
        is_binary=str(raw["value"]).endswith("i"),
    )


def read_requests(spec: Mapping[str, Any], classes: Mapping[str, RawObject]) -> ClaimRequests:
    """Raises Rejected: a class that does not exist, or what the sandbox's scheduler does not know, as a claim that a real
    API server refuses."""
    try:
        devices = spec.get("devices") or {}
        return ClaimRequests(
            requests=tuple(
                tuple(_option(name, option, classes) for name, option in _options(one))
                for one in devices.get("requests") or ()
            ),
            constraints=tuple(
                Constraint(
                    attribute=one.get("distinctAttribute") or one.get("matchAttribute") or "",
                    is_distinct=bool(one.get("distinctAttribute")),
                    requests=frozenset(one.get("requests") or ()),
                )
                for one in devices.get("constraints") or ()
            ),
        )
    except _MALFORMED as error:
        raise Rejected(f"a ResourceClaim is not of resource.k8s.io/v1: {error!r}") from error


def extended_requests_of(pod: RawObject, classes: Mapping[str, str]) -> list[tuple[RawObject, RawObject]]:
    """What kube-scheduler asks for in its own claim instead of the extended resources of these classes: of each container
    and resource its mapping in the pod's status, and its request. Each init container gets devices of its own here."""
    found = []
    for number, container in enumerate(raw_containers(pod)):
        names = sorted((container.get("resources") or {}).get("requests") or ())
        for resource, count in extended_requests(container).items():
            if resource in classes:
                name = f"container-{number}-request-{names.index(resource)}"
                exactly = {"deviceClassName": classes[resource], "allocationMode": "ExactCount", "count": count}
                mapping = {"containerName": container["name"], "resourceName": resource, "requestName": name}
                found.append((mapping, {"name": name, "exactly": exactly}))
    return found


def _options(request: RawObject) -> Iterator[tuple[str, RawObject]]:
    """What a request asks for, with its name. The name of an alternative has the request's name before it."""
    if request.get("exactly"):
        yield request["name"], request["exactly"]
    else:
        for one in request.get("firstAvailable") or ():
            yield f"{request['name']}/{one['name']}", one


def _option(name: str, raw: RawObject, classes: Mapping[str, RawObject]) -> Option:
    # A real scheduler waits for the class, with this reason.
    class_name = raw["deviceClassName"]
    if class_name not in classes:
        raise Rejected(f"request {name}: device class {class_name} does not exist")
    # It would give a device that others have: nothing here shows what that means.
    if raw.get("adminAccess"):
        raise Rejected(f"request {name}: the sandbox's scheduler gives no admin access")
    # The class's selectors first: its text names it, where both fail.
    parsed = [
        (f"{where}selector #{number}", parse_selector((selector.get("cel") or {}).get("expression", "")))
        for where, selectors in (
            (f"class {class_name}: ", classes[class_name]["spec"].get("selectors")),
            ("", raw.get("selectors")),
        )
        for number, selector in enumerate(selectors or ())
    ]
    count = raw.get("count") or 1
    # resource.k8s.io/v1 has no more results in one claim.
    if not 0 < count <= MAX_RESULTS:
        raise Rejected(f"request {name}: count must be from 1 to {MAX_RESULTS}")
    asked = (raw.get("capacity") or {}).get("requests") or {}
    return Option(
        name=name,
        selects=partial(_selects, parsed),
        count=None if raw.get("allocationMode") == "All" else count,
        asked={capacity: whole(amount) for capacity, amount in asked.items()},
        tolerations=tuple(convert(one, Toleration) for one in raw.get("tolerations") or ()),
    )


def _selects(selectors: Sequence[tuple[str, Callable[[Device], bool]]], device: Device) -> bool:
    for where, selector in selectors:
        try:
            # The first that says no decides; later ones may not even have a value for this device.
            if not selector(device):
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
            # From consumedCapacity, never from the request, because it was rounded.
            for name, amount in (one.consumed_capacity or {}).items():
                full = _full(name, one.driver)
                device[full] = device.get(full, 0) + whole(amount)
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
    field, devices = {"key": "metadata.name", "operator": "In", "values": [node]}, claim["spec"]["devices"]
    chosen = {share.request for share in shares}
    # The class of an alternative that was not taken has no say.
    options = {
        name: option for one in devices.get("requests") or () for name, option in _options(one) if name in chosen
    }
    config = [
        {"source": "FromClass", "requests": [name], **one}
        for name, option in options.items()
        for one in classes[option["deviceClassName"]]["spec"].get("config") or ()
    ]
    # After the class's: a driver lets the claim's own win.
    config += [{"source": "FromClaim", **one} for one in devices.get("config") or ()]
    return {
        "allocationTimestamp": timestamp(),
        "devices": {
            "results": [_result(share, options[share.request].get("tolerations")) for share in shares],
            **({"config": config} if config else {}),
        },
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
    }


def _result(share: Share, tolerations: Sequence[RawObject] | None) -> RawObject:
    driver, pool, device = share.device.key
    amounts = {
        name.removeprefix(f"{driver}/"): binary_quantity(amount)
        if share.device.capacity[name].is_binary
        else str(amount)
        for name, amount in share.consumed.items()
    }
    return {
        "request": share.request, "driver": driver, "pool": pool, "device": device,
        **({"tolerations": tolerations} if tolerations else {}),
        **({"shareID": str(uuid.uuid4())} if share.device.is_shared else {}),
        **({"consumedCapacity": amounts} if amounts else {}),
    }  # fmt: skip
