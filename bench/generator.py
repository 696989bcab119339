"""`python -m bench.generator DIRECTORY [--nodes N] [--pods N] [--seed N]`: writes there, as nodes.csv and pods.csv, a
made cluster and workload for `gpushare-agent simulate`. The same for the same seed (docs/how-to/simulate.md has the table).

The shapes are few on purpose: platforms offer sizes, and people ask for round numbers. The distributions are the
project's own, in the manner of published traces of shared clusters: most pods are small and short, few large and long.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from msgspec import Struct

from gpushare_agent.core.model.names import CORES_PER_GPU
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.simulation.traces import NODE_COLUMNS, POD_COLUMNS
from gpushare_agent.simulation.workload import Arrival, Cluster, Machine, Shape, Size, Workload, memory_of

MACHINES = (("H100", 8, 50), ("A10", 8, 30), ("T4", 4, 20))
"""Model, GPUs, and how many of a hundred nodes are such."""
WHOLE_GPUS = ((0, 60), (1, 28), (2, 6), (4, 4), (8, 2))
"""Whole GPUs, 0 for a share, and how many of a hundred pods ask so."""
SHARES = (
    (10, 2_048, 20),
    (20, 4_096, 20),
    (25, 8_192, 10),
    (30, 4_096, 15),
    (50, 8_192, 20),
    (50, 12_288, 10),
    (70, 12_288, 5),
)
"""Cores, memory in MiB, and how many of a hundred shares ask so."""


class Durations(Struct, frozen=True, kw_only=True):
    """Log-normal: half of the pods run shorter than the median; sigma is of the natural logarithm."""

    median_s: float
    sigma: float


DURATIONS = {
    Size.SHARE: Durations(median_s=1_200.0, sigma=1.2),
    Size.ONE_GPU: Durations(median_s=2_400.0, sigma=1.2),
    Size.SEVERAL_GPUS: Durations(median_s=3_600.0, sigma=1.0),
}
MIN_DURATION_S, MAX_DURATION_S = 30.0, 86_400.0
SWING, SWINGS = 0.5, 4
"""The swing of the rate of arrivals: so many turns of a sine of that height, so that there are busy and quiet hours."""
_DAY_S = 86_400.0


def generate_cluster(count: int, seed: int) -> Cluster:
    """`count` nodes of the three kinds, shuffled."""
    kinds = [
        Machine(model=model, gpus=gpus, memory_mib=memory_of(model))
        for model, gpus, weight in MACHINES
        for _ in range(math.ceil(count * weight / 100))
    ]
    # Names are given afterwards: kube-scheduler goes through nodes in their order, and kinds must not come in blocks.
    # Each purpose has a generator of its own, so that another number of nodes changes no pod.
    Random(f"{seed}/nodes").shuffle(kinds)
    digits = max(4, len(str(count - 1)))
    nodes = tuple(kind.node(f"node-{number:0{digits}}") for number, kind in enumerate(kinds[:count]))
    return Cluster(source=f"{count} generated nodes", nodes=nodes)


def generate_workload(count: int, seed: int, *, block_mib: int) -> Workload:
    """`count` pods, which arrive within a day: workload.at_load makes that fit a cluster."""
    # Sizes and times apart, so that the same pods come whatever the arrivals are.
    chance = Random(f"{seed}/pods")
    digits = len(str(count - 1))
    arrivals = []
    for number, at_s in enumerate(_times(Random(f"{seed}/times"), count)):
        shape, duration_s = _ask(chance, block_mib)
        name = f"pod-{number:0{digits}}"
        arrivals.append(Arrival(at_s=at_s, name=name, shape=shape, duration_s=duration_s))
    return Workload(source=f"{count} generated pods", arrivals=tuple(arrivals))


def _ask(chance: Random, block_mib: int) -> tuple[Shape, float]:
    (whole,) = chance.choices([gpus for gpus, _ in WHOLE_GPUS], [weight for _, weight in WHOLE_GPUS])
    if whole:
        shape = Shape(whole * CORES_PER_GPU, 0)
    else:
        (share,) = chance.choices(SHARES, [weight for *_, weight in SHARES])
        shape = Shape(share[0], max(1, share[1] // block_mib))
    durations = DURATIONS[shape.size]
    # A log-normal: exp of a normal draw, whose median is 1.
    drawn = durations.median_s * math.exp(chance.gauss(0.0, durations.sigma))
    return shape, round(min(MAX_DURATION_S, max(MIN_DURATION_S, drawn)), 3)


def _times(chance: Random, count: int) -> Iterator[float]:
    """Poisson arrivals: their number is given, so they are `count` sorted draws, bent by the swing of the day."""
    turns = 2 * math.pi * SWINGS
    for drawn in sorted(chance.random() for _ in range(count)):
        # Rises throughout, because SWING is below 1, and leaves 0 and 1 where they are: sorted draws stay sorted.
        bent = drawn + SWING / turns * (1 - math.cos(turns * drawn))
        yield bent * _DAY_S


def write_files(directory: Path, *, nodes: int, pods: int, seed: int) -> None:
    """nodes.csv and pods.csv, of which simulation/traces.py reads the same again."""
    block_mib = ResourceNames().memory_block_mib
    cluster, workload = generate_cluster(nodes, seed), generate_workload(pods, seed, block_mib=block_mib)
    machines = ((node.name, len(node.gpus), node.gpus[0].memory_mib, node.model) for node in cluster.nodes)
    _write(directory / "nodes.csv", NODE_COLUMNS, machines)
    arrivals = (
        (one.name, one.at_s, one.duration_s, one.shape.cores, one.shape.blocks * block_mib) for one in workload.arrivals
    )
    _write(directory / "pods.csv", POD_COLUMNS, arrivals)


def _write(path: Path, columns: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.generator", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIRECTORY")
    parser.add_argument("--nodes", type=int, default=100, metavar="N", help="%(default)s")
    parser.add_argument("--pods", type=int, default=10_000, metavar="N", help="%(default)s")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="%(default)s")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    write_files(options.directory, nodes=options.nodes, pods=options.pods, seed=options.seed)


if __name__ == "__main__":
    main()
