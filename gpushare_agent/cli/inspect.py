"""`gpushare-agent inspect`: what is allocated of every card, of one node by its agent or of all by the API server.

The agent's books are the truth about its node. Over all nodes the sums come from the pods' limits and annotations
(observability/inspection.py), which any tenant can write: what does not fit is told and charged to no card.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gpushare_agent.cli.agent_addresses import Where, open_door
from gpushare_agent.cli.agent_client import read_node
from gpushare_agent.cli.cluster_nodes import open_cluster, read_cluster
from gpushare_agent.cli.render_inspect import inspection_document, inspection_tables
from gpushare_agent.cli.render_text import Form, print_as
from gpushare_agent.observability.gpu_summaries import NodeCard
from gpushare_agent.observability.inspection import CardSums, ContainerSums, NodeSums
from gpushare_agent.settings.settings import Settings

_NO_NODE = (
    "no node has cards: none has the annotation gpushare-agent/cards, or a capacity of the resources; is the agent installed"
    " (docs/guide/install.md)?"
)


async def run(settings: Settings, where: Where, *, is_all_nodes: bool, with_details: bool, form: Form) -> int:
    """Raises AgentError."""
    if is_all_nodes:
        async with open_cluster(settings) as api:
            nodes = await read_cluster(api, settings)
    else:
        async with open_door(settings, where) as door:
            nodes = [sums_of_document(await read_node(door))]
    document = inspection_document(nodes)

    def tables(_width: int) -> Sequence[RenderableType]:
        return inspection_tables(document, with_details=with_details) if nodes else [Text(_NO_NODE)]

    print_as(form, document, tables)
    return 0


def sums_of_document(document: dict[str, Any]) -> NodeSums:
    """One node as its agent shows it."""
    return NodeSums(
        node=document["node"],
        cards=tuple(
            CardSums(
                card=NodeCard(
                    index=card["index"],
                    uuid=card["uuid"],
                    name=card["name"],
                    memory_bytes=card["memory"]["capacity_bytes"],
                    is_healthy=card["is_healthy"],
                    cordoned=card["cordoned"] or "",
                ),
                cores_allocated=card["cores"]["allocated"],
                memory_allocated_bytes=card["memory"]["allocated_bytes"],
                health_reason=card["health_reason"],
            )
            for card in document["cards"]
        ),
        containers=tuple(
            ContainerSums(
                namespace=container["namespace"],
                pod=container["pod"],
                container=container["container"],
                cards=tuple(card["index"] for card in container["cards"]),
                cores=container["cores"],
                memory_bytes=container["memory_bytes"],
            )
            for container in document["containers"]
        ),
    )
