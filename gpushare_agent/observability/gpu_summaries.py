"""What a node's object says of its cards, for `inspect`: by the annotation, which cluster/node_annotations.py reads.

The agent writes it (node_facts.py, docs/node-facts.md). A node without one, of an older agent or of gpu-manager, still has
its capacity: cards of equal size are taken from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpushare_agent.cluster.node_annotations import CARDS_ANNOTATION, ToldCard, even_cards, parse_cards
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.resources import ResourceNames

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCard:
    """One card as the node's object tells it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    is_healthy: bool = True
    cordoned: str = ""
    """Why an operator took it out of service; empty where nobody did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCards:
    """The cards of one node by index, the size of its memory blocks, and what a reader should know of where this is from."""

    cards: tuple[NodeCard, ...]
    memory_block_mib: int
    remark: str = ""


def cards_of_node(
    annotations: Mapping[str, Any], capacity: Mapping[str, int], names: ResourceNames
) -> NodeCards | None:
    """By the annotation, else by the capacity of the resources; None for a node that offers none of them."""
    text = annotations.get(CARDS_ANNOTATION)
    if text is None:
        return _by_capacity(capacity, names, f"no {CARDS_ANNOTATION}")
    try:
        told = parse_cards(text)
    except Corrupt as error:
        return _by_capacity(capacity, names, f"the annotation {CARDS_ANNOTATION} cannot be read ({error})")
    cards = tuple(_card(card) for card in sorted(told.cards, key=lambda card: card.index))
    return NodeCards(cards=cards, memory_block_mib=told.memory_block_mib or names.memory_block_mib)


def _card(told: ToldCard) -> NodeCard:
    return NodeCard(
        index=told.index,
        uuid=told.uuid,
        name=told.name,
        memory_bytes=told.memory_mib * MIB,
        is_healthy=told.is_healthy,
        cordoned=told.cordoned,
    )


def _by_capacity(capacity: Mapping[str, int], names: ResourceNames, trouble: str) -> NodeCards | None:
    """Equal cards: their number is the cores' hundreds, their memory an equal part of the blocks or units."""
    number, memory_mib = even_cards(capacity, names)
    if not number:
        return None
    cards = tuple(NodeCard(index=index, uuid="", name="", memory_bytes=memory_mib * MIB) for index in range(number))
    remark = f"{trouble}: cards of equal size are assumed from the node's capacity, and their health is not known"
    return NodeCards(cards=cards, memory_block_mib=names.memory_block_mib, remark=remark)
