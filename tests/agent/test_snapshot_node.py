"""One snapshot of a whole agent's node for everything that shows it, over real HTTP."""

from __future__ import annotations

import pytest

from gpushare_agent.agent.observability.node_snapshot import NodeSnapshot, SnapshotCache
from tests.agent.support_agent import open_agent
from tests.sandbox.support_sandbox import container, open_test_node, pod

PATHS = ("/api/v1/node", "/usage", "/graph", "/version", "/metrics")


async def test_everything_that_shows_the_node_is_made_from_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read, and however often, until something changes; then each shows the change."""
    made: list[NodeSnapshot] = []
    changes: list[None] = []
    async with open_test_node() as node, open_agent(node, "--sample-period-s=60") as agent:
        snapshots = agent.parts.observability.snapshots
        make = snapshots.make

        def counted() -> NodeSnapshot:
            made.append(make())
            return made[-1]

        def changed(cache: SnapshotCache) -> None:
            changes.append(None)
            expire(cache)

        expire = SnapshotCache.expire
        snapshots.make, snapshots.max_age_s = counted, 3600.0
        monkeypatch.setattr(SnapshotCache, "expire", changed)
        await node.start_pods(pod("shown", container(cores=30, blocks=10)))
        await agent.parts.observability.usage.sample_once()
        made.clear()
        changes.clear()
        for path in PATHS * 5:
            assert (await agent.page(path))[0] == 200
        assert len(made) <= 1 + len(changes) < len(PATHS) * 5
        before = len(made)
        snapshots.expire()
        assert '"shown"' in (await agent.page("/api/v1/node"))[1]
        assert len(made) > before
