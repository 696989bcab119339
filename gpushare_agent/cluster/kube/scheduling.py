"""What kube-scheduler checks of a node for a pod besides GPUs: cordon, labels, taints, CPU, memory and other resources.

For commands that say where a pod could run: they must promise nothing that kube-scheduler then refuses. What is not checked
here (affinity to other pods, spread, volumes, ports, gates) is named by `PodNeeds.unchecked`. Pure. Format: Kubernetes
core/v1 PodSpec and NodeSpec; the rules are those of its NodeUnschedulable, NodeAffinity, TaintToleration, NodeResourcesFit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from math import ceil

from msgspec import Raw, Struct, field
from msgspec.json import Decoder

from gpushare_agent.cluster.kube.objects import Quantity, amount, read_node_json
from gpushare_agent.kit.json_schema import NULL, Entries, decoded_or, texts

DEFAULT_SCHEDULER = "default-scheduler"
CPU, MEMORY, PODS = "cpu", "memory", "pods"
_UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
"""The taint that comes with `unschedulable`."""
_REFUSING = ("NoSchedule", "NoExecute")
_MILLI = 1000
_NAME_FIELD = "metadata.name"
"""The only field of a node that `matchFields` may name."""


class Requirement(Struct):
    """One of a node affinity's, or of a label selector's."""

    key: str
    operator: str
    values: list[str] | None = None

    def holds(self, labels: Mapping[str, str]) -> bool:
        value, values = labels.get(self.key), self.values or ()
        match self.operator:
            case "In":
                return value in values
            case "NotIn":
                return value not in values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case "Gt" | "Lt" if value is not None and len(values) == 1:
                try:
                    own, other = int(value), int(values[0])
                except ValueError:
                    return False
                return own > other if self.operator == "Gt" else own < other
        # An operator that is not known here holds for no node: a promise less, never one too many.
        return False


class Toleration(Struct):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None

    def tolerates(self, taint: Taint) -> bool:
        if self.effect not in (None, "", taint.effect) or self.key not in (None, "", taint.key):
            return False
        # Without a key it tolerates every taint, which Kubernetes allows with Exists alone.
        return self.operator == "Exists" or (bool(self.key) and (self.value or "") == (taint.value or ""))


class Taint(Struct, frozen=True):
    key: str
    effect: str
    value: str | None = None

    def __str__(self) -> str:
        return f"{self.key}{f'={self.value}' if self.value else ''}:{self.effect}"


class NodeOffer(Struct, frozen=True, kw_only=True):
    """What a node offers to every pod. CPU is in 1/1000; a resource that is not in `allocatable` is not known."""

    name: str
    labels: Mapping[str, str]
    is_cordoned: bool
    taints: tuple[Taint, ...]
    allocatable: Mapping[str, int]


class PodNeeds(Struct, frozen=True, kw_only=True):
    """What a pod asks of its node. A node has to have the labels of `selector`, and to meet one of the `terms` where there
    are any. `unchecked` are the fields that kube-scheduler checks too and nothing here does."""

    requests: Mapping[str, int]
    selector: Mapping[str, str]
    terms: tuple[tuple[Requirement, ...], ...] | None
    tolerations: tuple[Toleration, ...]
    scheduler: str
    unchecked: tuple[str, ...]


# --- reading ---


class _NodeSpec(Struct):
    unschedulable: object = None
    raw_taints: Raw = field(name="taints", default=NULL)


class _Resources(Struct):
    requests: dict[str, Quantity] | None = None
    limits: dict[str, Quantity] | None = None


class _Port(Struct, rename="camel"):
    host_port: int = 0


class _Container(Struct, rename="camel"):
    resources: _Resources | None = None
    restart_policy: object = None
    raw_ports: Raw = field(name="ports", default=NULL)


class _Term(Struct, rename="camel"):
    raw_expressions: Raw = field(name="matchExpressions", default=NULL)
    raw_fields: Raw = field(name="matchFields", default=NULL)


class _Required(Struct, rename="camel"):
    raw_terms: Raw = field(name="nodeSelectorTerms", default=NULL)


class _NodeAffinity(Struct):
    required: _Required | None = field(name="requiredDuringSchedulingIgnoredDuringExecution", default=None)


class _PodAffinity(Struct):
    raw_required: Raw = field(name="requiredDuringSchedulingIgnoredDuringExecution", default=NULL)


class _Affinity(Struct, rename="camel"):
    node_affinity: _NodeAffinity | None = None
    pod_affinity: _PodAffinity | None = None
    pod_anti_affinity: _PodAffinity | None = None


class _Spread(Struct, rename="camel"):
    when_unsatisfiable: str = ""


class _Volume(Struct, rename="camel"):
    persistent_volume_claim: object = None
    ephemeral: object = None


class _Spec(Struct, rename="camel"):
    scheduler_name: str | None = None
    raw_init: Raw = field(name="initContainers", default=NULL)
    raw_containers: Raw = field(name="containers", default=NULL)
    raw_selector: Raw = field(name="nodeSelector", default=NULL)
    raw_affinity: Raw = field(name="affinity", default=NULL)
    raw_tolerations: Raw = field(name="tolerations", default=NULL)
    raw_spread: Raw = field(name="topologySpreadConstraints", default=NULL)
    raw_volumes: Raw = field(name="volumes", default=NULL)
    raw_gates: Raw = field(name="schedulingGates", default=NULL)
    raw_claims: Raw = field(name="resourceClaims", default=NULL)
    overhead: dict[str, Quantity] | None = None
    resources: _Resources | None = None


class _Pod(Struct):
    spec: _Spec | None = None


_POD, _NODE_SPEC, _AFFINITY = Decoder(_Pod), Decoder(_NodeSpec), Decoder(_Affinity)
_CONTAINERS, _TERMS, _TAINTS = Entries(_Container), Entries(_Term), Entries(Taint)
REQUIREMENTS, _TOLERATIONS = Entries(Requirement), Entries(Toleration)
_SPREADS, _VOLUMES, _OBJECTS = Entries(_Spread), Entries(_Volume), Entries(dict[str, object])
_PORTS = Entries(_Port)


def node_offer(raw: Raw) -> NodeOffer:
    """The name is empty where it is no node."""
    node = read_node_json(raw)
    spec = decoded_or(_NODE_SPEC, node.raw_spec, _NodeSpec)
    is_cordoned = spec.unschedulable is True
    return NodeOffer(
        name=node.meta.name or "",
        labels=node.meta.labels,
        is_cordoned=is_cordoned,
        taints=tuple(
            taint
            for taint in _TAINTS.read(spec.raw_taints)
            # Said by `is_cordoned`, and gone with an uncordon.
            if taint.effect in _REFUSING and not (is_cordoned and taint.key == _UNSCHEDULABLE)
        ),
        allocatable=_amounts(node.status.allocatable),
    )


def pod_needs(raw: Raw, ours: Collection[str] = ()) -> PodNeeds:
    """`ours` are resources that placement counts."""
    spec = decoded_or(_POD, raw, _Pod).spec or _Spec()
    affinity = decoded_or(_AFFINITY, spec.raw_affinity, _Affinity) if spec.raw_affinity is not NULL else _Affinity()
    init, main = _CONTAINERS.read(spec.raw_init), _CONTAINERS.read(spec.raw_containers)
    requests = _requests(spec, init, main)
    return PodNeeds(
        requests={name: count for name, count in requests.items() if count and name not in ours},
        selector=texts(spec.raw_selector),
        terms=_terms(affinity.node_affinity),
        tolerations=tuple(_TOLERATIONS.read(spec.raw_tolerations)),
        scheduler=spec.scheduler_name or DEFAULT_SCHEDULER,
        unchecked=tuple(_unchecked(spec, affinity, [*init, *main])),
    )


def _requests(spec: _Spec, init: Sequence[_Container], main: Sequence[_Container]) -> Counter[str]:
    """As Kubernetes adds requests: main containers and sidecars, or an init container with the sidecars before it."""
    lasting: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    for container in init:
        own = _of_container(container.resources)
        peak |= lasting + own
        if container.restart_policy == "Always":
            lasting += own
    for container in main:
        lasting += _of_container(container.resources)
    total = peak | lasting
    # What the pod as a whole asks for replaces the sum of its containers, resource by resource.
    total.update({name: count - total[name] for name, count in _of_container(spec.resources).items()})
    return total + Counter(_amounts(spec.overhead)) + Counter({PODS: 1})


def _of_container(resources: _Resources | None) -> Counter[str]:
    if resources is None:
        return Counter()
    # The API server fills requests in from limits; a manifest that never passed it has the limits alone.
    return Counter(_amounts({**(resources.limits or {}), **(resources.requests or {})}))


def _amounts(quantities: Mapping[str, Quantity] | None) -> dict[str, int]:
    return {name: _amount(name == CPU, str(quantity)) for name, quantity in (quantities or {}).items()}


@lru_cache(maxsize=4096)
def _amount(is_cpu: bool, quantity: str) -> int:
    """Rounded up, as kube-scheduler counts; cached, for fifty thousand pods have a few texts."""
    return ceil((amount(quantity) or 0) * (_MILLI if is_cpu else 1))


def _terms(affinity: _NodeAffinity | None) -> tuple[tuple[Requirement, ...], ...] | None:
    if affinity is None or affinity.required is None:
        return None
    return tuple(
        (*REQUIREMENTS.read(term.raw_expressions), *REQUIREMENTS.read(term.raw_fields))
        for term in _TERMS.read(affinity.required.raw_terms)
    )


def _unchecked(spec: _Spec, affinity: _Affinity, containers: Iterable[_Container]) -> Iterable[str]:
    if _OBJECTS.read(spec.raw_gates):
        yield "schedulingGates"
    if any(one is not None and _OBJECTS.read(one.raw_required) for one in (affinity.pod_affinity,)):
        yield "podAffinity"
    if any(one is not None and _OBJECTS.read(one.raw_required) for one in (affinity.pod_anti_affinity,)):
        yield "podAntiAffinity"
    if any(one.when_unsatisfiable == "DoNotSchedule" for one in _SPREADS.read(spec.raw_spread)):
        yield "topologySpreadConstraints"
    volumes = _VOLUMES.read(spec.raw_volumes)
    if any(one.persistent_volume_claim is not None or one.ephemeral is not None for one in volumes):
        yield "persistent volumes"
    if _OBJECTS.read(spec.raw_claims):
        yield "resourceClaims"
    if any(port.host_port for container in containers for port in _PORTS.read(container.raw_ports)):
        yield "host ports"


# --- deciding ---


def lacking_labels(needs: PodNeeds, offer: NodeOffer) -> tuple[str, ...]:
    """The labels by which the node is not selected, of the affinity's nearest term; empty where it is selected."""
    labels = {**offer.labels, _NAME_FIELD: offer.name}
    lacking = [key for key, value in sorted(needs.selector.items()) if labels.get(key) != value]
    if needs.terms is not None:
        # A term without requirements selects no node; so does an affinity without terms.
        terms = [[one.key for one in term if not one.holds(labels)] for term in needs.terms if term]
        lacking += sorted(terms, key=len)[0] if terms else ["nodeAffinity"]
    return tuple(dict.fromkeys(lacking))


def refusing_taints(needs: PodNeeds, offer: NodeOffer) -> list[Taint]:
    return [taint for taint in offer.taints if not any(one.tolerates(taint) for one in needs.tolerations)]


def shortages(needs: PodNeeds, offer: NodeOffer, used: Mapping[str, int]) -> list[str]:
    """The resources of which the node has too little left; `used` is what its pods ask for."""
    return [
        name
        for name, count in sorted(needs.requests.items())
        # A device that no plugin offers is absent; a node that says nothing of its CPU is no refusal.
        if ("/" in name or name in offer.allocatable) and count > offer.allocatable.get(name, 0) - used.get(name, 0)
    ]
