"""Admissions through the sockets: one pod at a time on a filled and on an empty node, and a hundred pods at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.kubelet import CallTimes, RefusedPodError
from bench.node import POD_BLOCKS, POD_CORES, RESOURCES, BenchNode
from bench.pods import BenchPod, bench_pod
from bench.results import Row, row
from gpushare_agent.core.model.names import VCORE_RESOURCE, VMEMORY_RESOURCE

_MEDIAN_MS, _P99_MS = 9.0, 25.0
_BURST_PODS, _BURST_CORES, _BURST_BLOCKS = 100, 7, 24
_BURST_MS = _BURST_PODS * 40.0
_SEEN_S, _FREED_S, _BURST_FREED_S = 0.03, 0.05, 2.0
"""Time for the watch to deliver a pod resp. its end, so that this work is in no measured interval."""
_SHORT = {VCORE_RESOURCE: "vcore", VMEMORY_RESOURCE: "vmemory"}


@dataclass(slots=True, kw_only=True)
class Samples:
    """Milliseconds of each admission. `resources` in turn came first and second."""

    resources: dict[str, list[CallTimes]] = field(default_factory=lambda: {name: [] for name in RESOURCES})
    whole: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    wrong: str = ""

    def of(self, resource: str, seconds: Callable[[CallTimes], float]) -> list[float]:
        return [seconds(times) * 1000 for times in self.resources[resource]]


async def admit_pods(node: BenchNode, runs: int, label: str) -> Samples:
    """Admits and removes one pod after the other, the two resources in either order."""
    samples = Samples()
    for number in range(runs):
        pod = bench_pod(f"{label}-{number:04d}", POD_CORES, POD_BLOCKS)
        node.create(pod)
        await asyncio.sleep(_SEEN_S)
        order = RESOURCES if number % 2 else RESOURCES[::-1]
        processor = node.agent.processor_s()
        try:
            times = await node.kubelet.admit(pod, order)
        except RefusedPodError as refused:
            samples.wrong = str(refused)
        else:
            samples.processor.append((node.agent.processor_s() - processor) * 1000)
            samples.whole.append(sum(one.total_s for one in times.values()) * 1000)
            for resource, one in times.items():
                samples.resources[resource].append(one)
            samples.wrong = "; ".join(node.wrong_gpus()) or samples.wrong
        node.delete(pod)
        await asyncio.sleep(_FREED_S)
    if not samples.whole:
        raise RuntimeError(f"every pod was refused, the last with: {samples.wrong}\n{node.agent.log_tail()}")
    return samples


def filled_rows(samples: Samples) -> list[Row]:
    calls = (
        "from the first byte of the request to the last of the answer, the measuring kubelet's own time and the "
        "transport of the 388 kB List included; half of the runs are the pod's first resource, half its second"
    )
    rows = [
        row(
            f"{_SHORT[resource]}: GetPreferredAllocation + Allocate, List inside",
            samples.of(resource, lambda times: times.total_s),
            target_median=_MEDIAN_MS,
            target_p99=_P99_MS,
            failed=samples.wrong,
            note=calls,
        )
        for resource in RESOURCES
    ]
    for resource in RESOURCES:
        name = _SHORT[resource]
        rows += [
            row(f"  {name}: GetPreferredAllocation", samples.of(resource, lambda times: times.preferred_s)),
            row(f"  {name}: Allocate", samples.of(resource, lambda times: times.allocate_s)),
        ]
    return [
        *rows,
        row("whole pod: both resources, four calls", samples.whole),
        row(
            "  the agent's processor time in it",
            samples.processor,
            note="all its threads; what it does at the same time counts too",
        ),
    ]


def empty_rows(samples: Samples) -> list[Row]:
    note = "nothing is listed or taken: the kubelet offers 800 vcore and 2,560 vmemory IDs"
    return [
        row(
            f"{_SHORT[resource]}: the same on an empty node",
            samples.of(resource, lambda times: times.total_s),
            target_median=_MEDIAN_MS,
            target_p99=_P99_MS,
            failed=samples.wrong,
            note=note,
        )
        for resource in RESOURCES
    ]


async def burst_rows(node: BenchNode, runs: int) -> list[Row]:
    """A hundred pods created in one moment on an empty node and admitted one after the other."""
    times: list[float] = []
    processor: list[float] = []
    faults: list[str] = []
    for number in range(runs):
        pods = [bench_pod(f"burst-{number}-{n:03d}", _BURST_CORES, _BURST_BLOCKS) for n in range(_BURST_PODS)]
        started, before = time.perf_counter(), node.agent.processor_s()
        for pod in pods:
            node.create(pod)
        faults += await _admit_all(node, pods)
        times.append((time.perf_counter() - started) * 1000)
        processor.append((node.agent.processor_s() - before) * 1000 / _BURST_PODS)
        faults += node.wrong_gpus()
        for pod in pods:
            node.delete(pod)
        await asyncio.sleep(_BURST_FREED_S)
    at_once = row(
        f"{_BURST_PODS} pods at once: first creation to last Allocate",
        times,
        target_median=_BURST_MS,
        target_p99=_BURST_MS,
        failed="; ".join(faults[:3]),
        note="no pod refused, each on one GPU and no GPU over-full by the kubelet's records, else the row names it; 200 "
        "Lists at the kubelet's rate limit of 100 a second are 1.9 s of it; the agent's own watch and annotations run "
        "at the same time",
    )
    return [at_once, row("  the agent's processor time for each", processor)]


async def _admit_all(node: BenchNode, pods: list[BenchPod]) -> list[str]:
    faults = []
    for number, pod in enumerate(pods):
        try:
            await node.kubelet.admit(pod, RESOURCES if number % 2 else RESOURCES[::-1])
        except RefusedPodError as refused:
            faults.append(str(refused))
    return faults
