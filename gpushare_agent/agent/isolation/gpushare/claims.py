"""Reads what the containers on a GPU pay by their `usage`, and decides how much of it to believe. Pure.

A container may write anything into its `usage`. Its counters are numbers of 64 bits that jump, wrap around and go back:

    more than its share    is not believed, in no second; its ceiling, where it has one
    much at once           is believed over CARRIED_NS: a long kernel pays at its launch, and the next one waits
    less than before       is taken off what follows: what a launch has paid too much is given back

So a container that claims too much gives its own share away. One that hides its use is seen as time in which the GPU was
busy and nobody paid.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.isolation.gpushare.format import CORES_OF_GPU, GpuLimits, Observed, Paid
from gpushare_agent.agent.isolation.gpushare.turns import (
    CHANGE_NS,
    FULL,
    TURN_NS,
    Use,
    between_each_ns,
    busy_by,
    fullness,
    hidden_by,
)
from gpushare_agent.core.model.allocations import ContainerKey

MEAN_NS = 1_000_000_000
ACTIVE_NS = 1_000_000_000
"""A container counts as one that computes for so long after its last launch."""
SETTLED_NS = 1_500_000_000
"""So long after a container has begun, the driver's samples show it as much as the others."""
CARRIED_NS = 2_000_000_000
"""Payment above the share is believed for at most so long."""
_WRAP = 1 << 64
_S, _MS, _US = 1_000_000_000, 1_000_000, 1_000
_MOST_TURNS_A_SECOND = 5_000
"""The most turns that are believed: each has at least the change of context before it."""
_LONGER = 1.2
"""A kernel is at most so many times as long as its own turns, with those of each other one and of one that nobody counts."""
_MOST_BETWEEN_US = 0xFFFF


def _change(before: int, now: int) -> int:
    return (now - before + _WRAP // 2) % _WRAP - _WRAP // 2


class _Payments(Struct):
    """One counter of nanoseconds. `mean` is what is believed, of the GPU's time, over about a second."""

    counter: int = 0
    carried_ns: float = 0.0
    mean: float = 0.0

    def add(self, counter: int, most: float, passed_ns: int, weight: float) -> None:
        allowed, bound = most * passed_ns, most * CARRIED_NS
        paid = self.carried_ns + _change(self.counter, counter)
        self.counter = counter
        # Not by min and max, which take twice as long: of 100 shares ten times a second.
        paid = -bound if paid < -bound else allowed + bound if paid > allowed + bound else paid
        believed = 0.0 if paid < 0 else allowed if paid > allowed else paid
        self.carried_ns = paid - believed
        self.mean += (believed / passed_ns - self.mean) * weight


class Claim(Struct):
    """What one container pays on one GPU. Times are of CLOCK_MONOTONIC; `at_ns` of 0: nothing was read yet."""

    at_ns: int = 0
    launches: int = 0
    launched_at_ns: int = -ACTIVE_NS
    most: float = 0.0
    """The most of the GPU's time that is believed: its share, or its ceiling."""
    _all: _Payments = field(default_factory=_Payments)
    _long: _Payments = field(default_factory=_Payments)
    _present: _Payments = field(default_factory=_Payments)
    _turns: int = 0
    _turns_a_second: float = 0.0
    _turn_ns: float = TURN_NS
    _known_ns: int = 0
    """The time that the means are of, up to MEAN_NS."""

    def note(self, at_ns: int, most: float, paid: Paid, since_ns: int = 0) -> None:
        """One reading; at most `most` of the GPU's time is believed. Until `since_ns` nothing had changed."""
        passed_ns, is_first, self.most = at_ns - max(self.at_ns, since_ns), self.at_ns == 0, most
        if passed_ns <= 0:
            return
        if paid.launches != self.launches and not is_first:
            self.launched_at_ns = at_ns
        self.at_ns, self.launches = at_ns, paid.launches
        # Most containers rest most of the time. The means are then those of the next program, not of the pause before.
        if is_first or (paid.paid_ns == self._all.counter and not self.is_active(at_ns)):
            self._all, self._long = _Payments(counter=paid.paid_ns), _Payments(counter=paid.paid_long_ns)
            self._present, self._turns = _Payments(counter=paid.present_long_ns), paid.turns
            self._turns_a_second, self._turn_ns, self._known_ns = 0.0, TURN_NS, 0
            return
        self._known_ns = min(self._known_ns + passed_ns, MEAN_NS)
        weight = min(1.0, passed_ns / self._known_ns)
        paid_ns = _change(self._all.counter, paid.paid_ns)
        self._all.add(paid.paid_ns, most, passed_ns, weight)
        self._long.add(paid.paid_long_ns, most, passed_ns, weight)
        self._present.add(paid.present_long_ns, 1.0, passed_ns, weight)
        self._add_turns(paid.turns, paid_ns, passed_ns, weight)

    def _add_turns(self, turns: int, paid_ns: int, passed_ns: int, weight: float) -> None:
        new = _change(self._turns, turns)
        self._turns = turns
        rate = min(max(0.0, new * _S / passed_ns), _MOST_TURNS_A_SECOND)
        self._turns_a_second += (rate - self._turns_a_second) * weight
        if new > 0:
            self._turn_ns += (min(max(0.0, paid_ns / new), TURN_NS) - self._turn_ns) * weight

    @property
    def ratio(self) -> float:
        """Part of the GPU's time. A resize may have taken some of the share since."""
        return min(self._all.mean, self.most)

    def use(self, sharers: int) -> Use:
        """The limit among so many that compute. The kernels of a small share cannot be there all the time."""
        long = min(self._long.mean, self.ratio)
        return Use(
            paid=self.ratio,
            long=long,
            present=min(1.0, self._present.mean, _LONGER * (sharers + 1) * long),
            changes=self._turns_a_second * CHANGE_NS / _S,
            turn_ns=self._turn_ns,
        )

    def is_active(self, at_ns: int) -> bool:
        # A container with an unreadable `usage` pays nothing.
        is_paying = self._all.carried_ns > 0 and at_ns - self.at_ns < CARRIED_NS
        return at_ns - self.launched_at_ns < ACTIVE_NS or is_paying


class Claims(Struct):
    """The claims of the containers on one GPU. `full` is as in turns.fullness."""

    of: dict[ContainerKey, Claim] = field(default_factory=dict)
    full: float = 0.0
    _published_at_ns: int = 0
    _active: frozenset[ContainerKey] = frozenset()
    _begun_at_ns: int = 0
    _others: dict[ContainerKey, tuple[int, int]] = field(default_factory=dict)
    """For each container that was published to: how long the driver named others, and when that last grew."""

    def note(self, key: ContainerKey, limits: GpuLimits, at_ns: int, paid: Paid, since_ns: int = 0) -> None:
        most = CORES_OF_GPU if limits.cores is None else max(limits.cores, limits.ceiling or 0)
        self.of.setdefault(key, Claim()).note(at_ns, most / CORES_OF_GPU, paid, since_ns)

    def keep(self, keys: Collection[ContainerKey]) -> None:
        """Forgets all others."""
        self.of = {key: claim for key, claim in self.of.items() if key in keys}
        self._others = {key: others for key, others in self._others.items() if key in keys}

    def ratio(self, key: ContainerKey, at_ns: int) -> float | None:
        """What the container pays; None if it has launched nothing lately."""
        claim = self.of.get(key)
        return claim.ratio if claim is not None and claim.is_active(at_ns) else None

    def publish(
        self, seen: Mapping[ContainerKey, Observed], at_ns: int, busy: float | None
    ) -> dict[ContainerKey, Observed]:
        """`seen`, each with what it must know of the others. `busy` is the part of the time in which the driver saw the GPU
        busy. None: the driver does not say, and the sum of all payments is used instead."""
        active = {key: one for key, one in self.of.items() if one.is_active(at_ns)}
        uses = {key: one.use(len(active)) for key, one in active.items()}
        passed_s = min(at_ns - self._published_at_ns, MEAN_NS) / _S
        self._published_at_ns = at_ns
        by_all = busy_by(uses.values()) if busy is None else busy
        begins = active.keys() - self._active
        self._active = frozenset(active)
        if begins:
            self._begun_at_ns = at_ns
        if begins and sum(one.most for one in active.values()) > FULL:
            self.full = 1.0  # else a container that begins has a second without it
        self.full = fullness(self.full, by_all, passed_s) if len(uses) > 1 else 0.0
        own_and_others = {**dict.fromkeys(seen, _NOBODY), **uses}
        between = between_each_ns(
            tuple(own_and_others.values()), busy, is_settled=at_ns - self._begun_at_ns > SETTLED_NS
        )
        between_ns = dict(zip(own_and_others, between, strict=True))
        is_hidden = hidden_by(uses.values(), busy) > 0
        found = {}
        for key, one in seen.items():
            named_ns, named_at_ns = self._others.get(key, (one.others_ns, -ACTIVE_NS))
            named_at_ns = at_ns if one.others_ns != named_ns else named_at_ns
            self._others[key] = one.others_ns, named_at_ns
            # A container that hides what it computes counts as a companion too, if the driver names others.
            others = len(uses) - (key in uses) + (is_hidden and at_ns - named_at_ns < ACTIVE_NS)
            found[key] = replace(
                one,
                published_at_ms=at_ns // _MS % (1 << 32) or 1,
                companions=others,
                full=round(CORES_OF_GPU * self.full),
                between_us=min(_MOST_BETWEEN_US, round(between_ns[key] / _US)) if others else 0,
            )
        return found


_NOBODY = Use(paid=0.0, long=0.0, present=0.0, changes=0.0, turn_ns=0.0)
