"""One snapshot for all readers."""

from __future__ import annotations

from bench.sample_node import SampleNode
from gpushare_agent.agent.observability.node_snapshot import NodeSnapshot, SnapshotCache


def test_a_snapshot_is_made_once_until_it_is_old_or_expired() -> None:
    """However many ask."""
    now, made = 0.0, []

    def make() -> NodeSnapshot:
        made.append(now)
        return SampleNode(gpus=1, containers=1).snapshot()

    cache = SnapshotCache(make, max_age_s=1.0, clock=lambda: now)
    first = cache.current()
    assert all(cache.current() is first for _ in range(10))
    assert made == [0.0]
    cache.expire()
    assert cache.current() is not first
    assert len(made) == 2
    now = 1.0
    assert cache.current() is not first
    assert len(made) == 3
