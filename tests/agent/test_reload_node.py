"""An agent that reads its settings again (SIGHUP): what it still knows, and that the kubelet notices nothing else."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest
from aiohttp import ClientSession

from gpushare_agent.agent.auto_isolation import NodeSettings
from gpushare_agent.agent.composition import build
from gpushare_agent.agent.program import run_generation
from gpushare_agent.core.kit.supervision import stop_task
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.settings.settings import load_settings
from tests.agent.support_agent import open_agent, open_child, poll_until
from tests.sandbox.support_sandbox import (
    BLOCKS,
    CORE,
    CORES,
    MEMORY,
    NodeUnderTest,
    container,
    limits_of,
    open_test_node,
    pod,
)
from tests.support_core import used_cores

GPU_MEM = "aliyun.com/gpu-mem"
GPU = "nvidia.com/gpu"

ADMITTED = 'gpushare_admissions_total{outcome="allocated",reason="",resource="tencent.com/vcuda-core"}'


async def _life(node: NodeUnderTest, number: int) -> str:
    """The address of the agent's web port in its life of this number, from 1 on."""
    await poll_until(lambda: len(node.log_lines("web_listening")) >= number, "the web port")
    return f"http://127.0.0.1:{node.log_lines('web_listening')[number - 1]['port']}"


async def _get(url: str) -> Any:
    async with ClientSession() as session, session.get(url) as answer:
        return await answer.json() if "/api/" in url else await answer.text()


async def _admitted(url: str) -> list[str]:
    return [line for line in (await _get(f"{url}/metrics")).splitlines() if line.startswith(ADMITTED)]


async def _recovered(node: NodeUnderTest, lives: int) -> None:
    await poll_until(lambda: len(node.log_lines("allocations_recovered")) >= lives, "the next life answers")


def _sockets(node: NodeUnderTest) -> list[str]:
    return sorted(path.name for path in node.paths.device_plugin_path.glob("*-*.sock"))


def _registered(node: NodeUnderTest) -> list[str]:
    """The resources, once for each registration: a stream that is cut is followed by another one."""
    return [line["resource"] for line in node.log_lines("device_plugin_registered")]


async def _allocated_s(url: str, name: str) -> float:
    """GPU-seconds of a pod's container."""
    lines = (await _get(f"{url}/metrics")).splitlines()
    series = "gpushare_container_gpu_seconds_total{"
    (line,) = [one for one in lines if one.startswith(series) and f'pod="{name}"' in one and '"allocated"' in one]
    return float(line.split()[-1])


async def test_a_reload_keeps_counters_decisions_and_history() -> None:
    """Counters do not go back, numbers of decisions go on, and the curves have the points from before."""
    async with open_test_node() as node, open_child(node, "--sample-period-s=0.1") as child:
        url = await _life(node, 1)
        await node.start_pods(pod("before", container(cores=30, blocks=10)))
        admitted = await _admitted(url)
        assert admitted == [f"{ADMITTED} 1.0"]
        while (history := await _get(f"{url}/api/v1/history?only=gpus"))["at"] is None:
            await asyncio.sleep(0.05)
        began, allocated, ended = time.monotonic(), await _allocated_s(url, "before"), time.monotonic()
        child.send_signal(signal.SIGHUP)
        url = await _life(node, 2)
        await _recovered(node, 2)
        assert await _admitted(url) == admitted
        assert (await _get(f"{url}/api/v1/history?only=gpus"))["at"] >= history["at"]
        node.api.create_pod(pod("after", container(cores=30, blocks=10)))
        await node.wait_running("before", "after")
        found = (await _get(f"{url}/api/v1/decisions"))["decisions"]
        assert [(one["number"], one["pod"]) for one in found] == [(2, "after"), (1, "before")]
        # The reload's own time counts, and the other container's does not. A page is at most one period old.
        least_s = time.monotonic() - ended - 0.1
        now = await _allocated_s(url, "before")
        most_s = time.monotonic() - began + 0.1
        assert allocated + 0.3 * least_s - 0.001 <= now <= allocated + 0.3 * most_s + 0.001
        assert await _allocated_s(url, "after") < now


async def test_the_first_round_of_usage_in_a_life_stands_for_the_reload_too() -> None:
    """With nothing from before it would stand for one period, here an hour."""
    async with open_test_node() as node:
        chosen = NodeSettings(settings=load_settings(node.arguments("--sample-period-s=3600"), {}).settings)
        previous, covered_s = None, []
        for _ in range(2):
            previous = build(chosen, previous=previous)
            await previous.observability.usage.sample_once()
            found = previous.observability.usage.current
            assert found is not None
            covered_s.append(found.covered_s)
            await previous.gpus.driver.close()
    assert covered_s[0] == 3600 > covered_s[1]


async def test_a_reload_cuts_no_stream_of_a_resource_that_stays() -> None:
    """The new units come over the streams that are there; a resource that is new registers, one that is removed leaves."""
    with_gpu_mem, without = "gpushare: {enabled: true}\n", "resources: {memory_block_mib: 512}\n"
    async with open_test_node() as node:
        path = node.paths.state / "settings.yaml"
        path.write_text("simulated: {gpus: 2}\n")
        async with open_child(node, f"--config={path}") as child:
            sockets = _sockets(node)
            path.write_text("simulated: {gpus: 2}\n" + with_gpu_mem)
            child.send_signal(signal.SIGHUP)
            await node.wait_until(lambda: node.kubelet.devices.capacity().get(GPU_MEM, (0, 0))[1], "the new resource")
            assert set(sockets) < set(_sockets(node))
            path.write_text("simulated: {gpus: 2}\n" + without)
            child.send_signal(signal.SIGHUP)
            await node.wait_until(lambda: node.healthy(MEMORY) == BLOCKS, "the new blocks")
            assert node.kubelet.devices.capacity()[CORE] == (2 * CORES, 2 * CORES)
            await node.wait_until(lambda: not node.healthy(GPU_MEM), "the end of the removed resource")
            await poll_until(lambda: _sockets(node) == sockets, "its socket removed")
            assert sorted(_registered(node)) == sorted([CORE, MEMORY, GPU_MEM])
            await node.start_pods(pod("after", container(cores=50, blocks=BLOCKS // 4)))


@pytest.mark.parametrize(
    ("flags", "containers", "resources"),
    [
        ((), (container(cores=5, blocks=2), container("second", cores=2, blocks=1)), [CORE, MEMORY]),
        (("--nvidia.enabled", "--simulated.gpus=24"), (limits_of("main", {GPU: 1}),), [GPU, CORE, MEMORY]),
    ],
    ids=["shares", "whole"],
)
async def test_reloads_in_a_burst_reject_no_pod(
    flags: tuple[str, ...], containers: tuple[dict[str, Any], ...], resources: list[str]
) -> None:
    """Each waits for a moment between two admissions, of which a burst has no other than the end of one."""
    names = [f"burst-{number}" for number in range(24)]
    async with open_test_node() as node, open_child(node, *flags) as child:
        await node.wait_until(
            lambda: all(node.kubelet.devices.capacity().get(one, (0, 0))[1] for one in resources), "units"
        )
        for name in names:
            node.api.create_pod(pod(name, *containers))
        for life in range(2, 5):
            child.send_signal(signal.SIGHUP)
            await _recovered(node, life)
        await node.wait_running(*names)
        assert sorted(_registered(node)) == sorted(resources)
        assert not node.log_lines("admissions_not_paused")
        node.assert_nothing_shared()
        calls = [call for call in node.calls.calls if call.method == "Allocate"]
        ids = [(call.resource, device) for call in calls for device in call.device_ids]
        assert len(ids) == len(set(ids))


async def test_a_call_during_a_reload_is_answered_by_the_next_life_under_its_settings() -> None:
    """A pod that comes between two lives asks for a resource by the size of its unit that the second has."""
    async with open_test_node() as node, open_agent(node, "--simulated.gpus=2") as first:
        await first.parts.kubelet.pause()
        await stop_task(first.task)
        node.api.create_pod(pod("between", container(cores=50, blocks=20)))
        await node.wait_until(lambda: node.calls.open_calls, "the kubelet asks")
        settings = load_settings(node.arguments("--simulated.gpus=2", "--resources.memory-block-mib=512"), {}).settings
        second = build(NodeSettings(settings=settings), previous=first.parts)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(run_generation(second))
            await node.wait_running("between")
            (allocation,) = second.node.cache
            assert len(allocation.ids_of(ResourceKind.VMEMORY)) == 20 and used_cores(second.node.cache) == {
                allocation.gpus[0]: 50
            }
            await node.wait_until(lambda: node.healthy(MEMORY) == BLOCKS, "blocks of 512 MiB")
            assert not [call for call in node.calls.calls if call.error]
            await stop_task(task)
        assert not _sockets(node)


async def test_settings_with_which_no_life_starts_are_followed_by_those_before() -> None:
    """An address that is not this host's: the streams go on, and the web port is there again."""
    async with open_test_node() as node:
        path = node.paths.state / "settings.yaml"
        path.write_text("web: {addr: 127.0.0.1}\n")
        async with open_child(node, f"--config={path}") as child:
            path.write_text("web: {addr: 203.0.113.1}\n")
            for life in (2, 3):  # each reload says so
                child.send_signal(signal.SIGHUP)
                await _recovered(node, life)
                assert len(node.log_lines("settings_not_applied")) == life - 1
            assert "gpushare" in await _get(f"{await _life(node, 3)}/metrics")
            await node.start_pods(pod("after", container(cores=30, blocks=10)))
            assert sorted(_registered(node)) == [CORE, MEMORY]


async def test_settings_that_are_refused_change_nothing() -> None:
    """Not what is logged either: a level is in force with the life whose settings have it. With the last one the kubelet
    could not receive the lists."""
    async with open_test_node() as node:
        path = node.paths.state / "settings.yaml"
        large = "simulated: {gpus: 2, gpu_memory_mib: 81920}\n"
        path.write_text(large)
        async with open_child(node, f"--config={path}") as child:
            capacity = node.kubelet.devices.capacity()
            texts = ("memory_block_mib: none", "unheard_of: 1", "memory_block_mib: [", "memory_block_mib: 1")
            for number, text in enumerate(texts, 1):
                path.write_text(f"{large}log: {{level: error}}\nresources:\n  {text}\n")
                child.send_signal(signal.SIGHUP)
                await poll_until(lambda: len(node.log_lines("settings_not_reloaded")) == number, text)  # noqa: B023
            assert node.kubelet.devices.capacity() == capacity
            await node.start_pods(pod("after", container(cores=30, blocks=10)))
            await poll_until(lambda: node.log_lines("allocate"), "its admission is logged, which is no error")
            path.write_text(f"{large}log: {{level: debug}}\n")
            child.send_signal(signal.SIGHUP)
            await poll_until(lambda: node.log_lines("device_list_sent"), "the next life logs the details")
