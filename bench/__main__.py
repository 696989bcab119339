"""`python -m bench [--quick] [--only PART] [--beside PLUGIN] [--scheduler DIR] [--json FILE]`: measures, and prints a table
of each part.

Exit code 0, also where a target is missed: the table says so. 1 where something could not be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.admissions import admit_pods, burst_rows, empty_rows, filled_rows
from bench.beside import beside_rows
from bench.extender import extender_rows
from bench.growth import SHARES, growth_rows
from bench.imports import import_rows
from bench.lifecycle import again_rows, idle_rows, kill_rows, start_rows
from bench.node import PODS, open_node
from bench.nvml import gpushare_rows, nvml_idle_rows
from bench.observation import sampling_rows, scrape_rows
from bench.page import poll_rows
from bench.pure import list_rows, placement_rows
from bench.real_cluster import cluster_rows
from bench.real_scheduler import scheduler_rows
from bench.results import Part, Row, as_json, print_table, row
from bench.vdevice import memory_rows, pre_start_rows, register_rows, round_rows, wait_sockets


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How often each thing is measured."""

    starts: int = 8
    restarts: int = 30
    filled: int = 200
    empty: int = 100
    bursts: int = 3
    pure: int = 200
    rounds: int = 60
    pre_starts: int = 60
    registrations: int = 100
    """By name, and as many by ID."""
    scrapes: int = 30
    samplings: int = 60
    imports: int = 5
    extender_nodes: int = 5_000
    extender_pods: int = 400
    extender_resyncs: int = 3
    scheduler_pods: int = 300
    scheduler_rounds: int = 2
    cluster_pods: int = 30
    cluster_burst: int = 100
    lives: int = 15
    restarted: int = 3
    settle_s: float = 10.0
    """Until the first comparisons of everything with the kubelet are over."""
    idle_s: float = 20.0
    """Of each measurement of idleness."""


_QUICK = Extent(
    starts=3, restarts=8, filled=40, empty=15, bursts=1, pure=20, settle_s=1.0, idle_s=5.0, rounds=10, pre_starts=20,
    registrations=20, scrapes=4, samplings=10, imports=1, extender_nodes=500,
    extender_pods=60, extender_resyncs=1, scheduler_pods=300, scheduler_rounds=1, cluster_pods=5, cluster_burst=20,
    lives=15, restarted=2,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer runs: p99 means the worst one")
    parser.add_argument(
        "--only",
        action="append",
        choices=[*_PARTS, "cluster"],
        help="measure this part alone; may be repeated. cluster: the agent of the real cluster that KUBECONFIG names",
    )
    parser.add_argument(
        "--scheduler",
        type=Path,
        metavar="DIR",
        help="for the part scheduler, the real kube-scheduler alone and with the extender: DIR has kube-apiserver and "
        "kube-scheduler, and etcd where PATH has none",
    )
    parser.add_argument("--nodes", default="5000", help="of the scheduler's clusters, as 1000,5000 (%(default)s)")
    parser.add_argument("--pods", type=int, help="of each run of the scheduler (300)")
    parser.add_argument("--extender-options", default="", help="more options of the extender, for the part scheduler")
    parser.add_argument(
        "--beside", metavar="PLUGIN", help="for the part beside, in turns with this device plugin's program; as root"
    )
    parser.add_argument("--node", help="of the cluster, where several have an agent")
    parser.add_argument("--pod-image", default="busybox:1.35", help="of the cluster's pods: with sleep (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there, part by part")
    options = parser.parse_args()
    for name in options.only or ():
        if getattr(options, name, "") is None:
            parser.error(f"--only {name} needs --{name}")
    measured: list[Part] = []
    if options.json is not None:
        try:
            options.json.open("a").close()
        except OSError as error:  # known before half an hour of measurements, and not after
            parser.error(f"--json: {error}")
    extent = _QUICK if options.quick else Extent()
    for name in options.only or [part for part in _PARTS if getattr(options, part, True)]:
        _say(f"--- {name}")
        load_before = os.getloadavg()[0]
        try:
            rows = asyncio.run(
                _measure_cluster(extent, options) if name == "cluster" else _PARTS[name](extent, options)
            )
        except (OSError, RuntimeError, TimeoutError, ExceptionGroup) as error:
            _say(f"could not measure: {_reason(error)}")
            return 1
        machine = f"{os.cpu_count()} CPUs, Python {platform.python_version()}, load {load_before:.1f} before"
        machine += f" and {os.getloadavg()[0]:.1f} after"
        width = None if sys.stdout.isatty() else 150
        print_table(rows, Console(width=width), f"{name} ({machine})")
        measured.append(Part(name=name, machine=machine, rows=rows))
        if options.json is not None:
            options.json.write_text(as_json(measured))
    return 0


async def _measure_agent(extent: Extent, _options: argparse.Namespace) -> list[Row]:
    _say("placement")
    rows = placement_rows(extent.pure)
    async with open_node() as node:
        node.fill()
        answer = b"".join(pod.listed for pod in node.kubelet.pods.values())
        rows += list_rows(answer, extent.pure)
        _say(f"{extent.starts} starts")
        rows += await start_rows(node, extent.starts)
        rows += await kill_rows(node, extent.starts)
        await node.start_agent()
        _say(f"{extent.idle_s:g} s of idleness")
        rows += await idle_rows(node, extent.settle_s, extent.idle_s)
        _say(f"{extent.filled} admissions on the filled node")
        rows += filled_rows(await admit_pods(node, extent.filled, "filled"))
        rows.append(row("resident memory after them", [node.agent.resident_mib()], unit="MiB"))
        _say(f"{extent.restarts} restarts of the kubelet")
        rows += await again_rows(node, extent.restarts)
    _say(f"{extent.idle_s:g} s of idleness with NVML")
    rows += await nvml_idle_rows(extent.settle_s, extent.idle_s)
    rows += await gpushare_rows(extent.settle_s, extent.idle_s)
    async with open_node() as node:
        await node.start_agent()
        _say(f"{extent.empty} admissions on an empty node")
        rows += empty_rows(await admit_pods(node, extent.empty, "empty"))
        _say(f"{extent.bursts} times 100 pods at once")
        rows += await burst_rows(node, extent.bursts)
    rows += await _measure_vdevices(extent)
    return rows + await _measure_observation(extent)


async def _measure_vdevices(extent: Extent) -> list[Row]:
    _say(f"{2 * extent.rounds} rounds over 100 containers")
    with tempfile.TemporaryDirectory(prefix="gsb", dir="/tmp") as state:
        rows = await round_rows(Path(state), extent.rounds)
    async with open_node() as node:
        node.fill()
        await node.start_agent()
        await wait_sockets(node, PODS)
        _say(f"{extent.pre_starts} containers that start")
        rows += await pre_start_rows(node, extent.pre_starts)
        _say(f"{2 * extent.registrations} registrations")
        rows += await register_rows(node, extent.registrations)
    _say("200 vDevice servers")
    return rows + await memory_rows()


async def _measure_observation(extent: Extent) -> list[Row]:
    _say(f"{2 * extent.scrapes} scrapes of a full node")
    rows = await scrape_rows(extent.scrapes)
    _say(f"{extent.samplings} rounds of sampling")
    with tempfile.TemporaryDirectory(prefix="gsb", dir="/tmp") as state:
        rows += await sampling_rows(Path(state), extent.samplings)
    _say("the dashboard's polls")
    return rows + poll_rows()


async def _measure_growth(extent: Extent, _options: argparse.Namespace) -> list[Row]:
    rows = []
    for shares in SHARES:
        _say(f"{extent.lives} pods on a node with {shares:,} shares")
        rows += await growth_rows(shares, extent.lives, extent.restarted, max(extent.settle_s, 6.0))
    return rows


async def _measure_imports(extent: Extent, _options: argparse.Namespace) -> list[Row]:
    return await import_rows(extent.imports)


async def _measure_extender(extent: Extent, _options: argparse.Namespace) -> list[Row]:
    _say(f"the extender on {extent.extender_nodes} nodes, {extent.extender_pods} pods to schedule")
    with tempfile.TemporaryDirectory(prefix="gsb", dir="/tmp") as state:
        return await extender_rows(
            Path(state), nodes=extent.extender_nodes, pods=extent.extender_pods, resyncs=extent.extender_resyncs
        )


async def _measure_scheduler(extent: Extent, options: argparse.Namespace) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="gsb", dir="/tmp") as state:
        for nodes in map(int, options.nodes.split(",")):
            pods = options.pods or extent.scheduler_pods
            _say(f"{nodes} nodes, {pods} pods, {extent.scheduler_rounds} times plain, with the extender, and on a part")
            rows += await scheduler_rows(
                options.scheduler,
                Path(state) / "cluster",
                nodes=nodes,
                pods=pods,
                rounds=extent.scheduler_rounds,
                options=options.extender_options.split(),
            )
    return rows


async def _measure_beside(extent: Extent, options: argparse.Namespace) -> list[Row]:
    _say(f"in turns with {options.beside}")
    return await beside_rows(
        options.beside,
        starts=extent.starts,
        admissions=extent.empty,
        settle_s=extent.settle_s,
        idle_s=extent.idle_s,
    )


async def _measure_cluster(extent: Extent, options: argparse.Namespace) -> list[Row]:
    _say(f"{extent.cluster_pods} pods one after the other, then {extent.cluster_burst} at once")
    node, rows = await cluster_rows(
        node=options.node, image=options.pod_image, singles=extent.cluster_pods, burst=extent.cluster_burst
    )
    _say(f"measured on node {node}")
    return rows


_PARTS = {
    "agent": _measure_agent,
    "growth": _measure_growth,
    "imports": _measure_imports,
    "extender": _measure_extender,
    "beside": _measure_beside,
    "scheduler": _measure_scheduler,
}
"""In the order of the pages. The last two need an option."""


def _reason(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_reason(one) for one in error.exceptions)
    return str(error) or type(error).__name__


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)  # noqa: T201 - progress, on the terminal


if __name__ == "__main__":
    sys.exit(main())
