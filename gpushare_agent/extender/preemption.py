"""Makes room for pods of a higher priority: the answer to kube-scheduler's question about victims, and evictions of our own
where it does not ask.

It counts what is free on a node, so where the sum suffices it finds no victims. Up to Kubernetes 1.36 it then leaves the
node out and asks nobody (DryRunPreemption in pkg/scheduler/framework/preemption); later versions ask about it, with an empty
list. So the leader waits `GRACE_S` for its question; then it evicts by the Eviction API, which keeps every
PodDisruptionBudget, and nominates the pod. An eviction that is only tried tells whose end a budget forbids.

State owned: the pods that filter refused and the nodes that it was asked about, MAX_REFUSED of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import NoReturn

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.kube.events import EventRecorder
from gpushare_agent.core.kube.objects import ObjectReference
from gpushare_agent.core.kube.session import Throttled
from gpushare_agent.core.model.errors import AgentError, Conflict, NotFound
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.extender.bind import PodWrites
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.decisions.preemption import cost_of
from gpushare_agent.extender.steps import in_steps

log = structlog.get_logger(__name__)

MAX_REFUSED = 1000
MOST_NODES = 100
"""As kube-scheduler, which ends its search with so many nodes: each takes up to 15 ms with 8 GPUs and 100 pods."""
GRACE_S, LOOK_S = 2.0, 0.5
EVICTED_S = 30.0
"""The watch shows the end of a pod long before. A scheduler that is killed, or whose request fails, evicts none."""
TRIED_S = 2.0
"""For all evictions that are tried for one answer: the scheduler waits for it."""
PREEMPTED = "Preempted"
"""kube-scheduler's reason of the Event on a pod that ends for another."""

Victims = dict[str, list[PodUid]]


class Preemption(Struct, kw_only=True, eq=False):
    """`refused` and `victims` are called by the verbs; `run` once."""

    state: ClusterState
    writes: PodWrites
    unscheduled: Callable[[PodUid], Pod | None]
    events: EventRecorder
    clock: Callable[[], float] = time.monotonic
    _refused: dict[PodUid, tuple[float, tuple[str, ...]]] = field(default_factory=dict)
    _problems: ReportOnce = field(default_factory=ReportOnce)

    def refused(self, pod: Pod, names: Sequence[str]) -> None:
        """Filter has found no room for the pod; on these nodes, which the scheduler's own filters pass, it would fit if
        others ended."""
        self._refused.pop(pod.uid, None)
        if names and pod.rank.preempts:
            self._refused[pod.uid] = self.clock() + GRACE_S, tuple(names)
            if len(self._refused) > MAX_REFUSED:
                del self._refused[next(iter(self._refused))]

    async def victims(
        self, pod: Pod, candidates: Mapping[str, Sequence[PodUid]], violations: Mapping[str, int]
    ) -> tuple[Victims, Mapping[str, int]]:
        """The victims on each node that may be chosen, and how many of them budgets protect: those that the scheduler
        proposes where they make room, and of all other sets the cheapest."""
        _, names = self._refused.pop(pod.uid, (0.0, ()))
        more = islice(names, max(0, MOST_NODES - len(candidates)))
        candidates = {**dict.fromkeys(more, ()), **candidates}
        found = await in_steps(self.state.victims_steps(pod, candidates))
        own = {node for node, uids in found.items() if uids != list(candidates[node])}
        tried: set[PodUid] = set()
        protected: set[PodUid] = set()
        best = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(TRIED_S):
                while own:
                    best = min(own, key=lambda node: (cost_of(self.state.victims(found[node], protected)), node))
                    if tried.issuperset(found[best]):
                        break
                    for uid in found[best]:
                        if uid not in tried and await self._is_protected(uid):
                            protected.add(uid)
                        tried.add(uid)
                    found |= await in_steps(self.state.victims_steps(pod, {best: candidates[best]}, protected))
        counts = {**violations, best: len(protected.intersection(found.get(best, ())))}
        return {node: uids for node, uids in found.items() if node not in own or node == best}, counts

    async def _is_protected(self, uid: PodUid) -> bool:
        pod = self.state.pod(uid)
        if pod is None or self.state.is_ending(pod):
            return False
        try:
            await self.writes.evict(pod, is_tried=True)
        except Throttled:
            return True
        except AgentError as e:
            # Unknown: kube-scheduler would evict it all the same. A missing right fails for every pod.
            if not isinstance(e, NotFound | Conflict) and self._problems.is_new(type(e).__name__):
                log.warning("budget_unknown", error=str(e), then="the pod may be evicted")
        return False

    async def run(self) -> NoReturn:
        """Evicts where the scheduler did not ask, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.preempt_due()

    async def preempt_due(self) -> None:
        """Evicts for those that were refused GRACE_S ago."""
        self.state.forget_evicted(self.clock() - EVICTED_S)
        due = [uid for uid, (due_at, _) in self._refused.items() if due_at <= self.clock()]
        least = self.state.least_priority() if due else 0
        for uid in due:
            pod, (_, names) = self.unscheduled(uid), self._refused.pop(uid, (0.0, ()))
            if pod is None or pod.rank.priority <= least or not self.writes.leads():
                continue
            # Room meanwhile: the scheduler tries the pod again after the event of it.
            if (await in_steps(self.state.filter_steps(pod, names))).fitting:
                continue
            # Where others end for it already it costs nothing, which the search in parts must see first.
            ordered = sorted(names, key=lambda name: name != pod.rank.nominated_node)
            for first in range(0, len(ordered), MOST_NODES):
                some = dict.fromkeys(ordered[first : first + MOST_NODES], ())
                found, protected = await self.victims(pod, some, {})
                # One node at most. A budget that protects all of them is kept.
                for node, victims in found.items():
                    if not protected[node]:
                        await self._preempt(pod, node, victims)
                if found:
                    break

    async def _preempt(self, pod: Pod, node: str, victims: Sequence[PodUid]) -> None:
        known = [one for one in map(self.state.pod, victims) if one is not None]
        if self.unscheduled(pod.uid) is None:  # bound while evictions were tried
            return
        name = f"{pod.namespace}/{pod.name}"
        try:
            # Those that end already last: without the right to evict, the room would be kept for a pod that never has it.
            for one in sorted(known, key=self.state.is_ending):
                if not self.state.is_ending(one):
                    await self.writes.evict(one)
                    ended = ObjectReference(kind="Pod", namespace=one.namespace, name=one.name, uid=one.uid)
                    text = f"Preempted by pod {pod.uid} on node {node}"
                    self.events.record(ended, PREEMPTED, text, type_="Normal", key=(PREEMPTED, one.uid))
                    log.info("pod_preempted", pod=f"{one.namespace}/{one.name}", node=node, by=name)
                if self.unscheduled(pod.uid) is None:  # deleted meanwhile: no event would end the nomination
                    return
                # After each, because a budget may forbid the next one's end: whoever replaces this one would take its room.
                self.state.preempted(pod, node, [one.uid], self.clock())
                if pod.rank.nominated_node != node:
                    await self.writes.nominate(pod, node)
                    pod = replace(pod, rank=pod.rank._replace(nominated_node=node))
        except AgentError as e:
            if self._problems.is_new(type(e).__name__):
                log.warning(
                    "not_preempted", node=node, by=name, error=str(e), then="tried again when the pod is refused"
                )
        else:
            self._problems.is_over()
