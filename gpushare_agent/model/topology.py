"""How the GPUs of a node are connected: link kinds, the matrix of links, and the tree made from it.

Positions are indexes into the inventory's GPU list (the NVML index). The tree groups GPUs into branches: the GPUs of
a branch reach each other more cheaply than GPUs outside it.
"""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct


class LinkKind(IntEnum):
    """The worst element on the way between two GPUs, cheapest first (named as in `nvidia-smi topo -m`)."""

    SELF = 0
    NVLINK = 1
    PIX = 2
    PXB = 3
    PHB = 4
    NODE = 5
    SYS = 6


class Link(Struct, frozen=True, kw_only=True):
    """The connection of two GPUs. `nvlinks` counts bonded NVLinks, 0 unless kind is NVLINK."""

    kind: LinkKind
    nvlinks: int = 0


class Branch(Struct, frozen=True, kw_only=True):
    """A node of the topology tree: the GPUs below it (sorted indexes) and its sub-branches (none: a leaf group)."""

    kind: LinkKind
    gpus: tuple[int, ...]
    children: tuple[Branch, ...] = ()


class Topology(Struct, frozen=True, kw_only=True):
    """A symmetric matrix of links, `links[a][b]`, and the tree over GPUs 0..n-1."""

    links: tuple[tuple[Link, ...], ...]
    root: Branch

    def link(self, a: int, b: int) -> Link:
        return self.links[a][b]
