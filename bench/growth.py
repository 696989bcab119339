"""A pod's life on a node with few and with many shares: what each step costs the agent, and what it keeps in memory.

Nothing may grow with the shares that the pod has nothing to do with, but the List answer, which names them all.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from dataclasses import dataclass, field

from bench.containers import Containers
from bench.node import AGED_S, RESOURCES, BenchNode, open_node
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
_STEPS = ("seen by the watch", "four calls", "PreStartContainer", "after it", "status Running", "deletion")
_WAITED = _STEPS[3:]


@dataclass(slots=True, kw_only=True)
class Life:
    """Milliseconds of the agent's processor time by step, of several pods, and in `idle` of windows in which nothing
    happens, as long as each of `_WAITED`."""

    steps: dict[str, list[float]] = field(default_factory=lambda: {step: [] for step in _STEPS})
    idle: list[float] = field(default_factory=list)

    @property
    def whole(self) -> list[float]:
        """Of each pod, without what the agent does in the same time anyway."""
        own = len(_WAITED) * statistics.median(self.idle)
        return [sum(one) - own for one in zip(*self.steps.values(), strict=True)]


async def growth_rows(shares: int, pods: int, restarts: int, settle_s: float) -> list[Row]:
    """On a node with `shares` running containers, `pods` that come and go. Raises RuntimeError, RefusedPodError."""
    async with open_node(flags={"simulated.gpus": _GPUS}) as node:
        node.fill(shares, _CORES, _BLOCKS, gpus=_GPUS, foreign=0)
        await asyncio.sleep(AGED_S)
        # Started again once it has written files and annotations of each share, as it finds them on a node that is in use.
        await _start(node, shares, settle_s)
        await node.agent.stop()
        node.kubelet.plugins.clear()
        await _start(node, shares, settle_s)
        life = Life()
        for number in range(pods):
            await _live(node, number, life)
        await asyncio.sleep(settle_s)
        life.idle += [await _window_ms(node, _AFTER_S) for _ in range(pods)]
        rows = _rows(shares, life, node.agent.resident_mib())
        return [*rows, row(f"{shares:,} shares: start to READY", await _restart(node, restarts), note=_RESTART_NOTE)]


async def _start(node: BenchNode, shares: int, settle_s: float) -> None:
    """Until the agent does no more than it does anyway."""
    await node.start_agent(_STILL_S)
    await wait_sockets(node, shares, _STILL_S)
    before, now = math.inf, await _window_ms(node, settle_s)
    async with asyncio.timeout(_STILL_S):
        while now < before * _STILL:
            before, now = now, await _window_ms(node, settle_s)


async def _restart(node: BenchNode, runs: int) -> list[float]:
    times = []
    for _ in range(runs):
        await node.agent.stop()
        node.kubelet.plugins.clear()
        started = await node.agent.start()
        await node.agent.wait_ready()
        times.append((time.perf_counter() - started) * 1000)
    return times


async def _window_ms(node: BenchNode, window_s: float) -> float:
    """The agent's processor time in so long."""
    before = node.agent.processor_s()
    await asyncio.sleep(window_s)
    return (node.agent.processor_s() - before) * 1000


async def _live(node: BenchNode, number: int, life: Life) -> None:
    before = node.agent.processor_s()

    def end(step: str) -> None:
        nonlocal before
        spent = node.agent.processor_s()
        life.steps[step].append((spent - before) * 1000)
        before = spent

    pod = bench_pod(f"live-{number:04d}", _CORES, _BLOCKS)
    node.create(pod)
    await asyncio.sleep(_SEEN_S)
    end("seen by the watch")
    await node.kubelet.admit(pod, RESOURCES if number % 2 else RESOURCES[::-1])
    end("four calls")
    await node.kubelet.pre_start(pod, VCORE_RESOURCE)
    end("PreStartContainer")
    await asyncio.sleep(_AFTER_S)
    end("after it")
    containers = Containers(node.state / "cgroup")
    containers.put(pod.uid, [_FIRST_PID + number])
    node.run(pod, containers.id_of(pod.uid), containers.text_of(pod.uid))
    await asyncio.sleep(_AFTER_S)
    end("status Running")
    containers.remove(pod.uid)
    node.delete(pod)
    await asyncio.sleep(_AFTER_S)
    end("deletion")


def _rows(shares: int, life: Life, resident: float) -> list[Row]:
    note = f"the agent's processor time; {_GPUS} simulated GPUs, shares of {_CORES} core and {_BLOCKS} memory blocks"
    node = f"{shares:,} shares"
    waited = f"in {_AFTER_S:g} s; what runs anyway is in it"
    return [
        row(f"{node}: a pod's life", life.whole, note=f"{note}; without what runs anyway"),
        *(
            row(f"  {node}: {step}", values, note=waited if step in _WAITED else note)
            for step, values in life.steps.items()
        ),
        row(f"  {node}: nothing happens", life.idle, note=waited),
        row(f"{node}: resident memory", [resident], unit="MiB", note="VmRSS"),
    ]
