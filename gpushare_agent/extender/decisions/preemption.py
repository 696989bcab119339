"""Chooses the pods that end on a node so that a pod of a higher priority has room on its GPUs. Pure.

kube-scheduler adds up what is free on a node: its victims may be on different GPUs, and it has none where the sum suffices.
Victims are compared as it compares nodes (pickOneNodeForPreemption in pkg/scheduler/framework/preemption, 1.36): the fewest
that a PodDisruptionBudget protects, the lowest highest priority, the least sum of priorities, which is mostly the fewest
pods. As there, the most important are spared first.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from gpushare_agent.core.model.allocations import Charge, add_charges
from gpushare_agent.core.model.gpus import Topology
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import Pod, Rank
from gpushare_agent.core.placement import GpuAccount
from gpushare_agent.extender.decisions.pod_plan import plan_pod
from gpushare_agent.extender.values import ClusterPolicy, PodPlan

MOST_TRIED = 128
"""Tries to spare a victim of one node, but all of one set of GPUs at least: each takes 0.1 ms with 8 GPUs."""
_LEAST_PRIORITY = -(1 << 31) - 1


class Victim(NamedTuple):
    """A pod that may end, and what it has of each GPU, by index."""

    uid: PodUid
    rank: Rank
    charges: Mapping[int, Charge]
    is_protected: bool = False
    """By a PodDisruptionBudget that allows no further disruption."""
    is_ending: bool = False
    """Deleted already: its end costs nothing."""


Cost = tuple[int, int, int]


def cost_of(victims: Sequence[Victim]) -> Cost:
    """The least is best."""
    chosen = [one for one in victims if not one.is_ending]
    priorities = [one.rank.priority for one in chosen]
    return (
        sum(one.is_protected for one in chosen),
        max(priorities, default=_LEAST_PRIORITY),
        # Each counts from below the least: else two pods below 0 would cost less than one.
        sum(priority - _LEAST_PRIORITY for priority in priorities),
    )


def by_importance(victims: Iterable[Victim]) -> list[Victim]:
    """The most important first; of one priority the one that has run longest."""
    return sorted(
        victims, key=lambda one: (not one.is_protected, -one.rank.priority, one.rank.started_at or "~", one.uid)
    )


def charged(gpus: Sequence[GpuAccount], charges: Iterable[Mapping[int, Charge]], times: int) -> Sequence[GpuAccount]:
    """The accounts with the charges added, or with -1 taken away."""
    sums: dict[int, Charge] = {}
    for one in charges:
        add_charges(sums, one, times)
    return [replace(gpu, used=gpu.used.plus(sums[gpu.index])) if gpu.index in sums else gpu for gpu in gpus]


def choose_victims(
    pod: Pod, victims: Sequence[Victim], gpus: Sequence[GpuAccount], topology: Topology, policy: ClusterPolicy
) -> Generator[None, None, list[Victim] | None]:
    """The cheapest of `victims` that have to end so that the pod fits on `gpus`: none where it fits as it is, None where
    the end of all of them does not suffice. Yields before each try to spare one; MOST_TRIED bounds these."""

    def fits(gone: Iterable[Victim]) -> bool:
        left = charged(gpus, (one.charges for one in gone), -1)
        return isinstance(plan_pod(pod, left, topology, policy), PodPlan)

    if fits(()):
        return []
    victims = by_importance(victims)
    if not victims or not fits(victims):
        return None
    of_gpu = {gpu.index: [one for one in victims if gpu.index in one.charges] for gpu in gpus}
    latest_first = sorted(of_gpu, key=lambda index: _began_at(of_gpu[index]), reverse=True)
    cheapest_first = sorted(latest_first, key=lambda index: cost_of(of_gpu[index]))
    found: list[list[Victim]] = []
    seen: set[frozenset[int]] = set()
    tried = 0
    # Each GPU once as the first to be emptied, and as many of the cheapest others as the pod needs besides.
    for first in cheapest_first:
        near = {first}
        for index in cheapest_first:
            if fits(one for one in victims if not near.isdisjoint(one.charges)):
                break
            near.add(index)
        if frozenset(near) in seen:
            continue
        seen.add(frozenset(near))
        on_these = [one for one in victims if not near.isdisjoint(one.charges)]
        # Small ones first too: sparing the one that has run longest may take two others.
        by_size = sorted(on_these, key=lambda one: (not one.is_protected, -one.rank.priority, _size(one)))
        for order in (on_these, by_size):
            left = on_these
            for one in order:
                yield
                tried += 1
                others = [other for other in left if other is not one]
                if fits(others):
                    left = others
            found.append(left)
            if left is on_these:  # none can be spared, in whatever order
                break
        if tried > MOST_TRIED:
            break
    least = min(map(cost_of, found))
    return max((one for one in found if cost_of(one) == least), key=_began_at)


def _began_at(victims: Sequence[Victim]) -> str:
    """When the first of them began; of equally cheap sets the latest is taken."""
    return min((one.rank.started_at or "~" for one in victims), default="~")


def _size(victim: Victim) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(charge[:3] for charge in victim.charges.values()), strict=True)))
