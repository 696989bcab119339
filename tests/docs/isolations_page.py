"""What docs/explanation/isolation.md says of each term, made from the registry: an isolation's package names its own."""

from __future__ import annotations

from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.agent.isolation.kept import NOT_KEPT_TEXTS


def not_kept() -> str:
    """An item for each term, in the words of the agent, with the isolations that do not keep it."""
    lines = []
    for term, text in NOT_KEPT_TEXTS.items():
        under = ", ".join(f"`{name}`" for name, isolation in ISOLATIONS.items() if term in isolation.keeps.not_kept)
        lines.append(f"- `{term}` ({under}): {text}")
    return "\n".join(lines)
