"""Every metric that is made from the node's snapshot. A pure function; the texts are metrics_text.py's."""

from __future__ import annotations

from gpushare_agent.observability.metrics.containers import container_series
from gpushare_agent.observability.metrics.gpus import gpu_series
from gpushare_agent.observability.metrics.text import Series, labels_text
from gpushare_agent.observability.node_snapshot import NodeSnapshot


def node_series(snapshot: NodeSnapshot) -> list[Series]:
    """Those that have a row, always in the same order."""
    found = [*container_series(snapshot), *gpu_series(snapshot)]
    if snapshot.usage is not None:
        text = "When usage was last sampled, in seconds since the epoch."
        rows = [(labels_text(node=snapshot.node), snapshot.usage.sampled_at)]
        found.append(Series("gpushare_usage_sampled_timestamp_seconds", text, rows=list(rows)))
    return [series for series in found if series.rows]
