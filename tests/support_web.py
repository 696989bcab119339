"""The web server with the node's API over a made-up node: what the agent serves, without an agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bench.made_node import MadeNode
from gpushare_agent.services.live_stream import LiveStream
from gpushare_agent.services.metrics import AgentMetrics
from gpushare_agent.services.node_api import NodeApi
from gpushare_agent.services.node_document import node_document
from gpushare_agent.services.web import WebServer
from gpushare_agent.state.decision_log import DecisionLog
from tests.support_kube import DEADLINE_S, running

KEPT = 100


@dataclass
class ServedNode:
    """`asked` counts how often the document was made."""

    url: str
    node: MadeNode
    decisions: DecisionLog
    stream: LiveStream
    asked: list[int]

    def step(self) -> None:
        """Everything changes, and the stream is told."""
        self.node.step()
        self.stream.look()


def no_history() -> dict[str, Any]:
    return {"at": 0.0, "step_seconds": 5.0, "cards": {}, "containers": {}}


@asynccontextmanager
async def served_node(
    node: MadeNode,
    *,
    history: Callable[[], dict[str, Any]] = no_history,
    sample_period_s: float = 0.05,
    heartbeat_s: float = 15.0,
    port: int = 0,
) -> AsyncIterator[ServedNode]:
    """The server and the stream, until the block ends."""
    asked = [0]

    def document() -> dict[str, Any]:
        asked[0] += 1
        return node_document(node.snapshot())

    decisions = DecisionLog(KEPT)
    stream = LiveStream(
        document=document, decisions=decisions, sample_period_s=sample_period_s, heartbeat_s=heartbeat_s
    )
    api = NodeApi(snapshot=node.snapshot, history=history, decisions=decisions, kept_decisions=KEPT)
    server = WebServer(
        "127.0.0.1",
        port,
        metrics=AgentMetrics(),
        ready=list,
        routes=[*api.routes(), *stream.routes()],
        on_stop=stream.close,
    )
    async with running(stream.run), running(server.run):
        async with asyncio.timeout(DEADLINE_S):
            bound_port = await server.wait_listening()
        yield ServedNode(f"http://127.0.0.1:{bound_port}", node, decisions, stream, asked)
