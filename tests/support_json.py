"""JSON as a reader gets it: text, from the Python objects that tests build."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import Raw

from gpushare_agent.agent.observability.node_snapshot import NodeSnapshot, node_document


def undecoded(raw: object) -> Raw:
    """Also of what Python alone reads, such as NaN and half a surrogate pair."""
    return Raw(json.dumps(raw).encode())


def built(raw: Raw) -> Any:
    return json.loads(bytes(raw))


def written(document: object) -> Any:
    """As whoever reads it has it."""
    return json.loads(msgspec.json.encode(document))


def written_node(snapshot: NodeSnapshot) -> dict[str, Any]:
    """The node's document."""
    found: dict[str, Any] = written(node_document(snapshot))
    return found
