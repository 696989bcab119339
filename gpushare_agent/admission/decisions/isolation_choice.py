"""Which isolation a pod gets: the node's, or the one that its annotation names where the node allows that one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.isolation import IsolationName
from gpushare_agent.model.names import ISOLATION_ANNOTATION

_SHOWN_CHARS = 40


def choose_isolation(
    annotations: Mapping[str, str], node: IsolationName, allowed: Collection[IsolationName]
) -> IsolationName | Refused:
    """An annotation selects only among the isolations that the node's settings allow. Any other value is refused, not
    ignored: the pod was written for another isolation."""
    text = annotations.get(ISOLATION_ANNOTATION)
    if text is None:
        return node
    known = sorted({node, *allowed})
    if text in known:
        return IsolationName(text)
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
    return Refused(
        reason=RefusalReason.INVALID_REQUEST,
        detail=f"the annotation {ISOLATION_ANNOTATION} is {shown!r}, but this node allows {', '.join(known)}. Name one of"
        f" these, leave the annotation out for {node}, or have the setting isolations_allowed changed.",
    )
