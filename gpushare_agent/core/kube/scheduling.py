"""The checks of kube-scheduler on a node for a pod, apart from GPUs: cordon, labels, taints, CPU, memory and other
resources.

For commands that say where a pod could run: they must promise nothing that kube-scheduler then refuses. What is not checked
here (affinity to other pods, spread, volumes, ports, gates) is named by `PodNeeds.unchecked`. Pure. Format: Kubernetes
core/v1 PodSpec and NodeSpec; the rules are those of its NodeUnschedulable, NodeAffinity, TaintToleration, NodeResourcesFit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from math import ceil

from msgspec import Raw, Struct, field
from msgspec.json import Decoder

from gpushare_agent.core.kit.json_schema import NULL, Entries, decoded_or, texts
from gpushare_agent.core.kube.objects import Quantity, amount, read_node_json
from gpushare_agent.core.kube.pods import PodSpec
from gpushare_agent.core.model.taints import Taint, Toleration

DEFAULT_SCHEDULER = "default-scheduler"
CPU, MEMORY, PODS = "cpu", "memory", "pods"
_UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
"""The taint that comes with `unschedulable`."""
_REFUSING = ("NoSchedule", "NoExecute")
_MILLI = 1000
MAX_LABEL_VALUES, MAX_LABEL_CHARS = 16, 63
"""Longer ones are no Kubernetes labels."""
_NAME_FIELD = "metadata.name"
"""The only field of a node that `matchFields` may name."""


class Requirement(Struct):
    """A requirement of a node affinity, or of a label selector."""

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


class NodeOffer(Struct, frozen=True, kw_only=True):
    """The resources and labels that a node offers to every pod. CPU is in 1/1000; a resource that is not in `allocatable` is
    not known."""

    name: str
    labels: Mapping[str, str]
    is_cordoned: bool
    taints: tuple[Taint, ...]
    allocatable: Mapping[str, int]


class PodNeeds(Struct, frozen=True, kw_only=True):
    """The demands of a pod on its node. A node has to have the labels of `selector`, and to meet one of the `terms` where
    there are any. `unchecked` are the fields that kube-scheduler checks too and nothing here does."""

    requests: Mapping[str, int]
    selector: Mapping[str, str]
    terms: tuple[tuple[Requirement, ...], ...] | None
    tolerations: tuple[Toleration, ...]
    scheduler: str
    unchecked: tuple[str, ...]


# --- reading ---


class _Term(Struct, rename="camel"):
    raw_expressions: Raw = field(name="matchExpressions", default=NULL)
    raw_fields: Raw = field(name="matchFields", default=NULL)
    expressions = Entries(Requirement, of="raw_expressions")
    fields = Entries(Requirement, of="raw_fields")


class _Required(Struct, rename="camel"):
    raw_terms: Raw = field(name="nodeSelectorTerms", default=NULL)
    terms = Entries(_Term, of="raw_terms")


class _NodeAffinity(Struct):
    required: _Required | None = field(name="requiredDuringSchedulingIgnoredDuringExecution", default=None)


class _PodAffinity(Struct):
    raw_required: Raw = field(name="requiredDuringSchedulingIgnoredDuringExecution", default=NULL)
    required = Entries(dict[str, object], of="raw_required")


class _Affinity(Struct, rename="camel"):
    node_affinity: _NodeAffinity | None = None
    pod_affinity: _PodAffinity | None = None
    pod_anti_affinity: _PodAffinity | None = None


class _Spread(Struct, rename="camel"):
    when_unsatisfiable: str = ""


class _Volume(Struct, rename="camel"):
    persistent_volume_claim: object = None
    ephemeral: object = None


_AFFINITY, _TAINTS, _TOLERATIONS = Decoder(_Affinity), Entries(Taint), Entries(Toleration)
_SPREADS, _VOLUMES, _OBJECTS = Entries(_Spread), Entries(_Volume), Entries(dict[str, object])


def node_offer(raw: Raw) -> NodeOffer:
    """The name is empty where it is no node."""
    node = read_node_json(raw)
    is_cordoned = node.is_cordoned
    return NodeOffer(
        name=node.meta.name or "",
        labels=node.meta.labels,
        is_cordoned=is_cordoned,
        taints=tuple(
            taint
            for taint in _TAINTS.read(node.spec.raw_taints)
            # `is_cordoned` states it, and an uncordon removes it.
            if taint.effect in _REFUSING and not (is_cordoned and taint.key == _UNSCHEDULABLE)
        ),
        allocatable={
            name: amount_of(quantity, is_cpu=name == CPU) for name, quantity in (node.status.allocatable or {}).items()
        },
    )


def pod_needs(spec: PodSpec, ours: Collection[str] = ()) -> PodNeeds:
    """`ours` are resources that placement counts."""
    affinity = _affinity(spec)
    asking = (spec, *(spec.init_containers or ()), *(spec.containers or ()))
    names = {name for one in asking for name in one.requests} | set(spec.overhead)
    requests = {name: asked_of_node(spec, name) for name in names if name not in ours}
    return PodNeeds(
        requests={name: count for name, count in requests.items() if count} | {PODS: 1},
        selector=texts(spec.raw_selector),
        terms=_terms(affinity.node_affinity),
        tolerations=tuple(_TOLERATIONS.read(spec.raw_tolerations)),
        scheduler=str(spec.scheduler_name or DEFAULT_SCHEDULER),
        unchecked=tuple(_unchecked(spec, affinity)),
    )


def asked_of_node(spec: PodSpec, resource: str) -> int:
    """The amount of one resource that kube-scheduler counts (k8s.io/component-helpers, PodRequests): the pod's own request,
    else the highest sum of its containers at any moment; plus its overhead. CPU in 1/1000."""
    of_pod, is_cpu = spec.requests, resource == CPU
    if resource in of_pod:
        most = amount_of(of_pod[resource], is_cpu=is_cpu)
    else:
        # Init containers run one after the other, next to the sidecars that have started before them.
        running = most = 0
        for one in spec.init_containers or ():
            own = amount_of(one.requests.get(resource), is_cpu=is_cpu)
            most = max(most, running + own)
            running += own if one.restart_policy == "Always" else 0
        running += sum(amount_of(one.requests.get(resource), is_cpu=is_cpu) for one in spec.containers or ())
        most = max(most, running)
    return most + amount_of(spec.overhead.get(resource), is_cpu=is_cpu)


# Cached, because fifty thousand pods have a few texts.
@lru_cache(maxsize=16384)
def amount_of(quantity: Quantity | None, *, is_cpu: bool) -> int:
    """Rounded up, as kube-scheduler counts; CPU in 1/1000. 0 where there is none, or none that Kubernetes would take."""
    return max(0, ceil((amount(quantity) or 0) * (_MILLI if is_cpu else 1)))


def values_of_label(spec: PodSpec, label: str) -> tuple[str, ...]:
    """The values that a node's label may have for the pod, sorted, as far as a node selector, or each term of a required
    affinity by In, says so; empty: any."""
    value = texts(spec.raw_selector).get(label)
    if value is not None:
        return (value[:MAX_LABEL_CHARS],)
    allowed: set[str] = set()
    # Any of the terms suffices: one that says nothing of the label allows every value.
    for term in _terms(_affinity(spec).node_affinity) or ():
        values = [one.values or () for one in term if one.key == label and one.operator == "In"]
        if not values:
            return ()
        allowed.update(value[:MAX_LABEL_CHARS] for value in values[0])
    return tuple(sorted(allowed)[:MAX_LABEL_VALUES])


def _affinity(spec: PodSpec) -> _Affinity:
    return decoded_or(_AFFINITY, spec.raw_affinity, _Affinity) if spec.raw_affinity is not NULL else _Affinity()


def _terms(affinity: _NodeAffinity | None) -> tuple[tuple[Requirement, ...], ...] | None:
    if affinity is None or affinity.required is None:
        return None
    return tuple((*term.expressions, *term.fields) for term in affinity.required.terms)


def _unchecked(spec: PodSpec, affinity: _Affinity) -> Iterable[str]:
    if _OBJECTS.read(spec.raw_gates):
        yield "schedulingGates"
    if affinity.pod_affinity is not None and affinity.pod_affinity.required:
        yield "podAffinity"
    if affinity.pod_anti_affinity is not None and affinity.pod_anti_affinity.required:
        yield "podAntiAffinity"
    if any(one.when_unsatisfiable == "DoNotSchedule" for one in _SPREADS.read(spec.raw_spread)):
        yield "topologySpreadConstraints"
    if any(
        one.persistent_volume_claim is not None or one.ephemeral is not None for one in _VOLUMES.read(spec.raw_volumes)
    ):
        yield "persistent volumes"
    if spec.claims:
        yield "resourceClaims"
    containers = (*(spec.init_containers or ()), *(spec.containers or ()))
    if any(port.host_port for container in containers for port in container.ports):
        yield "host ports"


# --- deciding ---


def lacking_labels(needs: PodNeeds, offer: NodeOffer) -> tuple[str, ...]:
    """The labels by which the node is not selected, from the affinity's nearest term; empty where it is selected."""
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
    """The resources that the node has too little left of; `used` is what its pods ask for."""
    return [
        name
        for name, count in sorted(needs.requests.items())
        # A device that no plugin offers is absent; a node that says nothing of its CPU is no refusal.
        if ("/" in name or name in offer.allocatable) and count > offer.allocatable.get(name, 0) - used.get(name, 0)
    ]
