"""What shows one agent: usage, the one snapshot of the node, and everything that shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from gpushare_agent.admission.outcomes import DecisionLog
from gpushare_agent.gpus.watch import GpuDriver
from gpushare_agent.isolation.container_ids import ContainerIds
from gpushare_agent.isolation.isolations import Isolations
from gpushare_agent.kit.supervision import Runs, Tasks, bodies
from gpushare_agent.node import Node
from gpushare_agent.observability.display import DisplayServer
from gpushare_agent.observability.display import routes as display_routes
from gpushare_agent.observability.http.debug_pages import DebugSources
from gpushare_agent.observability.http.debug_server import DebugServer
from gpushare_agent.observability.http.node_api import NodeApi
from gpushare_agent.observability.http.server import WebServer
from gpushare_agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.observability.metrics.node import node_series
from gpushare_agent.observability.metrics.text import NodePage
from gpushare_agent.observability.node_snapshot import MAX_AGE_S, SnapshotCache
from gpushare_agent.observability.usage_history import UsageHistory
from gpushare_agent.observability.usage_sampling import UsageSampling
from gpushare_agent.observability.views import ContainerViews, node_snapshot
from gpushare_agent.runtime.cgroups import ProcessOwners
from gpushare_agent.settings.settings import Settings


class ObservabilityPart(Struct, frozen=True, kw_only=True):
    """`display` and `debug` are None where the settings switch them off."""

    usage: UsageSampling
    usage_history: UsageHistory
    snapshots: SnapshotCache
    metrics_page: NodePage
    web: WebServer
    display: DisplayServer | None
    debug: DebugServer | None

    def web_tasks(self) -> Tasks:
        return bodies({"web": self.web})

    def late_tasks(self) -> Tasks:
        services: dict[str, Runs | None] = {
            "usage sampling": self.usage,
            "display": self.display,
            "debug": self.debug,
        }
        return bodies(services)

    def expire(self) -> None:
        """The node has changed: all that shows it is made anew when it is asked for next."""
        self.snapshots.expire()
        self.metrics_page.expire()


def build(
    node: Node,
    metrics: AgentMetrics,
    decisions: DecisionLog,
    driver: GpuDriver,
    isolation: Isolations,
    not_ready: Callable[[], Sequence[str]],
) -> ObservabilityPart:
    """Joined, not started. Raises StartupError where other hosts could read the debug pages without a token."""
    settings = node.settings
    usage = UsageSampling(
        driver=driver,
        owners=ProcessOwners(settings.runtime.proc_root),
        pods=node.pods,
        ids=ContainerIds(isolation.runtime, node.pods),
        claims=node.claim_pods.claims_of_containers,
        allocations=node.cache.view,
        metrics=metrics,
        period_s=settings.sample_period_s,
        idle_period_s=settings.usage.idle_period_s,
    )
    history = UsageHistory(
        settings.usage.history_s,
        settings.usage.history_points,
        idle_period_s=settings.usage.idle_period_s,
        allocations=node.cache.view,
    )
    started_at, containers = time.time(), ContainerViews(node, isolation)
    snapshots = SnapshotCache(
        lambda: node_snapshot(node, isolation, containers, usage.current, started_at=started_at, not_ready=not_ready()),
        max_age_s=min(settings.sample_period_s, MAX_AGE_S),
    )
    node_api = NodeApi(
        snapshot=snapshots.current,
        history=history,
        decisions=decisions,
        kept_decisions=settings.decisions.kept,
    )
    socket = settings.display.socket
    return ObservabilityPart(
        usage=usage,
        usage_history=history,
        snapshots=snapshots,
        metrics_page=NodePage(lambda: node_series(snapshots.current()), max_age_s=settings.sample_period_s),
        web=WebServer(
            settings.web.addr,
            settings.web.port,
            metrics=metrics,
            ready=not_ready,
            routes=[*node_api.routes(), *display_routes(snapshots.current)],
            before_reading=usage.refresh,
        ),
        display=DisplayServer(socket, snapshots.current, before_reading=usage.refresh) if socket is not None else None,
        debug=_debug(settings, node, snapshots),
    )


def _debug(settings: Settings, node: Node, snapshots: SnapshotCache) -> DebugServer | None:
    if not settings.debug.addr:
        return None
    sources = DebugSources(
        settings=settings,
        snapshot=snapshots.current,
        allocations=lambda: node.cache,
        pods=node.pods.pods,
        now=time.monotonic,
    )
    return DebugServer(settings.debug, sources)
