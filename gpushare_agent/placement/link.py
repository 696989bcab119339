"""Several whole GPUs: the set whose links, summed over all its pairs, cost least.

Up to `EXACT_GPUS` free GPUs the answer is exact: depth-first search in lexicographic order, cut off where a lower bound
shows that no better set can follow. Above, the same search stops after `BOUNDED_STEPS` steps and gives the best set seen,
which is never worse than the greedy one it begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from msgspec import Struct, field

from gpushare_agent.model.topology import Link, LinkKind
from gpushare_agent.placement.gpu_account import GpuAccount

EXACT_GPUS = 16
BOUNDED_STEPS = 1_000

LINK_COSTS = {
    LinkKind.SELF: 0,
    LinkKind.PIX: 2_000,
    LinkKind.PXB: 4_000,
    LinkKind.PHB: 8_000,
    LinkKind.NODE: 16_000,
    LinkKind.SYS: 32_000,
}
"""Each further step outwards doubles the cost: a collective operation runs at the pace of its worst link, so one SYS
link must outweigh several better ones. NVLinks cost NVLINK_COST divided by their number, always below PIX."""
NVLINK_COST = 1_800
"""1,800 / n stays strictly decreasing up to 41 links; a GPU has at most 36."""


class LinkSet(Struct, frozen=True, kw_only=True):
    """The chosen indexes, sorted, the sum of their links' costs, and how many sets the search touched."""

    gpus: tuple[int, ...]
    cost: int
    is_exact: bool
    steps: int


def link_cost(link: Link) -> int:
    """The cost of one pair."""
    return NVLINK_COST // link.nvlinks if link.kind is LinkKind.NVLINK else LINK_COSTS[link.kind]


def set_cost(links: Sequence[Sequence[Link]], gpus: Sequence[int]) -> int:
    """The cost of all pairs of these indexes."""
    return sum(link_cost(links[a][b]) for n, a in enumerate(gpus) for b in gpus[n + 1 :])


def choose_linked(
    links: Sequence[Sequence[Link]], free: Sequence[GpuAccount], count: int, *, blocks: int = 0, must: frozenset[int]
) -> LinkSet | None:
    """The cheapest `count` of the free GPUs that contain `must` and have `blocks` of memory together.

    None where there is no such set. Of equally cheap sets the first is taken, in the order in which the GPUs are given.
    """
    gpus = list(free)
    search = _Search(
        costs=tuple(tuple(link_cost(links[a.index][b.index]) for b in gpus) for a in gpus),
        memory=tuple(gpu.total_blocks for gpu in gpus),
        count=count,
        blocks=blocks,
        must=tuple(position for position, gpu in enumerate(gpus) if gpu.index in must),
        max_steps=None if len(gpus) <= EXACT_GPUS else BOUNDED_STEPS,
    )
    if len(search.must) != len(must) or not search.run():
        return None
    return LinkSet(
        gpus=tuple(sorted(gpus[position].index for position in search.best)),
        cost=search.best_cost,
        is_exact=not search.is_stopped,
        steps=search.steps,
    )


class _Search(Struct, kw_only=True):
    """Branch and bound over positions 0..n-1. Its state lives for one decision: the best set, its cost, the steps."""

    costs: tuple[tuple[int, ...], ...]
    memory: tuple[int, ...]
    count: int
    blocks: int
    must: tuple[int, ...]
    max_steps: int | None
    best: tuple[int, ...] = ()
    best_cost: int = 0
    limit: int = 0
    """Sets of this cost or more are of no interest."""
    steps: int = 0
    is_stopped: bool = False
    _cheapest: list[list[int]] = field(default_factory=list)

    def run(self) -> bool:
        """Finds the best set; False where no set is feasible."""
        positions = range(len(self.costs))
        start = self._first_set()
        if start is None:
            return False
        self.best, self.best_cost = start, self._cost(start)
        self.limit = self.best_cost + 1  # so that an equally cheap set that comes earlier still replaces this one
        self._cheapest = [self._cheapest_sums(position) for position in positions]
        self._descend(
            self.must,
            self._cost(self.must),
            [position for position in positions if position not in self.must],
            [self._added(position, self.must) for position in positions],
        )
        return True

    def _descend(self, chosen: tuple[int, ...], cost: int, candidates: Sequence[int], added: Sequence[int]) -> None:
        """Completes `chosen` from `candidates` (ascending); `added[c]` is what c's links to the chosen cost."""
        self.steps += 1
        missing = self.count - len(chosen)
        if missing == 0:
            if cost < self.limit and self._has_memory(chosen):
                self.best, self.best_cost, self.limit = chosen, cost, cost
            return
        for number in range(len(candidates) - missing + 1):
            if self.max_steps is not None and self.steps >= self.max_steps:
                self.is_stopped = True
                return
            rest = candidates[number:]
            if not self._can_improve(chosen, cost, rest, added):
                return  # nor can what is left of it
            pick = rest[0]
            row = self.costs[pick]
            self._descend(
                (*chosen, pick), cost + added[pick], rest[1:], [a + b for a, b in zip(added, row, strict=True)]
            )

    def _can_improve(self, chosen: tuple[int, ...], cost: int, candidates: Sequence[int], added: Sequence[int]) -> bool:
        """Whether the cheapest that any completion can cost is below the limit, and the memory can suffice.

        Each further GPU pays its links to the chosen, and at least its cheapest links to as many others as are missing
        besides it; those count half, for the other end pays them too.
        """
        missing = self.count - len(chosen)
        doubled = sorted(2 * added[c] + self._cheapest[c][missing - 1] for c in candidates)
        if 2 * cost + sum(doubled[:missing]) >= 2 * self.limit:
            return False
        return self.blocks == 0 or self._has_memory(self._largest(chosen, candidates))

    def _first_set(self) -> tuple[int, ...] | None:
        """A good feasible set to begin with, None where there is none."""
        positions = [position for position in range(len(self.costs)) if position not in self.must]
        if len(positions) + len(self.must) < self.count or len(self.must) > self.count:
            return None
        largest = self._largest(self.must, positions)
        starts = [self.must] if self.must or self.count == 0 else [(position,) for position in positions]
        sets = [largest, *(self._grow(start, positions) for start in starts)]
        return min((s for s in sets if self._has_memory(s)), key=lambda s: (self._cost(s), sorted(s)), default=None)

    def _grow(self, chosen: tuple[int, ...], positions: Sequence[int]) -> tuple[int, ...]:
        """Greedy: always the GPU that adds least, of equals the first."""
        left = [position for position in positions if position not in chosen]
        added = {position: self._added(position, chosen) for position in left}
        while len(chosen) < self.count:
            pick = min(left, key=lambda position: (added[position], position))
            left.remove(pick)
            chosen = (*chosen, pick)
            for position in left:
                added[position] += self.costs[position][pick]
        return chosen

    def _largest(self, chosen: tuple[int, ...], candidates: Sequence[int]) -> tuple[int, ...]:
        by_memory = sorted(candidates, key=lambda position: (-self.memory[position], position))
        return (*chosen, *by_memory[: self.count - len(chosen)])

    def _has_memory(self, chosen: tuple[int, ...]) -> bool:
        return sum(self.memory[position] for position in chosen) >= self.blocks

    def _added(self, position: int, chosen: tuple[int, ...]) -> int:
        return sum(self.costs[position][member] for member in chosen)

    def _cost(self, chosen: tuple[int, ...]) -> int:
        return sum(self.costs[a][b] for n, a in enumerate(chosen) for b in chosen[n + 1 :])

    def _cheapest_sums(self, position: int) -> list[int]:
        """Entry m: what the m cheapest links of a GPU cost."""
        ordered = sorted(cost for other, cost in enumerate(self.costs[position]) if other != position)
        return [0, *accumulate(ordered)]
