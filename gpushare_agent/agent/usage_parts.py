"""Joins what is sampled and what is counted with the rest of the node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.cluster.pod_store import PodStore
from gpushare_agent.gpus.watch import GpuDriver
from gpushare_agent.isolation.vcuda.container_ids import ContainerIds
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.observability.metrics.node import node_series
from gpushare_agent.observability.metrics.text import NodePage
from gpushare_agent.observability.usage_history import UsageHistory
from gpushare_agent.observability.usage_sampling import UsageSampling
from gpushare_agent.runtime.cri import RuntimeClient
from gpushare_agent.runtime.process_owners import ProcessOwners
from gpushare_agent.settings.settings import Settings

if TYPE_CHECKING:
    from gpushare_agent.agent.node_parts import NodeParts


def build_usage(
    settings: Settings,
    *,
    driver: GpuDriver,
    runtime: RuntimeClient,
    cache: AllocationCache,
    store: PodStore,
    metrics: AgentMetrics,
) -> tuple[UsageSampling, UsageHistory]:
    """The sampling, and the history that it fills."""
    sampling = UsageSampling(
        driver=driver,
        owners=ProcessOwners(settings.runtime.proc_root),
        pods=store,
        ids=ContainerIds(runtime, store),
        allocations=cache.view,
        metrics=metrics,
        period_s=settings.sample_period_s,
    )
    history = UsageHistory(settings.usage.history_s, settings.usage.history_points, allocations=cache.view)
    sampling.subscribe(history.add)
    return sampling, history


def show_node(parts: NodeParts) -> None:
    """Let /metrics and all that shows the node show it anew after each round of sampling and each change."""
    metrics = parts.metrics
    page = NodePage(lambda: node_series(parts.snapshots.current()), max_age_s=parts.settings.sample_period_s)
    metrics.show_node(page)

    def expire() -> None:
        parts.snapshots.expire()
        page.expire()
        parts.live_stream.look()

    metrics.know_resources(parts.names.names)
    parts.decisions.subscribe(lambda _record: parts.live_stream.look())
    parts.usage.subscribe(lambda _round: expire())
    parts.cache.subscribe(lambda _old, _new: expire())
    parts.store.subscribe(lambda _old, _new: expire())

    def gpus_changed(inventory: GpuInventory) -> None:
        metrics.know_gpus([gpu.uuid for gpu in inventory.gpus])
        expire()

    parts.inventory.subscribe(gpus_changed)
    if (mps := parts.isolation.mps_watch) is not None:
        metrics.show_mps(lambda: not mps.unavailable_reason)
