"""A pod's life on a node with few and with many shares: what each step costs the agent, and what it keeps in memory.

Nothing may grow with the shares that the pod has nothing to do with, but the List answer, which names them all.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

from bench.containers import Containers
from bench.node import RESOURCES, BenchNode, open_node
from bench.pods import bench_pod
from bench.results import Row, row
from bench.vdevice import wait_sockets
from gpushare_agent.core.model.names import VCORE_RESOURCE

SHARES = (100, 500, 1500)
_GPUS = 16
_CORES, _BLOCKS = 1, 2
_SEEN_S, _AFTER_S = 0.05, 0.35
_STILL_S, _STILL = 120.0, 0.8
"""It is idle when a window costs more than this part of the one before."""
_FIRST_PID = 900_000
_RESTART_NOTE = "the kubelet's checkpoint and PodResources name as many pods; pods listed, the web server up"
_STEPS = ("four calls", "PreStartContainer", "after it", "status Running", "deletion")


@dataclass(slots=True, kw_only=True)
class Life:
    """Milliseconds of the agent's processor time by step, of several pods, less what it needs while nothing happens."""

    steps: dict[str, list[float]] = field(default_factory=lambda: {step: [] for step in _STEPS})
    seen: list[float] = field(default_factory=list)
    """Of what the watch delivers before the first call."""

    @property
    def whole(self) -> list[float]:
        return [sum(one) for one in zip(self.seen, *self.steps.values(), strict=True)]


async def growth_rows(shares: int, pods: int, restarts: int, settle_s: float) -> list[Row]:
    """On a node with `shares` running containers, `pods` that come and go. Raises RuntimeError, RefusedPodError."""
    async with open_node(flags={"simulated.gpus": _GPUS}) as node:
        node.fill(shares, _CORES, _BLOCKS, gpus=_GPUS, foreign=0)
        await node.start_agent()
        await wait_sockets(node, shares)
        # After its start the agent writes files and annotations of each share.
        before, idle = math.inf, await _idle_share(node, settle_s)
        async with asyncio.timeout(_STILL_S):
            while idle < before * _STILL:
                before, idle = idle, await _idle_share(node, settle_s)
        life = Life()
        for number in range(pods):
            await _live(node, number, life, idle)
        rows = _rows(shares, life, node.agent.resident_mib())
        return [*rows, row(f"{shares:,} shares: start to READY", await _restart(node, restarts), note=_RESTART_NOTE)]


async def _restart(node: BenchNode, runs: int) -> list[float]:
    times = []
    for _ in range(runs):
        await node.agent.stop()
        node.kubelet.plugins.clear()
        started = await node.agent.start()
        await node.agent.wait_ready()
        times.append((time.perf_counter() - started) * 1000)
    return times


async def _idle_share(node: BenchNode, window_s: float) -> float:
    """Processor time for each second in which nothing happens."""
    before, started = node.agent.processor_s(), time.perf_counter()
    await asyncio.sleep(window_s)
    return (node.agent.processor_s() - before) / (time.perf_counter() - started)


async def _live(node: BenchNode, number: int, life: Life, idle: float) -> None:
    started, before = time.perf_counter(), node.agent.processor_s()

    def spent_ms() -> float:
        nonlocal started, before
        then, spent = time.perf_counter(), node.agent.processor_s()
        found = spent - before - (then - started) * idle
        started, before = then, spent
        return found * 1000

    pod = bench_pod(f"live-{number:04d}", _CORES, _BLOCKS)
    node.create(pod)
    await asyncio.sleep(_SEEN_S)
    life.seen.append(spent_ms())
    await node.kubelet.admit(pod, RESOURCES if number % 2 else RESOURCES[::-1])
    life.steps["four calls"].append(spent_ms())
    await node.kubelet.pre_start(pod, VCORE_RESOURCE)
    life.steps["PreStartContainer"].append(spent_ms())
    await asyncio.sleep(_AFTER_S)
    life.steps["after it"].append(spent_ms())
    containers = Containers(node.state / "cgroup")
    containers.put(pod.uid, [_FIRST_PID + number])
    node.run(pod, containers.id_of(pod.uid), containers.text_of(pod.uid))
    await asyncio.sleep(_AFTER_S)
    life.steps["status Running"].append(spent_ms())
    containers.remove(pod.uid)
    node.delete(pod)
    await asyncio.sleep(_AFTER_S)
    life.steps["deletion"].append(spent_ms())


def _rows(shares: int, life: Life, resident: float) -> list[Row]:
    note = f"the agent's processor time; {_GPUS} simulated GPUs, shares of {_CORES} core and {_BLOCKS} memory blocks"
    node = f"{shares:,} shares"
    return [
        row(f"{node}: a pod's life", life.whole, note=note),
        row(f"  {node}: seen by the watch", life.seen, note=note),
        *(row(f"  {node}: {step}", values, note=note) for step, values in life.steps.items()),
        row(f"{node}: resident memory", [resident], unit="MiB", note="VmRSS"),
    ]
