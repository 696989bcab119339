"""The kinds of nodes that simulated clusters are made of: GPUs, their memory, and how they are linked.

`MEMORY_MIB` has, for models that a trace names without their memory, what nvidia-smi shows of such GPUs. A trace's model
that is a code name stands at `UNKNOWN_MEMORY_MIB`, which is an assumption.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from msgspec import Struct

from gpushare_agent.extender.values import ClusterNode
from gpushare_agent.model.gpus import GpuReport
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.topology import Link, LinkKind, Topology
from gpushare_agent.placement.topology_tree import build_topology

MEMORY_MIB = {
    "A10": 23_028,
    "A100": 81_920,
    "H100": 81_559,
    "P100": 16_280,
    "T4": 15_360,
    "V100M16": 16_160,
    "V100M32": 32_510,
}
UNKNOWN_MEMORY_MIB = 32_768
SMALLEST_MEMORY_MIB = min(MEMORY_MIB.values())
_MESHED = frozenset({"A100", "H100"})
"""Models whose GPUs are all joined by NVLink."""
_NVLINKS = 12


class Machine(Struct, frozen=True, kw_only=True):
    """A kind of node."""

    model: str
    gpus: int
    memory_mib: int

    def node(self, name: str) -> ClusterNode:
        return ClusterNode(
            name=name,
            gpus=tuple(
                GpuReport(index=index, uuid=GpuUuid(f"GPU-{name}-{index}"), memory_mib=self.memory_mib)
                for index in range(self.gpus)
            ),
            topology=_topology(self.gpus, self.model in _MESHED),
            model=self.model,
        )


def memory_of(model: str) -> int:
    return MEMORY_MIB.get(model, UNKNOWN_MEMORY_MIB)


@cache
def _topology(gpus: int, is_meshed: bool) -> Topology:
    """Meshed: NVLink between all. Else pairs below one switch, and half of the GPUs at each of two sockets from four up."""
    socket = (lambda index: 2 * index // gpus) if gpus >= 4 else (lambda index: 0)
    links = [[_link(a, b, socket, is_meshed) for b in range(gpus)] for a in range(gpus)]
    return build_topology(links, [socket(index) for index in range(gpus)])


def _link(a: int, b: int, socket: Callable[[int], int], is_meshed: bool) -> Link:
    if a == b:
        return Link(kind=LinkKind.SELF)
    if is_meshed:
        return Link(kind=LinkKind.NVLINK, nvlinks=_NVLINKS)
    if socket(a) != socket(b):
        return Link(kind=LinkKind.SYS)
    return Link(kind=LinkKind.PIX if a // 2 == b // 2 else LinkKind.PHB)
