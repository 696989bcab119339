"""Pods that filter refused and that may fit all the same: kube-scheduler is made to try them again.

A scheduler tries a pod that an extender refused again after an event of a node or pod, else after five minutes. Two things
are not among its events: a quota that allows more, and a request that named only a part of the nodes, where none fits, while
another node does; its next try begins where the last one ended. An update of the waiting pod is such an event, in every
version since 1.23 (Kubernetes 1.36, pkg/scheduler/framework/events.go: any update of an unscheduled pod; a scheduler with
extenders registers all events). So the leader writes an annotation into the pod: that retries this pod alone. With it goes
the node that would take the pod, as nominated node: a scheduler looks at that one first (schedule_one.go,
evaluateNominatedNode). Until then it keeps that room from all others of the pod's priority or a lower one, and its own
filters may refuse the node to the pod. So a pod is nominated once, and none for a while after one that leads to nothing.

State owned: the waiting pods, with the kinds of nodes that the quota closes to them, or how often they were refused on a
part of the nodes, MAX_WAITING of each at most; the pod nominated last, and from when on another one may be.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import NoReturn, TypeVar

import structlog
from msgspec import Struct, field

from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.model.errors import AgentError, Conflict, NotFound, Unavailable
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.extender.bind import PodWrites
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.steps import in_steps
from gpushare_agent.extender.values import NodeKind

log = structlog.get_logger(__name__)

V = TypeVar("V")
MAX_WAITING = 4096
GRACE_S = 0.1
"""The time from a gain to the first check: the scheduler also gets the event of a pod that ended, and may retry by
itself."""
PACE_S = 0.05
"""The time between two writes. A pod that is bound meanwhile counts, so a small gain does not retry a thousand pods."""
RETRY_S = 1.0
CHECKED_AT_ONCE = 64
LOOK_S = 0.05
DELAY_S, DELAY_DOUBLINGS = 0.25, 8
LONGEST_S = DELAY_S * 2.0**DELAY_DOUBLINGS
"""64 s: the longest time between a refusal of a part of the nodes and the next try. Before the first try there is none."""


class _Unnamed(Struct):
    """A pod that fits none of the nodes that were named, `refusals` times, and that we let be tried again `tries` times.
    `parts` of that size are the cluster."""

    parts: int
    refusals: int = 0
    tries: int = 0
    is_nominated: bool = False
    due_at: float = 0.0

    def delay_s(self) -> float:
        """At once, then more and more rarely: the scheduler may refuse the node that fits by its own rules (taints,
        selectors, CPU), which are not known here."""
        # The scheduler's own note on the pod makes it try at once, too: the next part, which has no better chance.
        if not self.tries:
            return 0.0
        return DELAY_S * 2.0 ** min(self.tries - 1, DELAY_DOUBLINGS)


class Waiters(Struct, kw_only=True, eq=False):
    """`answered` is called by the verbs, `gained` by QuotaState; `run` once. `unscheduled` finds a pod without a node."""

    state: ClusterState
    writes: PodWrites
    unscheduled: Callable[[PodUid], Pod | None]
    metrics: ExtenderMetrics
    pace_s: float = PACE_S
    clock: Callable[[], float] = time.monotonic
    _over_quota: dict[PodUid, tuple[NodeKind, ...]] = field(default_factory=dict)
    _unnamed: dict[PodUid, _Unnamed] = field(default_factory=dict)
    _nominated: PodUid | None = None
    _nominates_at: float = 0.0
    _gained: asyncio.Event = field(default_factory=asyncio.Event)
    _refused: asyncio.Event = field(default_factory=asyncio.Event)
    _problems: ReportOnce = field(default_factory=ReportOnce)

    def answered(self, uid: PodUid, closed: Collection[NodeKind] = (), parts: int = 0) -> None:
        """Filter has answered about the pod. Where it fits nowhere, `closed` are the kinds of nodes that only the quota
        refused it, and `parts` is how many tries name every node, 0 where this one did."""
        # Removed first, so that it goes to the end: whoever was refused longest ago is tried first.
        self._over_quota.pop(uid, None)
        if closed:
            _keep(self._over_quota, uid, tuple(closed))
        known = self._unnamed.pop(uid, _Unnamed(parts))
        if parts:
            one = _Unnamed(parts, known.refusals + 1, known.tries, known.is_nominated)
            # From this try on, whoever caused it: a pod that the scheduler tries by itself all the time needs none of ours.
            one.due_at = self.clock() + one.delay_s()
            _keep(self._unnamed, uid, one)
            self._refused.set()
        elif uid == self._nominated:
            self._nominates_at = 0.0

    def is_looking(self, uid: PodUid) -> bool:
        """Not every part of the nodes was named since the pod began to wait."""
        one = self._unnamed.get(uid)
        return one is not None and one.refusals < one.parts

    def gained(self) -> None:
        """A quota may allow more than before."""
        self._gained.set()

    async def run(self) -> NoReturn:
        """Tries pods again, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_quota())
            while True:
                await self._refused.wait()
                await asyncio.sleep(LOOK_S)
                await self.try_due()

    async def try_due(self) -> None:
        """Tries the pods whose time has come, where a node that is known would take them."""
        for number, (uid, one) in enumerate(list(self._unnamed.items())):
            await _breathe(number)
            if one.due_at > self.clock():
                continue
            pod = self.unscheduled(uid)
            # Bound or gone meanwhile, or no node would take it: the scheduler's next event is for it.
            fitting = await in_steps(self.state.somewhere_steps(pod)) if pod is not None else []
            # Filter may have answered meanwhile: that answer counts.
            if self._unnamed.get(uid) is not one:
                continue
            if pod is None or not fitting or not self.writes.leads():
                del self._unnamed[uid]
                continue
            # The next answer says when. None comes where no node passes the scheduler's own rules now.
            one.due_at = self.clock() + LONGEST_S
            one.tries += 1
            is_nominated = not one.is_nominated and self._may_nominate(pod)
            if is_nominated:
                one.is_nominated = True
                self._nominated, self._nominates_at = uid, one.due_at
            if not await self._try_again(pod, "node", fitting[0] if is_nominated else ""):
                await asyncio.sleep(RETRY_S)
                break
        if not self._unnamed:
            self._refused.clear()

    def _may_nominate(self, pod: Pod) -> bool:
        # Of a pod that never preempts the scheduler clears no nomination, and a profile without preemption clears none.
        last = self.unscheduled(self._nominated) if self._nominated is not None else None
        is_left = last is not None and last.rank.nominated_node
        # One that is there is of a preemption: the room that it made stays the pod's.
        return self.clock() >= self._nominates_at and pod.rank.preempts and not (pod.rank.nominated_node or is_left)

    async def _follow_quota(self) -> NoReturn:
        while True:
            await self._gained.wait()
            await asyncio.sleep(GRACE_S)
            # Before the pods are looked at: a gain meanwhile is another pass.
            self._gained.clear()
            for number, uid in enumerate(list(self._over_quota)):
                await _breathe(number)
                pod = self.unscheduled(uid)
                # None: bound or gone meanwhile.
                if pod is None:
                    self._over_quota.pop(uid, None)
                elif self._is_allowed(pod):
                    # Each pod once for each refusal.
                    kinds = self._over_quota.pop(uid)
                    if not await self._try_again(pod, "quota"):
                        # The API server is away: the same pods again, later. A filter may have answered meanwhile, with
                        # newer kinds.
                        self._over_quota.setdefault(uid, kinds)
                        self._gained.set()
                        await asyncio.sleep(RETRY_S)
                        break

    def _is_allowed(self, pod: Pod) -> bool:
        kinds = self._over_quota.get(pod.uid, ())
        return any(self.state.quota(pod, model=model, pool=pool) is None for model, pool in kinds)

    async def _try_again(self, pod: Pod, reason: str, node: str = "") -> bool:
        """`node` is one that would take the pod. False where the API server did not answer. `reason` is the metric's."""
        # A follower has no refusals: it answers no filter. A replica that has just lost the lease forgets the pod; the next
        # filter asks the new leader.
        if not self.writes.leads():
            return True
        try:
            await self.writes.ask_for_retry(pod, node)
        except (NotFound, Conflict):  # gone, or another pod by now
            return True
        except AgentError as e:
            is_retried = isinstance(e, Unavailable)
            # A missing right fails for every pod: one line says it.
            if self._problems.is_new(type(e).__name__):
                then = "tried again" if is_retried else "it waits for the scheduler's next event"
                log.warning("retry_not_written", error=str(e), then=then)
            return not is_retried
        self._problems.is_over()
        self.metrics.count("retries", reason)
        # The scheduler's bind of this pod counts before the next pod is checked.
        await asyncio.sleep(self.pace_s)
        return True


async def _breathe(number: int) -> None:
    # Four thousand checks in one go would hold the loop, and filter with it.
    if number % CHECKED_AT_ONCE == CHECKED_AT_ONCE - 1:
        await asyncio.sleep(0)


def _keep(waiting: dict[PodUid, V], uid: PodUid, value: V) -> None:
    """The oldest are dropped: the scheduler tries them by itself after five minutes at most."""
    waiting[uid] = value
    while len(waiting) > MAX_WAITING:
        del waiting[next(iter(waiting))]
