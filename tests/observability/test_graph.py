"""The topology tree as gpu-manager's tools read it (observability/display.py)."""

from __future__ import annotations

from gpushare_agent.observability.display import graph_text
from tests.observability.support_usage import UUIDS, allocation, facts, key_of, snapshot


def test_each_branch_of_the_graph_has_how_many_of_its_gpus_are_free() -> None:
    """gpu-manager's `aval`: a GPU that is cordoned is no whole one for a pod."""
    nothing = snapshot()
    count = len(nothing.inventory.gpus)
    assert graph_text(nothing).splitlines()[0] == f"ROOT:{count} (aval: {count})"
    cordoned = snapshot(cordoned={UUIDS[0]: "repair"})
    assert graph_text(cordoned).splitlines()[0] == f"ROOT:{count} (aval: {count - 1})"
    taken = snapshot(facts(allocation(key_of(1), (1,), cores=30, blocks=4)))
    assert graph_text(taken).splitlines()[0] == f"ROOT:{count} (aval: {count - 1})"
