"""fieldSelector of list and watch requests: `spec.nodeName=a,status.phase!=Failed`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gpushare_agent.model.errors import Rejected
from gpushare_agent.sandbox.api_store import Change, RawObject

Selector = Callable[[RawObject], bool]

_TERM = re.compile(r"(?P<path>[A-Za-z0-9_.]+)\s*(?P<operator>==|!=|=)\s*(?P<value>.*)")


def _field(raw: RawObject, path: str) -> str:
    value: Any = raw
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def parse_field_selector(text: str) -> Selector:
    """An absent field counts as empty. Raises Rejected for a term that is not `path=value` or `path!=value`."""
    terms: list[tuple[str, bool, str]] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = _TERM.fullmatch(part)
        if match is None:
            raise Rejected(f"unable to parse field selector term {part!r}: expected path=value or path!=value")
        terms.append((match["path"], match["operator"] != "!=", match["value"]))
    return lambda raw: all((_field(raw, path) == value) is wanted for path, wanted, value in terms)


def seen_by(change: Change, selects: Selector) -> tuple[str, RawObject] | None:
    """What a watcher with this selector is told: an object that starts or stops to match is ADDED or DELETED for it."""
    was = change.before is not None and selects(change.before)
    if change.after is not None and selects(change.after):
        return ("MODIFIED" if was else "ADDED"), change.after
    if not was or change.before is None:
        return None
    shown = change.after if change.after is not None else change.before
    return "DELETED", shown
