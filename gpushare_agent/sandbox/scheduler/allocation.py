"""Devices for ResourceClaims as kube-scheduler chooses them: CEL selectors, then first fit in the order of the slices. Pure.

Of CEL is known as much as a sandbox needs: `device.driver`, `device.attributes['domain'].name`,
`device.capacity['domain'].name`, literals, lists, the operators && || ! == != < <= > >= in, `quantity`, `semver`,
`startsWith`, `lowerAscii`, `matches` without groups and classes, and `compareTo`. Anything else is refused: a guess would
allocate what a real scheduler does not. Python's own parser reads the expression after its operators are translated; nothing
of it is executed as Python.

Pools go by driver and name, slices by name, devices as they stand; of one request's devices each is another one. A request
consumes what it asks of each capacity, rounded by the capacity's policy, and the default of what it does not ask. Where a
choice leaves nothing for a later request the next is tried. Source: resource.k8s.io/v1, and measurements on 1.36
(tests/data/dra/allocations.json).
"""

from __future__ import annotations

import ast
import keyword
import operator
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from typing import Any

from msgspec import Struct, convert, field

from gpushare_agent.cluster.kube.claims import DeviceResult, main_request
from gpushare_agent.cluster.kube.objects import whole_number
from gpushare_agent.cluster.kube.scheduling import Taint, Toleration
from gpushare_agent.dra.decisions.claim import MAX_RESULTS
from gpushare_agent.model.errors import Corrupt, Rejected
from gpushare_agent.sandbox.pod_manifest import RawObject, timestamp

# --- selectors ---

MAX_EXPRESSION_CHARS = 10 * 1024
"""resource.k8s.io's own limit."""
_TOKEN = re.compile(
    r"""\s*("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\w+|&&|\|\||==|!=|<=|>=|[<>!()\[\],.-])\s*""", re.ASCII
)
_PATTERN = re.compile(r"\^?(?:[\w -]|\.[*+]?)*\$?", re.ASCII)
"""What RE2 and `re` read alike."""
MAX_REPEATS = 2
"""Of a pattern: each multiplies what `re` tries on a string, at most MAX_MATCHED_CHARS long, as an attribute is."""
MAX_MATCHED_CHARS = 64
MAX_MATCHES = 16
"""In an expression."""
_TRANSLATED = {"&&": "and", "||": "or", "!": "~", "true": "True", "false": "False"}
_OPERATORS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


AttributeValue = str | int | bool
"""Of a device, but for a version."""


class Version(Struct, frozen=True, order=True):
    numbers: tuple[int, ...]


class DeviceView(Struct, frozen=True, kw_only=True):
    """Names with their domain: `gpushare-agent/uuid`. Capacities are Fractions."""

    driver: str
    attributes: Mapping[str, AttributeValue | Version]
    capacity: Mapping[str, Fraction]


class SelectorFailed(Rejected):
    """The expression has no value for a device, as of an attribute that it does not have."""


def version(text: str) -> Version:
    """Raises SelectorFailed. A pre-release is not compared."""
    match = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})", text)
    if match is None:
        raise SelectorFailed(f"{text!r:.80} is no version of three numbers")
    return Version(tuple(map(int, match.groups())))


def parse_selector(expression: str) -> Callable[[DeviceView], bool]:
    """Both this and the result raise Rejected for what is not known here, the result SelectorFailed too."""
    unknown = Rejected(
        f"the sandbox's scheduler cannot evaluate the CEL selector {expression!r:.200}; it knows comparisons of"
        " device.driver, device.attributes and device.capacity (docs/reference/sandbox.md)"
    )
    try:
        # Parsed only: nothing of the expression is ever run as Python.
        tree = ast.parse(_translated(expression), mode="eval").body
        if sum(isinstance(node, ast.Attribute) and node.attr == "matches" for node in ast.walk(tree)) > MAX_MATCHES:
            raise unknown
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise unknown from error

    def selects(device: DeviceView) -> bool:
        try:
            return bool(_of_type(_value(tree, device), bool))
        except (NotImplementedError, RecursionError) as error:
            raise unknown from error

    return selects


def _translated(expression: str) -> str:
    words, position = [], 0
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(expression)
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        # A word that is a keyword in Python would be parsed as one: in CEL it is a name that is not known.
        if match is None or (match[1] != "in" and keyword.iskeyword(match[1])):
            raise ValueError(expression)
        words.append(_TRANSLATED.get(match[1], match[1]))
        position = match.end()
    return " ".join(words)


def _value(node: ast.AST, device: DeviceView) -> Any:
    """Raises NotImplementedError for what is not known, SelectorFailed."""
    match node:
        # No floats: attributes and capacities have none.
        case ast.Constant(value=bool() | int() | str()):
            return node.value
        case ast.List():
            return [_value(one, device) for one in node.elts]
        case ast.BoolOp():
            return _joined(node, device)
        case ast.UnaryOp(op=ast.Invert()):
            return not _of_type(_value(node.operand, device), bool)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
        case ast.Compare(left=left, ops=[compared], comparators=[right]):
            return _compared(compared, _value(left, device), _value(right, device))
    return _called(node, device)


def _called(node: ast.AST, device: DeviceView) -> Any:
    match node:
        case ast.Call(func=ast.Name(id="quantity"), args=[ast.Constant(value=str() as text)], keywords=[]):
            return Fraction(_number(text, SelectorFailed))
        case ast.Call(func=ast.Name(id="semver"), args=[ast.Constant(value=str() as text)], keywords=[]):
            return version(text)
        case ast.Call(func=ast.Name(id="has"), args=[ast.Attribute() as attribute], keywords=[]):
            try:
                _value(attribute, device)
            except SelectorFailed:
                return False
            return True
        case ast.Call(func=ast.Attribute(value=target, attr="startsWith"), args=[prefix], keywords=[]):
            return _of_type(_value(target, device), str).startswith(_of_type(_value(prefix, device), str))
        case ast.Call(func=ast.Attribute(value=target, attr="lowerAscii"), args=[], keywords=[]):
            return _of_type(_value(target, device), str).encode().lower().decode()
        case ast.Call(
            func=ast.Attribute(value=target, attr="matches"), args=[ast.Constant(value=str() as pattern)], keywords=[]
        ) if _PATTERN.fullmatch(pattern) and pattern.count("*") + pattern.count("+") <= MAX_REPEATS:
            text = _of_type(_value(target, device), str)
            if len(text) > MAX_MATCHED_CHARS:
                raise NotImplementedError("matches")
            return re.search(pattern, text) is not None
        case ast.Call(func=ast.Attribute(value=target, attr="compareTo"), args=[other], keywords=[]):
            left = _value(target, device)
            right = _of_type(_value(other, device), type(left))
            return (left > right) - (left < right)
        case ast.Attribute(value=ast.Name(id="device"), attr="driver"):
            return device.driver
        case ast.Attribute(
            value=ast.Subscript(
                value=ast.Attribute(value=ast.Name(id="device"), attr="attributes" | "capacity" as group),
                slice=ast.Constant(value=str() as domain),
            ),
            attr=name,
        ):
            values = device.attributes if group == "attributes" else device.capacity
            # As in CEL: the expression has no value for a device without the attribute.
            if f"{domain}/{name}" not in values:
                raise SelectorFailed(f"no such key: {name}")
            return values[f"{domain}/{name}"]
    raise NotImplementedError(ast.dump(node)[:80])


def _joined(node: ast.BoolOp, device: DeviceView) -> bool:
    """A part that decides hides another's failure, on either side, as in CEL."""
    decides = isinstance(node.op, ast.Or)
    failure: SelectorFailed | None = None
    for part in node.values:
        try:
            if _of_type(_value(part, device), bool) == decides:
                return decides
        except SelectorFailed as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return not decides


def _compared(compared: ast.cmpop, left: Any, right: Any) -> bool:
    # A list of literals on the right, as in `device.driver in ['a', 'b']`.
    if isinstance(compared, ast.In):
        return left in _of_type(right, list)
    # CEL compares nothing of two types: an error and not false.
    right = _of_type(right, type(left))
    # Quantities and versions are ordered by compareTo alone.
    if not isinstance(compared, ast.Eq | ast.NotEq) and type(left) not in (int, str):
        raise SelectorFailed(f"{left!r:.80} has no order; use compareTo")
    return _OPERATORS[type(compared)](left, right)


def _of_type(value: Any, kind: type) -> Any:
    # type() and not isinstance: a bool is an int in Python.
    if type(value) is not kind:
        raise SelectorFailed(f"{value!r:.80} is compared with, or used as, another kind of value")
    return value


# --- allocation ---

DeviceKey = tuple[str, str, str]
"""Driver, pool, device."""
Used = Mapping[DeviceKey, Mapping[str, int]]
"""What is consumed of each device that is allocated."""


class Capacity(Struct, frozen=True, kw_only=True):
    """Whole numbers. `steps` are (least, most, step) of what can be asked, None for anything."""

    value: int
    default: int
    steps: tuple[int, int, int] | None = None
    is_binary: bool = False
    """Written with Ki, Mi, Gi."""

    def consumed(self, asked: int | None) -> int | None:
        """The amount that is consumed; None where the policy has nothing so large."""
        # A capacity that nobody asks for takes its default, which is often the whole: a trap for who asks for one of two.
        if asked is None:
            return self.default
        if self.steps is None:
            return asked
        least, most, step = self.steps
        # Rounded up to the next step (measured: 300Mi becomes 512Mi, no cores become 1).
        rounded = least + -(-max(0, asked - least) // step) * step
        return rounded if rounded <= most else None


class Device(Struct, frozen=True, kw_only=True):
    """Names of attributes and capacities have their domain: `gpushare-agent/uuid`."""

    key: DeviceKey
    view: DeviceView
    capacity: Mapping[str, Capacity] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()


class Option(Struct, frozen=True, kw_only=True):
    """One way to serve a request; `name` is `request` or `request/alternative`. `count` None: all that are selected.
    `asked` names capacities, those of the device's own driver without its domain."""

    name: str
    selects: Callable[[Device], bool] = lambda _device: True
    count: int | None = 1
    asked: Mapping[str, int] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()


class Constraint(Struct, frozen=True, kw_only=True):
    """`attribute` has its domain; `requests` empty: all of the claim."""

    attribute: str
    is_distinct: bool
    requests: frozenset[str] = frozenset()

    def covers(self, name: str) -> bool:
        # A constraint may name the request, or one alternative of it.
        return not self.requests or bool({name, main_request(name)} & self.requests)


class ClaimRequests(Struct, frozen=True, kw_only=True):
    """What a claim asks for: of each request its options, the first that can be had."""

    requests: tuple[tuple[Option, ...], ...]
    constraints: tuple[Constraint, ...] = ()


class Share(Struct, frozen=True, kw_only=True):
    """A result: what it consumes of each capacity of the device."""

    request: str
    device: Device
    consumed: Mapping[str, int]
    tolerations: tuple[Mapping[str, Any], ...] = ()


def allocate(claims: Sequence[ClaimRequests], devices: Sequence[Device], used: Used) -> list[list[Share]] | None:
    """The shares of each claim, all claims together; None where they cannot all be had. Raises what `selects` raises."""
    # All claims of a pod in one search: a choice for one may leave nothing for the next.
    search = _Search(claims, devices, used)
    if not search.request(0):
        return None
    return [[share for owner, share in search.picked if owner == number] for number in range(len(claims))]


class _Search:
    """Depth first, over the requests of all claims and the devices of each."""

    def __init__(self, claims: Sequence[ClaimRequests], devices: Sequence[Device], used: Used) -> None:
        self._claims = claims
        self._devices = devices
        self._used = used
        self._requests = [(number, options) for number, claim in enumerate(claims) for options in claim.requests]
        self.picked: list[tuple[int, Share]] = []

    def request(self, position: int) -> bool:
        """Whether the requests from this one on can be served."""
        # All are served: the search has found the first fit.
        if position == len(self._requests):
            return True
        number, options = self._requests[position]
        # In their order: firstAvailable means the first alternative that can be had.
        return any(self._option(position, number, option) for option in options)

    def _option(self, position: int, number: int, option: Option) -> bool:
        suitable = [device for device in self._devices if option.selects(device)]
        if option.count is None:  # all that have enough free, as measured
            suitable = [device for device in suitable if self._share(device, option) is not None]
        count = len(suitable) if option.count is None else option.count
        # allocationMode All of no device is no allocation.
        return count > 0 and self._pick(position, number, option, suitable, count)

    def _pick(self, position: int, number: int, option: Option, suitable: Sequence[Device], count: int) -> bool:
        """`count` more of `suitable`: a request's devices are equal, so only their combinations matter."""
        if count == 0:
            return self.request(position + 1)
        for n in range(len(suitable) - count + 1):
            share = self._share(suitable[n], option)
            if share is None or not self._is_allowed(number, share):
                continue
            self.picked.append((number, share))
            if self._pick(position, number, option, suitable[n + 1 :], count - 1):
                return True
            # What follows could not be served: another device is tried.
            self.picked.pop()
        return False

    def _share(self, device: Device, option: Option) -> Share | None:
        """The share of the device; None where it has not so much free."""
        asked = {name if "/" in name else f"{device.key[0]}/{name}": amount for name, amount in option.asked.items()}
        tolerations = [convert(one, Toleration) for one in option.tolerations]
        # A taint of the effect None keeps nothing away.
        kept_away = [taint for taint in device.taints if taint.effect != "None"]
        if not asked.keys() <= device.capacity.keys() or not all(
            any(one.tolerates(taint) for one in tolerations) for taint in kept_away
        ):
            return None
        # What this search has chosen counts as consumed already, of other claims too.
        picked = [share.consumed for _, share in self.picked if share.device.key == device.key]
        taken = [self._used.get(device.key, {}), *picked]
        consumed: dict[str, int] = {}
        for name, capacity in device.capacity.items():
            amount = capacity.consumed(asked.get(name))
            # Every capacity is consumed, asked for or not: all must have room.
            if amount is None or sum(one.get(name, 0) for one in taken) + amount > capacity.value:
                return None
            consumed[name] = amount
        return Share(request=option.name, device=device, consumed=consumed, tolerations=option.tolerations)

    def _is_allowed(self, number: int, share: Share) -> bool:
        others = [other for owner, other in self.picked if owner == number]
        for constraint in self._claims[number].constraints:
            if not constraint.covers(share.request):
                continue
            value = share.device.view.attributes.get(constraint.attribute)
            values = [
                other.device.view.attributes.get(constraint.attribute)
                for other in others
                if constraint.covers(other.request)
            ]
            # A device without the attribute satisfies no constraint on it.
            if value is None or (value in values if constraint.is_distinct else any(one != value for one in values)):
                return False
        return True


# --- the objects of the API ---

_UNITS = ("", "Ki", "Mi", "Gi", "Ti", "Pi")
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What reading raises of an object that a real API server would have refused."""


def read_devices(slices: Iterable[RawObject], node: str) -> list[Device]:
    """The devices of one node, in the scheduler's order; none of a pool that is not complete."""
    pools: dict[tuple[str, str], list[tuple[int, int, list[Device]]]] = {}
    # By name: first fit goes through slices in this order, which is how a driver influences the choice.
    for raw in sorted(slices, key=lambda one: str(one["metadata"].get("name"))):
        with suppress(*_MALFORMED):
            spec = raw["spec"]
            driver, pool = spec["driver"], spec["pool"]
            if spec.get("nodeName") == node:
                devices = [_device(one, driver, pool["name"]) for one in spec.get("devices") or ()]
                counts = pool.get("generation", 0), pool.get("resourceSliceCount", 1)
                pools.setdefault((driver, pool["name"]), []).append((*counts, devices))
    found: list[Device] = []
    for _, members in sorted(pools.items(), key=lambda item: item[0]):
        # A driver replaces slices one by one: those of an older generation are void.
        newest = max(generation for generation, _, _ in members)
        current = [(count, devices) for generation, count, devices in members if generation == newest]
        # A pool that lacks a slice is left out as a whole, as in kube-scheduler: half of it would show wrong devices.
        if len(current) == current[0][0]:
            found += [device for _, devices in current for device in devices]
    return found


def _device(raw: RawObject, driver: str, pool: str) -> Device:
    capacity = {_full(name, driver): _capacity(amount) for name, amount in (raw.get("capacity") or {}).items()}
    values = {_full(name, driver): _attribute(value) for name, value in (raw.get("attributes") or {}).items()}
    sizes = {name: Fraction(amount.value) for name, amount in capacity.items()}
    return Device(
        key=(driver, pool, raw["name"]),
        view=DeviceView(driver=driver, attributes=values, capacity=sizes),
        capacity=capacity,
        taints=tuple(convert(one, Taint) for one in raw.get("taints") or ()),
    )


def _full(name: str, driver: str) -> str:
    return name if "/" in name else f"{driver}/{name}"


def _attribute(value: Mapping[str, AttributeValue]) -> AttributeValue | Version:
    # An attribute has one value, under the name of its type.
    ((kind, found),) = value.items()
    return version(str(found)) if kind == "version" else found


def _capacity(raw: RawObject) -> Capacity:
    value, policy = _number(raw["value"]), raw.get("requestPolicy") or {}
    limits = policy.get("validRange")
    # What a range does not say: from nothing to the whole, in steps of 1.
    usual = {"min": 0, "max": value, "step": 1}
    least, most, step = (_number((limits or {}).get(name, number)) for name, number in usual.items())
    return Capacity(
        value=value,
        default=_number(policy.get("default", value)),
        steps=None if limits is None else (least, most, step),
        # Results are written in the units of the slice.
        is_binary=str(raw["value"]).endswith("i"),
    )


def _number(quantity: object, failure: type[Rejected] = Rejected) -> int:
    """Raises `failure`."""
    try:
        return whole_number(quantity, "a quantity")
    except Corrupt as error:
        raise failure(str(error)) from error


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


def _options(request: RawObject) -> Iterator[tuple[str, RawObject]]:
    """What a request asks for, with its name, of which an alternative's has the request's before it."""
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
        asked={capacity: _number(amount) for capacity, amount in asked.items()},
        tolerations=tuple(raw.get("tolerations") or ()),
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
    field, devices = {"key": "metadata.name", "operator": "In", "values": [node]}, claim["spec"]["devices"]
    chosen = {share.request for share in shares}
    # The class of an alternative that was not taken has no say.
    options = [option for one in devices.get("requests") or () for option in _options(one) if option[0] in chosen]
    config = [
        {"source": "FromClass", "requests": [name], **one}
        for name, option in options
        for one in classes[option["deviceClassName"]]["spec"].get("config") or ()
    ]
    # After the class's: a driver lets the claim's own win.
    config += [{"source": "FromClaim", **one} for one in devices.get("config") or ()]
    return {
        "allocationTimestamp": timestamp(),
        "devices": {"results": [_result(share) for share in shares], **({"config": config} if config else {})},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
    }


def _result(share: Share) -> RawObject:
    driver, pool, device = share.device.key
    amounts = {
        name.removeprefix(f"{driver}/"): _quantity(amount, is_binary=share.device.capacity[name].is_binary)
        for name, amount in share.consumed.items()
    }
    return {
        "request": share.request, "driver": driver, "pool": pool, "device": device,
        **({"tolerations": list(share.tolerations)} if share.tolerations else {}),
        "shareID": str(uuid.uuid4()), "consumedCapacity": amounts,
    }  # fmt: skip


def _quantity(number: int, *, is_binary: bool) -> str:
    """The quantity in its canonical form: the greatest unit of which it is a multiple."""
    power = 0
    # As Kubernetes writes quantities: the greatest unit that leaves a whole number.
    while is_binary and number and number % 1024 == 0 and power < len(_UNITS) - 1:
        number, power = number // 1024, power + 1
    return f"{number}{_UNITS[power]}"
