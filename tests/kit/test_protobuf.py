"""kit/protobuf.py against the generated classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.agent.kubelet.pod_resources import decode_pod_entry
from gpushare_agent.agent.kubelet.records import ListedContainer, ListedPod
from gpushare_agent.core.kit.protobuf import (
    Fields,
    MalformedMessageError,
    bytes_field,
    decode_allocate,
    decode_pod_containers,
    decode_pre_start,
    decode_preferred_allocation,
    integer_field,
    scan_fields,
    scan_pod_entry,
    scan_pods,
    scan_single_pod,
    string_list,
    varint,
)
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.wire import v1, v1beta1

TEXT = st.text(max_size=8) | st.sampled_from(["GPU-0a::17", "tencent.com/vcuda-core", "x" * 127, "x" * 128, "ü" * 70])
IDS = st.lists(TEXT, max_size=6)
INT32 = st.integers(-(2**31), 2**31 - 1)
UNKNOWN = st.sampled_from(
    [
        b"",
        bytes_field(99, b"anything"),
        integer_field(50, -1),
        varint(60 << 3 | 1) + bytes(8),
        varint(61 << 3 | 5) + bytes(4),
    ]
)

PREFERRED = st.lists(
    st.builds(
        v1beta1.ContainerPreferredAllocationRequest,
        available_device_ids=IDS,
        must_include_device_ids=IDS,
        allocation_size=INT32,
    ),
    max_size=3,
).map(lambda requests: v1beta1.PreferredAllocationRequest(container_requests=requests))
ALLOCATE = st.lists(st.builds(v1beta1.ContainerAllocateRequest, device_ids=IDS), max_size=3).map(
    lambda requests: v1beta1.AllocateRequest(container_requests=requests)
)
TOPOLOGY = st.none() | st.builds(
    v1.TopologyInfo, nodes=st.lists(st.builds(v1.NumaNode, id=st.integers(0, 300)), max_size=2)
)
DEVICES = st.builds(v1.ContainerDevices, resource_name=TEXT, device_ids=IDS, topology=TOPOLOGY)
CONTAINER = st.builds(
    v1.ContainerResources,
    name=TEXT,
    devices=st.lists(DEVICES, max_size=5),
    cpu_ids=st.lists(st.integers(0, 200), max_size=3),
    memory=st.lists(st.builds(v1.ContainerMemory, memory_type=TEXT, size=st.integers(0, 2**40)), max_size=1),
)
POD = st.builds(v1.PodResources, name=TEXT, namespace=TEXT, containers=st.lists(CONTAINER, max_size=3))
LIST = st.lists(POD, max_size=3).map(lambda pods: v1.ListPodResourcesResponse(pod_resources=pods))


def bodies_of(data: bytes) -> list[bytes]:
    return [data[start:stop] for start, stop in scan_pods(data)[0]]


def decode_all_pods(data: bytes) -> list[ListedPod]:
    ids = DeviceIds()
    return [decode_pod_entry(body, ids) for body in bodies_of(data)]


DECODERS: list[Callable[[bytes], Any]] = [
    decode_preferred_allocation,
    decode_allocate,
    decode_pre_start,
    decode_all_pods,
    scan_pod_entry,
    decode_pod_containers,
    scan_single_pod,
]


def as_listed(pod: v1.PodResources) -> ListedPod:
    """The same by way of the generated classes."""
    containers = []
    for container in pod.containers:
        devices: dict[str, frozenset[str]] = {}
        for entry in container.devices:
            merged = devices.get(entry.resource_name, frozenset()) | frozenset(DeviceIds().read(entry.device_ids))
            devices[entry.resource_name] = merged
        containers.append(ListedContainer(name=container.name, devices=devices))
    return ListedPod(namespace=pod.namespace, name=pod.name, containers=tuple(containers))


OFFERED = [f"8f3e2b1c-{n}" for n in (0, 7, 17, 123)] + ["8f3e2b1c-17/10s"]
KNOWN_IDS = DeviceIds([GpuUuid("GPU-8f3e2b1c-0000")])
for _text in OFFERED:
    KNOWN_IDS.write(KNOWN_IDS.read([_text])[0])


@given(
    st.lists(st.sampled_from([*OFFERED, "8f3e2b1c-9", "", "\n", "x" * 128]) | st.text(max_size=12), max_size=6),
    st.lists(st.sampled_from(OFFERED), max_size=1),
    st.integers(-1, 20_000),
    st.lists(
        st.tuples(st.integers(0, 90), st.sampled_from([0, 10, 18, 24, 128, 255]) | st.integers(0, 255)), max_size=3
    ),
)
def test_an_offer_of_known_ids_is_what_it_is_without_knowing_them(
    available: list[str], must: list[str], size: int, flips: list[tuple[int, int]]
) -> None:
    """Whatever single bytes are changed in it: the same value, or the same fault."""
    data = bytearray(bytes_field(1, string_list(1, available) + string_list(2, must) + integer_field(3, size)))
    for place, value in flips:
        data[place % len(data)] = value
    found: list[Any] = []
    for known in (None, KNOWN_IDS.read_fields):
        try:
            decoded = decode_preferred_allocation(bytes(data), known)
            found.append([
                (one.known or frozenset(KNOWN_IDS.read(one.available)), one.must_include, one.size) for one in decoded
            ])  # fmt: skip
        except MalformedMessageError as e:
            found.append(str(e))
    assert found[0] == found[1]


def test_known_ids_are_read_without_their_texts() -> None:
    """With one or two bytes of size, and a length of 10, which is the key of the field too."""
    for size in (1, 10, 24, 300):
        data = bytes_field(1, string_list(1, OFFERED) + integer_field(3, size))
        [found] = decode_preferred_allocation(data, KNOWN_IDS.read_fields)
        assert (found.known, found.available, found.size) == (frozenset(KNOWN_IDS.read(OFFERED)), [], size)
    # What stands for a length of 10 in the mapping is the first byte of a longer length in a message.
    offer = string_list(1, OFFERED[:1]).replace(b"\n\n", b"\n\xff") + integer_field(3, 1)
    with pytest.raises(MalformedMessageError):
        decode_preferred_allocation(bytes_field(1, offer), KNOWN_IDS.read_fields)


@given(PREFERRED, UNKNOWN)
def test_a_preferred_allocation_request_reads_as_the_generated_class_reads_it(
    message: v1beta1.PreferredAllocationRequest, unknown: bytes
) -> None:
    """Every valid message decodes to the same values, unknown fields of every wire type skipped."""
    decoded = decode_preferred_allocation(bytes(message) + unknown)
    assert [(c.available, c.must_include, c.size) for c in decoded] == [
        (c.available_device_ids, c.must_include_device_ids, c.allocation_size) for c in message.container_requests
    ]


@given(ALLOCATE, UNKNOWN)
def test_an_allocate_request_reads_as_the_generated_class_reads_it(
    message: v1beta1.AllocateRequest, unknown: bytes
) -> None:
    """Each container request keeps its IDs, in order."""
    assert decode_allocate(unknown + bytes(message)) == [c.device_ids for c in message.container_requests]


@given(IDS, UNKNOWN)
def test_a_pre_start_request_reads_as_the_generated_class_reads_it(ids: list[str], unknown: bytes) -> None:
    """The IDs come back in order."""
    assert decode_pre_start(bytes(v1beta1.PreStartContainerRequest(device_ids=ids)) + unknown) == ids


@given(LIST, UNKNOWN)
def test_a_list_answer_reads_as_the_generated_class_reads_it(
    message: v1.ListPodResourcesResponse, unknown: bytes
) -> None:
    """Pods, containers and merged devices equal those of the generated classes."""
    data = bytes(message) + unknown
    assert decode_all_pods(data) == [as_listed(pod) for pod in message.pod_resources]
    assert bodies_of(data) == [bytes(pod) for pod in message.pod_resources]


@pytest.mark.parametrize("sizes", [(10, 200, 20_000, 10), (0, 127, 128), (16_383, 16_384)])
def test_pods_of_every_size_are_split(sizes: tuple[int, ...]) -> None:
    """The length before each is of one, two or three bytes."""
    bodies = [bytes(size) for size in sizes]
    assert bodies_of(b"".join(bytes_field(1, body) for body in bodies)) == bodies


@given(POD)
def test_a_get_answer_reads_as_the_generated_class_reads_it(pod: v1.PodResources) -> None:
    """The one pod of a GetPodResourcesResponse has its names and its whole body."""
    entry = scan_single_pod(bytes(v1.GetPodResourcesResponse(pod_resources=pod)))
    assert entry is not None
    assert (entry.namespace, entry.name, decode_pod_entry(entry.body, DeviceIds())) == (
        pod.namespace,
        pod.name,
        as_listed(pod),
    )


def test_a_get_answer_without_a_pod_is_none() -> None:
    """An empty GetPodResourcesResponse holds no pod."""
    assert scan_single_pod(b"") is None


def _mutate(data: bytes, edits: list[tuple[int, int]], cut: int) -> bytes:
    mutated = bytearray(data)
    for position, value in edits:
        if mutated:
            mutated[position % len(mutated)] = value
    return bytes(mutated[: len(mutated) - cut % (len(mutated) + 1)])


@given(
    st.one_of(PREFERRED, ALLOCATE, LIST, POD).map(bytes) | st.binary(max_size=200),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=5),
    st.integers(0, 40),
)
def test_mutated_messages_give_a_value_or_malformed_and_nothing_else(
    data: bytes, edits: list[tuple[int, int]], cut: int
) -> None:
    """Bytes that were changed or cut, and any others, end in a value or in MalformedMessageError, in every decoder."""
    for decode in DECODERS:
        try:
            decode(_mutate(data, edits, cut))
        except MalformedMessageError as e:
            assert str(e)


@pytest.mark.parametrize("decode", [decode_preferred_allocation, decode_allocate, decode_all_pods])
def test_a_message_cut_inside_its_only_field_is_malformed(decode: Callable[[bytes], Any]) -> None:
    """Every cut of a message that is one field is found."""
    pod = v1.PodResources(name="p", namespace="n", containers=[v1.ContainerResources(name="c")])
    data = {
        decode_preferred_allocation: bytes(
            v1beta1.PreferredAllocationRequest(
                container_requests=[v1beta1.ContainerPreferredAllocationRequest(["a", "b" * 200], ["c"], 3)]
            )
        ),
        decode_allocate: bytes(v1beta1.AllocateRequest([v1beta1.ContainerAllocateRequest(["a", "b"])])),
        decode_all_pods: bytes(v1.ListPodResourcesResponse(pod_resources=[pod])),
    }[decode]
    decode(data)
    for length in range(1, len(data)):
        with pytest.raises(MalformedMessageError):
            decode(data[:length])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x0b", "wire type 3"),
        (b"\x0c", "wire type 4"),
        (b"\x0f", "wire type 7"),
        (b"\x00\x00", "field number 0"),
        (b"\x08\x01", "field 1 has wire type 0"),
        (b"\x0a\x03ab", "needs 3 bytes, 2 are left"),
        (b"\x0a\x02\xff\xfe", "not UTF-8"),
        (b"\x0a\x81\x01" + b"\xff" * 129, "not UTF-8"),
        (b"\x80" * 11, "cut off or longer than 64 bits"),
        (b"\xff" * 9 + b"\x7f", "cut off or longer than 64 bits"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "needs 9223372036854775807 bytes"),
        (b"\xfa\xff\xff\xff\x7f\x00", "field number"),
        (b"\x91\x06abc", "needs 8 bytes"),
        (b"\x95\x06abc", "needs 4 bytes"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, says: str) -> None:
    """Each kind of fault has a text of its own."""
    with pytest.raises(MalformedMessageError, match=says):
        decode_pre_start(data)


def test_more_fields_than_are_read_are_malformed() -> None:
    """Those in a message's own messages count, for who reads what anybody may send."""
    fields = Fields(3)
    assert len(list(scan_fields(b"\x08\x01" * 2, 0, 4, fields))) == 2
    with pytest.raises(MalformedMessageError, match="more than 3 fields"):
        list(scan_fields(b"\x08\x01" * 2, 0, 4, fields))


def test_fields_in_any_order_are_read() -> None:
    """Protobuf fixes no order: IDs behind the topology, and a name behind the devices, count too."""
    topology = bytes_field(3, b"")
    entry = string_list(1, ["r"]) + string_list(2, ["a"]) + topology + string_list(2, ["b"])
    container = bytes_field(2, entry) + string_list(1, ["c"]) + bytes_field(2, topology + string_list(2, ["d"]))
    assert decode_pod_containers(bytes_field(3, container)) == [
        ("c", {"r": frozenset({"a", "b"}), "": frozenset({"d"})}),
    ]


def test_an_entry_that_reaches_beyond_its_container_is_malformed() -> None:
    """Also where the bytes behind the container would fit."""
    entry = bytes_field(2, string_list(1, ["resource"]) + string_list(2, ["device"]))
    body = bytes_field(3, entry[:-3]) + bytes_field(9, bytes(20))
    with pytest.raises(MalformedMessageError):
        decode_pod_containers(body)
    ids = string_list(1, ["device"])
    with pytest.raises(MalformedMessageError):
        decode_allocate(bytes_field(1, ids[:-3]) + bytes_field(9, bytes(20)))


def test_the_last_of_several_names_counts() -> None:
    """Protobuf lets a scalar come twice; the last one is the value."""
    entry = scan_pod_entry(string_list(1, ["old", "new"]) + string_list(2, ["a", "b"]))
    assert (entry.name, entry.namespace) == ("new", "b")


@given(IDS, st.integers(0, 2**63 - 1))
def test_built_fields_read_back(ids: list[str], number: int) -> None:
    """What is written is what the generated classes write."""
    assert string_list(1, ids) == bytes(v1beta1.ContainerPreferredAllocationResponse(device_ids=ids))
    if number:
        assert integer_field(1, number) == bytes(v1beta1.NumaNode(id=number))
    assert integer_field(1, -number - 1) == bytes(v1beta1.NumaNode(id=-number - 1))
