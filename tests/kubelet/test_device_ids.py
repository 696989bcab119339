"""What the kubelet calls a device, in the present form and in earlier ones."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.names import GpuUuid, device_id, split_device_id

A = GpuUuid("GPU-8f3e2b1c-72c9-5b9d-9d89-58c142755660")
B = GpuUuid("GPU-2c486d30-868e-5ab3-8936-41d32198c5fe")
LIKE_A = GpuUuid("GPU-8f3e2b1c-7111-5b9d-9d89-58c142755660")
MIG = GpuUuid("MIG-8f3e2b1c-72c9-5b9d-9d89-58c142755661")
OLD_MIG = [GpuUuid(f"MIG-GPU-8f3e2b1c-72c9-5b9d-9d89-58c142755660/{instance}/0") for instance in (1, 2)]

HEX = st.text("01", min_size=32, max_size=32).map(lambda digits: GpuUuid(f"GPU-{digits[:8]}-{digits[8:]}"))


def test_an_id_is_eight_digits_of_the_uuid_and_a_number() -> None:
    """No longer than it has to be: it is in every pod's status, once for each unit."""
    ids = DeviceIds([A, B])
    assert [ids.write(device_id(gpu, n)) for gpu, n in ((A, 0), (B, 319))] == ["8f3e2b1c-0", "2c486d30-319"]
    assert ids.read(["2c486d30-319", "8f3e2b1c-0"]) == [device_id(B, 319), device_id(A, 0)]


def test_keys_depend_on_no_order_and_are_longer_for_gpus_that_begin_alike() -> None:
    """Whatever the driver's order: an agent that starts again says the same. MIG devices too, of both forms."""
    gpus = [A, B, LIKE_A, MIG, *OLD_MIG]
    expected = dict(zip(gpus, [ids_of(gpus, gpu) for gpu in gpus], strict=True))
    assert expected[B] == "2c486d30-7"
    assert expected[LIKE_A] == "8f3e2b1c71-7"
    assert expected[MIG] == "8f3e2b1c72c95b9d9d8958c142755661-7"
    assert len(set(expected.values())) == len(gpus)
    for some in permutations(gpus, 3):
        assert {gpu: ids_of(some, gpu) for gpu in some} == {gpu: ids_of(sorted(some), gpu) for gpu in some}
    for order in (gpus, gpus[::-1]):
        assert {gpu: ids_of(order, gpu) for gpu in gpus} == expected


def ids_of(gpus: list[GpuUuid] | tuple[GpuUuid, ...], gpu: GpuUuid) -> str:
    return DeviceIds(gpus).write(device_id(gpu, 7))


@given(st.lists(HEX, unique=True, max_size=6), st.integers(0, 999_999))
def test_what_is_written_is_read_again_and_no_two_gpus_share_a_text(gpus: list[GpuUuid], number: int) -> None:
    """UUIDs that begin alike for long stretches included; by another agent of the same node as well."""
    devices = [device_id(gpu, number) for gpu in gpus]
    texts = [DeviceIds(gpus).write(device) for device in devices]
    assert len(set(texts)) == len(gpus)
    assert DeviceIds(gpus[::-1]).read(texts) == devices


def test_the_form_of_nvidias_plugin_is_read_and_written_as_it_was() -> None:
    """The kubelet counts by ID: a container's must come back as it holds them, next to ours of the same number."""
    ids = DeviceIds([A, B])
    theirs, ours = ids.read([f"{A}::7", "8f3e2b1c-7"])
    assert split_device_id(theirs) == split_device_id(ours) == (A, 7)
    assert theirs != ours
    assert [ids.write(theirs), ids.write(ours)] == [f"{A}::7", "8f3e2b1c-7"]


def test_of_what_a_container_holds_another_plugins_devices_are_not_kept() -> None:
    """Ours are kept under any name, a former program's too, and under a name of the node's whatever its devices are."""
    ids = DeviceIds([A], resources=["tencent.com/vcuda-core"])
    assert ids.read_held("example.com/port", ["port-a", "port-b"]) == frozenset()
    assert ids.read_held("example.com/former-name", ["8f3e2b1c-7"]) == {device_id(A, 7)}
    assert ids.read_held("aliyun.com/gpu-mem", [f"{A}-_-3"]) == {f"{A}-_-3"}
    assert ids.read_held("tencent.com/vcuda-core", ["port-a"]) == {"port-a"}
    assert DeviceIds([A]).read_held("example.com/port", ["port-a"]) == {"port-a"}


def test_a_gpu_in_the_place_of_another_does_not_inherit_its_ids() -> None:
    """IDs of a GPU that is gone name none of the node's, and keep their text."""
    ids = DeviceIds([B])
    gone = ids.read(["8f3e2b1c-7", f"{A}::7"])
    assert B not in [split_device_id(device)[0] for device in gone if split_device_id(device) is not None]  # type: ignore[index]
    assert [ids.write(device) for device in gone] == ["8f3e2b1c-7", f"{A}::7"]


def test_a_gpu_that_is_shown_later_is_known_by_the_ids_that_containers_hold() -> None:
    """Also where another came in between that begins alike: keys that were given stay."""
    ids = DeviceIds([B])
    (unknown,) = ids.read(["8f3e2b1c-7"])
    assert ids.add_gpus([B, A])
    assert not ids.add_gpus([A, B])
    assert ids.read([ids.write(unknown)]) == [device_id(A, 7)]
    assert ids.add_gpus([LIKE_A])
    assert ids.read(["8f3e2b1c-7", "8f3e2b1c71-7"]) == [device_id(A, 7), device_id(LIKE_A, 7)]


def test_instances_that_are_gone_are_forgotten_and_gpus_are_not() -> None:
    """Each life of an instance has another UUID."""
    ids = DeviceIds([A, B])
    for life in range(20):
        assert ids.add_gpus([A, GpuUuid(f"MIG-{life:08x}-0000-4000-8000-000000000000")])
    assert not ids.add_gpus([A, B])
    assert ids._keys.keys() == {A, B}


def test_a_key_of_another_length_is_read_where_one_gpu_begins_with_it() -> None:
    """A GPU that began alike has left, or has come: then the key of those that are here is shorter, or longer."""
    longer = DeviceIds([A, LIKE_A]).write(device_id(A, 7))
    alone, both = DeviceIds([A]), DeviceIds([A, LIKE_A])
    (device,) = alone.read([longer])
    assert split_device_id(device) == (A, 7)
    assert alone.write(device) == longer
    (doubtful,) = both.read(["8f3e2b1c-7"])
    assert split_device_id(doubtful) == ("8f3e2b1c", 7)


@pytest.mark.parametrize(
    "text", ["", "gpu", "-", "-1", "8f3e2b1c-", "8f3e2b1c-x", "8f3e2b1c-01", "8f3e2b1c-1234567", "a::b", "8f3e2b1c-²"]
)
def test_what_is_no_id_comes_back_as_it_is(text: str) -> None:
    """Of another plugin, or of nobody: it names no GPU."""
    (device,) = DeviceIds([A]).read([text])
    assert device == text
    assert split_device_id(device) is None
    assert DeviceIds([A]).write(device) == text
