"""Strict, fast decoding of the protobuf messages that are read inside every admission; and the encoding of the large ones.

The generated classes need about 20 µs per listed device; a node lists thousands, and every admission of the node waits
for the answer. These functions know the few messages that matter and read them straight from the bytes. They are not a
general decoder: other messages go through the generated classes.

Strict means: whatever the bytes are, the result is a value or `MalformedMessageError`, in time linear in the length. A known
field of the wrong wire type is malformed; an unknown field is skipped by its wire type; groups (wire types 3 and 4, gone
since proto3) are malformed. There is no recursion. No state. Only the kubelet sends these messages, and
the channel or server that receives them has bounded their size; who reads another's counts `Fields`.

Formats: protos/deviceplugin.proto and protos/podresources.proto; the encoding is protobuf's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct

MAX_FIELDS = 16_384

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_FIELD_NUMBER = (1 << 29) - 1

_FIELD_1_BYTES = 1 << 3 | _BYTES
_FIELD_2_BYTES = 2 << 3 | _BYTES
_FIELD_3_BYTES = 3 << 3 | _BYTES
_FIELD_3_VARINT = 3 << 3 | _VARINT

_KEY_BYTES = 512
"""More than two fields that say their length in one byte."""
_SHORT = [bytes((value,)) for value in range(0x80)]
_TEN = b"\xff"

Field = tuple[int, int, int, int]
"""Key (field number << 3 | wire type), value (of a varint, else 0), and where the content starts and ends."""


class MalformedMessageError(ValueError):
    """The bytes are not the message that they should be."""


class PreferredContainer(Struct, frozen=True, kw_only=True):
    """One container request of GetPreferredAllocation. `size` counts the must-include IDs too. `known` is what the available
    IDs stand for where the reader knew all of them; then `available` is empty."""

    available: list[str]
    must_include: list[str]
    size: int
    known: Collection[Any] = ()


class PodEntry(Struct, frozen=True, kw_only=True):
    """One pod of a List answer, its devices not decoded. `body` is the encoded PodResources message."""

    namespace: str
    name: str
    body: bytes


ReadsFields = Callable[[list[bytes]], Collection[Any] | None]

ContainerDevices = tuple[str, dict[str, frozenset[str]]]
"""A container's name and its device IDs by resource name."""


def decode_preferred_allocation(data: bytes, read: ReadsFields | None = None) -> list[PreferredContainer]:
    """Decodes a PreferredAllocationRequest: its container requests, in order. `read` returns what the IDs of an offer stand
    for, by their fields without the fields' key: length and printable text, a length of 10 written as 255; None where one is
    not known."""
    found = []
    for start, stop in _messages(data):
        if read is not None and (offered := _known_ids(data, start, stop, read)) is not None:
            found.append(offered)
            continue
        available: list[str] = []
        must_include: list[str] = []
        size = 0
        lists = {_FIELD_1_BYTES: available, _FIELD_2_BYTES: must_include}
        for _, value, _, _ in _known_fields(data, start, stop, (_FIELD_3_VARINT,), lists):
            size = _int32(value)
        found.append(PreferredContainer(available=available, must_include=must_include, size=size))
    return found


def _known_ids(data: bytes, start: int, stop: int, read: ReadsFields) -> PreferredContainer | None:
    """The usual request, thousands of known IDs and a small size, split at once; None where it looks different.

    It is split at the key of field 1, which is in no text; as a length, 10, it is written as 255 before, which no other
    length of a known ID is. So each piece is a whole field: after the key comes what says how long it is."""
    end = stop - 2 if data[stop - 2] == _FIELD_3_VARINT else stop - 3
    if end <= start or data[end] != _FIELD_3_VARINT or data[start] != _FIELD_1_BYTES or data[stop - 1] > 127:
        return None
    offer = data[start:end]
    if _TEN in offer or (stop - end == 3 and data[stop - 2] < 128):
        return None
    pieces = offer.replace(b"\n\n", b"\n" + _TEN).split(b"\n")
    if (found := read(pieces[1:])) is None:
        return None
    return PreferredContainer(available=[], must_include=[], size=_varint(data, end + 1, stop)[0], known=found)


def decode_allocate(data: bytes) -> list[list[str]]:
    """Decodes an AllocateRequest: the device IDs of each container request, in order."""
    return [_device_ids(data, start, stop) for start, stop in _messages(data)]


def decode_pre_start(data: bytes) -> list[str]:
    """Decodes a PreStartContainerRequest: the container's device IDs."""
    return _device_ids(data, 0, len(data))


def decode_container_answer(data: bytes) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Of a ContainerAllocateResponse: its variables, its mounts, the host's path by that in the container, and its device
    nodes on the host."""
    env, mounts, nodes = dict[str, str](), dict[str, str](), list[str]()
    for key, _, start, stop in _known_fields(data, 0, len(data), (_FIELD_1_BYTES, _FIELD_2_BYTES, _FIELD_3_BYTES)):
        first, second = [""], [""]
        for _ in _known_fields(data, start, stop, (), {_FIELD_1_BYTES: first, _FIELD_2_BYTES: second}):
            pass
        if key == _FIELD_3_BYTES:
            nodes.append(second[-1])
        else:
            (mounts if key == _FIELD_2_BYTES else env)[first[-1]] = second[-1]
    return env, mounts, nodes


def scan_pods(data: bytes, settled: Mapping[bytes, int] = MappingProxyType({})) -> tuple[list[tuple[int, int]], int]:
    """Where in a ListPodResourcesResponse its pods' messages start and end, in their order, for `scan_pod_entry` and
    `decode_pod_containers`. Pods that begin with a key of `settled`, two fields, are left out; the sum of their values."""
    found, total, pos, value_of = [], 0, 0, settled.get
    padded, key, last = data + bytes(_KEY_BYTES), _FIELD_1_BYTES, len(data)
    # One loop, because there are a thousand and more: with lengths of two bytes, of one where a pod has no device, or three.
    while padded[pos] == key:
        start, size = pos + 2, padded[pos + 1]
        if size > 127:
            start, size = pos + 3, size + (padded[pos + 2] - 1 << 7)
            if padded[pos + 2] > 127:
                start, size = pos + 4, size + (padded[pos + 3] - 1 << 14)
        stop = start + size
        if stop > last or padded[start - 1] > 127:
            break
        pos, end = stop, start + padded[start + 1]
        value = value_of(padded[start : end + 4 + padded[end + 3]])
        if value is None:
            found.append((start, stop))
        else:
            total += value
    return found + _messages(data, pos), total


def scan_single_pod(data: bytes) -> PodEntry | None:
    """The pod of a GetPodResourcesResponse, None where the message holds none."""
    entries = [scan_pod_entry(data[start:stop]) for start, stop in _messages(data)]
    # protobuf: where a field is there several times, the last one counts.
    return entries[-1] if entries else None


def scan_pod_entry(body: bytes) -> PodEntry:
    """Reads namespace and name of one encoded PodResources message."""
    found = {_FIELD_1_BYTES: "", _FIELD_2_BYTES: ""}
    for key, _, start, stop in _known_fields(body, 0, len(body), (_FIELD_1_BYTES, _FIELD_2_BYTES, _FIELD_3_BYTES)):
        if key != _FIELD_3_BYTES:
            found[key] = _text(body, start, stop)
    return PodEntry(name=found[_FIELD_1_BYTES], namespace=found[_FIELD_2_BYTES], body=body)


def decode_pod_containers(body: bytes) -> list[ContainerDevices]:
    """The containers of one encoded PodResources message, with the several entries of one resource merged. A resource
    without any ID is kept as an empty set."""
    containers = []
    for key, _, start, stop in _known_fields(body, 0, len(body), (_FIELD_1_BYTES, _FIELD_2_BYTES, _FIELD_3_BYTES)):
        if key == _FIELD_3_BYTES:
            containers.append(_container(body, start, stop))
    return containers


def _container(data: bytes, pos: int, stop: int) -> ContainerDevices:
    name = ""
    found: dict[str, list[str]] = {}
    while (pos := _plain_devices(data, pos, stop, found)) < stop:
        # The field that ended the run; behind it the run goes on.
        end = _field(data, pos, stop)[3]
        for key, _, start, _ in _known_fields(data, pos, end, (_FIELD_1_BYTES, _FIELD_2_BYTES)):
            if key == _FIELD_1_BYTES:
                name = _text(data, start, end)
                continue
            resources, ids = [""], list[str]()
            lists = {_FIELD_1_BYTES: resources, _FIELD_2_BYTES: ids}
            for _ in _known_fields(data, start, end, (_FIELD_3_BYTES,), lists):
                pass  # the topology
            # Where a text comes twice, the last one counts.
            found.setdefault(resources[-1], []).extend(ids)
        pos = end
    return name, {resource: frozenset(ids) for resource, ids in found.items()}


def _plain_devices(data: bytes, pos: int, stop: int, found: dict[str, list[str]]) -> int:
    """Reads the run of ContainerDevices at `pos` that look as the kubelet writes them; returns where it ends.

    That is: lengths below 128, one resource name, one ID, then nothing or one topology. 5,000 devices take 3.4 ms so and
    10 ms field by field. Whatever looks different is left to the careful reader.
    """
    while stop - pos > 5 and data[pos] == _FIELD_2_BYTES and data[pos + 2] == _FIELD_1_BYTES:
        entry_stop = pos + 2 + data[pos + 1]
        id_key = pos + 4 + data[pos + 3]
        if entry_stop > stop or id_key + 2 > entry_stop or data[id_key] != _FIELD_2_BYTES:
            break
        id_stop = id_key + 2 + data[id_key + 1]
        if (data[pos + 1] | data[pos + 3] | data[id_key + 1]) > 127 or id_stop > entry_stop:
            break
        if id_stop != entry_stop and (
            entry_stop - id_stop < 2
            or data[id_stop] != _FIELD_3_BYTES
            or data[id_stop + 1] > 127
            or id_stop + 2 + data[id_stop + 1] != entry_stop
        ):
            break
        found.setdefault(_text(data, pos + 4, id_key), []).append(_text(data, id_key + 2, id_stop))
        pos = entry_stop
    return pos


def _device_ids(data: bytes, pos: int, stop: int) -> list[str]:
    ids: list[str] = []
    for _ in _known_fields(data, pos, stop, (), {_FIELD_1_BYTES: ids}):
        pass
    return ids


def _messages(data: bytes, pos: int = 0) -> list[tuple[int, int]]:
    """The places of the submessages in field 1, for messages that have no other known field."""
    return [(start, stop) for _, _, start, stop in _known_fields(data, pos, len(data), (_FIELD_1_BYTES,))]


def _known_fields(
    data: bytes, pos: int, stop: int, known: tuple[int, ...], lists: Mapping[int, list[str]] = MappingProxyType({})
) -> Iterator[Field]:
    """The fields of the `known` keys, and into `lists` the texts of theirs; other fields are skipped. Raises
    MalformedMessageError for one that has another's wire type, too."""
    while pos < stop:
        if data[pos] in lists:
            pos = _texts(data, pos, stop, lists[data[pos]])
            if pos == stop:
                return
        field = _field(data, pos, stop)
        key, _, start, pos = field
        if key in known:
            yield field
        elif key in lists:
            lists[key].append(_text(data, start, pos))
        elif any(key >> 3 == one >> 3 for one in (*known, *lists)):
            raise MalformedMessageError(
                f"field {key >> 3} has wire type {key & 7}, which is not the one it should have"
            )


def _texts(data: bytes, pos: int, stop: int, out: list[str]) -> int:
    """Reads the run of texts of less than 128 bytes in the field at `pos` into `out`; returns where the run ends. A node's
    list has tens of thousands of IDs."""
    # A text needs two bytes at least, key and length: one comparison instead of two in the loop.
    key, last, append = data[pos], stop - 1, out.append
    try:
        while pos < last and data[pos] == key:
            end = pos + 2 + data[pos + 1]
            if data[pos + 1] > 127 or end > stop:
                break
            append(data[pos + 2 : end].decode())
            pos = end
    except UnicodeDecodeError as e:
        raise MalformedMessageError(f"the string at byte {pos + 2} is not UTF-8") from e
    return pos


class Fields:
    """How many more fields of one message, and of the messages in it, are read. For messages that anybody may send."""

    __slots__ = ("_left", "_limit")

    def __init__(self, limit: int = MAX_FIELDS) -> None:
        self._left = self._limit = limit

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise MalformedMessageError(f"it has more than {self._limit} fields")


def scan_fields(data: bytes, pos: int, stop: int, fields: Fields | None = None) -> Iterator[Field]:
    """The fields of one message, which lies in `data` from `pos` to `stop`, checked for their framing only."""
    while pos < stop:
        if fields is not None:
            fields.take()
        field = _field(data, pos, stop)
        pos = field[3]
        yield field


def _field(data: bytes, pos: int, stop: int) -> Field:
    # As nearly all are: key and length of one byte each.
    if pos + 1 < stop and data[pos] & 0x87 == _BYTES and data[pos] > _BYTES:
        end = pos + 2 + data[pos + 1]
        if data[pos + 1] < 0x80 and end <= stop:
            return data[pos], 0, pos + 2, end
    key, start = _varint(data, pos, stop)
    wire_type = key & 7
    # Field 0 does not exist: zeroes instead of a message are not taken for fields.
    if not 1 <= key >> 3 <= _MAX_FIELD_NUMBER:
        raise MalformedMessageError(f"field number {key >> 3} at byte {pos} is not allowed")
    if wire_type == _VARINT:
        value, end = _varint(data, start, stop)
        return key, value, start, end
    if wire_type == _BYTES:
        length, start = _varint(data, start, stop)
        end = start + length
    elif wire_type == _FIXED64:
        end = start + 8
    elif wire_type == _FIXED32:
        end = start + 4
    else:
        raise MalformedMessageError(f"wire type {wire_type} at byte {pos} is not allowed")
    if end > stop:
        raise MalformedMessageError(f"the field at byte {pos} needs {end - start} bytes, {stop - start} are left")
    return key, 0, start, end


def _varint(data: bytes, pos: int, stop: int) -> tuple[int, int]:
    """The value of at most 64 bits at `pos`, and where it ends."""
    value = shift = 0
    start = pos
    while pos < stop:
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            # Ten groups of seven bits have room for 70: protobuf's numbers have 64.
            if value >> 64:
                break
            return value, pos
        shift += 7
        # The loop ends for any input: a number has ten bytes at most.
        if shift > 63:
            break
    raise MalformedMessageError(f"the number at byte {start} is cut off or longer than 64 bits")


def _int32(value: int) -> int:
    value &= 0xFFFF_FFFF
    # Negative int32 are sent as 64 bits: the upper half is dropped, as in protobuf.
    return value - (1 << 32) if value >> 31 else value


def _text(data: bytes, start: int, stop: int) -> str:
    try:
        return data[start:stop].decode()
    except UnicodeDecodeError as e:
        raise MalformedMessageError(f"the string at byte {start} is not UTF-8") from e


# --- writing: the generated classes need about 20 µs for a device ---


def varint(value: int) -> bytes:
    """`value`, not negative, in 7-bit groups, lowest first."""
    if value < 0x80:
        return _SHORT[value]
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def bytes_field(number: int, content: bytes) -> bytes:
    """A string, bytes or submessage field."""
    key, length = number << 3 | _BYTES, len(content)
    # Nearly all keys and lengths are one byte: an admission encodes hundreds.
    return (
        (_SHORT[key] if key < 0x80 else varint(key)) + (_SHORT[length] if length < 0x80 else varint(length)) + content
    )


def integer_field(number: int, value: int) -> bytes:
    """An int32 or int64 field; a negative value takes ten bytes, as protobuf has it."""
    return varint(number << 3 | _VARINT) + varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def string_list(number: int, texts: Iterable[str]) -> bytes:
    """A repeated string field."""
    key = varint(number << 3 | _BYTES)
    parts: list[bytes] = []
    for text in texts:
        content = text.encode()
        parts += (key, _SHORT[len(content)] if len(content) < 0x80 else varint(len(content)), content)
    return b"".join(parts)
