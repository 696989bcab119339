"""Reads the protobuf messages of device plugins that are large, and writes NUMA nodes.

A node of 8 GPUs has thousands of device IDs; the generated classes need tens of milliseconds for such a message, the
kubelet they stand for needs less than one. The counterpart for writing is kit/wire_build. Field numbers are those of
protos/deviceplugin.proto and protos/podresources.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpushare_agent.kit.wire_build import bytes_field, integer_field
from gpushare_agent.model.errors import Corrupt

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of every field. Raises Corrupt for what is no protobuf message."""
    position, end = 0, len(message)
    while position < end:
        tag, position = _read_varint(message, position)
        kind = tag & 7
        if kind == _LENGTH:
            size, position = _read_varint(message, position)
        elif kind == _VARINT:
            value, position = _read_varint(message, position)
            yield tag >> 3, value
            continue
        else:
            size = {_FIXED64: 8, _FIXED32: 4}.get(kind, end)
        if position + size > end:
            raise Corrupt(f"a protobuf field of {size} bytes at {position} passes the end of the message ({end} bytes)")
        yield tag >> 3, message[position : position + size]
        position += size


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(message) and shift < 64:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise Corrupt(f"a protobuf number at {position} does not end")


def submessages(message: bytes, number: int) -> list[bytes]:
    return [value for field, value in fields(message) if field == number and isinstance(value, bytes)]


def texts(message: bytes, number: int) -> list[str]:
    """A repeated string field. Raises Corrupt for what is not UTF-8."""
    try:
        return [value.decode() for value in submessages(message, number)]
    except UnicodeDecodeError as error:
        raise Corrupt(f"a protobuf string is not UTF-8: {error}") from error


def numa_nodes(topology: bytes) -> tuple[int, ...]:
    """The node IDs of a TopologyInfo message; zero is an absent field."""
    nodes = []
    for node in submessages(topology, 1):
        ids = [value for field, value in fields(node) if field == 1 and isinstance(value, int)]
        nodes.append(ids[-1] if ids else 0)
    return tuple(nodes)


def topology_message(nodes: Sequence[int]) -> bytes:
    return b"".join(bytes_field(1, integer_field(1, node) if node else b"") for node in nodes)
