"""From what the node's object has to what it should have: the least patch. Pure.

Others write the same object (kubelet, people, other agents), and whoever may patch nodes can write everything here: what is
not ours is left. node_fields.py reads and patches; docs/reference/node-facts.md has the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from msgspec import Struct, field

from gpushare_agent.cluster.decisions.feature_labels import PREFIX as FEATURES_PREFIX
from gpushare_agent.cluster.decisions.feature_labels import TIMESTAMP_LABEL
from gpushare_agent.cluster.decisions.node_annotations import ALLOCATIONS_ANNOTATION, OWN_PREFIX
from gpushare_agent.cluster.decisions.node_facts import LABEL_NAME, NodeFacts
from gpushare_agent.cluster.kube.pods import mapping_or_empty

LABELS_ANNOTATION = f"{OWN_PREFIX}/labels"
"""Names of the labels that the agent wrote, comma list, sorted: only these are ever removed. Anybody who may patch the node,
its kubelet too, can write it: `_recorded` bounds what is believed of it."""
FEATURES_ANNOTATION = f"{OWN_PREFIX}/gfd-timestamp"
"""The label nvidia.com/gfd.timestamp as the agent wrote it: another value is of a GPU Feature Discovery that runs."""
MAX_RECORD_CHARS = 16 * 1024
MAX_RECORDED = 256

_KUBERNETES_DOMAINS = ("kubernetes.io", "k8s.io")
"""With all below them. A kubelet is kept from changing labels of these (NodeRestriction), others it may change anyway."""


class NodeObject(Struct, frozen=True, kw_only=True):
    """What the node's object has of the fields that are written here. Values that are no text are left out."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    capacity: Mapping[str, str]


class NodePatch(Struct, frozen=True, kw_only=True):
    """What has to change; None removes. `foreign` are labels to which somebody else gave other values, left as they are;
    `unusable` those of the settings that Kubernetes would refuse."""

    labels: Mapping[str, str | None] = field(default_factory=dict)
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    capacity: Mapping[str, str] = field(default_factory=dict)
    foreign: Sequence[str] = ()
    unusable: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.labels or self.annotations or self.capacity)


def parse_node(raw_node: Mapping[str, Any]) -> NodeObject:
    metadata, status = mapping_or_empty(raw_node.get("metadata")), mapping_or_empty(raw_node.get("status"))
    return NodeObject(
        labels=_texts(metadata.get("labels")),
        annotations=_texts(metadata.get("annotations")),
        capacity=_texts(status.get("capacity")),
    )


def plan_facts_patch(node: NodeObject, wanted: NodeFacts) -> NodePatch:
    """Labels and the annotation about the GPUs.

    A label is removed only where the node's own record says that the agent wrote it, and never one of Kubernetes, for the
    record may be forged. A label that somebody else wrote with another value is left, unless it is the agent's by name.
    Where GPU Feature Discovery runs, all labels of its prefix are its own.
    """
    labels = node.labels
    recorded = _recorded(node.annotations.get(LABELS_ANNOTATION, ""))
    others_features = _of_feature_discovery(node, wanted, recorded)
    recorded -= others_features
    features = _features(node, wanted) if not others_features else {}
    all_wanted = {**wanted.labels, **features}
    foreign = {
        name
        for name, value in {**wanted.labels, **wanted.features}.items()
        if name not in wanted.owned and name not in recorded and labels.get(name, value) != value
    }
    set_labels = {n: v for n, v in all_wanted.items() if n not in foreign and labels.get(n) != v}
    kept = all_wanted.keys() if wanted.are_gpus_named else all_wanted.keys() | labels.keys()
    gone = {name for name in recorded - kept if name in labels}
    ours = (recorded & kept) | set_labels.keys() | (wanted.owned & wanted.labels.keys())
    annotations: dict[str, str | None] = {**wanted.annotations, LABELS_ANNOTATION: ",".join(sorted(ours))}
    written_at = features.get(TIMESTAMP_LABEL)
    if wanted.are_gpus_named and node.annotations.get(FEATURES_ANNOTATION) != written_at:
        annotations[FEATURES_ANNOTATION] = written_at
    changed = {name: value for name, value in annotations.items() if node.annotations.get(name) != value}
    return NodePatch(
        labels=dict(sorted({**set_labels, **dict.fromkeys(gone)}.items())),
        annotations=dict(sorted(changed.items())),
        foreign=tuple(sorted(foreign)),
        unusable=wanted.unusable,
    )


def _of_feature_discovery(node: NodeObject, wanted: NodeFacts, recorded: Set[str]) -> Set[str]:
    """Names under its prefix that are not the agent's to write or remove: all, where GPU Feature Discovery runs."""
    own_timestamp = node.annotations.get(FEATURES_ANNOTATION)
    is_overwritten = node.labels.get(TIMESTAMP_LABEL, own_timestamp) != own_timestamp
    if is_overwritten or any(name in node.labels and name not in recorded for name in wanted.features):
        names = node.labels.keys() | wanted.features.keys()
        return {name for name in names if name.startswith(FEATURES_PREFIX)} - wanted.owned
    return frozenset()


def _features(node: NodeObject, wanted: NodeFacts) -> Mapping[str, str]:
    """With the timestamp of before, where nothing else changes."""
    before = node.labels.get(TIMESTAMP_LABEL)
    if before is None or any(
        node.labels.get(name) != value for name, value in wanted.features.items() if name != TIMESTAMP_LABEL
    ):
        return wanted.features
    return {**wanted.features, TIMESTAMP_LABEL: before} if wanted.features else wanted.features


def plan_allocations_patch(node: NodeObject, text: str) -> NodePatch:
    """The annotation about the allocations."""
    return NodePatch(annotations=_changed(node.annotations, {ALLOCATIONS_ANNOTATION: text}))


def plan_capacity_patch(node: NodeObject, wanted: Mapping[str, int]) -> NodePatch:
    """Counts of extended resources in the node's capacity."""
    return NodePatch(capacity=_changed(node.capacity, {resource: str(count) for resource, count in wanted.items()}))


def _changed(present: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in wanted.items() if present.get(name) != value}


def _recorded(text: str) -> set[str]:
    """The names of the record that may be the agent's work; none where it is larger than the agent ever makes it."""
    names = set(text.split(",")) if len(text) <= MAX_RECORD_CHARS else set()
    plausible = {name for name in names if LABEL_NAME.fullmatch(name) and not _is_of_kubernetes(name)}
    return plausible if len(names) <= MAX_RECORDED else set()


def _is_of_kubernetes(name: str) -> bool:
    domain, slash, _ = name.rpartition("/")
    return bool(slash) and any(domain == known or domain.endswith(f".{known}") for known in _KUBERNETES_DOMAINS)


def _texts(raw: object) -> dict[str, str]:
    return {n: v for n, v in mapping_or_empty(raw).items() if isinstance(n, str) and isinstance(v, str)}
