"""Chooses the way to an agent: its own address, or the API server's proxy to the agent's pod.

On a node the agent of this very node is meant; `kubectl gpushare` runs on a person's own machine and always goes through
the API server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gpushare_agent.cli.agent_client import AgentClient, check_url, default_url, open_agent_client
from gpushare_agent.cli.cluster_nodes import AGENT_NAMESPACE, ProxyDoor, find_agent, node_of_pod, open_cluster
from gpushare_agent.settings.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Whose node is meant. `server` is the agent's URL. `node` is a node's name; `is_remote` without one means the node
    that the pod is on, or the only one with an agent. An empty `agent_namespace` means all."""

    server: str = ""
    node: str = ""
    is_remote: bool = False
    agent_namespace: str = AGENT_NAMESPACE


@asynccontextmanager
async def open_agent(
    settings: Settings, where: Where, *, pod: str = "", namespace: str = "default"
) -> AsyncIterator[AgentClient]:
    """`pod`, where it is named, is whose node is meant unless `where` names one. Raises AgentError."""
    if where.server or not (where.node or where.is_remote):
        async with open_agent_client(check_url(where.server) if where.server else default_url(settings)) as door:
            yield door
        return
    async with open_cluster(settings) as api:
        node = where.node or (await node_of_pod(api, namespace, pod) if pod else "")
        yield ProxyDoor(api, await find_agent(api, settings, node=node, namespace=where.agent_namespace))
