"""What needs no process: placement on a large machine, and reading a long List answer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from bench.results import Row, row
from gpushare_agent.agent.kubelet.pod_resources import decode_pod_entry
from gpushare_agent.core.kit.protobuf import scan_pod_entry, scan_pods
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.gpus import Topology
from gpushare_agent.core.model.names import CORES_PER_GPU, GpuUuid
from gpushare_agent.core.model.resources import Request
from gpushare_agent.core.placement import GpuAccount, place
from gpushare_agent.core.placement.topology import build_topology, parse_topology

_TREE = Path(__file__).parents[1] / "tests" / "data" / "topology" / "a10-x16-deep-tree.txt"
_GPUS, _MEMORY_MIB = 16, 24_576
_PLACEMENT_TARGET_MS = 50.0


def placement_rows(runs: int) -> list[Row]:
    """8 of 16 GPUs, and the slowest number of GPUs that can be asked for."""
    parsed = parse_topology(_TREE.read_text())
    topology = build_topology(parsed.links, parsed.numa)
    times = {count: _milliseconds(lambda count=count: _place(topology, count), runs) for count in range(1, _GPUS + 1)}  # type: ignore[misc]  # mypy does not infer a lambda's default
    slowest = max(times, key=lambda count: statistics.median(times[count]))
    note = "in the benchmark's process, on the tree of a10-x16-deep-tree.txt, every GPU free"
    target = _PLACEMENT_TARGET_MS
    return [
        row("place 8 of 16 GPUs", times[8], target_median=target, target_p99=target, note=note),
        row(
            f"place {slowest} of 16 GPUs, the slowest",
            times[slowest],
            target_median=target,
            target_p99=target,
            note=note,
        ),
    ]


def list_rows(answer: bytes, runs: int) -> list[Row]:
    """Splitting a List answer into pods, as each admission does, and decoding all of it, as recovery does."""
    size = f"{len(answer) / 1000:,.0f} kB"
    ids = DeviceIds()
    note = "in the benchmark's process, the answer of the filled node"
    return [
        row(f"split a List answer of {size} into pods", _milliseconds(lambda: _split(answer), runs), note=note),
        row(
            "decode every device ID of it",
            _milliseconds(lambda: [decode_pod_entry(answer[i:j], ids) for i, j in scan_pods(answer)[0]], runs),
            note=note,
        ),
    ]


def _split(answer: bytes) -> None:
    for start, stop in scan_pods(answer)[0]:
        scan_pod_entry(answer[start:stop])


def _place(topology: Topology, count: int) -> None:
    gpus = [GpuAccount(index=index, uuid=GpuUuid(f"GPU-{index}"), memory_mib=_MEMORY_MIB) for index in range(_GPUS)]
    placed = place(Request(cores=count * CORES_PER_GPU), gpus, topology, share_policy="binpack")
    if isinstance(placed, Refused):
        raise AssertionError(placed.detail)


def _milliseconds(body: Callable[[], object], runs: int) -> list[float]:
    body()
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        body()
        times.append((time.perf_counter() - started) * 1000)
    return times
