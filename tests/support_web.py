"""The web server with the node's API over a sample node: what the agent serves, without an agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bench.sample_node import SampleNode
from gpushare_agent.admission.decision_log import DecisionLog
from gpushare_agent.observability.http.answers import encode
from gpushare_agent.observability.http.live_stream import LiveStream
from gpushare_agent.observability.http.node_api import NodeApi
from gpushare_agent.observability.http.server import WebServer
from gpushare_agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.observability.node_snapshot import node_document
from gpushare_agent.observability.usage_history import UsageHistory
from tests.support_kube import DEADLINE_S, running

KEPT = 600


@dataclass
class ServedNode:
    """`asked` counts how often the document was made."""

    url: str
    node: SampleNode
    decisions: DecisionLog
    stream: LiveStream
    asked: list[int]

    def step(self) -> None:
        """Everything changes, and the stream is notified."""
        self.node.step()
        self.stream.changed()


@dataclass(frozen=True)
class FakeHistory:
    """A history that is this document."""

    document: dict[str, Any]
    version: int = 1

    def pieces(self, *, gpus: bool, containers: bool) -> Iterator[bytes]:
        assert gpus or containers
        yield encode(self.document)


@asynccontextmanager
async def served_node(
    node: SampleNode,
    *,
    history: UsageHistory | None = None,
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
    curves = history or UsageHistory(60, 6)
    api = NodeApi(snapshot=node.snapshot, history=curves, decisions=decisions, kept_decisions=KEPT)
    server = WebServer(
        "127.0.0.1",
        port,
        metrics=AgentMetrics(),
        ready=list,
        routes=api.routes(),
        streams=stream.routes(),
        on_stop=stream.close,
    )
    async with running(stream.run), running(server.run):
        async with asyncio.timeout(DEADLINE_S):
            bound_port = await server.wait_listening()
        yield ServedNode(f"http://127.0.0.1:{bound_port}", node, decisions, stream, asked)
