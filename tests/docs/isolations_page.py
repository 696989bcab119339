"""docs/reference/isolations.md, made from the registry: an isolation's package gives itself its row."""

from __future__ import annotations

from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.agent.isolation.request import Follows

_HEAD = """What each limits of a share; [isolation.md](../explanation/isolation.md#what-is-kept-and-by-whom) explains them
and has the terms. A resize is that of a container that runs ([resize.md](../explanation/resize.md));
the driver's limit follows it where the agent sets the limit.

| isolation | memory by | compute by | not limited | resize of memory | of cores | shares of MIG instances |
|---|---|---|---|---|---|---|"""
_RESIZED = {
    Follows.NOBODY: "no process",
    Follows.NEW_PROCESSES: "processes that start later",
    Follows.RUNNING_PROCESSES: "running processes",
}


def isolations() -> str:
    """A row for each in the registry, on a node of which nothing special is known."""
    lines = [_HEAD]
    for name, isolation in ISOLATIONS.items():
        kept = isolation.keeps
        terms = ", ".join(f"`{term}`" for term in kept.not_kept)
        resized = [_RESIZED[follows] for follows in (isolation.memory_follows, isolation.cores_follow)]
        mig = f"refused: {isolation.why_not_in_mig}" if isolation.why_not_in_mig else "yes"
        lines.append("| " + " | ".join([f"`{name}`", kept.memory_by, kept.compute_by, terms, *resized, mig]) + " |")
    return "\n".join(lines)
