"""How the cards of a node are connected: link kinds, the matrix of links, and the tree made from it.

Positions are indexes into the inventory's card list (the NVML index). The tree groups cards into branches: the cards of
a branch reach each other more cheaply than cards outside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class LinkKind(IntEnum):
    """The worst element on the way between two cards, cheapest first (the words of `nvidia-smi topo -m`)."""

    SELF = 0
    NVLINK = 1
    PIX = 2
    PXB = 3
    PHB = 4
    NODE = 5
    SYS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection of two cards. `nvlinks` counts bonded NVLinks, 0 unless kind is NVLINK."""

    kind: LinkKind
    nvlinks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A node of the topology tree: the cards below it (sorted indexes) and its sub-branches (none: a leaf group)."""

    kind: LinkKind
    cards: tuple[int, ...]
    children: tuple[Branch, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A symmetric matrix of links, `links[a][b]`, and the tree over cards 0..n-1."""

    links: tuple[tuple[Link, ...], ...]
    root: Branch

    def link(self, a: int, b: int) -> Link:
        return self.links[a][b]
