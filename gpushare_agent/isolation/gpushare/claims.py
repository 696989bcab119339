"""What the containers on a GPU pay by their `usage`, and how much of it is believed. Pure.

A container may write anything into its `usage`. Its counters are numbers of 64 bits that jump, wrap around and go back:

    more than its share    is not believed, in no second; its ceiling, where it has one
    much at once           is believed over CARRIED_NS: a long kernel pays at its launch, and the next one waits
    less than before       is taken off what follows: what a launch has paid too much is given back

So whoever boasts gives its own share away, and whoever hides its use is seen in the driver's samples alone (BusyCount).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.isolation.gpushare.format import CORES_OF_GPU, GpuLimits, Observed, Paid
from gpushare_agent.model.allocations import ContainerKey

MEAN_NS = 1_000_000_000
ACTIVE_NS = 1_000_000_000
"""So long after its last launch a container counts as one that computes."""
CARRIED_NS = 2_000_000_000
"""What is paid above the share is believed for so long at most."""
_WRAP = 1 << 64
_MS = 1_000_000


class _Payments(Struct):
    """One counter of nanoseconds. `mean` is what is believed, of the GPU's time, over about a second."""

    counter: int = 0
    carried_ns: float = 0.0
    mean: float = 0.0

    def add(self, counter: int, most: float, passed_ns: int, weight: float) -> None:
        change = (counter - self.counter + _WRAP // 2) % _WRAP - _WRAP // 2
        self.counter = counter
        allowed, bound = most * passed_ns, most * CARRIED_NS
        paid = min(max(self.carried_ns + change, -bound), allowed + bound)
        believed = min(max(paid, 0.0), allowed)
        self.carried_ns = paid - believed
        self.mean += (believed / passed_ns - self.mean) * weight


class Claim(Struct):
    """What one container pays on one GPU. Times are of CLOCK_MONOTONIC; `at_ns` of 0: nothing was read yet."""

    at_ns: int = 0
    launches: int = 0
    launched_at_ns: int = -ACTIVE_NS
    _most: float = 0.0
    _all: _Payments = field(default_factory=_Payments)
    _long: _Payments = field(default_factory=_Payments)
    _known_ns: int = 0
    """The means are of so long, up to MEAN_NS."""

    def note(self, at_ns: int, most: float, paid: Paid) -> None:
        """One reading; `most` of the GPU's time is believed."""
        passed_ns, is_first, self._most = at_ns - self.at_ns, self.at_ns == 0, most
        if passed_ns <= 0:
            return
        if paid.launches != self.launches and not is_first:
            self.launched_at_ns = at_ns
        self.at_ns, self.launches = at_ns, paid.launches
        # Most containers rest most of the time. The means are then of the next program, not of the pause before it.
        if is_first or (paid.paid_ns == self._all.counter and not self.is_active(at_ns)):
            self._all, self._long = _Payments(counter=paid.paid_ns), _Payments(counter=paid.paid_long_ns)
            self._known_ns = 0
            return
        self._known_ns = min(self._known_ns + passed_ns, MEAN_NS)
        weight = min(1.0, passed_ns / self._known_ns)
        self._all.add(paid.paid_ns, most, passed_ns, weight)
        self._long.add(paid.paid_long_ns, most, passed_ns, weight)

    @property
    def ratio(self) -> float:
        """Of the GPU's time. A resize may have taken some of the share since."""
        return min(self._all.mean, self._most)

    @property
    def ratio_of_long(self) -> float:
        """Of it for launches of several turns."""
        return min(self._long.mean, self.ratio)

    def is_active(self, at_ns: int) -> bool:
        return at_ns - self.launched_at_ns < ACTIVE_NS or self._all.carried_ns > 0


class Claims(Struct):
    """Of the containers on one GPU."""

    of: dict[ContainerKey, Claim] = field(default_factory=dict)

    def note(self, key: ContainerKey, limits: GpuLimits, at_ns: int, paid: Paid) -> None:
        most = CORES_OF_GPU if limits.cores is None else max(limits.cores, limits.ceiling or 0)
        self.of.setdefault(key, Claim()).note(at_ns, most / CORES_OF_GPU, paid)

    def keep(self, keys: Collection[ContainerKey]) -> None:
        """Forgets all others."""
        self.of = {key: claim for key, claim in self.of.items() if key in keys}

    def ratio(self, key: ContainerKey, at_ns: int) -> float | None:
        """What the container pays; None where it has launched nothing of late."""
        claim = self.of.get(key)
        return claim.ratio if claim is not None and claim.is_active(at_ns) else None

    def tell(self, seen: Mapping[ContainerKey, Observed], at_ns: int) -> dict[ContainerKey, Observed]:
        """`seen`, each with what the others pay."""
        active = {key: (one.ratio, one.ratio_of_long) for key, one in self.of.items() if one.is_active(at_ns)}
        # Summed once for all: a GPU may have 100 shares.
        total, total_of_long = (sum(ratios) for ratios in zip((0.0, 0.0), *active.values(), strict=True))
        found = {}
        for key, one in seen.items():
            own, own_of_long = active.get(key, (0.0, 0.0))
            found[key] = replace(
                one,
                told_at_ms=at_ns // _MS % (1 << 32) or 1,
                companions=len(active) - (key in active),
                claimed=_cores(total - own),
                claimed_long=_cores(total_of_long - own_of_long),
            )
        return found


def _cores(ratio: float) -> int:
    return min(CORES_OF_GPU, max(0, round(CORES_OF_GPU * ratio)))
