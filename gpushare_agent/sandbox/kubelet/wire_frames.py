"""Reads the protobuf messages of device plugins that are large, and writes NUMA nodes.

A node of 8 GPUs has thousands of device IDs; the generated classes need tens of milliseconds for such a message, a kubelet
less than one. The counterpart for writing is kit/protobuf. Field numbers are those of protos/deviceplugin.proto and
protos/podresources.proto. All functions raise MalformedMessageError for anything that is no such message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpushare_agent.core.kit.protobuf import Fields, MalformedMessageError, bytes_field, integer_field, scan_fields

_VARINT = 0


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of every field: any number of them, as in a real kubelet, which bounds a message's bytes alone."""
    # As many fields as bytes: the agent's bound is for what is read inside an admission, and a list may have 109,120 IDs.
    for key, value, start, stop in scan_fields(message, 0, len(message), Fields(len(message))):
        yield key >> 3, value if key & 7 == _VARINT else message[start:stop]


def submessages(message: bytes, number: int) -> list[bytes]:
    return [value for field, value in fields(message) if field == number and isinstance(value, bytes)]


def texts(message: bytes, number: int) -> list[str]:
    """A repeated string field."""
    try:
        return [value.decode() for value in submessages(message, number)]
    except UnicodeDecodeError as error:
        raise MalformedMessageError(f"a protobuf string is not UTF-8: {error}") from error


def numa_nodes(topology: bytes) -> tuple[int, ...]:
    """The node IDs of a TopologyInfo message; zero is an absent field."""
    nodes = []
    for node in submessages(topology, 1):
        ids = [value for field, value in fields(node) if field == 1 and isinstance(value, int)]
        nodes.append(ids[-1] if ids else 0)
    return tuple(nodes)


def topology_message(nodes: Sequence[int]) -> bytes:
    return b"".join(bytes_field(1, integer_field(1, node) if node else b"") for node in nodes)
