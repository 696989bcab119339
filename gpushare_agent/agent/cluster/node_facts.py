"""What the node's object should have of its GPUs, labels and one annotation, and the least patch that gives it that. Pure.

Others write the same object (kubelet, people, other agents), and whoever may patch nodes can write everything here: what is
not ours is left. node_fields.py reads and patches. Names: docs/reference/node-facts.md; `gaia.tencent.com/gpu-model` is
gpu-manager's, the names under the prefix `nvidia.com` are those of NVIDIA's feature discovery.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from types import MappingProxyType
from typing import TypeVar

from msgspec import Struct, field

from gpushare_agent.agent.cluster.feature_labels import PREFIX as FEATURES_PREFIX
from gpushare_agent.agent.cluster.feature_labels import TIMESTAMP_LABEL
from gpushare_agent.core.kube.objects import NodeJson, amount
from gpushare_agent.core.model.gpus import Gpu, GpuInventory, LinkKind, Topology
from gpushare_agent.core.model.names import GPU_MODEL_LABEL, GPUSHARE_COUNT_RESOURCE, GpuUuid
from gpushare_agent.core.node_report.annotations import (
    ALLOCATIONS_ANNOTATION,
    GPUS_ANNOTATION,
    GPUS_SCHEMA,
    MAX_REASON_CHARS,
    OWN_PREFIX,
)

T = TypeVar("T")

MAX_LABEL_CHARS = 63

_BRANDS = frozenset({"NVIDIA", "TESLA", "GEFORCE", "QUADRO", "GRID"})
_SERIES = frozenset({"RTX", "GTX", "GTS", "GT", "TITAN", "NVS", "PRO", "CMP"})
"""Parts of a name that are no model alone: the next part belongs to it."""
_NOT_OF_LABELS = re.compile(r"[^A-Za-z0-9_.-]+")
LABEL_NAME = re.compile(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII
)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", re.ASCII)


class NodeFacts(Struct, frozen=True, kw_only=True):
    """What the node should have. `owned` are label names that are the agent's whoever wrote them last; `unusable` those of
    the setting node_labels that Kubernetes would refuse, and with them the whole patch. While the driver names none of the
    node's GPUs, `are_gpus_named` is false: labels of before stay. `features` are the labels of GPU Feature Discovery."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    owned: Set[str] = field(default=frozenset())
    unusable: Sequence[str] = ()
    are_gpus_named: bool = True
    features: Mapping[str, str] = field(default_factory=dict)


def node_facts(
    inventory: GpuInventory,
    report: str,
    *,
    label_prefix: str,
    node_labels: Mapping[str, str],
    features: Mapping[str, str] = MappingProxyType({}),
) -> NodeFacts:
    """Everything that the node should have. `report` is the annotation about the GPUs; `node_labels` are the operator's and
    win over what the driver reports."""
    # One invalid label would have the API server refuse the patch, and all others with it.
    valid = {name: value for name, value in node_labels.items() if is_label(name, value)}
    labels = {**gpu_labels(inventory, label_prefix), **valid}
    # gpu-model is gpu-manager's: a node that is taken over from it has its value, which is to be replaced.
    owned = {GPU_MODEL_LABEL, *valid, *(name for name in labels if name.startswith(f"{OWN_PREFIX}/"))}
    return NodeFacts(
        labels=dict(sorted(labels.items())),
        annotations={GPUS_ANNOTATION: report},
        owned=frozenset(owned),
        unusable=tuple(sorted(node_labels.keys() - valid.keys())),
        are_gpus_named=not inventory.gpus or bool(_named(inventory)),
        # The operator's labels win, those under NVIDIA's prefix too.
        features={name: value for name, value in features.items() if name not in valid},
    )


def gpu_labels(inventory: GpuInventory, prefix: str) -> dict[str, str]:
    """Labels of what the node has, whether its GPUs are healthy or not: health is in the annotation.

    With several kinds of GPUs, product and model are those of the most numerous (then the largest) and
    `gpu.mixed` is set; memory and compute capability are the least, which every GPU of the node keeps.
    """
    named = _named(inventory)
    if not named:
        return {}
    product = _most_numerous(named)
    labels = {
        GPU_MODEL_LABEL: gpu_model(product),
        f"{prefix}/gpu.product": label_value(product),
        # The least: a pod that selects by it may get any of the node's GPUs.
        f"{prefix}/gpu.memory": str(min(gpu.memory_mib for gpu in named) or ""),
        f"{prefix}/gpu.count": str(len(inventory.gpus)),
    }
    if len({(gpu.name, gpu.memory_mib) for gpu in named}) > 1:
        labels[f"{prefix}/gpu.mixed"] = "true"
    capabilities = [gpu.compute_capability for gpu in named]
    known = [capability for capability in capabilities if capability is not None]
    # Of one GPU the driver may not report it: the least of the others would promise too much.
    if len(known) == len(named):
        major, minor = min(known)
        labels |= {f"{prefix}/gpu.compute.major": str(major), f"{prefix}/gpu.compute.minor": str(minor)}
    labels |= _driver_labels(inventory.driver_version, prefix)
    return {name: value for name, value in labels.items() if value}


def gpu_model(name: str) -> str:
    """The part of the name after the brand, as a label value: `Tesla P40` → `P40`, `NVIDIA H100 80GB HBM3` → `H100`.

    A name of no known brand gives its second part, as gpu-manager does. Parts that only name a series (RTX, GTX, TITAN)
    take the next with them: `Quadro RTX 8000` → `RTX-8000`, `NVIDIA RTX PRO 6000 Blackwell` → `RTX-PRO-6000`.
    """
    words = name.split()
    behind = list(words)
    # `NVIDIA GeForce RTX 4090` has two; the last word stays, whatever it is.
    while len(behind) > 1 and behind[0].upper() in _BRANDS:
        del behind[0]
    # `RTX PRO 6000` has two.
    length = next((n for n, word in enumerate(behind[:-1], 1) if word.upper() not in _SERIES), len(behind))
    if length > 1:
        # A Quadro of an earlier generation has the same number.
        generation = ["Ada"] if "Ada" in behind[length:] else []
        return label_value("-".join([*behind[:length], *generation]))
    # No brand that is known: the first word is taken for it.
    if len(behind) == len(words) and len(words) > 1:
        return label_value(words[1])
    return label_value(behind[0]) if behind else ""


def label_value(text: str) -> str:
    """The text as Kubernetes takes it for a label: other characters than letters, digits, `-_.` become one `-`."""
    return _NOT_OF_LABELS.sub("-", text)[:MAX_LABEL_CHARS].strip("-_.")


def is_label(name: str, value: str) -> bool:
    """Whether Kubernetes takes this label: one that it refuses would keep all others away."""
    return LABEL_NAME.fullmatch(name) is not None and _LABEL_VALUE.fullmatch(value) is not None


def gpus_annotation(
    inventory: GpuInventory,
    *,
    cordoned: Mapping[GpuUuid, bool],
    memory_block_mib: int,
    shares_in_mig: bool = False,
    unhealthy: Mapping[GpuUuid, str] = MappingProxyType({}),
    in_parts: Collection[GpuUuid] = (),
) -> str:
    """The GPUs as compact JSON, about 250 bytes a GPU. `links` has an entry for each GPU of the list, in its order.
    `shares_in_mig` as ResourceNames has it. `cordoned` says of each such GPU whether an uncordon would put it back in
    service, `unhealthy` what is wrong with a GPU itself; `in_parts` are those that serve names such as NVIDIA's too."""
    gpus = sorted(inventory.gpus, key=lambda gpu: gpu.index)

    def fact_of(gpu: Gpu) -> dict[str, object]:
        fact: dict[str, object] = {
            **{name: getattr(gpu, name) for name in ("index", "uuid", "name", "memory_mib", "is_healthy")},
            "numa": gpu.numa_node,
            "links": [_link_word(inventory.topology, gpu.index, other.index) for other in gpus],
        }
        # Only where it is true: 200 bytes a GPU, and most are not cordoned.
        if gpu.uuid in cordoned:
            fact["cordoned"] = True
        if cordoned.get(gpu.uuid):
            fact["would_be_healthy"] = True
        if gpu.uuid in unhealthy:
            fact["reason"] = unhealthy[gpu.uuid][:MAX_REASON_CHARS]
        if gpu.host_memory is not None:
            fact["host_memory"] = gpu.host_memory
        if gpu.uuid in in_parts:
            fact["parts"] = True
        if gpu.mig:
            takes_shares = shares_in_mig and gpu.mig.has_own_memory
            fact["mig"] = {"label": gpu.label, "profile": gpu.mig.profile, "shares": takes_shares}
        return fact

    document: dict[str, object] = {"schema": GPUS_SCHEMA, "memory_block_mib": memory_block_mib}
    document["gpus"] = [fact_of(gpu) for gpu in gpus]
    if inventory.on_demand:
        document["mig_gpus"] = [fact_of(gpu) for gpu in inventory.on_demand]
    return json.dumps(document, separators=(",", ":"))


def _named(inventory: GpuInventory) -> list[Gpu]:
    return [gpu for gpu in inventory.gpus if gpu.name]


def _most_numerous(gpus: Sequence[Gpu]) -> str:
    counts = Counter(gpu.name for gpu in gpus)
    # Of one name the largest: the last one written wins.
    largest = {gpu.name: gpu.memory_mib for gpu in sorted(gpus, key=lambda gpu: gpu.memory_mib)}
    return min(counts, key=lambda name: (-counts[name], -largest[name], name))


def _driver_labels(version: str, prefix: str) -> dict[str, str]:
    parts = version.split(".")
    if len(parts) < 2 or not all(part.isascii() and part.isdigit() for part in parts):
        return {}
    base = f"{prefix}/cuda.driver-version"
    return {f"{base}.full": label_value(version), f"{base}.major": parts[0], f"{base}.minor": parts[1]}


def _link_word(topology: Topology, a: int, b: int) -> str:
    """The link as nvidia-smi writes it; a GPU that the topology does not know is far from all."""
    if a == b:
        return "X"
    if max(a, b) >= len(topology.links):
        return LinkKind.SYS.name
    link = topology.link(a, b)
    return f"NV{link.nvlinks}" if link.kind is LinkKind.NVLINK else link.kind.name


LABELS_ANNOTATION = f"{OWN_PREFIX}/labels"
"""Names of the labels that the agent wrote, comma list, sorted: only these are ever removed. Anybody who may patch the node,
its kubelet too, can write it: `_recorded` bounds what is believed of it."""
FEATURES_ANNOTATION = f"{OWN_PREFIX}/gfd-timestamp"
"""The label nvidia.com/gfd.timestamp as the agent wrote it: another value is of a GPU Feature Discovery that runs."""
MAX_RECORD_CHARS = 16 * 1024
MAX_RECORDED = 256

_KUBERNETES_DOMAINS = ("kubernetes.io", "k8s.io")
"""Domains with all below them. A kubelet may not change labels of these (NodeRestriction), others it may change anyway."""


class NodePatch(Struct, frozen=True, kw_only=True):
    """What has to change: a merge patch (None removes), empty where nothing has, and `shown` of it in the log. `foreign` are
    labels to which somebody else gave other values, left as they are; `unusable` those of the settings that Kubernetes would
    refuse."""

    what: str
    body: Mapping[str, object] = field(default_factory=dict)
    shown: Mapping[str, object] = field(default_factory=dict)
    subresource: str = ""
    foreign: Sequence[str] = ()
    unusable: Sequence[str] = ()


def plan_facts_patch(node: NodeJson, desired: NodeFacts) -> NodePatch:
    """Labels and the annotation about the GPUs.

    A label is removed only where the node's own record says that the agent wrote it, and never one of Kubernetes, for the
    record may be forged. A label that somebody else wrote with another value is left, unless it is the agent's by name.
    Where GPU Feature Discovery runs, all labels of its prefix are its own.
    """
    labels, present = node.meta.labels, node.meta.annotations
    recorded = _recorded(present.get(LABELS_ANNOTATION, ""))
    others_features = _of_feature_discovery(labels, present.get(FEATURES_ANNOTATION), desired, recorded)
    # GPU Feature Discovery has come after us: its labels are no longer ours to remove.
    recorded -= others_features
    features = _features(labels, desired) if not others_features else {}
    all_desired = {**desired.labels, **features}
    foreign = {
        name
        for name, value in {**desired.labels, **desired.features}.items()
        if name not in desired.owned and name not in recorded and labels.get(name, value) != value
    }
    # Only what differs is sent, so that a node that is right costs no write.
    set_labels = {n: v for n, v in all_desired.items() if n not in foreign and labels.get(n) != v}
    # A driver that is away for a moment must not take the labels by which pods are scheduled to this node.
    applicable = all_desired.keys() if desired.are_gpus_named else all_desired.keys() | labels.keys()
    gone = {name for name in recorded - applicable if name in labels}
    # A label with the desired value that somebody else wrote is not recorded: it is theirs to remove.
    ours = (recorded & applicable) | set_labels.keys() | (desired.owned & desired.labels.keys())
    annotations: dict[str, str | None] = {**desired.annotations, LABELS_ANNOTATION: ",".join(sorted(ours))}
    written_at = features.get(TIMESTAMP_LABEL)
    # While the driver is away the labels stay, and the record of them with them.
    if desired.are_gpus_named and present.get(FEATURES_ANNOTATION) != written_at:
        annotations[FEATURES_ANNOTATION] = written_at
    changed = {"labels": {**set_labels, **dict.fromkeys(gone)}, "annotations": _changed(present, annotations)}
    metadata = {key: dict(sorted(values.items())) for key, values in changed.items() if values}
    return NodePatch(
        what="labels and annotations",
        body={"metadata": metadata} if metadata else {},
        shown={"labels": set_labels, "removed": sorted(gone), "annotations": sorted(changed["annotations"])},
        foreign=tuple(sorted(foreign)),
        unusable=desired.unusable,
    )


def _of_feature_discovery(
    labels: Mapping[str, str], own_timestamp: str | None, desired: NodeFacts, recorded: Set[str]
) -> Set[str]:
    """Names under its prefix that are not the agent's to write or remove: all, where GPU Feature Discovery runs."""
    # GPU Feature Discovery writes its timestamp at each start: another value than ours is its work.
    is_overwritten = labels.get(TIMESTAMP_LABEL, own_timestamp) != own_timestamp
    if is_overwritten or any(name in labels and name not in recorded for name in desired.features):
        names = labels.keys() | desired.features.keys()
        return {name for name in names if name.startswith(FEATURES_PREFIX)} - desired.owned
    return frozenset()


def _features(labels: Mapping[str, str], desired: NodeFacts) -> Mapping[str, str]:
    """The features, with the timestamp of before where nothing else changes."""
    # The time alone is no change: it would be a write to the API server with every comparison.
    before = labels.get(TIMESTAMP_LABEL)
    if before is None or any(
        labels.get(name) != value for name, value in desired.features.items() if name != TIMESTAMP_LABEL
    ):
        return desired.features
    return {**desired.features, TIMESTAMP_LABEL: before} if desired.features else desired.features


def plan_allocations_patch(node: NodeJson, text: str) -> NodePatch:
    """The annotation about the allocations."""
    changed = _changed(node.meta.annotations, {ALLOCATIONS_ANNOTATION: text})
    return NodePatch(what="annotations", body={"metadata": {"annotations": changed}} if changed else {})


def plan_capacity_patch(node: NodeJson, desired: tuple[str, int | None]) -> NodePatch:
    """The number of GPUs of GPUShare, after its resource of memory, in the node's capacity; the kubelet takes it over into
    what can be allocated. None removes it, unless a device plugin, not this agent's, offers that resource."""
    resource, count = desired
    if count is None and amount((node.status.allocatable or {}).get(resource)):
        return NodePatch(what="capacity")
    wanted = {GPUSHARE_COUNT_RESOURCE: None if count is None else str(count)}
    capacity = _changed(node.status.capacity or {}, wanted)
    # The subresource status has a right of its own.
    body = {"status": {"capacity": capacity}} if capacity else {}
    return NodePatch(what="capacity", body=body, shown={"capacity": capacity}, subresource="status")


def _changed(present: Mapping[str, object], desired: Mapping[str, T]) -> dict[str, T]:
    return {name: value for name, value in desired.items() if present.get(name) != value}


def _recorded(text: str) -> set[str]:
    """The names of the record that may be the agent's work; none where it is larger than the agent ever makes it."""
    # Whoever may patch the node may have made it long: nothing of such a record is believed.
    names = set(text.split(",")) if len(text) <= MAX_RECORD_CHARS else set()
    plausible = {name for name in names if LABEL_NAME.fullmatch(name) and not _is_of_kubernetes(name)}
    return plausible if len(names) <= MAX_RECORDED else set()


def _is_of_kubernetes(name: str) -> bool:
    # Without a slash it is the user's own label, of no domain.
    domain, slash, _ = name.rpartition("/")
    return bool(slash) and any(domain == known or domain.endswith(f".{known}") for known in _KUBERNETES_DOMAINS)
