"""NVML is lost, for one GPU and for all, while pods run and while new ones come."""

from __future__ import annotations

from msgspec.structs import replace

from gpushare_agent.core.model.gpus import Health
from tests.agent.support_agent import (
    InnerAgent,
    Moments,
    counted_for_costs,
    open_agent,
    open_child,
    poll_until,
    record_claim,
    write_faults,
)
from tests.sandbox.support_sandbox import BLOCKS, CORE, CORES, MEMORY, NodeUnderTest, container, open_test_node, pod

ONE_LOOK = ("--health.recovery-probes=1", "--health.recovery-period-s=0.05")
"""A GPU is back at the first poll that finds it usable; tests/agent/test_health_node.py has more of the way back."""


async def _wait_healthy(node: NodeUnderTest, gpus: int) -> None:
    wanted = {CORE: gpus * CORES, MEMORY: gpus * BLOCKS}

    def is_shown() -> bool:
        status = node.api.node(node.name)["status"]["allocatable"]
        return all(node.healthy(name) == count and status.get(name) == str(count) for name, count in wanted.items())

    await node.wait_until(is_shown, f"{gpus} healthy GPUs")


async def test_a_lost_gpu_is_unhealthy_in_both_resources_and_new_pods_go_elsewhere() -> None:
    """Who runs on it stays and keeps its share; when the GPU is back, it is used again."""
    async with open_test_node() as node, open_agent(node, "--simulated.gpus=2", *ONE_LOOK) as agent:
        await node.start_pods(pod("first", container(cores=30, blocks=10)))
        lost, other = agent.uuid_of(0), agent.uuid_of(1)
        assert node.gpus_of("first") == {lost}
        write_faults(node.paths.faults, lost={"0": "fell off the bus"})
        await _wait_healthy(node, 1)
        assert node.states_of(lost) == {False} and node.states_of(other) == {True}
        node.api.create_pod(pod("second", container(cores=30, blocks=10)))
        await node.wait_running("first", "second")
        assert node.gpus_of("second") == {other}
        await node.wait_ledger_equal(agent)
        write_faults(node.paths.faults)
        await _wait_healthy(node, 2)
        node.api.create_pod(pod("third", container(cores=70, blocks=80)))
        node.api.create_pod(pod("fourth", container(cores=70, blocks=80)))
        await node.wait_running("first", "second", "third", "fourth")
        await node.wait_sound(agent)


async def test_with_all_gpus_lost_pods_wait_and_running_ones_stay() -> None:
    """The whole driver unavailable: nothing can be allocated, nothing is released; when it returns, the waiting pod runs."""
    async with open_test_node() as node, open_agent(node, "--simulated.gpus=2", *ONE_LOOK) as agent:
        await node.start_pods(pod("first", container(cores=30, blocks=10)))
        before = agent.held()
        write_faults(node.paths.faults, all_lost="driver/library version mismatch")
        await _wait_healthy(node, 0)
        assert node.kubelet.devices.capacity()[CORE] == (2 * CORES, 0)
        node.api.create_pod(pod("waits", container(cores=30, blocks=10)))
        node.api.create_pod(pod("bypass", container(cores=30, blocks=10), nodeName=node.name))
        assert "no healthy devices" in await node.wait_settled("bypass")
        assert agent.held() == before and await node.wait_phase("waits", "Pending")
        write_faults(node.paths.faults)
        await _wait_healthy(node, 2)
        await node.wait_running("first", "waits")
        await node.wait_sound(agent)


async def test_a_gpu_lost_between_preference_and_allocate_is_not_given() -> None:
    """The plan is made and the GPU fails: the pod is refused, and placed elsewhere."""
    # No poll of its own finds the GPU usable in between.
    flags = ("--simulated.gpus=2", "--health.check-period-s=3600", "--health.recovery-period-s=3600")
    async with open_test_node() as node, open_agent(node, *flags) as agent:
        Moments(node, "unlucky").at_next("GetPreferredAllocation answered", lambda: _lose_gpu(agent, 0))
        message = await node.settle_pod(pod("unlucky", container(cores=30, blocks=10)))
        assert "NoHealthyGPU" in message and "Create the pod again" in message
        await _wait_healthy(node, 1)
        await node.start_pods(pod("again", container(cores=30, blocks=10)))
        await node.wait_ledger_equal(agent)


def _lose_gpu(agent: InnerAgent, index: int) -> None:
    """What the next poll would find, applied now."""
    found = agent.parts.node.inventory.current
    gpus = tuple(
        replace(gpu, health=Health.UNHEALTHY, unhealthy_reason="lost") if gpu.index == index else gpu
        for gpu in found.gpus
    )
    agent.parts.node.inventory.read(replace(found, gpus=gpus))


async def test_without_a_driver_the_agent_ends_with_the_reason() -> None:
    """fail_on_init_error is the default: exit code 1, one line that names what to check."""
    async with open_test_node() as node:
        write_faults(node.paths.faults, all_lost="driver not loaded")
        async with open_child(node, wait=False) as child:
            assert await child.wait() == 1
        text = node.paths.agent_log.read_text()
        assert "driver not loaded" in text and "--fail-on-init-error=false" in text
        assert "Traceback" not in text


async def test_without_a_driver_and_reported_to_stay_the_agent_serves_no_device() -> None:
    """Registered with zero devices; it goes on looking."""
    async with open_test_node() as node:
        write_faults(node.paths.faults, all_lost="driver not loaded")
        async with open_child(node, "--fail-on-init-error=false", wait=False):
            await node.wait_until(lambda: {CORE, MEMORY} <= node.kubelet.devices.capacity().keys(), "both resources")
            assert node.kubelet.devices.capacity()[CORE] == (0, 0)
        assert node.log_lines("gpus_unreadable")


async def test_a_claim_counts_for_costs_once_its_gpu_is_there() -> None:
    """Its record was read before the driver answered."""
    async with open_test_node() as node:
        record_claim(node)
        write_faults(node.paths.faults, all_lost="driver not loaded")
        flags = ("--fail-on-init-error=false", "--dra.gpus=1")
        async with open_agent(node, *flags, wait=False) as agent:
            await poll_until(lambda: len(agent.parts.node.cache) == 1, "the claim")
            assert not counted_for_costs(agent)
            write_faults(node.paths.faults)
            await agent.parts.gpus.watch.poll()
            assert counted_for_costs(agent)
