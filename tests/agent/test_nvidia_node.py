"""NVIDIA's resource names in the whole agent, on the embedded node: the sample pod of NVIDIA's plugin, shares next to it,
and other settings while pods run."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from gpushare_agent.agent.isolation.gpushare.format import CONFIG_NAME, gpu_uuids
from gpushare_agent.agent.isolation.gpushare.library import MARK
from gpushare_agent.core.formats.vdevice import decode_config
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.names import RESIZE_ANNOTATION
from gpushare_agent.core.model.resources import replica_layout
from gpushare_agent.core.wire.v1beta1 import ContainerAllocateResponse
from tests.agent.support_agent import open_agent, open_child, poll_until, write_faults
from tests.gpus.support_nvml import becomes
from tests.gpus.test_nvml_mig import A100, ONE_G, TWO_G
from tests.isolation.support_library import fake_library
from tests.sandbox.support_sandbox import CORE, MEMORY, NodeUnderTest, container, limits_of, open_test_node, pod

GPU = "nvidia.com/gpu"
FLAGS = ("--nvidia.enabled", "--simulated.gpus=2", "--isolation=none")


def sample(name: str, count: int = 1, **extra: Any) -> dict[str, Any]:
    """As in the README of NVIDIA's device plugin."""
    made = pod(name, limits_of("cuda-container", {GPU: count}), **extra)
    made["spec"]["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    return made


def answer(node: NodeUnderTest, name: str) -> tuple[tuple[str, ...], ContainerAllocateResponse]:
    """The device IDs and what the container got."""
    (call,) = [c for c in node.calls_of(name, "Allocate") if c.resource == GPU]
    return tuple(call.device_ids), ContainerAllocateResponse.parse(call.response)


async def test_a_node_may_offer_nvidias_names_alone() -> None:
    """Setting resources.enabled: a share waits for another node, and the agent is ready."""
    async with open_test_node() as node, open_agent(node, *FLAGS, "--resources.enabled=false", wait=False) as agent:
        await node.wait_allocatable(GPU, 2)
        await node.start_pods(sample("whole"))
        assert set(node.kubelet.devices.capacity()) == {GPU}
        assert agent.parts.kubelet.not_ready() == [] and agent.parts.kubelet.registrar.all_registered.is_set()


async def test_a_gpu_given_whole_is_out_of_the_shares_also_over_a_restart() -> None:
    async with open_test_node() as node:
        async with open_agent(node, *FLAGS):
            await node.wait_allocatable(GPU, 2)
            await node.start_pods(sample("whole"))
            await node.wait_allocatable(CORE, 100)
            await node.wait_allocatable(MEMORY, 96)
            (device,), given = answer(node, "whole")
            assert given.envs["NVIDIA_VISIBLE_DEVICES"].startswith(f"GPU-{device.rpartition('-')[0]}")
        async with open_agent(node, *FLAGS):
            await node.wait_allocatable(CORE, 100)
            await node.start_pods(pod("share", container(cores=30, blocks=20)))
            await node.wait_allocatable(GPU, 1)  # the one that is taken
            for name in ("whole", "share"):
                await node.remove_pod(name, grace_period_s=0)
            await node.wait_allocatable(GPU, 2)
            await node.wait_allocatable(CORE, 200)


async def test_replicas_keep_their_terms_when_the_settings_change() -> None:
    """A quarter stays one; what is left of its GPU is a half."""
    async with open_test_node() as node:
        async with open_agent(node, *FLAGS, "--nvidia.replicas=*=4"):
            await node.wait_allocatable(GPU, 8)
            await node.start_pods(sample("quarter"))
            await node.wait_allocatable(CORE, 175)
        async with open_agent(node, *FLAGS, "--nvidia.replicas=*=2"):
            await node.wait_allocatable(GPU, 4)  # a half of one GPU, two halves of the other, and the quarter
            (device,), given = answer(node, "quarter")
            (found,) = DeviceIds([]).read([device])
            assert replica_layout(found).of == 4 and given.envs["NVIDIA_VISIBLE_DEVICES"]
            await node.remove_pod("quarter", grace_period_s=0)
            await node.wait_allocatable(GPU, 4)
            await node.wait_allocatable(CORE, 200)


async def test_replicas_that_are_shares_are_held_to_their_part() -> None:
    """By the node's isolation, here vcuda; a whole GPU is not limited by it."""
    flags = ("--nvidia.enabled", "--simulated.gpus=2", "--isolation=vcuda", "--nvidia.sharing=shares")
    async with open_test_node() as node, open_agent(node, *flags, "--nvidia.replicas=0=4"):
        await node.wait_allocatable(GPU, 5)
        await node.start_pods(sample("first"), sample("second"))
        configs = {}
        for name in ("first", "second"):
            path = node.paths.virtual_manager / node.uid_of(name) / "cuda-container" / "vcuda.config"
            config, ((device,), _) = decode_config(path.read_bytes()), answer(node, name)
            configs[device.rpartition("/")[2]] = (config.utilization, config.memory_bytes, config.enable)
        assert configs == {"4s": (25, 6 * 2**30, True), "1": (100, 24 * 2**30, False)}


async def test_instances_of_a_new_profile_get_their_resource_while_pods_run(script: Path) -> None:
    """The agent's next life registers it, and a pod on another GPU runs on; on the real nvidia-ml-py, on a scripted library.
    This machine has no capability nodes, so the instances are Unhealthy."""
    small, medium = "nvidia.com/mig-1g.5gb", "nvidia.com/mig-2g.10gb"
    becomes(script, A100 + ONE_G)
    flags = ("--driver=nvml", "--isolation=none", "--device-list-strategy=envvar", "--health.check-period-s=0.2")
    async with open_test_node() as node, open_child(node, *flags, "--nvidia.enabled", "--nvidia.mig-strategy=mixed"):
        await node.wait_allocatable(GPU, 1)
        await node.wait_devices(small, 1, 0)
        await node.start_pods(sample("whole"))
        becomes(script, A100 + ONE_G + TWO_G)
        await node.wait_devices(medium, 1, 0)
        assert node.kubelet.devices.capacity()[GPU] == (1, 1) and node.kubelet.devices.capacity()[small] == (1, 0)
        assert node.api.pod("default", "whole")["status"]["phase"] == "Running"
        assert answer(node, "whole")[1].envs["NVIDIA_VISIBLE_DEVICES"] == "GPU-bbbb"


async def test_with_strategy_single_unlike_instances_are_given_to_nobody() -> None:
    """As by NVIDIA's plugin. They come and go while the agent runs: who has one keeps it, and the shares' GPU serves on."""
    flags = ("--nvidia.enabled", "--nvidia.mig-strategy=single", "--nvidia.gpus=0", "--isolation=none")
    async with open_test_node() as node:
        write_faults(node.paths.faults, mig={"0": ["1g.10gb", "1g.10gb"]})
        async with open_agent(node, *flags, "--simulated.gpus=2", "--health.check-period-s=0.2"):
            await node.wait_allocatable(GPU, 2)
            await node.start_pods(sample("first"))
            write_faults(node.paths.faults, mig={"0": ["1g.10gb", "1g.10gb", "3g.40gb"]})
            await node.wait_devices(GPU, 3, 1)
            assert node.api.pod("default", "first")["status"]["phase"] == "Running"
            await node.start_pods(pod("share", container(cores=30, blocks=4)))
            write_faults(node.paths.faults, mig={"0": ["1g.10gb", "1g.10gb", "1g.10gb"]})
            # The share is on the GPU that no other name serves.
            await node.wait_until(
                lambda: node.kubelet.devices.capacity().get(GPU, (0, 0))[1] == 3, "all that are alike"
            )
            await node.start_pods(sample("second"))


async def test_an_excluded_gpu_is_offered_to_nobody() -> None:
    """By none of the resources."""
    async with open_test_node() as node, open_agent(node, *FLAGS, "--excluded-gpus=0"):
        await node.wait_allocatable(GPU, 1)
        await node.wait_allocatable(CORE, 100)
        await node.wait_allocatable(MEMORY, 96)
        capacity = node.kubelet.devices.capacity()
        assert {name: healthy for name, (_, healthy) in capacity.items()} == {GPU: 1, CORE: 100, MEMORY: 96}


async def test_shares_inside_an_instance_are_next_to_a_whole_one(short_dir: Path) -> None:
    """One ledger; one file for each share, which names the instance and follows a resize."""
    library = fake_library(short_dir / "libgpushare.so")
    library.write_bytes(library.read_bytes() + MARK)
    flags = ("--nvidia.enabled", "--nvidia.mig-strategy=single", "--simulated.gpus=1", "--isolation=gpushare")
    flags = (*flags, f"--libgpushare.library={library}", "--resize.mode=free-capacity")
    async with open_test_node() as node:
        write_faults(node.paths.faults, mig={"0": ["1g.10gb"] * 3})
        async with open_agent(node, *flags) as agent:
            await node.wait_allocatable(GPU, 3)
            await node.wait_allocatable(CORE, 300)
            await node.start_pods(
                pod("web", container(cores=30, blocks=8)), pod("batch", container(cores=60, blocks=2))
            )
            await node.wait_allocatable(GPU, 2)
            await node.start_pods(sample("whole"))
            await node.wait_allocatable(CORE, 200)
            of = {one.pod_name: one.gpus for one in agent.parts.node.cache}
            assert of["web"] == of["batch"] != of["whole"] and all(one[0].startswith("MIG-") for one in of.values())
            config = node.paths.virtual_manager / node.uid_of("web") / "main" / CONFIG_NAME
            assert gpu_uuids(config.read_bytes()) == list(of["web"])
            node.annotate("web", {RESIZE_ANNOTATION: "main:cores=40"})
            await poll_until(lambda: struct.unpack_from("=I", config.read_bytes(), 512 + 64) == (4000,), "the new size")
            # In the third: the first has no cores left.
            await node.start_pods(pod("more", container(cores=1, blocks=1)))
            await node.wait_allocatable(GPU, 1)
            node.api.create_pod(sample("none"))
            await node.wait_until(lambda: node.api.pod("default", "none")["status"].get("conditions"), "no room for it")
            assert node.api.pod("default", "none")["status"]["phase"] == "Pending"
