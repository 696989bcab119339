"""Adds up what is allocated on the cards of a node, from what the API server knows: its pods and their annotations.

Pure sums for `inspect --all-nodes`; where one node's agent is asked, its own books are the truth and these sums are not
used. Any tenant can write a pod's annotations: an index that the node has no card for, or that does not fit what the
container asks for, is shown and charged to no card. Format: docs/formats.md, section 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpushare_agent.model.names import (
    CORES_PER_CARD,
    GPU_ASSIGNED_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    PREDICATE_GPU_INDEX_PREFIX,
)
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.observability.gpu_summaries import NodeCard, NodeCards

MIB = 1024 * 1024
MAX_INDEXES = 64
_INDEXES = re.compile(r"[0-9]{1,4}(,[0-9]{1,4})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSums:
    """One card and what of it is allocated. `health_reason` is what is wrong with the card itself, None where that is not
    told."""

    card: NodeCard
    cores_allocated: int
    memory_allocated_bytes: int
    health_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSums:
    """One container's part. `cards` are those that it is charged to, none where it is unplaced; `remark` says why, or what
    a reader should know."""

    namespace: str
    pod: str
    container: str
    cards: tuple[int, ...]
    cores: int
    memory_bytes: int
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSums:
    """One node. What unplaced containers ask for is in no card's sum."""

    node: str
    cards: tuple[CardSums, ...]
    containers: tuple[ContainerSums, ...]
    remark: str = ""

    @property
    def unplaced(self) -> tuple[ContainerSums, ...]:
        return tuple(container for container in self.containers if not container.cards)


def node_sums(node: str, cards: NodeCards, pods: Sequence[Pod], names: ResourceNames) -> NodeSums:
    """Pods that have ended hold nothing. What an init container asks for is handed on to the main ones and not counted."""
    by_index = {card.index: card for card in cards.cards}
    containers = tuple(
        _container_sums(pod, container, by_index, cards.memory_block_mib, names)
        for pod in sorted(pods, key=lambda pod: (pod.namespace, pod.name, pod.uid))
        if not pod.is_terminal
        for container in pod.containers
        if container.kind is not ContainerKind.INIT and _wants(container, names)
    )
    return NodeSums(
        node=node,
        cards=tuple(_card_sums(by_index[index], containers) for index in sorted(by_index)),
        containers=containers,
        remark=cards.remark,
    )


def _wants(container: ContainerSpec, names: ResourceNames) -> bool:
    return any(names.wanted(container, kind) > 0 for kind in names.kinds)


def _card_sums(card: NodeCard, containers: Sequence[ContainerSums]) -> CardSums:
    here = [container for container in containers if card.index in container.cards]
    return CardSums(
        card=card,
        cores_allocated=sum(c.cores // len(c.cards) for c in here),
        memory_allocated_bytes=sum(card.memory_bytes if _is_whole(c) else c.memory_bytes for c in here),
        health_reason="" if card.is_healthy else None,  # the node's object has no room for it
    )


def _is_whole(container: ContainerSums) -> bool:
    return container.cores >= CORES_PER_CARD


def _container_sums(
    pod: Pod, container: ContainerSpec, cards: Mapping[int, NodeCard], block_mib: int, names: ResourceNames
) -> ContainerSums:
    cores = names.wanted(container, ResourceKind.VCORE)
    blocks = names.wanted(container, ResourceKind.VMEMORY)
    units = names.wanted(container, ResourceKind.GPU_MEM)
    told = _told_indexes(pod, container, is_gpu_mem=cores == 0 and units > 0)
    wanted = max(1, cores // CORES_PER_CARD)
    placed, remark = _placed(told, wanted, cards, is_assigned=pod.annotations.get(GPU_ASSIGNED_ANNOTATION) != "false")
    memory_bytes = (blocks * block_mib + units * names.gpu_mem_unit_mib) * MIB
    if cores >= CORES_PER_CARD and placed:
        memory_bytes = sum(cards[index].memory_bytes for index in placed)
    return ContainerSums(
        namespace=pod.namespace,
        pod=pod.name,
        container=container.name,
        cards=placed,
        cores=cores,
        memory_bytes=memory_bytes,
        remark=remark,
    )


def _told_indexes(pod: Pod, container: ContainerSpec, *, is_gpu_mem: bool) -> str | None:
    """The annotation about this container: by its position, else for memory alone GPUShare's, which is about the pod."""
    group = "" if container.kind is ContainerKind.MAIN else "init-"
    told = pod.annotations.get(f"{PREDICATE_GPU_INDEX_PREFIX}{group}{container.position}")
    return pod.annotations.get(GPUSHARE_INDEX_ANNOTATION) if told is None and is_gpu_mem else told


def _placed(
    told: str | None, wanted: int, cards: Mapping[int, NodeCard], *, is_assigned: bool
) -> tuple[tuple[int, ...], str]:
    """The cards that it is charged to, and a remark."""
    if told is None:
        return (), "no card is known yet"
    if not _INDEXES.fullmatch(told) or told.count(",") >= MAX_INDEXES:
        return (), f"its annotation {told[:40]!r} is no list of card indexes"
    indexes = tuple(sorted({int(word) for word in told.split(",")}))
    missing = [index for index in indexes if index not in cards]
    if missing:
        return (), f"its annotation names card {missing[0]}, which the node does not have"
    if len(indexes) != wanted:
        return (), f"its annotation names {len(indexes)} cards where it asks for {wanted}"
    return indexes, "" if is_assigned else "chosen by the scheduler, not yet given by the agent"
