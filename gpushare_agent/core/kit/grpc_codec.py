"""The message codec of gRPC servers and clients: fast decoders where given, strict checks elsewhere, bytes as they are.

The generated classes accept truncated and mistyped input silently; here it is found before they see it. Errors are
`MalformedMessageError`, which a server answers with INVALID_ARGUMENT. No state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import betterproto2
from grpclib.encoding.base import CodecBase

from gpushare_agent.core.kit.protobuf import Fields, MalformedMessageError, scan_fields

M = TypeVar("M", bound=betterproto2.Message)
Decoder = Callable[[bytes], Any]

_WIRE_TYPES = (
    dict.fromkeys(betterproto2.WIRE_VARINT_TYPES, 0)
    | dict.fromkeys(betterproto2.WIRE_FIXED_64_TYPES, 1)
    | dict.fromkeys(betterproto2.WIRE_LEN_DELIM_TYPES, 2)
    | dict.fromkeys(betterproto2.WIRE_FIXED_32_TYPES, 5)
)
_MAX_DEPTH = 100
_ANY_NUMBER = 2**31
"""The limit of fields in an answer: a runtime's list of containers has tens of thousands."""


class StrictCodec(CodecBase):
    """Encodes and decodes for `GrpcServer`. `decoders` maps a generated message class to what decodes it instead; others
    have at most `max_fields`, those of messages in them included."""

    __content_subtype__ = "proto"

    def __init__(self, decoders: Mapping[type, Decoder] | None = None, *, max_fields: int = _ANY_NUMBER) -> None:
        self._decoders = dict(decoders or {})
        self._max_fields = max_fields

    def encode(self, message: Any, message_type: Any) -> bytes:
        """Bytes pass through: the caller has encoded them (cached frames)."""
        if isinstance(message, bytes):
            return message
        if not isinstance(message, message_type):
            raise TypeError(f"the answer must be {message_type.__name__} or bytes, not {type(message).__name__}")
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        """`message_type` bytes: as they are. Raises MalformedMessageError: the bytes are no such message."""
        if message_type is bytes:
            return data
        decoder = self._decoders.get(message_type)
        try:
            if decoder is not None:
                return decoder(data)
            return decode_generated(data, message_type, max_fields=self._max_fields)
        except MalformedMessageError as e:
            raise MalformedMessageError(f"malformed {message_type.__name__} of {len(data)} bytes: {e}") from e


def decode_generated(data: bytes, message_type: type[M], *, max_fields: int = _ANY_NUMBER) -> M:
    """Decodes with a generated class after checking what the class does not.

    Raises:
        MalformedMessageError: cut off, a known field of the wrong wire type, text that is not UTF-8, nested too deep.
    """
    fields = Fields(max_fields)
    # A list instead of recursion: a message nested ten thousand deep must not end in RecursionError.
    pending: list[tuple[type[betterproto2.Message], int, int, int]] = [(message_type, 0, len(data), 0)]
    while pending:
        cls, start, stop, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise MalformedMessageError(f"messages are nested more than {_MAX_DEPTH} deep")
        for nested, nested_start, nested_stop in _check_fields(data, cls, start, stop, fields):
            pending.append((nested, nested_start, nested_stop, depth + 1))
    try:
        return message_type.parse(data)
    except (ValueError, EOFError) as e:
        raise MalformedMessageError(str(e)) from e


def _check_fields(
    data: bytes, cls: type[betterproto2.Message], start: int, stop: int, fields: Fields
) -> list[tuple[type[betterproto2.Message], int, int]]:
    """Checks one message's own fields; returns the submessages in it that are left to check."""
    description = cls._betterproto  # type: ignore[arg-type]  # betterproto2 types its class property for Never
    nested = []
    for key, _, content, content_stop in scan_fields(data, start, stop, fields):
        name = description.field_name_by_number.get(key >> 3)
        # Unknown fields are allowed: a newer kubelet or runtime sends some.
        if name is None:
            continue
        meta = description.meta_by_field_name[name]
        # proto3 packs repeated numbers by default, and a reader must take both forms.
        is_packed = meta.repeated and meta.proto_type in betterproto2.PACKED_TYPES and key & 7 == 2
        if key & 7 != _WIRE_TYPES[meta.proto_type] and not is_packed:
            raise MalformedMessageError(f"field {key >> 3} ({name}) has wire type {key & 7}")
        # Maps are messages here too, their entries are checked as such.
        if meta.proto_type == betterproto2.TYPE_MESSAGE:
            nested.append((description.cls_by_field[name], content, content_stop))
    return nested
