"""What /metrics says of containers and cards, read from the parts that know it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.pods import ContainerKind
from gpushare_agent.services.metrics import CardView, ContainerView

if TYPE_CHECKING:
    from gpushare_agent.apps.node_parts import NodeParts


def container_views(parts: NodeParts) -> list[ContainerView]:
    """What /metrics says of each container that holds a share."""
    index = {card.uuid: card.index for card in parts.inventory.current.cards}
    memory = {card.uuid: card.memory_mib for card in parts.inventory.current.cards}
    return [
        ContainerView(
            namespace=a.namespace,
            pod=a.pod_name,
            container=a.key.container,
            node=parts.settings.node_name,
            cores=a.cores,
            memory_mib=sum(memory.get(card, 0) for card in a.cards)
            if a.is_whole
            else a.memory_blocks * parts.names.memory_block_mib + len(a.gpu_mem_ids) * parts.names.gpu_mem_unit_mib,
            cards=tuple(index[card] for card in a.cards if card in index),
        )
        for a in parts.cache
        if a.pod_name and not _is_over(parts, a)
    ]


def _is_over(parts: NodeParts, held: Allocation) -> bool:
    """An init container that has run: what it held is counted with the containers that took it over."""
    pod = parts.store.get(held.key.pod_uid)
    return held.kind is ContainerKind.INIT and pod is not None and pod.has_started


def card_views(parts: NodeParts) -> list[CardView]:
    """What /metrics says of each card."""
    cores, blocks, units = parts.cache.used_cores(), parts.cache.used_blocks(), parts.cache.used_gpu_mem()
    whole = {card for a in parts.cache if a.is_whole for card in a.cards}
    return [
        CardView(
            index=card.index,
            uuid=card.uuid,
            memory_mib=card.memory_mib,
            cores_allocated=cores.get(card.uuid, 0),
            memory_mib_allocated=card.memory_mib
            if card.uuid in whole
            else blocks.get(card.uuid, 0) * parts.names.memory_block_mib
            + units.get(card.uuid, 0) * parts.names.gpu_mem_unit_mib,
            is_healthy=card.is_healthy,
        )
        for card in parts.inventory.current.cards
    ]
