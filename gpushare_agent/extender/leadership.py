"""From the lease to decisions: a new leader lists the whole cluster before it answers the scheduler.

The former leader's last binds may not have reached this replica's watches yet. A follower keeps its state warm meanwhile.
State owned: the term in which the cluster was last listed from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import structlog
from msgspec import Struct

from gpushare_agent.cluster.informer import Informer
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.leader_election import AlwaysLeads, LeaderElection
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.verbs import in_steps
from gpushare_agent.model.pods import Pod

log = structlog.get_logger(__name__)

MAX_WARMED_PODS = 8


class Leadership(Struct, kw_only=True, eq=False):
    """`run` once. `unscheduled` are the pods without a node: verdicts for some of them are worked out before the first
    answer, which would have to wait for them. `on_listed` is called each time that the cluster was listed; it may take a
    while."""

    election: LeaderElection | AlwaysLeads
    informers: Sequence[Informer]
    state: ClusterState
    unscheduled: Callable[[], Sequence[Pod]]
    metrics: ExtenderMetrics
    listed_in: int = 0

    def not_ready(self) -> list[str]:
        """Why the scheduler's verbs are not answered now; empty when they are."""
        if not self.election.leads():
            return [f"this replica does not lead; the lease is held by {self.election.holder or 'nobody'}"]
        if self.listed_in != self.election.term:
            return ["this replica leads, and is listing the cluster before it decides"]
        return []

    def not_warm(self) -> list[str]:
        """Why this replica cannot take over, or go on, within a moment. One that is alone has nothing to take over: it is
        ready when it decides."""
        if isinstance(self.election, AlwaysLeads):
            return self.not_ready()
        return [f"{one.kind} are not listed yet" for one in self.informers if not one.has_listed]

    async def run(self, on_listed: Callable[[], None]) -> NoReturn:
        """List in each term, until cancelled. Informers are refreshed in their order: nodes before pods, so that a pod finds
        its node."""
        election = self.election
        while True:
            term, is_leading = election.term, election.leads()
            if is_leading and self.listed_in != term:
                self.metrics.became_leader()
                for informer in self.informers:
                    await informer.refresh()
                on_listed()
                for pod in self.unscheduled()[:MAX_WARMED_PODS]:
                    await in_steps(self.state.filter_steps(pod, None))
                self.listed_in = term
                log.info("deciding", term=term)
            await election.wait_change(term, is_leading)
