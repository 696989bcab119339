"""The GPUs of containers that gpu-manager or GPUShare's plugin started, by every source that names them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.admission.decisions.former_devices import held_back
from gpushare_agent.agent.admission.decisions.recovery import Evidence, Records, rebuild, reconcile
from gpushare_agent.agent.admission.decisions.resize import is_resizable
from gpushare_agent.agent.gpus.inventory import GpuInventoryState
from gpushare_agent.agent.kubelet.records import read_checkpoint
from gpushare_agent.agent.node import gpu_split
from gpushare_agent.core.model.allocations import Allocation, Charge
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.names import ENV_GPUSHARE_INDEX, VCORE_RESOURCE, VMEMORY_RESOURCE, GpuUuid
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.core.wire.v1beta1 import ContainerAllocateResponse, DeviceSpec
from tests.support_core import NAMES, container, inventory, listed, mig_instance, pod

BLOCK = 268435456
GPU_MEM = "aliyun.com/gpu-mem"
INVENTORY = inventory(3)


def cores(count: int, first: int = 0) -> list[str]:
    return [f"tencent.com/vcuda-core-{n}" for n in range(first, first + count)]


def blocks(count: int, size: int = BLOCK) -> list[str]:
    return [f"tencent.com/vcuda-memory-{size}-{n}" for n in range(count)]


def units(count: int, uuid: str = "GPU-0") -> list[str]:
    return [f"{uuid}-_-{n}" for n in range(count)]


def answer(*nodes: str, **env: str) -> bytes:
    """As gpu-manager's, with the control nodes that it always has."""
    paths = [*nodes, "/dev/nvidiactl", "/dev/nvidia-uvm"]
    devices = [DeviceSpec(container_path=path, host_path=path, permissions="rwm") for path in paths]
    return bytes(ContainerAllocateResponse(devices=devices, envs=env))


class Node:
    """The kubelet's checkpoint, and gpu-manager's own next to it, as files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._entries: list[dict[str, object]] = []
        self._own: dict[str, dict[str, object]] = {}

    def holds(self, uid: str, resource: str, texts: list[str], response: bytes = b"", *, name: str = "main") -> None:
        entry = {"PodUID": uid, "ContainerName": name, "ResourceName": resource, "DeviceIDs": {"-1": texts}}
        self._entries.append({**entry, "AllocResp": base64.b64encode(response).decode()})

    def wrote(self, uid: str, *nodes: str, name: str = "main") -> None:
        self._own.setdefault(uid, {})[name] = {"Devices": list(nodes), "Cores": 30, "Memory": 30 * BLOCK}

    def rebuilt(self, *pods: Pod, gpus: GpuInventory = INVENTORY) -> dict[str, Allocation]:
        path = self._directory / "kubelet_internal_checkpoint"
        path.write_text(json.dumps({"Data": {"PodDeviceEntries": self._entries}}))
        own = self._directory / "gpumanager_internal_checkpoint"
        own.write_text(json.dumps({"PodGPUMapping": self._own}))
        entries = read_checkpoint(path, own)
        found = rebuild(Records(listed=(), checkpoint=entries, pods=pods or None), NAMES, gpus, 0.0)
        return {one.key.container: one for one in found}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def charges(found: dict[str, Allocation]) -> dict[GpuUuid, Charge]:
    cache = AllocationCache()
    cache.replace_all(found.values())
    return cache.charges()


def test_the_answer_in_the_kubelets_checkpoint_names_the_gpu(node: Node) -> None:
    """Its device node, also where the annotation says another."""
    node.holds("u1", VCORE_RESOURCE, cores(30, first=170), answer("/dev/nvidia1", NVIDIA_VISIBLE_DEVICES="GPU-1"))
    node.holds("u1", VMEMORY_RESOURCE, blocks(30))
    stale = {"tencent.com/predicate-gpu-idx-0": "2", "tencent.com/gpu-assigned": "true"}
    owner = pod("one", container(cores=30, blocks=30), uid="u1", annotations=stale)
    found = node.rebuilt(owner)
    assert found["main"].started_by == "gpu-manager" and not found["main"].is_limited
    assert charges(found) == {"GPU-1": Charge(cores=30, blocks=30, shares=1)}
    assert held_back(found.values()) == {} and not is_resizable(found["main"], [owner], NAMES)


ASSIGNED = {"tencent.com/predicate-gpu-idx-0": "1", "tencent.com/gpu-assigned": "true"}


@pytest.mark.parametrize(
    ("annotations", "gpus"),
    [
        (ASSIGNED, "GPU-1"),
        (ASSIGNED | {"tencent.com/gpu-assigned": "false"}, "GPU-0|GPU-1|GPU-2|"),  # the extender's plan
        (ASSIGNED | {"tencent.com/predicate-gpu-idx-0": "7"}, "GPU-0|GPU-1|GPU-2|"),  # no such GPU
        (ASSIGNED | {"tencent.com/predicate-gpu-idx-0": "0,2"}, "GPU-0|GPU-2|"),  # a share is of one
        (ASSIGNED | {"tencent.com/predicate-gpu-idx-0": "\u0661"}, "GPU-0|GPU-1|GPU-2|"),  # a digit of another script
        ({"tencent.com/predicate-gpu-idx-1": "1", "tencent.com/gpu-assigned": "true"}, "GPU-0|GPU-1|GPU-2|"),
        ({}, "GPU-0|GPU-1|GPU-2|"),
    ],
)
def test_the_annotation_names_it_where_no_file_does(node: Node, annotations: dict[str, str], gpus: str) -> None:
    node.holds("u1", VCORE_RESOURCE, cores(30))
    found = node.rebuilt(pod("one", container(cores=30, blocks=30), uid="u1", annotations=annotations))
    assert found["main"].gpus == (gpus,)
    assert set(held_back(found.values())) == ({*gpus.split("|")} - {""} if "|" in gpus else set())


def test_what_the_listing_alone_has_is_found_by_the_pods_name() -> None:
    """The kubelet's checkpoint cannot be read."""
    known = pod("one", container(cores=30, blocks=30), uid="u1", annotations=ASSIGNED)
    records = Records(listed=[listed("one", main=(cores(30), blocks(30)))], checkpoint=(), pods=[known])
    (found,) = rebuild(records, NAMES, INVENTORY, 0.0)
    assert (found.key.pod_uid, found.gpus, found.cores, found.memory_blocks) == ("u1", ("GPU-1",), 30, 30)


def test_each_container_has_its_own_gpu_and_whole_gpus_are_whole(node: Node) -> None:
    node.holds("u1", VCORE_RESOURCE, cores(30), answer("/dev/nvidia0"), name="a")
    node.holds("u1", VCORE_RESOURCE, cores(200, first=30), answer("/dev/nvidia2", "/dev/nvidia1"), name="b")
    found = node.rebuilt()
    assert found["a"].gpus == ("GPU-0",) and found["b"].gpus == ("GPU-1", "GPU-2") and found["b"].is_whole
    assert [charges(found)[GpuUuid(f"GPU-{n}")].cores for n in range(3)] == [30, 100, 100]


def test_a_whole_gpu_of_which_one_is_not_named_may_be_any(node: Node) -> None:
    node.holds("u1", VCORE_RESOURCE, cores(200), answer("/dev/nvidia0"))
    assert set(held_back(node.rebuilt().values())) == {"GPU-0", "GPU-1", "GPU-2"}


def test_minor_numbers_and_indexes_are_no_identities(node: Node) -> None:
    """The first GPU has fallen off: the driver's indexes moved, its minor numbers did not."""
    left = replace(INVENTORY, gpus=tuple(replace(gpu, index=gpu.index - 1) for gpu in INVENTORY.gpus[1:]))
    node.holds("u1", VCORE_RESOURCE, cores(30), answer("/dev/nvidia1"), name="node")
    node.holds("u2", GPU_MEM, units(8), answer(**{ENV_GPUSHARE_INDEX: "1"}), name="index")
    node.holds("u3", VCORE_RESOURCE, cores(30), answer("/dev/nvidia1", NVIDIA_VISIBLE_DEVICES="GPU-2"), name="both")
    node.holds("u4", VCORE_RESOURCE, cores(30), answer("/dev/nvidia0", NVIDIA_VISIBLE_DEVICES="GPU-0"), name="lost")
    found = node.rebuilt(gpus=left)
    assert found["node"].gpus == ("GPU-1",) and found["lost"].gpus == ("GPU-0",)
    assert found["index"].gpus == found["both"].gpus == ("GPU-1|GPU-2|",)


def test_a_gpu_that_mig_divides_now_may_be_in_any_instance(node: Node) -> None:
    instances = tuple(replace(mig_instance(3 + n, 0, n), minor=0) for n in range(2))
    node.holds("u1", VCORE_RESOURCE, cores(30), answer("/dev/nvidia0", NVIDIA_VISIBLE_DEVICES="GPU-0"))
    found = node.rebuilt(gpus=replace(INVENTORY, gpus=(*INVENTORY.gpus[1:], *instances)))
    assert set(held_back(found.values())) == {"MIG-3", "MIG-4"}


def test_blocks_of_another_size_are_not_counted_as_this_nodes(node: Node) -> None:
    """How much the container has is not known here, so nobody else gets its GPU."""
    node.holds("u1", VCORE_RESOURCE, cores(30), answer("/dev/nvidia1"))
    node.holds("u1", VMEMORY_RESOURCE, blocks(30, size=2 * BLOCK))
    found = node.rebuilt()
    assert found["main"].gpus == ("GPU-1|",) and set(held_back(found.values())) == {"GPU-1"}


def gpushare(**env: str) -> ContainerSpec:
    return replace(container(), requests={GPU_MEM: 8}, env=env)


@pytest.mark.parametrize(
    ("response", "spec", "annotations", "gpus"),
    [
        (answer(**{ENV_GPUSHARE_INDEX: "2", "NVIDIA_VISIBLE_DEVICES": "2"}), gpushare(), {}, "GPU-2"),
        (answer(**{ENV_GPUSHARE_INDEX: "0", "NVIDIA_VISIBLE_DEVICES": "GPU-1"}), gpushare(), {}, "GPU-1"),
        (answer("/dev/nvidia1", **{ENV_GPUSHARE_INDEX: "-1"}), gpushare(), {}, "GPU-1"),
        (answer(NVIDIA_VISIBLE_DEVICES="0:1"), gpushare(), {}, "GPU-0|GPU-1|GPU-2|"),  # no name that it gives
        (b"", gpushare(), {"ALIYUN_COM_GPU_MEM_IDX": "2", "ALIYUN_COM_GPU_MEM_ASSIGNED": "true"}, "GPU-2"),
        (b"", gpushare(), {"scheduler.framework.gpushare.allocation": '{"0":{"1":8}}'}, "GPU-1"),
        (b"", gpushare(**{ENV_GPUSHARE_INDEX: "2"}), {}, "GPU-2"),
        (b"", gpushare(), {"ALIYUN_COM_GPU_MEM_IDX": "2"}, "GPU-0|GPU-1|GPU-2|"),
        (b"", gpushare(), {"scheduler.framework.gpushare.allocation": "[[["}, "GPU-0|GPU-1|GPU-2|"),
        (b"", gpushare(), {"scheduler.framework.gpushare.allocation": '{"0":[1,"a|b"]}'}, "GPU-0|GPU-1|GPU-2|"),
        (b"", gpushare(), {"scheduler.framework.gpushare.allocation": '{"0":7}'}, "GPU-0|GPU-1|GPU-2|"),
        (b"\xff\xff\xff", gpushare(), {}, "GPU-0|GPU-1|GPU-2|"),
    ],
)
def test_gpushares_units_are_on_the_gpu_of_its_index(
    node: Node, response: bytes, spec: ContainerSpec, annotations: dict[str, str], gpus: str
) -> None:
    """Not on the one that their IDs name: the kubelet takes any."""
    node.holds("u1", GPU_MEM, units(5) + units(3, "GPU-1"), response)
    found = node.rebuilt(pod("one", spec, uid="u1", annotations=annotations))
    assert found["main"].gpus == (gpus,) and found["main"].started_by == "GPUShare"
    if "|" not in gpus:
        assert charges(found) == {gpus: Charge(units=8, shares=1)}


def test_a_container_for_which_gpushare_found_no_gpu_holds_none(node: Node) -> None:
    """Its runtime cannot start it: `no-gpu-has-8GiB-to-run`."""
    node.holds(
        "u1", GPU_MEM, units(8), answer(**{ENV_GPUSHARE_INDEX: "-1", "NVIDIA_VISIBLE_DEVICES": "no-gpu-has-8GiB"})
    )
    assert node.rebuilt() == {}
    # Unless another of its answers names one.
    node.holds("u1", "tencent.com/vcuda-core", cores(30), answer("/dev/nvidia1"))
    assert node.rebuilt()["main"].gpus == ("GPU-1",)


@pytest.mark.parametrize("kind", [ContainerKind.MAIN, ContainerKind.INIT])
def test_before_the_driver_is_loaded_it_may_be_any_gpu(node: Node, kind: ContainerKind) -> None:
    """One that the driver shows later is nobody else's before the records are read again."""
    node.holds("u1", VCORE_RESOURCE, cores(30), answer("/dev/nvidia1"))
    owner = pod("one", replace(container(cores=30, blocks=30), kind=kind), uid="u1")
    before = node.rebuilt(owner, gpus=inventory(0))["main"]
    state = GpuInventoryState()
    state.hold(held_back([before]))
    state.read(INVENTORY)
    assert [gpu.is_healthy for gpu in state.current.gpus] == [False] * 3
    assert gpu_split(("all",), INVENTORY.gpus, [before]).claimable == frozenset()
    after = node.rebuilt(owner)["main"]
    evidence = Evidence(
        listed=(), rebuilt=[after], pods={owner.uid: owner}, scope=None, is_trusted=True, missing_before=()
    )
    assert [one.allocation for one in reconcile({before.key: before}, evidence).corrections] == [after]
    state.hold(held_back([after]))
    assert after.gpus == ("GPU-1",) and all(gpu.is_healthy for gpu in state.current.gpus)


def test_claims_get_no_gpu_that_such_a_container_may_have(node: Node) -> None:
    node.holds("u1", VCORE_RESOURCE, cores(30), answer("/dev/nvidia0", "/dev/nvidia1"))
    assert gpu_split(("all",), INVENTORY.gpus, node.rebuilt().values()).claimable == {"GPU-2"}


@pytest.mark.parametrize(
    "own", ["[]", '{"PodGPUMapping": {"u1": {"main": {"Devices": 7}}}}', "{", '{"PodGPUMapping": []}']
)
def test_a_checkpoint_of_gpu_manager_that_is_none_names_nothing(tmp_path: Path, own: str) -> None:
    (tmp_path / "own").write_text(own)
    entry = {"PodUID": "u1", "ContainerName": "main", "ResourceName": VCORE_RESOURCE, "DeviceIDs": {"-1": cores(1)}}
    (tmp_path / "kubelets").write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}}))
    (found,) = read_checkpoint(tmp_path / "kubelets", tmp_path / "own")
    assert found.gpu_names == frozenset()
