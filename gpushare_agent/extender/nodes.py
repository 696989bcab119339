"""A Node of the API server's JSON as the scheduler extender needs it: its cards, how they are linked, and who holds them.

Read once, bounded, and never trusted. What the node's annotations cannot tell is taken from its counts of the resources, and
the complaint says so; nothing raises. Formats: docs/node-facts.md, Kubernetes core/v1 Node.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gpushare_agent.cluster.kube.quantities import whole_number
from gpushare_agent.cluster.node_annotations import (
    CARDS_ANNOTATION,
    HELD_ANNOTATION,
    HELD_SCHEMA,
    ToldCard,
    even_cards,
    is_count,
    parse_cards,
    parse_document,
)
from gpushare_agent.extender.values import Charge, ClusterNode, NodeCard
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.names import CORES_PER_CARD, GpuUuid, PodUid
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.model.topology import Link, LinkKind, Topology
from gpushare_agent.placement.topology_text import link_of_word
from gpushare_agent.placement.topology_tree import build_topology

MAX_CARDS = 64
"""Of a node, and highest index plus one: the tree over their links takes the cube of it in steps."""
MAX_PODS = 512
"""That hold cards of one node."""
_MAX_UID_CHARS = 128
_MAX_LABEL_CHARS = 63
_MAX_COUNT = 1 << 30
_COUNTS = 4
"""Of a pod on a card: cores, blocks, units, and 1 for a whole card."""
_TOPOLOGIES_KEPT = 256
"""Nodes of one build are alike: a cluster has few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """`node` is None where it offers nothing of ours. `complaint` is for the log: what could not be read, and what is taken
    instead; empty where all is well."""

    node: ClusterNode | None
    complaint: str = ""


def read_node(raw: Mapping[str, Any], names: ResourceNames, *, model_label: str, pool_label: str) -> NodeReading:
    """`names` must be those of the node's agent. `model_label` and `pool_label` name the node's labels."""
    metadata, status = _mapping(raw.get("metadata")), _mapping(raw.get("status"))
    name = metadata.get("name")
    if not isinstance(name, str) or not name:
        return NodeReading(node=None, complaint="a node without a name is left out")
    counts = _counts(status, names)
    offered = [counts[resource] for resource in (names.vcore, names.gpu_mem) if resource in counts]
    if not offered:
        return NodeReading(node=None)
    labels, annotations = _mapping(metadata.get("labels")), _mapping(metadata.get("annotations"))
    model, pool = _label(labels, model_label), _label(labels, pool_label)
    text = annotations.get(CARDS_ANNOTATION)
    trouble = ""
    if text is not None:
        try:
            cards, topology = _told(text, names, is_offered=any(offered))
        except Corrupt as error:
            trouble = (
                f"node {name}: the annotation {CARDS_ANNOTATION} cannot be used: {error}. Its capacity is divided evenly "
                "instead; see the agent's log there"
            )
        else:
            held, complaint = _held(
                name, annotations.get(HELD_ANNOTATION), {str(card.index): card.index for card in cards}
            )
            node = ClusterNode(name=name, cards=cards, topology=topology, model=model, pool=pool, held=held)
            return NodeReading(node=node, complaint=complaint)
    return NodeReading(node=_even_node(name, counts, names, model, pool), complaint=trouble)


# --- the cards ---


def _told(text: object, names: ResourceNames, *, is_offered: bool) -> tuple[tuple[NodeCard, ...], Topology]:
    """The cards and links of the annotation. Where the kubelet offers nothing now, no card is of use."""
    told = parse_cards(text)
    cards = sorted(told.cards, key=lambda card: card.index)
    if not cards:
        raise Corrupt("it lists no cards")
    if cards[-1].index >= MAX_CARDS:
        raise Corrupt(f"it has a card {cards[-1].index}; indexes below {MAX_CARDS} are understood")
    if told.memory_block_mib not in (None, names.memory_block_mib):
        raise Corrupt(
            f"its memory blocks are of {told.memory_block_mib} MiB, here they are of {names.memory_block_mib}: make the "
            "setting memory_block_mib the same everywhere"
        )
    uuids = [card.uuid or _made_uuid(card.index) for card in cards]
    if len(set(uuids)) != len(uuids):
        raise Corrupt("two cards have the same UUID")
    found = tuple(
        NodeCard(
            index=card.index,
            uuid=GpuUuid(uuid),
            memory_mib=card.memory_mib,
            is_healthy=is_offered and card.is_healthy and not card.cordoned,
        )
        for card, uuid in zip(cards, uuids, strict=True)
    )
    return found, _topology_of(told.cards)


def _made_uuid(index: int) -> str:
    """For a card that nobody names: placement tells cards apart by it."""
    return sys.intern(f"card-{index}")


def _topology_of(cards: Iterable[ToldCard]) -> Topology:
    """`links` of a card follow the order of the list, the matrix the indexes. A card without links is far from all."""
    in_order = tuple(cards)
    size = len(in_order)
    if any(len(card.links) not in (0, size) for card in in_order):
        raise Corrupt("the `links` of a card are not one word for each card")
    return _topology(
        tuple(card.index for card in in_order),
        tuple(card.links for card in in_order),
        tuple(card.numa for card in in_order),
    )


@lru_cache(maxsize=_TOPOLOGIES_KEPT)
def _topology(indexes: tuple[int, ...], words: tuple[tuple[str, ...], ...], numa: tuple[int | None, ...]) -> Topology:
    """One object for all nodes of one build."""
    size = max(indexes, default=-1) + 1
    kinds = ((LinkKind.SELF if a == b else LinkKind.SYS for b in range(size)) for a in range(size))
    matrix = [[Link(kind=kind) for kind in row] for row in kinds]
    nodes: list[int | None] = [None] * size
    for a, row, numa_node in zip(indexes, words, numa, strict=True):
        nodes[a] = numa_node
        for b, word in zip(indexes, row, strict=False):
            link = link_of_word(word)
            if link is None or (link.kind is LinkKind.SELF) != (a == b):
                raise Corrupt(f"the link of cards {a} and {b} is {word[:20]!r}")
            matrix[a][b] = link
    for a in range(size):
        for b in range(a):
            if matrix[a][b] != matrix[b][a]:
                raise Corrupt(f"cards {b} and {a} tell different links of each other")
    return build_topology(matrix, nodes)


def _even_node(name: str, counts: Mapping[str, int], names: ResourceNames, model: str, pool: str) -> ClusterNode | None:
    number, memory_mib = even_cards(counts, names)
    number = min(number, MAX_CARDS)
    if not number:
        return None
    cards = tuple(
        NodeCard(index=index, uuid=GpuUuid(_made_uuid(index)), memory_mib=memory_mib) for index in range(number)
    )
    indexes = tuple(range(number))
    topology = _topology(indexes, ((),) * number, (None,) * number)
    return ClusterNode(name=name, cards=cards, topology=topology, model=model, pool=pool, is_exact=False)


# --- who holds them ---


def _held(
    name: str, text: object, indexes: Mapping[str, int]
) -> tuple[Mapping[PodUid, tuple[Charge, ...]] | None, str]:
    """What each pod has by the agent's word; None, and why, where that cannot be read: half of it would be worse."""
    if text is None:
        return None, ""
    try:
        raw = parse_document(text, HELD_SCHEMA).get("held")
        if not isinstance(raw, dict):
            raise Corrupt("`held` is no JSON object")
        if len(raw) > MAX_PODS:
            raise Corrupt(f"it names {len(raw)} pods, more than {MAX_PODS}")
        return {PodUid(uid): _charges(uid, raw[uid], indexes) for uid in sorted(raw)}, ""
    except Corrupt as error:
        return None, (
            f"node {name}: the annotation {HELD_ANNOTATION} cannot be used: {error}. Its pods are charged by what they ask "
            "for; see the agent's log there"
        )


def _charges(uid: str, raw: Any, indexes: Mapping[str, int]) -> tuple[Charge, ...]:
    if not uid or len(uid) > _MAX_UID_CHARS:
        raise Corrupt("a pod's UID is empty or too long")
    if not isinstance(raw, dict):
        raise Corrupt(f"what pod {uid} holds is no JSON object")
    charges = [_charge(uid, key, counts, indexes) for key, counts in raw.items()]
    return tuple(sorted(charges, key=lambda charge: charge.index))


def _charge(uid: str, key: str, raw: Any, indexes: Mapping[str, int]) -> Charge:
    index = indexes.get(key)
    if index is None:
        raise Corrupt(f"pod {uid} holds something of card {key[:20]!r}, which the node does not have")
    where = f"what pod {uid} holds of card {index}"
    if not isinstance(raw, list) or len(raw) > _COUNTS or not all(is_count(count, _MAX_COUNT) for count in raw):
        raise Corrupt(f"{where} is no list of at most {_COUNTS} counts")
    cores, blocks, units, whole = [*raw, 0, 0, 0, 0][:_COUNTS]
    if cores > CORES_PER_CARD or whole > 1:
        raise Corrupt(f"{where} is more than a card")
    return Charge(index=index, cores=cores, blocks=blocks, units=units, is_whole=whole == 1)


# --- the rest of the object ---


def _counts(status: Mapping[str, Any], names: ResourceNames) -> dict[str, int]:
    """What can be given out of each resource that the node has: without the devices of unhealthy cards."""
    capacity, allocatable = _mapping(status.get("capacity")), _mapping(status.get("allocatable"))
    told = {name: allocatable.get(name, capacity.get(name)) for name in names.names}
    return {name: _count(quantity) for name, quantity in told.items() if quantity is not None}


def _count(quantity: Any) -> int:
    try:
        return whole_number(quantity, "what the node can give")
    except Corrupt:
        return 0


def _label(labels: Mapping[str, Any], name: str) -> str:
    """Empty where the node has no such label, or one that Kubernetes would not take."""
    value = labels.get(name)
    return sys.intern(value) if isinstance(value, str) and len(value) <= _MAX_LABEL_CHARS else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
