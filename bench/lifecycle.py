"""Start, registration after a kubelet's restart, stop, and what the agent costs while nothing happens."""

from __future__ import annotations

import asyncio
import time

from bench.node import PODS, RESOURCES, BenchNode
from bench.results import Row, row

_START_MS, _SERVED_MS, _AGAIN_MS, _STOP_MS, _KILLED_MS = 250.0, 1000.0, 300.0, 2000.0, 2000.0
_MEMORY_MIB, _PROCESSOR_PERCENT = 64.0, 0.5
_BETWEEN_RESTARTS_S = 0.25
_SOCKETS_TIMEOUT_S = 20.0


async def start_rows(node: BenchNode, runs: int) -> list[Row]:
    """Each run starts the process on the filled node and stops it when it is READY."""
    registered, served, ready, stopped = [], [], [], []
    for number in range(runs + 1):
        started = await node.agent.start()
        await node.wait_registered()
        registered_at = max(plugin.registered_at for plugin in node.kubelet.plugins.values())
        served_at = await _wait_sockets(node)
        await node.agent.wait_ready()
        ready_at = time.perf_counter()
        stop_s = await node.agent.stop()
        node.kubelet.plugins.clear()
        if number:  # the first one compiles what is not compiled yet
            registered.append((registered_at - started) * 1000)
            served.append((served_at - started) * 1000)
            ready.append((ready_at - started) * 1000)
            stopped.append(stop_s * 1000)
    note = (
        "on the filled node; until the kubelet has dialled back for the second resource. Its calls wait until the "
        "allocation cache is rebuilt"
    )
    return [
        row(
            "process start to both resources registered", registered, target_median=_START_MS, target_p99=_START_MS,
            note=note,
        ),
        row(
            f"process start to the vDevice sockets of {PODS} running shares", served, target_median=_SERVED_MS,
            target_p99=_SERVED_MS, note="polled every 5 ms, once both resources are registered",
        ),
        row("process start to READY (pods listed, web up)", ready),
        row("SIGTERM to the end of the process", stopped, target_median=_STOP_MS, target_p99=_STOP_MS),
    ]  # fmt: skip


async def kill_rows(node: BenchNode, runs: int) -> list[Row]:
    """Each run kills the agent that serves the filled node and starts it again at once, as a kubelet does the first time."""
    times = []
    await node.start_agent()
    for _ in range(runs):
        await node.agent.kill()
        node.kubelet.plugins.clear()
        started = await node.agent.start()
        await node.wait_registered()
        times.append((max(plugin.listed_at for plugin in node.kubelet.plugins.values()) - started) * 1000)
        await node.agent.wait_ready()
    await node.agent.stop()
    node.kubelet.plugins.clear()
    note = "SIGKILL while it serves; until the last byte of the second ListAndWatch message, without the kubelet's own time"
    return [row("start after a kill to both device lists sent", times, target_median=_KILLED_MS, note=note)]


async def _wait_sockets(node: BenchNode) -> float:
    """When every running share had its socket again: a stop has removed them all."""
    async with asyncio.timeout(_SOCKETS_TIMEOUT_S):
        while node.served() < PODS:  # noqa: ASYNC110 - files have no event
            await asyncio.sleep(0.005)
    return time.perf_counter()


async def again_rows(node: BenchNode, runs: int) -> list[Row]:
    """Each run is a kubelet that ends, removes the sockets and makes its own again, as a starting one does."""
    times: list[float] = []
    streams: dict[str, list[float]] = {resource: [] for resource in RESOURCES}
    for _ in range(runs):
        there_at = await node.kubelet.restart()
        await node.wait_registered()
        plugins = node.kubelet.plugins
        times.append((max(plugin.listed_at for plugin in plugins.values()) - there_at) * 1000)
        for resource, plugin in plugins.items():
            streams[resource].append((plugin.listed_at - plugin.stream_opened_at) * 1000)
        await asyncio.sleep(_BETWEEN_RESTARTS_S)
    rows = [
        row(
            "kubelet.sock made again to both first device lists sent", times, target_median=_AGAIN_MS, target_p99=_AGAIN_MS,
            note="both plugins served and registered again; until the last byte of the second ListAndWatch message",
        )
    ]  # fmt: skip
    for resource, values in streams.items():
        plugin = node.kubelet.plugins[resource]
        name = f"  ListAndWatch of {len(plugin.devices):,} IDs, {len(plugin.message) / 1000:,.0f} kB, from its opening"
        rows.append(row(name, values))
    return rows


async def idle_rows(node: BenchNode, settle_s: float, window_s: float) -> list[Row]:
    """The filled node without any call, `settle_s` after the start: after the first comparisons with the kubelet."""
    await asyncio.sleep(settle_s)
    started, before, calls = time.perf_counter(), node.agent.processor_s(), node.kubelet.calls
    await asyncio.sleep(window_s)
    share = (node.agent.processor_s() - before) / (time.perf_counter() - started) * 100
    window = f"over {window_s:g} s on the filled node, {node.kubelet.calls - calls} PodResources calls of the periodic "
    window += "comparison with the kubelet among it"
    return [
        row("resident memory, idle", [node.agent.resident_mib()], unit="MiB", target_median=_MEMORY_MIB, note="VmRSS"),
        row("processor time, idle", [share], unit="%", target_median=_PROCESSOR_PERCENT, note=f"of one CPU, {window}"),
    ]
