"""Why a pod waits that wants MIG instances by ResourceClaims or by a DeviceClass's resource, and what would let it start.
Pure.

The devices are those of this driver's ResourceSlices: existing instances, and the places for them, which share counters
(resource.k8s.io/v1). Of a claim and a class the profile that an expression (CEL) compares is read, and nothing else.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set

from msgspec import Raw, Struct, field

from gpushare_agent.core.claims.claim import DRIVER
from gpushare_agent.core.claims.devices import CORDONED_TAINT, NVIDIA_DRIVER
from gpushare_agent.core.kit.json_schema import NULL, Lenient
from gpushare_agent.core.kube.claims import ClaimStatus, Device, SliceSpec
from gpushare_agent.core.kube.claims import Counter as Amount
from gpushare_agent.core.kube.objects import KubeObject, whole_number

_PROFILE = re.compile(r"\.profile\s*==\s*'([\w.+]{1,32})'")
_INSTANCE = re.compile(r"\.type\s*==\s*'mig'")
_CLASS = re.compile(r'"deviceClassName"\s*:\s*"([a-z0-9.-]{1,253})"')
_RESOURCE = re.compile(r'"extendedResourceName"\s*:\s*"([\w./-]{1,320})"')
_MOST_NAMED = 5


class SliceJson(KubeObject):
    spec: SliceSpec | None = None


class ClaimJson(KubeObject):
    """A ResourceClaim; of a DeviceClass the spec."""

    raw_spec: Raw = field(name="spec", default=NULL)
    raw_status: Raw = field(name="status", default=NULL)
    status = Lenient(ClaimStatus, of="raw_status")


class ClaimCluster(Struct, frozen=True):
    """All that decides which instances a pod can get."""

    slices: Sequence[SliceJson]
    claims: Sequence[ClaimJson]
    classes: Sequence[ClaimJson]


def _sum(counters: Iterable[tuple[str, Mapping[str, Amount]]]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for name, of_set in counters:
        found.update({(name, one): whole_number(amount.value, one) for one, amount in of_set.items()})
    return found


def _needs(place: Device) -> Counter[tuple[str, str]]:
    return _sum((one.counter_set, one.counters) for one in place.consumes_counters)


def _attribute(place: Device, name: str) -> str:
    found = place.attributes.get(name) or place.attributes.get(f"{NVIDIA_DRIVER}/{name}")
    return (found.text if found is not None else None) or ""


class _Node(Struct):
    """The pool of a node: its places, what is left of the counters, and who has each device."""

    places: list[Device] = field(default_factory=list)
    left: Counter[tuple[str, str]] = field(default_factory=Counter)
    users: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def taken_by(self, place: Device) -> set[str]:
        """Who has to end for the place to be free; empty where it is."""
        if place.name in self.users:
            return self.users[place.name]
        lacking = {counter for counter, amount in _needs(place).items() if self.left[counter] < amount}
        others = [one.name for one in self.places if one.name in self.users and lacking & _needs(one).keys()]
        return {user for name in others for user in self.users[name]}


class WaitsFor(Struct, frozen=True):
    """Why no node has an instance (or `fits`, where one has), by how many nodes, and what would let the pod start."""

    fits: str = ""
    reasons: Mapping[str, int] = {}
    changes: Sequence[Mapping[str, object]] = ()


def profiles_of(cluster: ClaimCluster, namespace: str, claims: Sequence[str], resources: Sequence[str]) -> list[str]:
    """Those that a pod asks for, by its claims and its resources; empty: an instance of any."""
    classes = {one.meta.name: _text(one.raw_spec) for one in cluster.classes}
    specs = [
        _text(one.raw_spec) for one in cluster.claims if one.meta.namespace == namespace and one.meta.name in claims
    ]
    texts = [*specs, *(classes.get(name, "") for spec in specs for name in _CLASS.findall(spec))]
    texts += [text for text in classes.values() if any(name in resources for name in _RESOURCE.findall(text))]
    found = [profile for text in texts for profile in _PROFILE.findall(text)]
    return found or [""] * any(_INSTANCE.search(text) for text in texts)


def _text(raw: Raw) -> str:
    return bytes(raw).decode(errors="replace").replace('\\"', "'")


def waits_for(profile: str, cluster: ClaimCluster) -> WaitsFor:
    """Of one instance of this profile."""
    nodes, wanted = _nodes(cluster), f" {profile}" if profile else ""
    reasons: Counter[str] = Counter()
    ends: list[tuple[int, str, str]] = []
    # By text: what helps one place of a GPU helps the others.
    changes: dict[str, tuple[str, str]] = {}
    for name, node in sorted(nodes.items()):
        known, hindering = set(), set[str]()
        for place in node.places:
            if not (found := _attribute(place, "profile")):
                continue
            known.add(found)
            gpu, users = f"GPU {_attribute(place, 'parentUUID')} of {name}", node.taken_by(place)
            why = users | {f"{taint.key} ({taint.value})" for taint in place.taints}
            if profile not in ("", found):
                if not why:
                    changes.setdefault(f"ask for {found}: there is room on {name}", ("profile", name))
                continue
            if not why:
                return WaitsFor(f"now on {gpu}")
            if not place.taints:
                ends.append((len(users), name, f"the end of {_joined(users)} on {gpu}"))
            elif not users and any(taint.key == CORDONED_TAINT for taint in place.taints):
                changes[f"uncordon {gpu}"] = "uncordon", name
            hindering |= why
        has = f"there are {_joined(known)}" if known else "no GPU in MIG mode is for claims (dra.gpus, mig.on_demand)"
        lacks = f"no MIG instance{wanted}, and no place for one: {has}"
        taken = f"every place for an instance{wanted} is taken or blocked: {_joined(hindering)}"
        reasons[taken if hindering else lacks] += 1
    changes |= {text: ("end", name) for _, name, text in sorted(ends)[:1]}
    if not nodes:
        reasons["no node has ResourceSlices of this driver: are dra.gpus or mig.on_demand set?"] += 1
    shown = [{"kind": kind, "text": text, "node": name, "gpus": ()} for text, (kind, name) in changes.items()]
    return WaitsFor(reasons=reasons, changes=shown[-_MOST_NAMED:])


def _joined(names: Set[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(sorted(names)[:_MOST_NAMED])}{more}"


def _nodes(cluster: ClaimCluster) -> Mapping[str, _Node]:
    specs = [one.spec for one in cluster.slices if one.spec is not None and one.spec.driver == DRIVER]
    # While a driver writes its slices again, those of the older generation are void.
    newest: dict[str, int] = {}
    for pool in (one.pool for one in specs):
        newest[pool.name] = max(pool.generation, newest.get(pool.name, 0))
    nodes = {name: _Node() for name in newest}
    for spec in specs:
        if spec.pool.generation == newest[spec.pool.name]:
            nodes[spec.pool.name].places += spec.devices
            nodes[spec.pool.name].left.update(_sum((one.name, one.counters) for one in spec.shared_counters))
    for claim in cluster.claims:
        allocation, users, where = claim.status.allocation, claim.status.reserved_for, claim.meta.namespace
        user = f"pod {where}/{users[0].name}" if users else f"claim {where}/{claim.meta.name}"
        for one in (allocation.devices.results or ()) if allocation is not None else ():
            if one.driver == DRIVER and one.pool in nodes:
                nodes[one.pool].users[one.device].add(user)
    for node in nodes.values():
        for place in node.places:
            if place.name in node.users:
                node.left.subtract(_needs(place))
    return nodes
