"""Pods that a quota refused: once it allows them, kube-scheduler is made to try them again.

A scheduler tries a pod that an extender refused again after an event of a node or pod, else after five minutes:
quotas are not among its events. An update of the waiting pod is such an event, in every version since 1.23 (Kubernetes 1.36,
pkg/scheduler/framework/events.go: any update of an unscheduled pod; a scheduler with extenders registers all events). So the
leader writes an annotation into the pod: that retries this pod alone, and needs no further right.

State owned: the waiting pods, with the kinds of nodes that the quota closes to them, MAX_WAITING at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import NoReturn

import structlog
from msgspec import Struct, field

from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.pod_writes import PodWrites
from gpushare_agent.extender.quota_state import QuotaState
from gpushare_agent.kit.supervision import ReportOnce
from gpushare_agent.model.errors import AgentError, Conflict, NotFound, Unavailable
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod

log = structlog.get_logger(__name__)

NodeKind = tuple[str, str]
"""Model and pool."""
MAX_WAITING = 4096
GRACE_S = 0.1
"""The time from a gain to the first check: where a pod has ended, the scheduler has that event too, and may retry by
itself."""
PACE_S = 0.05
"""The time between two writes. A pod that is bound meanwhile counts, so a small gain does not retry a thousand pods."""
RETRY_S = 1.0
CHECKED_AT_ONCE = 64


class QuotaWaiters(Struct, kw_only=True, eq=False):
    """`answered` is called by the verbs, `gained` by QuotaState; `run` once. `unscheduled` finds a pod
    without a node."""

    quota: QuotaState
    writes: PodWrites
    unscheduled: Callable[[PodUid], Pod | None]
    metrics: ExtenderMetrics
    pace_s: float = PACE_S
    _waiting: dict[PodUid, tuple[NodeKind, ...]] = field(default_factory=dict)
    _gained: asyncio.Event = field(default_factory=asyncio.Event)
    _problems: ReportOnce = field(default_factory=ReportOnce)

    def answered(self, uid: PodUid, closed: Collection[NodeKind]) -> None:
        """Filter has answered about the pod; `closed` are the kinds of nodes that only the quota refused it, none where it
        fits somewhere."""
        # Removed first, so that it goes to the end: whoever was refused longest ago is tried first.
        self._waiting.pop(uid, None)
        if closed:
            self._waiting[uid] = tuple(closed)
            # The oldest go: the scheduler tries them by itself after five minutes at most.
            while len(self._waiting) > MAX_WAITING:
                del self._waiting[next(iter(self._waiting))]

    def gained(self) -> None:
        """A quota may allow more than before."""
        self._gained.set()

    async def run(self) -> NoReturn:
        """Tries pods again as quotas allow them, until cancelled."""
        while True:
            await self._gained.wait()
            await asyncio.sleep(GRACE_S)
            # Before the pods are looked at: a gain meanwhile is another pass.
            self._gained.clear()
            for number, uid in enumerate(list(self._waiting)):
                # Four thousand checks in one go would hold the loop, and filter with it.
                if number % CHECKED_AT_ONCE == CHECKED_AT_ONCE - 1:
                    await asyncio.sleep(0)
                if self._is_allowed(uid) and not await self._try_again(uid):
                    # The API server is away: the same pods again, later.
                    self._gained.set()
                    await asyncio.sleep(RETRY_S)
                    break

    def _is_allowed(self, uid: PodUid) -> bool:
        kinds, pod = self._waiting.get(uid, ()), self.unscheduled(uid)
        # Bound or gone meanwhile.
        if pod is None:
            self._waiting.pop(uid, None)
            return False
        return any(self.quota(pod, model=model, pool=pool) is None for model, pool in kinds)

    async def _try_again(self, uid: PodUid) -> bool:
        """Each pod once for each refusal. False where the API server did not answer."""
        kinds, pod = self._waiting.pop(uid), self.unscheduled(uid)
        # A follower's refusals are none: it answers no filter. One that has just lost the lease forgets the pod, whose
        # next filter asks the new leader.
        if pod is None or not self.writes.leads():
            return True
        try:
            await self.writes.ask_for_retry(pod)
        except (NotFound, Conflict):  # gone, or another pod by now
            return True
        except AgentError as e:
            is_retried = isinstance(e, Unavailable)
            # A missing right fails for every pod: one line says it.
            if self._problems.is_new(type(e).__name__):
                then = "tried again" if is_retried else "it waits for the scheduler's next event"
                log.warning("quota_retry_not_written", error=str(e), then=then)
            if is_retried:
                # A filter may have answered meanwhile, with newer kinds.
                self._waiting.setdefault(uid, kinds)
            return not is_retried
        self._problems.is_over()
        self.metrics.quota_retried()
        # The scheduler's bind of this pod counts before the next pod is checked.
        await asyncio.sleep(self.pace_s)
        return True
