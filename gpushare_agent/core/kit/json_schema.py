"""JSON from outside, read by schemas: msgspec Structs that name what is used. All else is skipped and never built.

Text stays text (`msgspec.Raw`) until the reader that knows its schema. Its receiver bounds its size before. The part of
a document that decides something is typed, and one wrong value in it makes the whole Corrupt; a part that is only of use
where it is right is a `Raw` field, read by one of the lenient readers here. No state.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from msgspec import Raw, ValidationError, convert
from msgspec.json import Decoder

from gpushare_agent.core.model.errors import Corrupt

T = TypeVar("T")
D = TypeVar("D")

NULL = Raw(b"null")
"""The value of a `Raw` field that its object lacks."""

MOST_ENTRIES = 10_000
UNREADABLE = (ValueError, TypeError, OverflowError, RecursionError, MemoryError)
"""All that msgspec and json raise for content: for half a surrogate pair, deep nesting or 5,000 digits no DecodeError."""


def decoded(decoder: Decoder[T], content: bytes | bytearray | Raw, where: str) -> T:
    """The content, read by the schema. Raises Corrupt: `where`, then the place in the document and what is wrong."""
    try:
        return decoder.decode(content)
    except ValidationError as e:
        raise Corrupt(f"{where}: {e}") from e
    except UNREADABLE as e:
        raise Corrupt(f"{where} is no JSON ({e})") from e


def loaded(content: str | bytes) -> Any:
    """JSON of any form, read by json: it takes half a surrogate pair in a text, and a GPU must not be lost because of its
    name. Raises Corrupt."""
    try:
        return json.loads(content)
    except UNREADABLE as e:
        raise Corrupt(f"it is no JSON: {e}") from e


def converted(raw: Any, schema: type[T], where: str = "") -> T:
    """What `loaded` gave, read by the schema. Raises Corrupt: `where`, if it is given, then what is wrong."""
    try:
        return convert(raw, schema)
    except UNREADABLE as e:
        raise Corrupt(f"{where}: {e}" if where else str(e)) from e


def decoded_or(decoder: Decoder[T], content: bytes | bytearray | Raw, absent: Callable[[], D]) -> T | D:
    """The content, read by the schema; else the result of `absent`."""
    try:
        return decoder.decode(content)
    except UNREADABLE:
        return absent()


class Entries(Generic[T]):
    """Reads lists: an entry that is not of its schema is skipped, what is no list has none. Only the first `MOST_ENTRIES`
    are read, which is more than Kubernetes ever makes. As an attribute of a Struct it is the list in the `Raw` field named
    `of`."""

    def __init__(self, kind: type[T], of: str = "") -> None:
        self._all = Decoder(list[kind])  # type: ignore[valid-type] # a type that only the caller knows
        self._one = Decoder(kind)
        self._of = of

    def __get__(self, instance: object, owner: type) -> list[T]:
        return self.read(getattr(instance, self._of))

    def read(self, content: Raw) -> list[T]:
        if content is NULL:  # as most are: an exception costs ten times as much
            return []
        try:
            # All at once, which is the rule; one by one only where an entry is wrong.
            return self._all.decode(content)[:MOST_ENTRIES]
        except UNREADABLE:
            raws = decoded_or(_RAWS, content, list[Raw])[:MOST_ENTRIES]
            each = (decoded_or(self._one, raw, lambda: None) for raw in raws)
            return [one for one in each if one is not None]


class Lenient(Generic[T]):
    """An attribute of a Struct: what the schema makes of the `Raw` field named `of`, else an empty one."""

    def __init__(self, kind: type[T], of: str) -> None:
        self._decoder: Decoder[T] = Decoder(kind)
        self._empty = kind
        self._of = of

    def __get__(self, instance: object, owner: type) -> T:
        content: Raw = getattr(instance, self._of)
        # Not decoded where it is absent, for the reason that Entries has.
        return self._empty() if content is NULL else decoded_or(self._decoder, content, self._empty)


def texts(content: Raw) -> dict[str, str]:
    """The pairs of text of an object, such as labels; empty where it is none."""
    if content is NULL:
        return {}
    try:
        # Labels are texts as a rule; the slow way below is for objects that no API server sends.
        return _TEXTS.decode(content)
    except UNREADABLE:
        values = decoded_or(_VALUES, content, dict[str, object])
        return {name: value for name, value in values.items() if isinstance(value, str)}


_RAWS, _TEXTS, _VALUES = Decoder(list[Raw]), Decoder(dict[str, str]), Decoder(dict[str, object])
