"""Pods that gpu-manager or GPUShare's plugin started on the embedded node, and the agent that then takes their place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gpushare_agent.agent.gpus.simulated.driver import simulated_uuid
from gpushare_agent.commands import main
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.names import ENV_GPUSHARE_INDEX
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.wire.v1beta1 import ContainerAllocateResponse, DeviceSpec
from tests.agent.support_agent import open_agent, poll_until
from tests.sandbox.support_sandbox import (
    CORE,
    MEMORY,
    NodeUnderTest,
    SmallPlugin,
    container,
    limits_of,
    open_test_node,
    pod,
)

GPU_MEM = "aliyun.com/gpu-mem"
FLAGS = ("--simulated.gpus=2", "--isolation=vcuda")
ASSIGNED = {"tencent.com/predicate-gpu-idx-0": "1", "tencent.com/gpu-assigned": "true"}
GPUS = [simulated_uuid("node-a", index) for index in range(2)]


def answer(*minors: int) -> ContainerAllocateResponse:
    """gpu-manager's, as far as it says which GPUs these are."""
    paths = [*(f"/dev/nvidia{minor}" for minor in minors), "/dev/nvidiactl"]
    return ContainerAllocateResponse(
        devices=[DeviceSpec(container_path=path, host_path=path, permissions="rwm") for path in paths],
        envs={"NVIDIA_VISIBLE_DEVICES": ",".join(GPUS[minor] for minor in minors)},
    )


@asynccontextmanager
async def gpu_manager(node: NodeUnderTest) -> AsyncIterator[SmallPlugin]:
    """Its two plugins; `answer` is what the next container gets."""
    memory_ids = {f"{MEMORY}-268435456-{n}": ("Healthy", None) for n in range(192)}
    core_ids = {f"{CORE}-{n}": ("Healthy", None) for n in range(200)}
    cores = SmallPlugin(CORE, core_ids, prefers=False, wants_pre_start=True)  # type: ignore[arg-type]
    async with node.open_plugin(SmallPlugin(MEMORY, memory_ids, prefers=False)), node.open_plugin(cores):  # type: ignore[arg-type]
        yield cores


async def start(
    node: NodeUnderTest, plugin: SmallPlugin, made: dict[str, Any], given: ContainerAllocateResponse
) -> None:
    plugin.answer = given
    node.api.create_pod(made)
    await node.wait_running(made["metadata"]["name"])


def is_offered(node: NodeUnderTest) -> Iterator[bool]:
    """Of each of gpu-manager's cores that the kubelet knows."""
    return (is_healthy for text, is_healthy in node.kubelet.devices.health(CORE).items() if text.startswith(CORE))


async def test_what_gpu_manager_gave_is_given_to_nobody_else_until_its_pod_ends() -> None:
    """One GPU by the kubelet's record of the answer, one by the annotation; over a restart, too. One that ended before holds
    nothing."""
    async with open_test_node() as node:
        async with gpu_manager(node) as plugin:
            await start(node, plugin, pod("ended", container(cores=30, blocks=30), restartPolicy="Never"), answer(0))
            node.kill_container("ended")
            await node.wait_phase("ended", "Failed", "Succeeded")
            await start(node, plugin, pod("by-answer", container(cores=30, blocks=30)), answer(0))
            marked = pod("by-annotation", container(cores=60, blocks=20), annotations=ASSIGNED)
            await start(node, plugin, marked, ContainerAllocateResponse())
        for _ in range(2):
            async with open_agent(node, *FLAGS) as agent:
                # Annotations are known when the API server has listed the pods.
                await poll_until(lambda: agent.used_by_gpu() == {GPUS[0]: 30, GPUS[1]: 60}, "both are known")
                assert agent.parts.kubelet.not_ready() == []
                # The scheduler counts 200 less what these pods ask for, as before.
                await node.wait_allocatable(CORE, 200)
                await node.wait_allocatable(MEMORY, 192)
                # By their IDs, which a kubelet that starts again must find, or it rejects the pods.
                await node.wait_until(lambda: sum(is_offered(node)) == 90, "its cores are listed")
        async with open_agent(node, *FLAGS) as agent:
            await node.start_pods(pod("next", container(cores=70, blocks=60)))
            assert node.gpus_of("next") == {GPUS[0]}
            # Nothing of the agent's is in the containers that it did not start.
            uid = node.uid_of("by-answer")
            assert not (node.paths.virtual_manager / uid).exists()
            # Their containers may start again, with what they have.
            changed: list[Allocation | None] = []
            agent.parts.node.cache.subscribe(lambda old, new: changed.append(new))
            for name in ("by-answer", "by-annotation"):
                assert len(node.calls_of(name, "PreStartContainer")) == 1, "gpu-manager's"
                node.kill_container(name)
                await node.wait_until(lambda: len(node.calls_of(name, "PreStartContainer")) == 2, "a start")  # noqa: B023
                await node.wait_running(name)
            assert changed == []
            annotations = node.api.pod("default", "by-annotation")["metadata"]["annotations"]
            assert {name: annotations.get(name) for name in ASSIGNED} == ASSIGNED
            assert not ASSIGNED.keys() & node.api.pod("default", "by-answer")["metadata"]["annotations"].keys()
            for name in ("by-answer", "by-annotation", "next"):
                await node.remove_pod(name, grace_period_s=0)
            await node.wait_until(lambda: not len(agent.parts.node.cache), "all released")
            await node.wait_until(lambda: not any(is_offered(node)), "its IDs are offered to nobody")
            await node.wait_allocatable(CORE, 200)
        # Until the pods are listed the second GPU is held back in silence.
        assert node.messages("GPUUnhealthy") == node.messages("GPURecovered") == []


async def test_each_container_of_a_pod_keeps_its_own_gpu() -> None:
    async with open_test_node() as node:
        async with gpu_manager(node) as plugin:
            answers = iter([answer(1), answer(0)])

            async def next_answer(ids: list[str]) -> None:
                plugin.answer = next(answers)

            plugin.on_allocate = next_answer
            await node.start_pods(pod("two", container("a", cores=30, blocks=4), container("b", cores=100, blocks=96)))
        async with open_agent(node, *FLAGS) as agent:
            uid = node.uid_of("two")
            held = {one.key.container: (one.gpus, one.is_whole) for one in agent.parts.node.cache.of_pod(uid)}
            assert held == {"a": ((GPUS[1],), False), "b": ((GPUS[0],), True)}


async def test_a_pod_whose_gpu_nobody_knows_keeps_others_off_every_gpu() -> None:
    """Said by readiness, an Event of the Node, the pod that waits, and `check`; over when the pod has ended."""
    async with open_test_node() as node:
        async with gpu_manager(node) as plugin:
            await start(node, plugin, pod("former", container(cores=30, blocks=30)), ContainerAllocateResponse())
        async with open_agent(node, *FLAGS, wait=False) as agent:
            why = "gpu-manager started container main of pod default/former, and nothing tells what it has of which GPU"
            await node.wait_until(lambda: len(node.messages("GPUUnhealthy")) == 2, "an Event of each GPU")
            assert all(why in text for text in node.messages("GPUUnhealthy"))
            assert why in (await agent.page("/readyz"))[1]
            # What `inspect` and `explain` show of the node.
            await node.wait_until(
                lambda: str(node.api.node(node.name)["metadata"].get("annotations")).count(why) == 2,
                "the reasons in the report",
            )
            await node.wait_allocatable(CORE, 0)
            node.api.create_pod(pod("waits", container(cores=10, blocks=4)))
            await node.wait_phase("waits", "Pending")
            await node.wait_until(
                lambda: "Insufficient" in str(node.api.pod("default", "waits")["status"]), "its reason"
            )
            node.api.delete_pod("default", "former", grace_period_s=0)
            await node.wait_running("waits")
            assert why not in (await agent.page("/readyz"))[1]
            await node.wait_until(lambda: len(node.messages("GPURecovered")) == 2, "an Event of each GPU")


async def test_check_names_the_pods_of_former_programs(capsys: pytest.CaptureFixture[str]) -> None:
    async with open_test_node() as node:
        async with gpu_manager(node) as plugin:
            await start(node, plugin, pod("known", container(cores=30, blocks=30)), answer(0))
            await start(node, plugin, pod("former", container(cores=30, blocks=30)), ContainerAllocateResponse())
        uids = {name: node.uid_of(name) for name in ("known", "former")}
        await asyncio.to_thread(main, ["check", *node.arguments(*FLAGS)])
        text = " ".join(capsys.readouterr().out.split())
        assert f"gpu-manager started container main of pod with UID {uids['former']}" in text
        assert uids["known"] not in text


async def test_gpushares_pods_keep_the_gpu_of_their_index() -> None:
    """Whatever GPU their IDs name."""
    index = ContainerAllocateResponse(envs={ENV_GPUSHARE_INDEX: "1", "NVIDIA_VISIBLE_DEVICES": "1"})
    ids = {f"{uuid}-_-{n}": ("Healthy", None) for uuid in GPUS for n in range(24)}
    async with open_test_node() as node:
        async with node.open_plugin(SmallPlugin(GPU_MEM, ids)) as plugin:  # type: ignore[arg-type]
            await start(node, plugin, pod("old", limits_of("main", {GPU_MEM: 20})), index)
        async with open_agent(node, *FLAGS, "--gpushare.enabled=true") as agent:
            (found,) = agent.parts.node.cache
            assert found.gpus == (GPUS[1],) and len(found.ids_of(ResourceKind.GPU_MEM)) == 20
            await node.wait_allocatable(GPU_MEM, 48)
            await node.start_pods(pod("new", limits_of("main", {GPU_MEM: 10})))
            (new,) = agent.parts.node.cache.of_pod(node.uid_of("new"))
            assert new.gpus == (GPUS[0],)
