"""The kinds of nodes that simulated clusters are made of: cards, their memory, and how they are linked.

`MEMORY_MIB` has, for models that a trace names without their memory, what nvidia-smi shows of such cards. A trace's model
that is a code name stands at `UNKNOWN_MEMORY_MIB`, which is an assumption.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from gpushare_agent.extender.values import ClusterNode, NodeCard
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
"""Models whose cards are all joined by NVLink."""
_NVLINKS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A kind of node."""

    model: str
    cards: int
    memory_mib: int

    def node(self, name: str) -> ClusterNode:
        return ClusterNode(
            name=name,
            cards=tuple(
                NodeCard(index=index, uuid=GpuUuid(f"GPU-{name}-{index}"), memory_mib=self.memory_mib)
                for index in range(self.cards)
            ),
            topology=_topology(self.cards, self.model in _MESHED),
            model=self.model,
        )


def memory_of(model: str) -> int:
    return MEMORY_MIB.get(model, UNKNOWN_MEMORY_MIB)


@cache
def _topology(cards: int, is_meshed: bool) -> Topology:
    """Meshed: NVLink between all. Else pairs below one switch, and half of the cards at each of two sockets from four up."""
    socket = (lambda index: 2 * index // cards) if cards >= 4 else (lambda index: 0)
    links = [[_link(a, b, socket, is_meshed) for b in range(cards)] for a in range(cards)]
    return build_topology(links, [socket(index) for index in range(cards)])


def _link(a: int, b: int, socket: Callable[[int], int], is_meshed: bool) -> Link:
    if a == b:
        return Link(kind=LinkKind.SELF)
    if is_meshed:
        return Link(kind=LinkKind.NVLINK, nvlinks=_NVLINKS)
    if socket(a) != socket(b):
        return Link(kind=LinkKind.SYS)
    return Link(kind=LinkKind.PIX if a // 2 == b // 2 else LinkKind.PHB)
