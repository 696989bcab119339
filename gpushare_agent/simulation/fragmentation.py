"""How much of what is free can nobody use? Pure.

A node's free cores are unusable for a shape where they are on cards that cannot serve it: too few cores or too little
memory left for a share, not wholly free (or too few such cards) for whole cards. The fragmentation of a cluster is the
mean of that over the workload's shapes, each counted as often as pods ask so, as a part of all cores of the cluster: what
an average pod sees free and cannot have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpushare_agent.model.names import CORES_PER_CARD
from gpushare_agent.simulation.workload import Shape

TYPICAL_SHAPES = 32
"""The most frequent ones stand for the workload."""


class FreeCard(NamedTuple):
    """What a card has left. `blocks` is of `all_blocks`."""

    cores: int
    blocks: int
    all_blocks: int

    @property
    def is_whole(self) -> bool:
        return self.cores == CORES_PER_CARD and self.blocks == self.all_blocks


def unusable_cores(cards: Sequence[FreeCard], shape: Shape) -> int:
    """Of one node, for one shape, whatever models it may run on."""
    if not shape.whole_cards:
        return sum(card.cores for card in cards if card.cores < shape.cores or card.blocks < shape.blocks)
    whole = sorted((card.blocks for card in cards if card.is_whole), reverse=True)
    free = sum(card.cores for card in cards)
    if len(whole) < shape.whole_cards or sum(whole[: shape.whole_cards]) < shape.blocks:
        return free
    return free - CORES_PER_CARD * len(whole)


def typical_shapes(counts: Mapping[Shape, int]) -> tuple[tuple[Shape, int], ...]:
    """The most frequent shapes, with their counts; models do not matter here."""
    merged: dict[Shape, int] = {}
    for shape, count in counts.items():
        plain = Shape(shape.cores, shape.blocks)
        merged[plain] = merged.get(plain, 0) + count
    return tuple(sorted(merged.items(), key=lambda item: (-item[1], item[0]))[:TYPICAL_SHAPES])
