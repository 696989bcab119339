"""Field and label selectors of the embedded API server. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from gpushare_agent.model.errors import Rejected
from gpushare_agent.sandbox.pod_manifest import RawObject

Selector = Callable[[RawObject], bool]

_FIELD = re.compile(r"(?P<path>[A-Za-z0-9_.]+)\s*(?P<operator>==|!=|=)\s*(?P<value>.*)")
_LABEL = re.compile(  # possessive throughout: its time grows with the length of the text
    r"\s*+(?:(?P<absent>!)\s*+)?(?P<key>[A-Za-z0-9_./-]++)"
    r"(?:\s*+(?P<operator>==|!=|=)\s*+(?P<value>[\w.-]*+)|\s++(?P<set>in|notin)\s*+\((?P<values>[\w.,\s-]*+)\))?+"
    r"\s*+(?:,|$)"
)


def parse_field_selector(text: str) -> Selector:
    """An absent field counts as empty. Raises Rejected for a term that is not `path=value` or `path!=value`."""
    terms: list[tuple[str, bool, str]] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = _FIELD.fullmatch(part)
        if match is None:
            raise Rejected(f"unable to parse field selector term {part!r}: expected path=value or path!=value")
        terms.append((match["path"], match["operator"] != "!=", match["value"]))
    return lambda raw: all((_field(raw, path) == value) is wanted for path, wanted, value in terms)


def _field(raw: RawObject, path: str) -> str:
    value: Any = raw
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def parse_label_selector(text: str) -> Selector:
    """`a=b`, `a!=b`, `a in (b,c)`, `a notin (b)`, `a`, `!a`, joined by commas. Raises Rejected."""
    terms: list[tuple[str, bool, frozenset[str] | None]] = []
    position = 0
    while position < len(text):
        match = _LABEL.match(text, position)
        if match is None or match.end() == position or (match["absent"] and (match["operator"] or match["set"])):
            raise Rejected(f"unable to parse label selector {text!r:.200}: found {text[position : position + 40]!r}")
        if match["operator"] is not None:
            terms.append((match["key"], match["operator"] != "!=", frozenset({match["value"]})))
        elif match["set"] is not None:
            values = frozenset(value.strip() for value in match["values"].split(","))
            terms.append((match["key"], match["set"] == "in", values))
        else:
            terms.append((match["key"], match["absent"] is None, None))
        position = match.end()
    return lambda raw: _has_labels(raw, terms)


def _has_labels(raw: RawObject, terms: list[tuple[str, bool, frozenset[str] | None]]) -> bool:
    labels: Mapping[str, str] = raw["metadata"].get("labels") or {}
    return all(
        (key in labels if values is None else labels.get(key) in values) is wanted for key, wanted, values in terms
    )
