"""JSON as a reader gets it: text, from the Python objects that tests build."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import Raw

from gpushare_agent.agent.observability.node_snapshot import NodeSnapshot, node_document

HOSTILE = {
    "half a pair": b'{"schema": 1, "version": 1, "a": "\\ud800", "gpus": [{"uuid": "\\udfff"}], "shares": []}',
    "half a pair as a key": b'{"\\ud800": 1, "schema": 1, "gpus": [{"\\ud800": 1}], "allocations": {"\\udfff": {}}}',
    "half a pair, unescaped": b'{"a": "\xed\xa0\x80"}',
    "nested": b"[" * 100_000,
    "nested and closed": b'{"a": ' * 50_000 + b"1" + b"}" * 50_000,
    "nested in a field": b'{"version": 1, "gpus": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "5,000 digits": b'{"version": ' + b"9" * 5_000 + b', "gpus": []}',
    "too large": b'{"schema": 1, "version": 1e999, "gpus": [{"index": 1e999, "memory_mib": -1e999}]}',
    "no numbers": b'{"version": NaN, "gpus": -Infinity, "schema": Infinity}',
    "twins": b'{"version": 1, "version": 2, "gpus": [], "gpus": {}}',
    "byte-order mark": b'\xef\xbb\xbf{"version": 1, "gpus": []}',
    "UTF-16": '{"version": 1}'.encode("utf-16"),
    "NUL": b'{"a": "\0"}',
    "NUL in a text": b'{"version": 1, "gpus": [{"uuid": "\\u0000"}]}',
    "no UTF-8": b'{"a": "\xff\xfe"}',
    "nothing": b"",
    "spaces": b" \n ",
    "half": b'{"version": 1, "gpus": [{"uuid": "GPU',
    "null": b"null",
    "a text": b'"\\ud800"',
    "a number": b"1e999",
}
"""What readers of JSON get wrong; with fields of ours, so that it is read and not skipped."""


def any_json(*keys: str, leaves: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    """What a reader may get: of these keys, where some are given, and with these leaves among others."""
    names = st.sampled_from(keys) if keys else st.text(max_size=8)
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    return st.recursive(
        scalars | st.sampled_from(leaves) if leaves else scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=6),
        max_leaves=15,
    )


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
