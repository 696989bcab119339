"""The cost of observation: a scrape of a full node over HTTP, and a round of sampling with its processes.

The GPUs and what is used of them are fake; the agent, its HTTP, the joining and the reading of processes are real. The
fake files of /proc have its shape; reading the kernel's own is a row of its own.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from aiohttp import ClientSession

from bench.containers import Containers
from bench.node import FIRST_PID, GPUS, NODE_NAME, PROCESSES, BenchNode, open_node
from bench.pods import CONTAINER
from bench.results import Row, row
from gpushare_agent.agent.cluster.pod_store import PodStore
from gpushare_agent.agent.gpus.simulated.driver import simulated_uuid
from gpushare_agent.agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.agent.observability.usage_history import UsageHistory
from gpushare_agent.agent.observability.usage_sampling import UsageSampling
from gpushare_agent.agent.runtime.cgroups import ProcessOwners
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.names import PodUid, device_id
from gpushare_agent.core.model.pods import ContainerKind, Pod, PodPhase
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.model.usage import DriverSample, GpuSample, ProcessSample

_CONTAINERS, _PROCESSES_EACH = 200, 5
_CORES, _BLOCKS = 4, 8
_SCRAPE_MS, _ROUND_MS = 10.0, 50.0
_PERIOD_S = 1.0
_READY_S = 20.0
_MIB = 1024 * 1024
_PROMETHEUS = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
    "Accept-Encoding": "gzip",
}
_ROWS = b"gpushare_container_sm_utilization_ratio{"


async def scrape_rows(runs: int) -> list[Row]:
    """The first scrape after a round of sampling, which makes the text, and one straight after it, which does not."""
    first: list[float] = []
    again: list[float] = []
    work: list[float] = []
    faults: list[str] = []
    async with _full_node() as (node, url), ClientSession(headers=_PROMETHEUS, auto_decompress=False) as session:
        await _wait_used(session, url)
        for number in range(runs):
            _put_usage(node, number + 1)
            await asyncio.sleep(_PERIOD_S * 1.1)
            for times in (first, again):
                worked, started = node.agent.processor_s(), time.perf_counter()
                async with session.get(url) as response:
                    packed = await response.read()
                times.append((time.perf_counter() - started) * 1000)
                if times is first:
                    work.append((node.agent.processor_s() - worked) * 1000)
                text = gzip.decompress(packed)
                if text.count(_ROWS) != _CONTAINERS:
                    faults.append(f"{text.count(_ROWS)} containers were shown; {node.agent.log_tail(3)}")
    size = f"{len(text) // 1000:,} KB of text, gzipped to {len(packed) // 1000}"
    note = f"{GPUS} GPUs, {_CONTAINERS} containers whose use changes, {size}"
    failed = "; ".join(faults[:2])
    return [
        row("scrape of /metrics, first after a round", first, target_median=_SCRAPE_MS, failed=failed, note=note),
        row("  the agent's processor time for it", work),
        row("  another one before the next round", again, target_median=_SCRAPE_MS, failed=failed, note=note),
    ]


@asynccontextmanager
async def _full_node() -> AsyncIterator[tuple[BenchNode, str]]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    flags = {"web.port": port, "web.addr": "127.0.0.1", "sample-period-s": _PERIOD_S}
    async with open_node(isolation="none", flags=flags) as node:
        node.fill(_CONTAINERS, _CORES, _BLOCKS)
        containers = Containers(node.state / "cgroup")
        uids = [PodUid(pod.uid) for pod in node.kubelet.pods.values()]
        for number, uid in enumerate(uids):
            put_processes(node.state / "proc", containers.text_of(uid), _pids(number))
        _put_usage(node, 0)
        await node.start_agent()
        yield node, f"http://127.0.0.1:{port}/metrics"


def _put_usage(node: BenchNode, step: int) -> None:
    """Every container uses something else at each step."""
    raw = [
        {
            "pid": pid,
            "gpu": number % GPUS,
            "sm": round(0.005 + 0.000_01 * ((step + number) % 97), 6),
            "memory_bytes": (64 + (step + number) % 31) * _MIB,
        }
        for number in range(_CONTAINERS)
        for pid in _pids(number)
    ]
    new = node.state / "usage.new"
    new.write_text(json.dumps({"processes": raw}))
    new.replace(node.state / "usage.json")


async def _wait_used(session: ClientSession, url: str) -> None:
    async with asyncio.timeout(_READY_S):
        while True:
            async with session.get(url) as response:
                if gzip.decompress(await response.read()).count(_ROWS) == _CONTAINERS:
                    return
            await asyncio.sleep(_PERIOD_S)


async def sampling_rows(state: Path, runs: int) -> list[Row]:
    """Processor time of all threads of this process, over whole rounds: the driver answers at once."""
    world = _World(state)
    metrics = AgentMetrics()
    sampling = UsageSampling(
        driver=cast("Any", world),
        owners=ProcessOwners(state / "proc"),
        pods=world.pods,
        ids=cast("Any", world),
        allocations=lambda: world.allocations,
        metrics=metrics,
        period_s=1.0,
    )
    sampling.subscribe(UsageHistory(900.0, 180).add)
    times = []
    for number in range(runs + 1):
        before = time.process_time()
        await sampling.sample_once()
        if number:  # the first one makes the rings of the history
            times.append((time.process_time() - before) * 1000)
    current = sampling.current
    counted = sum(len(use.pids) for use in current.containers.values()) if current is not None else 0
    expected = _CONTAINERS * _PROCESSES_EACH
    failed = "" if counted == expected else f"{counted} of {expected} processes were found with their containers"
    return [
        row(
            "round of sampling: processor time",
            times,
            target_median=_ROUND_MS,
            failed=failed,
            note=f"{GPUS} GPUs, {_CONTAINERS} containers with {_PROCESSES_EACH} processes each, without the driver's part",
        ),
        row(
            "  reading as many files of the kernel's /proc",
            [_kernel_reads(expected) for _ in range(runs)],
            note="beyond the cost of the fake files, which are read in the round",
        ),
    ]


def _kernel_reads(count: int) -> float:
    """Milliseconds of processor time for `count` cgroup files of processes that exist."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    owners = ProcessOwners()
    before = time.process_time()
    done = 0
    while done < count:
        owners.read(pids[: count - done])
        done += len(pids)
    return (time.process_time() - before) * 1000


def _pids(number: int) -> range:
    """Of one container; the node's others of it are not on a GPU."""
    return range(FIRST_PID + PROCESSES * number, FIRST_PID + PROCESSES * number + _PROCESSES_EACH)


def put_processes(proc: Path, text: str, pids: range) -> None:
    for pid in pids:
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "cgroup").write_text(text)


class _World:
    """The driver, the pods and their allocations."""

    def __init__(self, state: Path) -> None:
        containers = Containers(state / "cgroup")
        uids = [PodUid(f"00000000-0000-4000-8000-{number:012d}") for number in range(_CONTAINERS)]
        uuids = [simulated_uuid(NODE_NAME, gpu) for gpu in range(GPUS)]
        self.allocations: Mapping[ContainerKey, Allocation] = {
            ContainerKey(uid, CONTAINER): Allocation(
                key=ContainerKey(uid, CONTAINER),
                namespace="bench",
                pod_name=f"pod-{number:03d}",
                kind=ContainerKind.MAIN,
                gpus=(uuids[number % GPUS],),
                ids={ResourceKind.VCORE: frozenset(device_id(uuids[number % GPUS], n) for n in range(_CORES))},
            )
            for number, uid in enumerate(uids)
        }
        self.pods = PodStore()
        self.pods.replace_all(
            Pod(
                uid=uid,
                namespace="bench",
                name=f"pod-{number:03d}",
                phase=PodPhase.RUNNING,
                containers=(),
                has_started=True,
                container_ids={CONTAINER: containers.id_of(uid)},
            )
            for number, uid in enumerate(uids)
        )
        for number, uid in enumerate(uids):
            put_processes(state / "proc", containers.text_of(uid), _pids(number))
        self._sample = DriverSample(
            gpus=tuple(
                GpuSample(
                    uuid=uuid,
                    sm_ratio=0.5,
                    memory_used_bytes=2**35,
                    processes=tuple(
                        ProcessSample(pid=pid, memory_bytes=64 * _MIB, sm_ratio=0.005, memory_ratio=0.002)
                        for number in range(gpu, _CONTAINERS, GPUS)
                        for pid in _pids(number)
                    ),
                )
                for gpu, uuid in enumerate(uuids)
            )
        )

    async def sample(self) -> DriverSample:
        return self._sample

    async def running(self) -> Mapping[ContainerKey, str]:
        return {}
