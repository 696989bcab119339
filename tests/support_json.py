"""JSON as a reader gets it: text, from the Python objects that tests build."""

from __future__ import annotations

import json
from typing import Any

from msgspec import Raw


def undecoded(raw: object) -> Raw:
    """Also of what Python alone reads, such as NaN and half a surrogate pair."""
    return Raw(json.dumps(raw).encode())


def built(raw: Raw) -> Any:
    return json.loads(bytes(raw))
