"""How contexts of a GPU take turns, by what containers say of themselves and the driver of the GPU as a whole. Pure.

While several contexts have work each computes for a turn, and the next one loses a little at its beginning. A kernel of many
turns is longer by the others' turns. How many of the others are there between two turns of a container is measured: each says
for how long its long kernels were on the GPU, the others' turns included. Two of them are there together as often as chance
has it, unless the time that the GPU was busy says more or less.

Figures of an H200: turns of 2 ms (NVIDIA's default time slice), 130 us lost at a change of context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

TURN_NS = 2_000_000
CHANGE_NS = 130_000
HIDDEN = 0.15
"""Of the GPU's time: busy beyond all that was paid, and taken for a container that does not say so."""
FULL = 0.935
"""Of the GPU's time, said in whole percents: above it the GPU has none left."""
FILLS_A_SECOND, EMPTIES_A_SECOND = 100.0, 5.0
"""A GPU that is 95 percent busy is full within a second, and slowly less so, for being full is what makes room."""
_LEAST_TOGETHER = 0.05
_SHORT_AT_MOST = 0.9


class Use(Struct, frozen=True, kw_only=True):
    """Of one container: parts of the GPU's time, about a second's mean.

    `long` of `paid` was for launches of several turns, which were on the GPU for `present`. `turn_ns` is how long its other
    turns are, `changes` what it lost at the beginning of all its turns.
    """

    paid: float
    long: float
    present: float
    changes: float
    turn_ns: float


def between_ns(own: Use, others: Sequence[Use], busy: float | None) -> float:
    """How long the others compute between two turns of a container that computes without a pause.

    `busy` is the part of the time in which the driver saw the GPU busy; None: it does not say.
    """
    everybody = (own, *others)
    present = [one.present for one in others]
    together = 1.0
    if busy is not None:
        hidden = busy - sum(one.paid + one.changes for one in everybody)
        if hidden > HIDDEN:
            present.append(min(1.0, 1.5 * hidden))  # it has turns where it has to wait, as all have
        long_busy = busy - sum(max(0.0, one.paid - one.long) for one in everybody)
        all_present = sum(present) + own.present
        by_chance = all_present - (1 - (1 - own.present) * math.prod(1 - one for one in present))
        if by_chance > _LEAST_TOGETHER:
            together = min(2.0, max(0.5, (all_present - long_busy) / by_chance))
    part = _part_of_turns([min(1.0, together * one) for one in present])
    short = min(sum(max(0.0, one.paid - one.long) for one in others), _SHORT_AT_MOST)
    return TURN_NS * (1 / part - 1) + min(TURN_NS * short / (1 - short), sum(one.turn_ns for one in others))


def _part_of_turns(present: Sequence[float]) -> float:
    """Which part of the turns is a context's own, where each other one is there with this chance."""
    chances = [1.0]  # that so many of them are there
    for one in present:
        chances = [
            stays * (1 - one) + comes * one for stays, comes in zip([*chances, 0.0], [0.0, *chances], strict=True)
        ]
    return sum(chance / (count + 1) for count, chance in enumerate(chances))


def fullness(before: float, busy: float, passed_s: float) -> float:
    """From 0 to 1: how much of what a turn's beginning loses each container is to pay."""
    rate = FILLS_A_SECOND if busy > FULL else EMPTIES_A_SECOND
    return min(1.0, max(0.0, before + (busy - FULL) * rate * passed_s))
