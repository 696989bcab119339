"""Devices for ResourceClaims as kube-scheduler chooses them: first fit in the order in which the devices stand.

Each device of one request is another one. A request consumes what it asks of each capacity, rounded by the capacity's
policy, and the default of what it does not ask. A device that is not shared goes to one request alone. A device consumes
counters of its pool once, whoever shares it. Where a choice leaves nothing for a later request the next is tried. Source:
resource.k8s.io/v1, and measurements on 1.36 (tests/data/dra/allocations.json).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field

from gpushare_agent.core.model.taints import Taint, Toleration

DeviceKey = tuple[str, str, str]
"""Driver, pool, device."""
Used = Mapping[DeviceKey, Mapping[str, int]]
"""The consumed capacities of each allocated device."""


class Capacity(Struct, frozen=True, kw_only=True):
    """Whole numbers. `steps` are (least, most, step) of what can be asked, None for anything. `is_binary`: written with Ki,
    Mi, Gi."""

    value: int
    default: int
    steps: tuple[int, int, int] | None = None
    is_binary: bool = False

    def consumed(self, asked: int | None) -> int | None:
        """The amount that is consumed; None where it is more than the policy allows."""
        # A capacity that nobody asks for takes its default, which is often the whole: a trap for who asks for one of two.
        if asked is None:
            return self.default
        if self.steps is None:
            return asked
        least, most, step = self.steps
        # Rounded up to the next step (measured: 300Mi becomes 512Mi, no cores become 1).
        rounded = least + -(-max(0, asked - least) // step) * step
        return rounded if rounded <= most else None


Counter = tuple[str, str, str, str]
"""Driver, pool, counter set, counter."""


class Device(Struct, frozen=True, kw_only=True):
    """Names of attributes and capacities have their domain: `gpushare-agent/uuid`. `consumes` has for each counter how much
    of how much."""

    key: DeviceKey
    capacity: Mapping[str, Capacity] = field(default_factory=dict)
    attributes: Mapping[str, object] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    is_shared: bool = True
    consumes: Mapping[Counter, tuple[int, int]] = field(default_factory=dict)


class Option(Struct, frozen=True, kw_only=True):
    """One way to serve a request; `name` is `request` or `request/alternative`. `count` None: all that are selected.
    `asked` names capacities, those of the device's own driver without its domain."""

    name: str
    selects: Callable[[Device], bool] = lambda _device: True
    count: int | None = 1
    asked: Mapping[str, int] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()


class Constraint(Struct, frozen=True, kw_only=True):
    """`attribute` has its domain; `requests` empty: all of the claim."""

    attribute: str
    is_distinct: bool
    requests: frozenset[str] = frozenset()

    def covers(self, name: str) -> bool:
        # A constraint may name the request, or one alternative of it.
        return not self.requests or bool({name, name.partition("/")[0]} & self.requests)


class ClaimRequests(Struct, frozen=True, kw_only=True):
    """What a claim asks for: the options of each request; the first that can be had is taken."""

    requests: tuple[tuple[Option, ...], ...]
    constraints: tuple[Constraint, ...] = ()


class Share(Struct, frozen=True, kw_only=True):
    """A result: what it consumes of each capacity of the device."""

    request: str
    device: Device
    consumed: Mapping[str, int]


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
        self._counted: dict[Counter, int] = {}
        for device in devices:
            if device.key in used:
                self._count(device, 1)

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
            is_new = not self._is_taken(share.device)
            self.picked.append((number, share))
            self._count(share.device, is_new)
            if self._pick(position, number, option, suitable[n + 1 :], count - 1):
                return True
            # What follows could not be served: another device is tried.
            self.picked.pop()
            self._count(share.device, -is_new)
        return False

    def _is_taken(self, device: Device) -> bool:
        return device.key in self._used or any(share.device.key == device.key for _, share in self.picked)

    def _count(self, device: Device, times: int) -> None:
        for counter, (amount, _) in device.consumes.items():
            self._counted[counter] = self._counted.get(counter, 0) + times * amount

    def _share(self, device: Device, option: Option) -> Share | None:
        """The share of the device; None where too little is free."""
        asked = {name if "/" in name else f"{device.key[0]}/{name}": amount for name, amount in option.asked.items()}
        # A taint of the effect None keeps nothing away.
        kept_away = [taint for taint in device.taints if taint.effect != "None"]
        if not asked.keys() <= device.capacity.keys() or not all(
            any(one.tolerates(taint) for one in option.tolerations) for taint in kept_away
        ):
            return None
        if not self._is_taken(device):
            counters = (
                (self._counted.get(counter, 0) + amount, of) for counter, (amount, of) in device.consumes.items()
            )
            if any(counted > of for counted, of in counters):
                return None
        elif not device.is_shared:
            return None
        # Nothing is consumed of what nobody shares: it is had as a whole.
        if not device.is_shared:
            is_enough = all(amount <= device.capacity[name].value for name, amount in asked.items())
            return Share(request=option.name, device=device, consumed={}) if is_enough else None
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
        return Share(request=option.name, device=device, consumed=consumed)

    def _is_allowed(self, number: int, share: Share) -> bool:
        others = [other for owner, other in self.picked if owner == number]
        for constraint in self._claims[number].constraints:
            if not constraint.covers(share.request):
                continue
            value = share.device.attributes.get(constraint.attribute)
            values = [
                other.device.attributes.get(constraint.attribute)
                for other in others
                if constraint.covers(other.request)
            ]
            # A device without the attribute satisfies no constraint on it.
            if value is None or (value in values if constraint.is_distinct else any(one != value for one in values)):
                return False
        return True
