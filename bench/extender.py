"""The scheduler extender on a large cluster: memory, resync, filter, prioritize and bind, over HTTP as a scheduler asks.

The extender is a process of its own, started from its command line; the API server and the scheduler are in this one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from bench.cluster import CPUS, ClusterServer, SampleCluster, filter_args, raw_pod
from bench.results import Row, resident_mib, row

FILTER_P50_MS, FILTER_P99_MS = 10.0, 30.0
BIND_MS = 20.0
NODE_POLICY = "fgd"
"""The one that costs the most: by kinds of pods, of which there are far more than of requests for GPUs."""
MEMORY_MIB = 400.0
RESYNC_S = 10.0
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 15.0
_LISTED = ("/api/v1/nodes", "/api/v1/pods")
_ROOT = Path(__file__).parents[1]
REQUESTS = ((10, 8), (20, 16), (30, 16), (30, 32), (50, 32), (50, 48), (70, 48), (100, 0), (200, 0), (25, 24), (40, 12))
"""Cores and blocks of the pods that are scheduled, in turn."""


async def extender_rows(state: Path, *, nodes: int, pods: int, resyncs: int) -> list[Row]:
    """`pods` is how many are scheduled one after the other. Raises RuntimeError where the extender does not come up."""
    cluster = SampleCluster(nodes=nodes)
    server = ClusterServer(cluster)
    async with server.serving(), _extender(server, state) as extender:
        started_s = await extender.wait_ready()
        rows = [row(f"extender: start to ready, {nodes:,} nodes and {cluster.pods:,} pods", [started_s], unit="s")]
        resync = await _resync(extender, server, cluster, resyncs)
        timings = await _schedule(extender, server, cluster, pods)
        note = f"{nodes:,} nodes of 8 GPUs, {cluster.pods:,} pods, names only (nodeCacheCapable); HTTP round trip"
        rows += [
            row(
                "extender: filter",
                timings.filter_ms,
                target_median=FILTER_P50_MS,
                target_p99=FILTER_P99_MS,
                note=note,
            ),
            row(f"extender: prioritize what fits, policy {NODE_POLICY}", timings.prioritize_ms, note=note),
            row(
                "extender: bind",
                timings.bind_ms,
                target_median=BIND_MS,
                target_p99=BIND_MS,
                note="with a patch and a binding of an API server that answers at once",
            ),
            row("extender: whole resync", resync.seconds, unit="s", target_median=RESYNC_S, target_p99=RESYNC_S),
            row(
                "extender: filter during a resync",
                resync.filter_ms,
                failed=f"{resync.wrong} wrong answers" if resync.wrong else "",
                note="every answer compared with the right one",
            ),
            row(
                "extender: resident memory after it all",
                [extender.resident_mib()],
                unit="MiB",
                target_median=MEMORY_MIB,
            ),
        ]
    return rows


class _Extender:
    """The process, and the scheduler's connection to it."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, port: int, http: aiohttp.ClientSession) -> None:
        self._process = process
        self._log = log
        self._url = f"http://127.0.0.1:{port}"
        self._http = http
        self._started_at = time.perf_counter()

    async def wait_ready(self) -> float:
        """Seconds from the process's start until it answers the scheduler."""
        while time.perf_counter() - self._started_at < _START_TIMEOUT_S:
            if self._process.returncode is not None:
                break
            try:
                async with self._http.get(f"{self._url}/readyz") as answer:
                    if answer.status == 200:
                        return time.perf_counter() - self._started_at
            except aiohttp.ClientConnectionError:
                pass  # it does not listen yet
            await asyncio.sleep(0.02)
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"the extender is not ready; its log:\n{tail}")

    async def ask(self, verb: str, body: bytes) -> tuple[float, bytes]:
        """Milliseconds until the whole answer is here, and the answer."""
        began = time.perf_counter()
        async with self._http.post(f"{self._url}/scheduler/{verb}", data=body) as answer:
            content = await answer.read()
            took_ms = (time.perf_counter() - began) * 1000
            if answer.status != 200:
                raise RuntimeError(f"{verb} was answered {answer.status}: {content[:500]!r}")
        return took_ms, content

    def resident_mib(self) -> float:
        return resident_mib(self._process.pid)


@asynccontextmanager
async def _extender(server: ClusterServer, state: Path) -> AsyncIterator[_Extender]:
    kubeconfig, log_path = state / "kubeconfig", state / "extender.log"
    kubeconfig.write_text(_kubeconfig(server.port))
    port = free_port()
    command = [
        *(sys.executable, "-m", "gpushare_agent", "extender", "--kubeconfig", str(kubeconfig)),
        *("--extender.addr", "127.0.0.1", "--extender.port", str(port), "--extender.leader-elect=false"),
        *("--extender.node-policy", NODE_POLICY),
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUSHARE_")}
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=_ROOT, env=kept, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            yield _Extender(process, log_path, port, http)
    finally:
        await end_process(process)


async def end_process(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


@dataclass(slots=True, kw_only=True)
class _Timings:
    filter_ms: list[float] = field(default_factory=list)
    prioritize_ms: list[float] = field(default_factory=list)
    bind_ms: list[float] = field(default_factory=list)


async def _schedule(extender: _Extender, server: ClusterServer, cluster: SampleCluster, count: int) -> _Timings:
    """As a scheduler does: filter over all nodes, prioritize what fits, bind to the best."""
    timings = _Timings()
    for number, (cores, blocks) in zip(range(count), itertools.cycle(REQUESTS), strict=False):
        pod = raw_pod(f"new-{number}", cores, blocks, cpu=CPUS[number % len(CPUS)])
        server.add(pod)
        took_ms, content = await extender.ask("filter", filter_args(pod, cluster.names))
        timings.filter_ms.append(took_ms)
        fitting = json.loads(content)["NodeNames"]
        if not fitting:
            raise RuntimeError(f"pod {number} with {cores} cores fits nowhere: {content[:300]!r}")
        took_ms, content = await extender.ask("prioritize", filter_args(pod, fitting))
        timings.prioritize_ms.append(took_ms)
        best = max(json.loads(content), key=lambda one: (one["Score"], one["Host"]))["Host"]
        metadata = pod["metadata"]
        binding = {"PodName": metadata["name"], "PodNamespace": metadata["namespace"], "PodUID": metadata["uid"]}
        took_ms, content = await extender.ask("bind", json.dumps({**binding, "Node": best}).encode())
        timings.bind_ms.append(took_ms)
        error = json.loads(content)["Error"]
        if error or cluster.bound.get(metadata["uid"]) != best:
            raise RuntimeError(f"pod {number} was not bound to {best}: {error}")
    return timings


@dataclass(slots=True, kw_only=True)
class _Resync:
    seconds: list[float] = field(default_factory=list)
    filter_ms: list[float] = field(default_factory=list)
    wrong: int = 0


async def _resync(extender: _Extender, server: ClusterServer, cluster: SampleCluster, count: int) -> _Resync:
    """Everything is listed again while the scheduler goes on asking for two free GPUs: there are the same nodes always."""
    result, expected = _Resync(), cluster.roomy_for_two_gpus()
    question = filter_args(raw_pod("probe", 200, 0), cluster.names)
    async with asyncio.timeout(_START_TIMEOUT_S):
        await server.watched(_LISTED)
    # The first answer about a pod names the best nodes alone, every later one all that fit.
    await extender.ask("filter", question)
    for _ in range(count):
        before = dict(server.watches)
        server.relist()
        began = time.perf_counter()
        while any(server.watches[path] == before[path] for path in _LISTED):
            took_ms, content = await extender.ask("filter", question)
            result.filter_ms.append(took_ms)
            result.wrong += set(json.loads(content)["NodeNames"]) != expected
            await asyncio.sleep(0.02)
            if time.perf_counter() - began > _START_TIMEOUT_S:
                raise RuntimeError("the extender does not list again")
        result.seconds.append(time.perf_counter() - began)
    return result


def _kubeconfig(port: int) -> str:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bench",
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
        "clusters": [{"name": "bench", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "bench", "user": {"token": "bench"}}],
    }
    return json.dumps(document)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
