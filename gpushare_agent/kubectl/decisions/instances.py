"""Why a pod waits that wants MIG instances by ResourceClaims or by a DeviceClass's resource, and what would let it start.
Pure.

The devices are those of this driver's ResourceSlices: existing instances, and the places for them, which share counters
(resource.k8s.io/v1). Of an expression (CEL) the profiles that it compares are read, and nothing else.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property

from msgspec import Raw, Struct, field
from msgspec.json import Decoder

from gpushare_agent.core.claims.claim import DRIVER
from gpushare_agent.core.claims.devices import CORDONED_TAINT, NVIDIA_DRIVER
from gpushare_agent.core.kit.json_schema import NULL, Lenient, decoded_or
from gpushare_agent.core.kube.claims import ClaimStatus, Device, SliceSpec
from gpushare_agent.core.kube.claims import Counter as Amount
from gpushare_agent.core.kube.objects import KubeObject, amount, whole_number
from gpushare_agent.core.model.names import NVIDIA_MIG_PREFIX

_PROFILE = re.compile(r"\.profile\s*==\s*'([^']{1,64})'")
_INSTANCE = re.compile(r"\.type\s*==\s*'mig'")
_CLASS = re.compile(r'"deviceClassName"\s*:\s*"([a-z0-9.-]{1,253})"')
_RESOURCE = re.compile(r'"extendedResourceName"\s*:\s*"([\w./-]{1,320})"')
_COUNT = re.compile(r'"count"\s*:\s*(\d{1,9})')
_CAPACITY = re.compile(r'"capacity"\s*:\s*\{\s*"requests"\s*:\s*\{([^{}]*)\}')
_AMOUNT = re.compile(r'"([\w./-]{1,100})"\s*:\s*"?([\w.]{1,20})')
_ONE_GPU = re.compile(r'"matchAttribute"\s*:\s*"[\w.-]+/parentUUID"')
_GIB = re.compile(r"(\d{1,4})gb")
_MOST_NAMED = 5
_MOST_PROFILES = 3
_OWN = "the pod's other instances"


class SliceJson(KubeObject):
    spec: SliceSpec | None = None


class ClaimJson(KubeObject):
    """A ResourceClaim; of a DeviceClass the spec."""

    raw_spec: Raw = field(name="spec", default=NULL)
    raw_status: Raw = field(name="status", default=NULL)
    status = Lenient(ClaimStatus, of="raw_status")


class _Devices(Struct):
    requests: Sequence[Raw] = ()
    constraints: Raw = NULL


class _ClaimSpec(Struct):
    devices: _Devices = field(default_factory=_Devices)


_CLAIM_SPEC = Decoder(_ClaimSpec)


class Wanted(Struct, frozen=True):
    """So many instances of one of the profiles, none for any, all on one GPU where the claim says so; of a share what
    it asks of each."""

    profiles: Set[str]
    count: int = 1
    capacity: Sequence[tuple[str, str]] = ()
    on_one_gpu: bool = False

    def is_of(self, place: Device) -> bool:
        return not self.profiles or _attribute(place, "profile") in self.profiles

    def too_small(self, place: Device) -> str:
        """What the place has less of than is asked; empty where it has enough."""
        for name, asked in self.capacity:
            if name not in place.capacity:
                return f"it has no capacity {name}"
            has = place.capacity[name].value
            if (amount(asked) or 0) > (amount(has) or 0):
                return f"it has {name} {has}, and {asked} is asked"
        return ""


class ClaimCluster(Struct, frozen=True, dict=True):
    """All that decides which instances a pod can get."""

    slices: Sequence[SliceJson]
    claims: Sequence[ClaimJson]
    classes: Sequence[ClaimJson]

    # Once for all pods that wait: a cluster may have thousands of them and of claims.
    @cached_property
    def by_name(self) -> Mapping[tuple[str | None, str | None], ClaimJson]:
        return {(claim.meta.namespace, claim.meta.name): claim for claim in self.claims}

    @cached_property
    def class_texts(self) -> Mapping[str | None, str]:
        return {one.meta.name: _text(one.raw_spec) for one in self.classes}

    @cached_property
    def by_resource(self) -> Mapping[str, str]:
        return {name: text for text in self.class_texts.values() for name in _RESOURCE.findall(text)[:1]}


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
    """The pool of a node: its places, what each needs, what is left of it, and who has each device. A device is a counter of
    its own, too."""

    places: list[Device] = field(default_factory=list)
    needs: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)
    left: Counter[tuple[str, str]] = field(default_factory=Counter)
    users: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def taken_by(self, place: Device, own: Counter[tuple[str, str]]) -> set[str]:
        """Who has to end for the place to be free, next to the pod's own instances; empty where it is."""
        lacking = {one for one, asked in self.needs[place.name].items() if self.left[one] - own[one] < asked}
        others = [name for name in self.users if name in self.needs and lacking & self.needs[name].keys()]
        return {user for name in others for user in self.users[name]} | ({_OWN} if lacking & own.keys() else set())

    def take(self, wanted: Sequence[Wanted], gpu: str) -> _Taken:
        """First fit, as the scheduler's; `gpu` is the only one, empty for any."""
        taken = _Taken(gpu)
        for one in wanted:
            of_it = (place for place in self.places if gpu in ("", _attribute(place, "parentUUID")))
            fitting = (place for place in of_it if one.is_of(place) and not place.taints and not one.too_small(place))
            for _ in range(one.count):
                if (place := next((one for one in fitting if not self.taken_by(one, taken.needs)), None)) is None:
                    taken.short = one
                    return taken
                taken.places.append(place)
                taken.needs.update(self.needs[place.name])
        return taken


class _Taken(Struct):
    """What a pod's instances find on a node, and the first request that finds too little."""

    gpu: str
    places: list[Device] = field(default_factory=list)
    needs: Counter[tuple[str, str]] = field(default_factory=Counter)
    short: Wanted | None = None


class WaitsFor(Struct, frozen=True):
    """Why no node has an instance (or `fits`, where one has), by how many nodes, and what would let the pod start."""

    fits: str = ""
    reasons: Mapping[str, int] = {}
    changes: Sequence[Mapping[str, object]] = ()


def wanted_of(
    cluster: ClaimCluster, namespace: str, claims: Sequence[str], resources: Mapping[str, int]
) -> Sequence[Wanted]:
    """What a pod asks for of MIG, by its claims and its resources. Raises nothing."""
    classes, of_resources = cluster.class_texts, cluster.by_resource
    found = [
        _wanted(of_resources[name], [of_resources[name]], count, on_one_gpu=False)
        for name, count in resources.items()
        if name in of_resources
    ]
    for claim in (cluster.by_name.get((namespace, name)) for name in dict.fromkeys(claims)):
        if claim is None:
            continue
        devices = decoded_or(_CLAIM_SPEC, claim.raw_spec, _ClaimSpec).devices
        on_one_gpu = _ONE_GPU.search(_text(devices.constraints)) is not None
        for text in map(_text, devices.requests):
            texts = [text, *(classes.get(name, "") for name in _CLASS.findall(text))]
            found.append(_wanted(text, texts, int((_COUNT.findall(text) or "1")[0]), on_one_gpu=on_one_gpu))
    return [one for one in found if one is not None]


def _wanted(request: str, texts: Sequence[str], count: int, *, on_one_gpu: bool) -> Wanted | None:
    """Of a request and its classes; None where they are not of MIG. The request's profiles are among its class's."""
    profiles = next(filter(None, map(_PROFILE.findall, texts)), [])
    if not profiles and not any(_INSTANCE.search(one) for one in texts):
        return None
    capacity = [one for asked in _CAPACITY.findall(request) for one in _AMOUNT.findall(asked)]
    return Wanted(frozenset(profiles), count, capacity, on_one_gpu)


def _text(raw: Raw) -> str:
    return bytes(raw).decode(errors="replace").replace('\\"', "'")


def waits_for(wanted: Sequence[Wanted], cluster: ClaimCluster) -> WaitsFor:
    """Of all that a pod asks for of MIG."""
    nodes, total = _nodes(cluster), sum(one.count for one in wanted)
    reasons: Counter[str] = Counter()
    ends: list[tuple[int, str, str]] = []
    # By text: what helps one place of a GPU helps the others.
    changes: dict[str, tuple[str, str]] = {}
    other: dict[str, str] = {}
    fewer: list[tuple[int, str, str]] = []
    for name, node in sorted(nodes.items()):
        one_gpu = any(one.on_one_gpu for one in wanted)
        gpus = sorted({_attribute(place, "parentUUID") for place in node.places} - {""}) if one_gpu else []
        most = max((node.take(wanted, gpu) for gpu in gpus or [""]), key=lambda one: len(one.places))
        if (short := most.short) is None:
            labels = ", ".join(dict.fromkeys(map(_label, most.places)))
            return WaitsFor(f"now on GPU{'s' * (',' in labels)} {labels} of {name}")
        last = total - len(most.places) == 1
        if most.places and len(wanted) == 1:
            fewer.append((-len(most.places), name, f"ask for {len(most.places)}: there is room on {name}"))
        known, hindering = set[str](), set[str]()
        for place in node.places:
            if not (found := _attribute(place, "profile")):
                continue
            known.add(found)
            if most.gpu not in ("", _attribute(place, "parentUUID")):
                continue
            gpu, users = f"GPU {_label(place)} of {name}", node.taken_by(place, most.needs)
            why = users | {f"{taint.key} ({taint.value})" for taint in place.taints}
            small = short.too_small(place)
            if not short.is_of(place):
                if not why and not small and total == 1:
                    other.setdefault(found, name)
                continue
            if small:
                hindering.add(small)
                continue
            if not place.taints and last and _OWN not in users:
                ends.append((len(users), name, f"the end of {_joined(users)} on {gpu}"))
            elif not users and last and any(taint.key == CORDONED_TAINT for taint in place.taints):
                changes[f"uncordon {gpu}"] = "uncordon", name
            hindering |= why
        asked = "".join(f" {profile}" for profile in [" or ".join(sorted(short.profiles))] if profile)
        has = f"there are {_joined(known)}" if known else "no GPU in MIG mode is for claims (dra.gpus, mig.on_demand)"
        lacks = f"no MIG instance{asked}, and no place for one: {has}"
        is_small = any(short.is_of(place) and short.too_small(place) for place in node.places)
        taken = (
            f"every place for an instance{asked} is {'too small, ' * is_small}taken or blocked: {_joined(hindering)}"
        )
        room = f"there is room for {len(most.places)} of {total} instances; for the next, " if total > 1 else ""
        reasons[f"{room}{taken if hindering else lacks}"] += 1
    size = max((_gib(profile) for one in wanted for profile in one.profiles), default=0)
    near = sorted(other, key=lambda profile: abs(_gib(profile) - size))[:_MOST_PROFILES]
    changes = {f"ask for {one}: there is room on {other[one]}": ("profile", other[one]) for one in near} | changes
    changes |= {text: ("count", name) for _, name, text in sorted(fewer)[:1]}
    changes |= {text: ("end", name) for _, name, text in sorted(ends)[:1]}
    if not nodes:
        reasons["no node has ResourceSlices of this driver: are dra.gpus or mig.on_demand set?"] += 1
    shown = [{"kind": kind, "text": text, "node": name, "gpus": ()} for text, (kind, name) in changes.items()]
    return WaitsFor(reasons=reasons, changes=shown[-_MOST_NAMED:])


def instead_of(resource: str, cluster: ClaimCluster) -> str:
    """What there is instead of a MIG resource that no DeviceClass has, as the end of a sentence; empty where nothing is."""
    places = [place for node in _nodes(cluster).values() for place in node.places]
    have = {NVIDIA_MIG_PREFIX + found.replace("+", ".") for place in places if (found := _attribute(place, "profile"))}
    if resource in have:
        return "; GPUs have this profile: the component dra-mig-profiles (Helm: dra.migProfiles) makes its class"
    classes = have & cluster.by_resource.keys()
    return f"; claims give {_joined(classes)}" if classes else ""


def attributes_of_instances(cluster: ClaimCluster) -> str:
    """What an expression can ask of a MIG instance, without other domains' names."""
    places = [place for node in _nodes(cluster).values() for place in node.places if _attribute(place, "profile")]
    return ", ".join(sorted({name for place in places[:1] for name in place.attributes if "/" not in name}))


def _label(place: Device) -> str:
    """Of the GPU of a place, as other views name it."""
    index = place.attributes.get("index")
    return _attribute(place, "parentUUID") if index is None or index.number is None else str(index.number)


def _gib(profile: str) -> int:
    return int((_GIB.findall(profile) or "0")[0])


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
            node = nodes[spec.pool.name]
            node.places += spec.devices
            node.needs |= {one.name: Counter({("", one.name): 1}) + _needs(one) for one in spec.devices}
            node.left.update({("", one.name): 1 for one in spec.devices})
            node.left.update(_sum((one.name, one.counters) for one in spec.shared_counters))
    for claim in cluster.claims:
        allocation, users, where = claim.status.allocation, claim.status.reserved_for, claim.meta.namespace
        user = f"pod {where}/{users[0].name}" if users else f"claim {where}/{claim.meta.name}"
        for one in (allocation.devices.results or ()) if allocation is not None else ():
            if one.driver == DRIVER and one.pool in nodes:
                nodes[one.pool].users[one.device].add(user)
    for node in nodes.values():
        for place in node.places:
            if place.name in node.users:
                node.left.subtract(node.needs[place.name])
    return nodes
