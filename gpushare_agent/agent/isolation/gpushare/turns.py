"""How contexts of a GPU take turns, by what containers say of themselves and the driver of the GPU as a whole. Pure.

While several contexts have work each computes for a turn, and the next one loses a little at its beginning. A kernel of many
turns is longer by the others' turns. How many of the others are there between two turns of a container is measured: each
says for how long its long kernels were on the GPU, the others' turns included. Two of them are there together as often as
chance has it, unless the time that the GPU was busy says more or less.

Figures of an H200: turns of 2 ms (NVIDIA's default time slice), 130 us lost at a change of context.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from msgspec import Struct

TURN_NS = 2_000_000
CHANGE_NS = 130_000
HIDDEN = 0.15
"""Of the GPU's time: busy beyond all that was paid, and taken for a container that does not say so."""
BOASTED = 0.22
"""Paid beyond what the GPU was busy, and not believed: a driver's samples may be a second old."""
FULL = 0.935
"""Of the GPU's time, said in whole percents: above it the GPU has none left."""
FILLS_A_SECOND, EMPTIES_A_SECOND = 300.0, 2.0
"""A GPU that is 95 percent busy is full within half a second, and slowly less so: being full is what makes room."""
_LEAST_TOGETHER = 0.05
_GAUSS = (
    (0.019855071751231884, 0.050614268145188130), (0.101666761293186630, 0.111190517226687235),
    (0.237233795041835507, 0.156853322938943644), (0.408282678752175098, 0.181341891689180991),
    (0.591717321247824902, 0.181341891689180991), (0.762766204958164493, 0.156853322938943644),
    (0.898333238706813370, 0.111190517226687235), (0.980144928248768116, 0.050614268145188130),
)  # fmt: skip
"""Places and weights between 0 and 1. Where each other is there with a chance p, the part of the turns that is a context's
own, the mean of 1 / (1 + how many are there), is the integral of the product of 1 - p + p * x: exact for 15 others."""
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


def between_each_ns(uses: Sequence[Use], busy: float | None, *, is_settled: bool = True) -> list[float]:
    """Of each of these containers on a GPU: how long the others compute between two turns of it while it computes without
    a pause. `busy` is the part of the time in which the driver saw the GPU busy; None: it does not say. `is_settled`: it
    is of these containers, none of which has just begun.

    Ten times a second for up to 100 of them, so what is of all is made once, and of that each one's own is taken out.
    """
    short = [max(0.0, one.paid - one.long) for one in uses]
    present = [one.present for one in uses]
    together = 1.0
    if hidden := hidden_by(uses, busy):
        present.append(min(1.0, 1.5 * hidden))  # it has turns where it has to wait, as all have
    if busy is not None:
        by_chance = sum(present) - (1 - math.prod(1 - one for one in present))
        if by_chance > _LEAST_TOGETHER:
            together = min(2.0, max(0.5, (sum(present) - (busy - sum(short))) / by_chance))
    there = [min(1.0, together * one) for one in present]
    chances = [weight * math.prod(1 - one + one * at for one in there) for at, weight in _GAUSS]
    all_short, paid, turns_ns = sum(short), sum(one.paid for one in uses), sum(one.turn_ns for one in uses)
    found = []
    for use, own_short, own in zip(uses, short, there, strict=False):
        part = sum(chance / (1 - own + own * at) for chance, (at, _) in zip(chances, _GAUSS, strict=True))
        others_short = min(all_short - own_short, _SHORT_AT_MOST)
        between = min(TURN_NS * others_short / (1 - others_short), turns_ns - use.turn_ns)
        found.append(
            (TURN_NS * (1 / part - 1) + max(0.0, between))
            * (_believed(use.paid, paid - use.paid, busy) if is_settled else 1)
        )
    return found


def _believed(own: float, others: float, busy: float | None) -> float:
    """Which part of what others say that they paid: all, unless the GPU was busy for less."""
    if busy is None or own + others - busy < BOASTED:
        return 1.0
    return min(1.0, max(0.0, busy - own) / others) if others > 0 else 1.0


def hidden_by(uses: Collection[Use], busy: float | None) -> float:
    """For how much of the time somebody computes who does not say so; 0 for little, and where the driver does not say how
    busy the GPU is."""
    hidden = 0.0 if busy is None else busy - sum(one.paid + one.changes for one in uses)
    return hidden if hidden > HIDDEN else 0.0


def busy_by(uses: Collection[Use]) -> float:
    """For how much of the time these keep the GPU busy, where the driver does not say: a turn loses something where another
    container had the one before it."""
    paid = sum(one.paid for one in uses)
    return min(1.0, paid + sum(one.changes * min(1.0, paid - one.paid) for one in uses))


def fullness(before: float, busy: float, passed_s: float) -> float:
    """From 0 to 1: how much of what a turn's beginning loses each container is to pay."""
    rate = FILLS_A_SECOND if busy > FULL else EMPTIES_A_SECOND
    return min(1.0, max(0.0, before + (busy - FULL) * rate * passed_s))
