"""GPUShare's resource in the whole agent, on the embedded node: memory alone, next to vcore and vmemory, one account."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_agent.agent.cluster.node_facts import plan_capacity_patch
from gpushare_agent.core.formats.vdevice import decode_config
from gpushare_agent.core.kube.objects import read_node_json
from gpushare_agent.core.model.errors import StartupError
from gpushare_agent.core.wire.v1beta1 import ContainerAllocateResponse
from tests.agent.support_agent import open_agent
from tests.sandbox.support_sandbox import MEMORY, NodeUnderTest, container, limits_of, open_test_node, pod
from tests.support_json import undecoded

GPU_MEM, GPU_COUNT = "aliyun.com/gpu-mem", "aliyun.com/gpu-count"
FLAGS = ("--gpushare.enabled", "--simulated.gpus=2", "--isolation=vcuda")


def memory(units: int, name: str = "main", **extra: Any) -> dict[str, Any]:
    return limits_of(name, {GPU_MEM: units}, **extra)


def answer(node: NodeUnderTest, name: str) -> ContainerAllocateResponse:
    (call,) = [c for c in node.calls_of(name, "Allocate") if c.resource == GPU_MEM]
    return ContainerAllocateResponse.parse(call.response)


async def test_a_pod_gets_memory_of_one_gpu_with_gpushares_variables_and_annotations() -> None:
    """Without any extender; the compute follows the memory, and the container finds its limits."""
    async with open_test_node() as node, open_agent(node, *FLAGS):
        await node.wait_allocatable(GPU_MEM, 48)
        await node.start_pods(pod("share", memory(6), memory(2, "side")))
        calls = [c for c in node.calls.calls if c.method == "Allocate" and c.resource == GPU_MEM]
        env = ContainerAllocateResponse.parse(calls[0].response).envs
        key = calls[0].device_ids[0].rpartition("-")[0]
        assert {d.rpartition("-")[0] for c in calls for d in c.device_ids} == {key}  # binpack
        assert env["NVIDIA_VISIBLE_DEVICES"].startswith(f"GPU-{key}")
        index = env["ALIYUN_COM_GPU_MEM_IDX"]
        assert (env["ALIYUN_COM_GPU_MEM_POD"], env["ALIYUN_COM_GPU_MEM_CONTAINER"]) == ("8", "6")
        assert env["ALIYUN_COM_GPU_MEM_DEV"] == "24"
        uid = node.uid_of("share")
        config = decode_config((node.paths.virtual_manager / uid / "main" / "vcuda.config").read_bytes())
        assert (config.utilization, config.memory_bytes, config.enable) == (25, 6 * 2**30, True)
        reported = await node.wait_annotation("share", "ALIYUN_COM_GPU_MEM_ASSIGNED", "true")
        assert reported["ALIYUN_COM_GPU_MEM_IDX"] == index and int(reported["ALIYUN_COM_GPU_MEM_ASSUME_TIME"]) > 10**18


async def test_the_gpu_that_gpushares_extender_chose_is_taken_where_it_fits() -> None:
    """And another where it does not: any tenant can write the annotation."""
    async with open_test_node() as node, open_agent(node, *FLAGS):
        await node.wait_allocatable(GPU_MEM, 48)
        for name, units, wish in (("first", 20, "1"), ("second", 4, "1"), ("third", 6, "1"), ("odd", 1, "../1")):
            await node.start_pods(pod(name, memory(units), annotations={"ALIYUN_COM_GPU_MEM_IDX": wish}))
        gpus = [answer(node, name).envs["ALIYUN_COM_GPU_MEM_IDX"] for name in ("first", "second", "third")]
        assert gpus == ["1", "1", "0"]
        await node.wait_annotation("third", "ALIYUN_COM_GPU_MEM_IDX", "0")  # set right


async def test_a_gpus_memory_is_one_account() -> None:
    """What one resource takes the others offer no more, and get back when the pod has ended; also over a restart."""
    async with open_test_node() as node:
        async with open_agent(node, *FLAGS):
            await node.wait_allocatable(GPU_MEM, 48)
            await node.start_pods(pod("whole", container(cores=100)))
            await node.wait_allocatable(GPU_MEM, 24)
            await node.start_pods(pod("units", memory(10)))
            await node.wait_allocatable(MEMORY, 2 * 96 - 40)
            await node.start_pods(pod("share", container(cores=30, blocks=20)))
            await node.wait_allocatable(GPU_MEM, 24 - 5)
        async with open_agent(node, *FLAGS):
            await node.wait_allocatable(GPU_MEM, 24 - 5)
            await node.start_pods(pod("late", memory(9)))
            await node.wait_allocatable(MEMORY, 2 * 96 - 76)
            for name in ("whole", "units", "share", "late"):
                await node.remove_pod(name, grace_period_s=0)
            await node.wait_allocatable(GPU_MEM, 48)
            await node.wait_allocatable(MEMORY, 2 * 96)


def shown(node: NodeUnderTest, resource: str) -> str | None:
    """What of the resource is allocatable, by the Node object."""
    raw = node.api.store.find("nodes", ("", node.name)) or {}
    found: str | None = raw["status"].get("allocatable", {}).get(resource)
    return found


async def test_the_nodes_capacity_tells_how_many_gpus_there_are() -> None:
    """GPUShare's inspection tool divides by it; a kubelet that starts again keeps it."""
    async with open_test_node() as node, open_agent(node, *FLAGS) as agent:
        assert "capacity" in agent.parts.cluster.node_fields

        def heartbeat() -> str:
            return str(node.api.node(node.name)["status"]["conditions"][0]["lastHeartbeatTime"])

        await node.wait_until(lambda: shown(node, GPU_COUNT) == "2", "the number of GPUs in the Node object")
        await node.kubelet.restart()
        before = heartbeat()
        await node.wait_until(lambda: heartbeat() > before, "a status of the kubelet that started")
        assert shown(node, GPU_COUNT) == "2"


async def test_the_number_of_gpus_goes_when_it_is_switched_off() -> None:
    """The kubelet keeps what was patched; a number that goes with another program's memory stays."""
    async with open_test_node() as node:
        async with open_agent(node, *FLAGS):
            await node.wait_until(lambda: shown(node, GPU_COUNT) == "2", "the number of GPUs in the Node object")
        await node.wait_until(lambda: shown(node, GPU_MEM) in (None, "0"), "a status of the kubelet without the memory")
        async with open_agent(node, "--simulated.gpus=2"):
            await node.wait_until(lambda: shown(node, GPU_COUNT) is None, "no number of GPUs")
    capacity = {GPU_COUNT: "1", GPU_MEM: "24"}
    others = read_node_json(undecoded({"status": {"capacity": capacity, "allocatable": capacity}}))
    assert plan_capacity_patch(others, (GPU_MEM, None)).body == {}


async def test_units_of_which_there_are_too_many_end_the_start() -> None:
    """In MiB eight GPUs make a list that no kubelet takes; the text names the unit that fits."""
    async with open_test_node() as node:
        with pytest.raises(BaseExceptionGroup) as raised:
            async with open_agent(node, "--gpushare.enabled", "--gpushare.unit=MiB", wait=False) as agent:
                await agent.task
        (error,) = raised.value.exceptions
        while isinstance(error, BaseExceptionGroup):
            (error,) = error.exceptions
        assert isinstance(error, StartupError) and "gpushare.unit to GiB" in str(error)


async def test_a_plan_by_container_goes_before_gpushares_index() -> None:
    """Two containers on two GPUs, and an index left on the pod by somebody else: the extender's plan stands."""
    async with open_test_node() as node, open_agent(node, *FLAGS):
        await node.wait_allocatable(GPU_MEM, 48)
        plan = {
            "tencent.com/predicate-node": node.name,
            "tencent.com/predicate-gpu-idx-0": "0",
            "tencent.com/predicate-gpu-idx-1": "1",
            "tencent.com/gpu-assigned": "false",
            "ALIYUN_COM_GPU_MEM_IDX": "1",
        }
        await node.start_pods(pod("two", memory(3), memory(4, "side"), annotations=plan))
        calls = [c for c in node.calls_of("two", "Allocate") if c.resource == GPU_MEM]
        given = [ContainerAllocateResponse.parse(call.response).envs["ALIYUN_COM_GPU_MEM_IDX"] for call in calls]
        assert given == ["0", "1"]
        written = await node.wait_annotation("two", "tencent.com/gpu-assigned", "true")
        assert written["scheduler.framework.gpushare.allocation"] == '{"0":{"0":3},"1":{"1":4}}'
        assert written.items() >= (plan | {"tencent.com/gpu-assigned": "true"}).items()
