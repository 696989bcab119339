"""The web server with the node's API over a sample node: what the agent serves, without an agent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.sample_node import SampleNode
from gpushare_agent.agent.admission.outcomes import DecisionLog
from gpushare_agent.agent.observability.http.node_api import NodeApi
from gpushare_agent.agent.observability.http.server import WebServer
from gpushare_agent.agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.agent.observability.saved_past import SavedPast
from gpushare_agent.agent.observability.usage_history import UsageHistory
from gpushare_agent.core.kit.http_answers import encode
from gpushare_agent.core.model.usage import ProcessFacts
from tests.cluster.support_kube import running
from tests.observability.support_usage import inventory

KEPT = 600


@dataclass
class ServedNode:
    url: str
    node: SampleNode
    decisions: DecisionLog


@dataclass(frozen=True)
class FakeHistory:
    """A history that is this document."""

    document: dict[str, Any]
    version: int = 1

    def now(self) -> tuple[float | None, int]:
        return self.document["at"], 0

    def pieces(self, *, gpus: bool, containers: bool, container: str) -> Iterator[bytes]:
        assert gpus or containers
        yield encode(self.document)


def no_past(recent: UsageHistory, directory: Path | None = None) -> SavedPast:
    return SavedPast(directory=directory, recent=recent, gpus=inventory)


@asynccontextmanager
async def served(port: int = 0, **parts: Any) -> AsyncIterator[str]:
    """The address of a running web server of these parts."""
    server = WebServer("127.0.0.1", port, **({"metrics": AgentMetrics(), "ready": list} | parts))
    async with running(server.run):
        yield f"http://127.0.0.1:{await server.wait_listening()}"


@asynccontextmanager
async def served_node(
    node: SampleNode,
    *,
    history: UsageHistory | None = None,
    describe: Callable[[Collection[int], float], Awaitable[Mapping[int, ProcessFacts]]] | None = None,
    past: SavedPast | None = None,
    port: int = 0,
) -> AsyncIterator[ServedNode]:
    """The server, until the block ends."""
    decisions = DecisionLog(KEPT)
    curves = history or UsageHistory(60, 6)
    api = NodeApi(
        snapshot=node.snapshot,
        history=curves,
        past=past or no_past(curves),
        decisions=decisions,
        kept_decisions=KEPT,
        describe=describe,
    )
    async with served(port, routes=api.routes()) as url:
        yield ServedNode(url, node, decisions)
