"""Helpers for the tests of GPUs, topology and placement."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.gpus import Branch, Link, Topology
from gpushare_agent.core.model.names import CORES_PER_GPU, MEMORY_BLOCK_MIB, GpuUuid
from gpushare_agent.core.placement import GpuAccount
from gpushare_agent.core.placement.place import link_cost
from gpushare_agent.core.placement.topology import build_topology, parse_topology

TOPOLOGY_DIRECTORY = Path(__file__).parents[1] / "data" / "topology"
TOPOLOGY_NAMES = tuple(sorted(path.stem for path in TOPOLOGY_DIRECTORY.glob("*.txt")))
BLOCKS = 96
"""Memory blocks of a test GPU: 24 GiB in blocks of 256 MiB."""


def topology_text(name: str) -> str:
    return (TOPOLOGY_DIRECTORY / f"{name}.txt").read_text()


def read_topology(name: str) -> Topology:
    parsed = parse_topology(topology_text(name))
    return build_topology(parsed.links, parsed.numa)


def shape(branch: Branch) -> str:
    """`SYS[PIX(0,1) PHB(2,3)]`: branches with their GPUs."""
    if branch.children:
        return f"{branch.kind.name}[{' '.join(shape(child) for child in branch.children)}]"
    return f"{branch.kind.name}({','.join(map(str, branch.gpus))})"


def uuid_of(index: int) -> GpuUuid:
    return GpuUuid(f"GPU-{index:08d}")


def indexes_of(uuids: Collection[GpuUuid]) -> tuple[int, ...]:
    return tuple(int(uuid.removeprefix("GPU-")) for uuid in uuids)


def gpu(
    index: int, *, cores: int = 100, blocks: int | None = None, total: int = BLOCKS, healthy: bool = True
) -> GpuAccount:
    """A GPU with this much free; as it is by default, wholly free."""
    return GpuAccount(
        index=index,
        uuid=uuid_of(index),
        is_healthy=healthy,
        memory_mib=total * MEMORY_BLOCK_MIB,
        used=Charge(cores=CORES_PER_GPU - cores, blocks=0 if blocks is None else total - blocks),
    )


def node(
    topology: Topology, *, used: Collection[int] = (), shared: Mapping[int, tuple[int, int]] | None = None
) -> list[GpuAccount]:
    """Every GPU of a topology: wholly free, except those wholly `used` and those with (cores, blocks) left."""
    left = dict(shared or {}) | dict.fromkeys(used, (0, 0))
    return [
        gpu(index, cores=left[index][0], blocks=left[index][1]) if index in left else gpu(index)
        for index in range(len(topology.links))
    ]


def set_cost(links: Sequence[Sequence[Link]], gpus: Sequence[int]) -> int:
    """The cost of a set of GPUs: that of all its pairs."""
    return sum(link_cost(links[a][b]) for n, a in enumerate(gpus) for b in gpus[n + 1 :])
