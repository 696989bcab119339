"""ResourceClaims, DeviceClasses and ResourceSlices as the API server has them, read into the values of allocation.py. Pure.

Devices are read as this project's driver publishes them: in slices of one node, each shareable, a capacity's policy a range.
Admin access is refused with a sentence. Format: resource.k8s.io/v1.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from gpushare_agent.cluster.kube.quantities import whole_number
from gpushare_agent.dra.decisions.claim import MAX_RESULTS
from gpushare_agent.model.errors import Corrupt, Rejected
from gpushare_agent.sandbox.pod_manifest import RawObject, timestamp
from gpushare_agent.sandbox.scheduler.allocation import (
    Capacity,
    Constraint,
    Device,
    DeviceKey,
    Option,
    Share,
    Wanted,
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


def read_wanted(spec: Mapping[str, Any], classes: Mapping[str, RawObject]) -> Wanted:
    """Raises Rejected: a class that does not exist, or what the sandbox's scheduler does not know."""
    devices = spec.get("devices") or {}
    return Wanted(
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
    """In the canonical form: the greatest unit of which it is a multiple."""
    power = 0
    while is_binary and number and number % 1024 == 0 and power < len(_UNITS) - 1:
        number, power = number // 1024, power + 1
    return f"{number}{_UNITS[power]}"
