"""What the sandbox plays its containers to use: how much, on which GPUs, by which processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from structlog.testing import capture_logs

from gpushare_agent.agent.gpus.simulated.driver import SimulatedDriver
from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.core.formats.simulated_gpus import Usage, parse_usage
from gpushare_agent.core.model.errors import Rejected
from gpushare_agent.core.model.names import ISOLATION_ANNOTATION
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.sandbox.report import ReportedNode
from gpushare_agent.sandbox.workload import (
    PERIOD_S,
    SimulatedContainer,
    WorkloadPlayer,
    memory_load,
    simulated_usage,
    sm_load,
)
from tests.sandbox.support_containers import needs_processes
from tests.sandbox.support_sandbox import (
    CORE,
    MEMORY,
    NodeUnderTest,
    SmallPlugin,
    container,
    device_ids,
    limits_of,
    open_test_node,
    pod,
)

GPU_MEM = "aliyun.com/gpu-mem"
GIB = 2**30
MOMENTS = [PERIOD_S * n / 40 for n in range(200)]


def played(**changes: Any) -> SimulatedContainer:
    base: dict[str, Any] = {
        "name": "default/a/main", "gpus": (0,), "pids": (7,), "share": 0.5, "memory_bytes": 1000, "age_s": 0.0,
    }  # fmt: skip
    return SimulatedContainer(**{**base, **changes})


# --- how much ---


@pytest.mark.parametrize(
    ("changes", "low", "high"),
    [
        ({}, 0.2, 0.95),
        ({"share": 1.0}, 0.2, 0.9),
        ({"is_limited": False}, 0.2, 1.2),
        ({"share": 1.0, "is_limited": False}, 0.2, 0.9),
    ],
    ids=["share", "whole GPU", "share that nothing limits", "whole GPU without isolation"],
)
def test_use_is_a_wave_within_the_share(changes: dict[str, Any], low: float, high: float) -> None:
    """Between these parts of the share, and reaching both; only what nothing limits goes over it."""
    loads = [sm_load(played(**changes), moment) for moment in MOMENTS]
    assert low <= min(loads) < low + 0.02
    assert high - 0.02 < max(loads) <= high


def test_what_nothing_limits_goes_over_its_share_now_and_then() -> None:
    """At one peak of three."""
    is_over = [sm_load(played(is_limited=False), PERIOD_S * n / 40) > 1 for n in range(9 * 40)]
    assert sum(now and not before for before, now in pairwise(is_over)) == 3


def test_containers_have_phases_of_their_own_and_the_same_at_the_same_time() -> None:
    """By their names: no random number is in it."""
    first, again, other = (sm_load(played(name=name), 1000.0) for name in ("d/a/main", "d/a/main", "d/b/main"))
    assert first == again
    assert abs(first - other) > 0.01


def test_memory_fills_up_after_the_start() -> None:
    """To seven tenths of the limit."""
    loads = [memory_load(played(age_s=age_s)) for age_s in (-5, 0, 90, 180, 1e6)]
    assert loads == pytest.approx([0.1, 0.1, 0.4, 0.7, 0.7])


def test_a_constant_load_is_exact() -> None:
    """Half of the share of each GPU, half of the memory of each GPU, in equal parts of its processes."""
    usage = simulated_usage([played(load=0.5, gpus=(0, 2), pids=(7, 8), memory_bytes=1001)], 77.0)
    assert [(p.gpu, p.sample.pid, p.sample.sm_ratio, p.sample.memory_bytes) for p in usage] == [
        (0, 7, 0.125, 250), (0, 8, 0.125, 250), (2, 7, 0.125, 250), (2, 8, 0.125, 250),
    ]  # fmt: skip
    usage = simulated_usage([played(load=1, memory_bytes=1001, pids=(7, 8))], 77.0)
    assert [p.sample.memory_bytes for p in usage] == [501, 500]
    assert simulated_usage([played(pids=())], 0.0) == []  # it ends just now


def test_what_is_wanted_of_a_gpu_beyond_all_of_it_is_shared_out() -> None:
    """Three that want half of it each get a third, and the other GPU is not touched by that."""
    crowd = [played(name=str(n), pids=(n,), load=1.0) for n in (1, 2, 3)]
    usage = simulated_usage([*crowd, played(gpus=(1,), load=1.0)], 0.0)
    assert [p.sample.sm_ratio for p in usage] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.5], abs=1e-5)


# --- of the embedded node ---


@asynccontextmanager
async def open_played(**settings: Any) -> AsyncIterator[tuple[NodeUnderTest, WorkloadPlayer]]:
    """A node with two simulated GPUs behind small plugins, and who plays its containers' use."""
    async with open_test_node() as node:
        driver = SimulatedDriver(gpus=2, gpu_memory_mib=(24576,), topology_text=None, gpu_name="T", seed="n")
        gpus = (await driver.read()).gpus
        uuids = [gpu.uuid for gpu in gpus]
        names = ResourceNames(vcore=CORE, vmemory=MEMORY, gpu_mem=GPU_MEM)
        shown = ReportedNode(node=node, gpus=gpus, names=names)
        async with (
            node.open_plugin(SmallPlugin(CORE, device_ids(*uuids, count=100)), "core.sock"),
            node.open_plugin(SmallPlugin(MEMORY, device_ids(*uuids, count=96)), "memory.sock"),
            node.open_plugin(SmallPlugin(GPU_MEM, device_ids(uuids[1], count=24)), "gpumem.sock"),
        ):
            yield node, WorkloadPlayer(shown, node.paths.usage, **settings)


def written_now(node: NodeUnderTest, player: WorkloadPlayer) -> Usage:
    player.play()
    return parse_usage(node.paths.usage.read_text())


HALF = {"sandbox.gpushare-agent/load": "0.5"}


@pytest.mark.parametrize(
    ("limits", "sm", "memory_bytes", "gpus"),
    [
        ({CORE: 40, MEMORY: 8}, 0.2, GIB, {0}),
        ({CORE: 100}, 0.5, 12 * GIB, {0}),
        ({CORE: 200}, 0.5, 12 * GIB, {0, 1}),
        ({GPU_MEM: 6}, 0.125, 3 * GIB, {1}),
    ],
    ids=["share", "whole GPU", "two GPUs", "memory only"],
)
async def test_a_container_uses_the_gpus_that_it_was_given(
    limits: dict[str, int], sm: float, memory_bytes: int, gpus: set[int]
) -> None:
    """Half of its share, as its annotation says, by its own process."""
    async with open_played() as (node, player):
        await node.start_pods(pod("a", limits_of("main", limits), annotations=HALF))
        usage = written_now(node, player)
        assert {process.gpu for process in usage} == gpus
        assert {process.sample.pid for process in usage} == {node.container_of("a").pid}
        assert {process.sample.sm_ratio for process in usage} == {sm}
        assert {process.sample.memory_bytes for process in usage} == {memory_bytes}


@needs_processes
async def test_all_processes_of_a_container_have_a_part() -> None:
    """Also those that its command starts."""
    async with open_played() as (node, player):
        twins = limits_of("main", {CORE: 40, MEMORY: 8}, command=["sh", "-c", "sleep 600 & sleep 600"])
        await node.start_pods(pod("a", {**twins, "image": "sandbox/host"}, annotations=HALF))
        while len(usage := written_now(node, player)) < 3:
            await asyncio.sleep(0.05)  # another process starts its children in its own time
        pids = node.kubelet.runtime.pids(node.container_of("a"))
        assert {process.sample.pid for process in usage} == set(pids)
        assert sum(process.sample.sm_ratio or 0 for process in usage) == pytest.approx(0.2, abs=1e-5)
        assert sum(process.sample.memory_bytes or 0 for process in usage) == GIB


async def test_containers_without_gpus_and_ended_ones_use_nothing() -> None:
    """A plain container of the same pod, and afterwards the one with the GPU."""
    async with open_played() as (node, player):
        await node.start_pods(pod("a", container(cores=40, blocks=8), container("plain"), restartPolicy="Never"))
        assert len(written_now(node, player)) == 1
        node.kill_container("a")
        await node.kubelet.wait_for(lambda: not node.container_of("a").is_running)
        assert written_now(node, player) == ()


async def test_while_the_kubelet_is_down_use_stays_as_it_was() -> None:
    """Only the kubelet knows who has which GPU, and the containers run on."""
    async with open_played() as (node, player):
        await node.start_pods(pod("a", container(cores=40, blocks=8), annotations=HALF))
        before = written_now(node, player)
        await node.kubelet.stop()
        assert written_now(node, player) == before
        await node.kubelet.start()
        assert written_now(node, player) == before


@pytest.mark.parametrize(
    ("node_wide", "annotation", "is_over"),
    [("none", None, True), ("vcuda", None, False), ("vcuda", "none", True), ("none", "vcuda", False)],
)
async def test_only_isolation_none_lets_a_container_over_its_share(
    node_wide: str, annotation: str | None, is_over: bool
) -> None:
    """The node's, or the one that the pod has chosen."""
    moments = iter(MOMENTS)
    settings = {"isolation": node_wide, "allowed": tuple(ISOLATIONS), "clock": lambda: next(moments)}
    async with open_played(**settings) as (node, player):
        chosen = {} if annotation is None else {ISOLATION_ANNOTATION: annotation}
        await node.start_pods(pod("a", container(cores=40, blocks=8), annotations=chosen))
        found = [written_now(node, player)[0].sample.sm_ratio or 0 for _ in MOMENTS]
        assert (max(found) > 0.4) is is_over


async def test_a_usage_file_that_cannot_be_written_is_reported_once() -> None:
    """And the sandbox goes on."""
    async with open_played() as (node, player):
        node.paths.usage.mkdir()
        with capture_logs() as logs:
            player.play()
            player.play()
        assert [entry["event"] for entry in logs] == ["usage_file_not_written"]


async def test_the_file_is_replaced_and_never_half_written() -> None:
    """Who has opened the old one reads it to its end."""
    async with open_played() as (node, player):
        player.play()
        with node.paths.usage.open() as old:
            await node.start_pods(pod("a", container(cores=40, blocks=8)))
            assert len(written_now(node, player)) == 1
            assert json.load(old) == {"processes": []}


@pytest.mark.parametrize("load", ["much", "-0.5", "nan", "inf"])
async def test_a_load_that_is_no_part_is_refused(load: str) -> None:
    """At the pod's creation, naming the annotation."""
    async with open_test_node() as node:
        with pytest.raises(Rejected, match=r"annotations\[sandbox.gpushare-agent/load\].*a part of the share"):
            node.api.create_pod(pod("a", annotations={"sandbox.gpushare-agent/load": load}))
