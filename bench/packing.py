"""`python -m bench.packing TRACES [--rules | --scheduler DIR] [--json FILE]`: how full the public trace's cluster gets by
each policy, next to the published means; or by each way to place pods without GPUs, simulated or by the real kube-scheduler.

TRACES is a folder with the openb files of github.com/hkust-adsl/kubernetes-scheduler-simulator, data/csv, and optionally
`published.csv`, the means of the authors' ten runs (trace, policy, allocated_at_100). Ten minutes on one CPU. The programs
in DIR are those of `python -m bench --scheduler`.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, convert, to_builtins

from bench.inflation import CpuPods, CpuRule, InflationPolicy, inflate, read_hosts, read_kinds
from bench.real_packing import WAYS, Filled, fill_clusters
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.extender.values import ClusterPolicy

TRACES = ("default", "gpushare100", "multigpu50", "gpuspec33", "cpu200")
FIRST_SEED, SEEDS = 42, 10
MARK = 100
PUBLISHED = {
    InflationPolicy.FGD: "06-FGD",
    InflationPolicy.BEST_FIT: "05-BestFit",
    InflationPolicy.PACKING: "04-GpuPacking",
    InflationPolicy.DOT_PRODUCT: "02-DotProd",
    InflationPolicy.RANDOM: "01-Random",
}


class Case(NamedTuple):
    policy: InflationPolicy
    cpu_pods: CpuPods = CpuPods.GPU_AWARE
    taint_above: float = 1.0


class PackingRow(Struct, frozen=True, kw_only=True):
    """Percent of the GPUs allocated when all have been asked for; `published` is None where nothing is."""

    trace: str
    policy: str
    cpu_pods: str
    taint_above: float
    seeds: int
    mean: float
    sd: float
    published: float | None


POLICIES = tuple(map(Case, (InflationPolicy.FGD, InflationPolicy.BINPACK, *list(PUBLISHED)[1:])))
RULES = tuple(
    Case(policy, *rule)
    for policy, rule in product(
        (InflationPolicy.FGD, InflationPolicy.DRA),
        (
            (CpuPods.LEAST, 1.0),
            (CpuPods.MOST, 1.0),
            *((CpuPods.TAINT, above) for above in (0.0, 0.25, 0.5)),
        ),
    )
)
RULES_SEEDS, SCHEDULER_SEEDS = 1, 5


def measured(folder: Path, seeds: int, cases: Iterable[tuple[str, Case]]) -> Iterator[PackingRow]:
    published = _published(folder / "published.csv")
    hosts = read_hosts(folder / "openb_node_list_gpu_node.csv")
    rules = ClusterPolicy(names=ResourceNames())
    for trace, case in cases:
        pods = read_kinds(folder / f"openb_pod_list_{trace}.csv")
        parts = [
            inflate(
                hosts,
                pods,
                case.policy,
                seed=seed,
                cpu_pods=CpuRule(case.cpu_pods, case.taint_above),
                rules=rules,
            ).allocated_percent[MARK]
            for seed in range(FIRST_SEED, FIRST_SEED + seeds)
        ]
        yield PackingRow(
            trace=trace,
            policy=case.policy.value,
            cpu_pods=case.cpu_pods.value,
            taint_above=case.taint_above,
            seeds=seeds,
            mean=round(statistics.mean(parts), 2),
            sd=round(statistics.stdev(parts), 2) if seeds > 1 else 0.0,
            published=published.get((trace, PUBLISHED.get(case.policy, ""))),
        )


def _published(path: Path) -> dict[tuple[str, str], float]:
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {(row["trace"], row["policy"]): float(row[f"allocated_at_{MARK}"]) for row in csv.DictReader(file)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.packing", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="TRACES")
    parser.add_argument("--seeds", type=int, help=f"from {FIRST_SEED} on ({SEEDS}, with --scheduler {SCHEDULER_SEEDS})")
    parser.add_argument("--rules", action="store_true", help=f"what places pods without GPUs, {RULES_SEEDS} seeds")
    parser.add_argument(
        "--scheduler", type=Path, metavar="DIR", help="the real kube-scheduler on the trace scaled down"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the rows there; what it has is not measured again"
    )
    options = parser.parse_args()
    rows = json.loads(options.json.read_text()) if options.json is not None and options.json.exists() else []

    def add(row: Struct) -> None:
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
        rows.append(to_builtins(row))
        # After each row: it takes long.
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=0) + "\n", encoding="utf-8")

    if options.scheduler is not None:
        asyncio.run(_add_filled(options, convert(rows, list[Filled]), add))
        return
    known = {(row["trace"], row["policy"], row["cpu_pods"], row["taint_above"]) for row in rows}
    seeds, cases = (RULES_SEEDS, RULES) if options.rules else (options.seeds or SEEDS, POLICIES)
    for row in measured(
        options.folder, seeds, ((trace, case) for case, trace in product(cases, TRACES) if (trace, *case) not in known)
    ):
        add(row)


async def _add_filled(options: argparse.Namespace, rows: Iterable[Filled], add: Callable[[Struct], None]) -> None:
    known = {(row.way, row.seed) for row in rows}
    seeds = range(FIRST_SEED, FIRST_SEED + (options.seeds or SCHEDULER_SEEDS))
    wanted = [(way, seed) for seed, way in product(seeds, WAYS) if (way, seed) not in known]
    with tempfile.TemporaryDirectory(prefix="packing-") as state:
        async for row in fill_clusters(options.scheduler, Path(state), options.folder, wanted):
            add(row)


if __name__ == "__main__":
    main()
