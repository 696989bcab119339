"""The verbs of the scheduler extender: filter, prioritize, preempt and bind. HTTP: http.py; JSON: messages.py.

With reserve=bind, filter changes nothing, so that preemption and autoscalers may ask what would be; bind reserves the GPUs.
With reserve=filter it does what gpu-admission's does, for schedulers that bind themselves: it chooses one node, reserves
the GPUs and annotates the pod. A pod that is filtered again gets a new answer. State owned: the pods that passed the filter
and were not bound yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

import structlog
from msgspec import Struct, field

from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.extender.bind import Binder
from gpushare_agent.extender.cluster_state import ClusterState, Filtered
from gpushare_agent.extender.messages import (
    NodesArgs,
    Result,
    bad_request,
    binding_result,
    filter_result,
    host_priorities,
    parse_bind_args,
    parse_nodes_args,
    parse_preempt_args,
    preemption_result,
)
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.preemption import Preemption
from gpushare_agent.extender.steps import in_steps
from gpushare_agent.extender.values import Stage
from gpushare_agent.extender.waiters import Waiters

log = structlog.get_logger(__name__)

MAX_PASSED = 1000
SCHEDULERS_LEAST = 100
"""kube-scheduler names a part of the nodes only where at least so many pass its own filters (minFeasibleNodesToFind, 1.36):
otherwise it has looked at all nodes."""


class Extender(Struct, kw_only=True, eq=False):
    """Answers the requests that http.py reads."""

    state: ClusterState
    binder: Binder
    metrics: ExtenderMetrics
    waiters: Waiters
    preemption: Preemption
    reserves_at_filter: bool = False
    most_fitting: int = 0
    """Nodes that filter answers at most, and then without reasons for the others; 0: all."""
    _passed: dict[PodUid, None] = field(default_factory=dict)
    """Pods that fitted somewhere and were not bound yet, the last MAX_PASSED of them; for `scheduled`."""
    _bound_by_others: ReportOnce = field(default_factory=ReportOnce)

    def scheduled(self, pod: Pod) -> None:
        """The pod has a node now. With reserve=bind, one that was filtered here and bound by the scheduler had no
        reservation, and two such pods may share what one was to have: gpu-admission's policy files only filter."""
        if pod.uid in self._passed:
            del self._passed[pod.uid]
            if self._bound_by_others.is_new("bind"):
                log.warning(
                    "scheduler_binds_by_itself",
                    namespace=pod.namespace,
                    pod=pod.name,
                    then="its GPUs were reserved by nobody until it was bound",
                    cure="set extender.reserve: filter, or give the scheduler's extender the verb bind",
                )

    # --- from bytes to bytes ---

    async def filter(self, content: bytes) -> Result:
        args: NodesArgs | None = None
        try:
            args = parse_nodes_args(content, self.state.policy.names)
            answer = await self.nodes_for(args)
        except Corrupt as e:
            # 200 with the field Error: kube-scheduler shows that text, of another status only the number.
            return Result(filter_result(Filtered(error=str(e)), None), "bad")
        return Result(filter_result(answer, args), "error" if answer.error else "ok")

    async def prioritize(self, content: bytes) -> Result:
        """HostPriorityList has no place for an error."""
        try:
            args = parse_nodes_args(content, self.state.policy.names)
        except Corrupt as e:
            return bad_request(e)
        if not args.pod.containers:
            return Result(host_priorities([(name, 0) for name in args.names]))
        return Result(host_priorities(await in_steps(self.state.prioritize_steps(args.pod, args.names))))

    async def bind(self, content: bytes) -> Result:
        try:
            args = parse_bind_args(content)
        except Corrupt as e:
            return Result(binding_result(str(e)), "bad")
        self._passed.pop(args.uid, None)
        error = await self.binder.bind(args)
        return Result(binding_result(error), "error" if error else "ok")

    async def preempt(self, content: bytes) -> Result:
        """ExtenderPreemptionResult has no place for an error."""
        try:
            args = await in_steps(parse_preempt_args(content, self.state.policy.names))
        except Corrupt as e:
            return bad_request(e)
        # The nodes where the pod would fit once the victims are gone, each with its victims.
        victims, violations = args.victims, args.violations
        if args.pod.containers:
            # Nobody is evicted while a node that was not named yet has room.
            is_looking = self.waiters.is_looking(args.pod.uid)
            is_room = is_looking and bool(await in_steps(self.state.somewhere_steps(args.pod)))
            victims, violations = (
                ({}, {}) if is_room else await self.preemption.victims(args.pod, args.victims, args.violations)
            )
            # With one node there is no choice left: what the scheduler does next can be known now. The room of a pod that
            # was deleted meanwhile would be kept without end.
            if len(victims) == 1 and self.preemption.unscheduled(args.pod.uid) is not None:
                [(node, uids)] = victims.items()
                self.state.preempted(args.pod, node, uids, self.preemption.clock())
        return Result(await in_steps(preemption_result(victims, violations)))

    # --- filter ---

    async def nodes_for(self, args: NodesArgs) -> Filtered:
        """Where the pod fits. A pod that asks for nothing of ours fits everywhere."""
        # A scheduler without managedResources sends every pod.
        if not args.pod.containers:
            return Filtered(fitting=list(args.names))
        if self.reserves_at_filter:
            return await self._filter_and_reserve(args)
        # Another filter, or a plugin, may have refused the node that was answered before.
        is_again = args.pod.uid in self._passed
        found = await self._filter(args)
        # The reasons of the others do not count where a node fits. This was measured with 1.36 for pods that were then
        # scheduled; where none fits, none is left out.
        if self.most_fitting and found.fitting and not is_again:
            return Filtered(fitting=await self._best(args, found.fitting))
        return found

    async def _filter(self, args: NodesArgs) -> Filtered:
        found = await in_steps(self.state.filter_steps(args.pod, args.names))
        # Where the pod fits somewhere, the scheduler binds it or tries again by itself.
        if found.fitting:
            self.waiters.answered(args.pod.uid)
        else:
            self.waiters.answered(args.pod.uid, found.over_quota, self._parts(args.names))
            # A scheduler that binds by itself is another one, whose pods may not be meant to preempt. Nodes that were not
            # named yet come first; once all were, those with room have failed the scheduler's own filters.
            if not self.reserves_at_filter and not self.waiters.is_looking(args.pod.uid):
                self.preemption.refused(args.pod, list(found.failed))
        for verdict, nodes in (("fits", found.fitting), ("failed", found.failed), ("unresolvable", found.unresolvable)):
            self.metrics.count("filtered_nodes", verdict, times=len(nodes))
        if found.fitting and not self.reserves_at_filter:
            self._passed[args.pod.uid] = None
            # The oldest are dropped: many were deleted before anybody bound them.
            if len(self._passed) > MAX_PASSED:
                del self._passed[next(iter(self._passed))]
        return found

    def _parts(self, names: Sequence[str]) -> int:
        """How many such parts the cluster is, 0 where every node was looked at."""
        known = self.state.known_names()
        if len(names) < SCHEDULERS_LEAST or known <= set(names):
            return 0
        return 1 + len(known) // len(names)

    async def _best(self, args: NodesArgs, fitting: list[str]) -> list[str]:
        """The nodes of the least cost: kube-scheduler's own criteria choose among them, and one node it neither scores nor
        asks us to score. A pod with preferences of its own gets all nodes; where kube-scheduler would rather avoid one of
        the best, the nodes of the lowest costs."""
        if args.prefers_nodes:
            return fitting
        costs = await in_steps(self.state.costs_steps(args.pod, fitting))
        known = [(cost, number) for number, cost in enumerate(costs) if cost is not None]
        # All were taken since they were asked about. Bind says why, and the scheduler tries again; it would wait for an
        # event after an answer without nodes.
        if not known:
            return fitting[: self.most_fitting]
        least = min(known)[0]
        best = [fitting[number] for cost, number in known if cost == least]
        if not any(map(self.state.is_avoided, best)):
            return best[: self.most_fitting]
        # Where the cost is the same, the first in the scheduler's order, which begins elsewhere each time.
        return [fitting[number] for _, number in nsmallest(self.most_fitting, known)]

    async def _filter_and_reserve(self, args: NodesArgs) -> Filtered:
        """One node, where the GPUs are reserved."""
        pod = args.pod
        # Filtered again, so the scheduler has not bound it to the node that it was given: what is reserved there is
        # free.
        self.binder.release(pod.uid)
        known = self.state.reservation(pod.uid)
        # A scheduler asks about unscheduled pods only: its cache lags behind the bind.
        if known is not None and known.stage is not Stage.ASSUMED:
            return Filtered(error=f"pod {pod.namespace}/{pod.name} is on node {known.node} already")
        found = await self._filter(args)
        if not found.fitting:
            return found
        # The name breaks ties, so that the same cluster gives the same node.
        best, _ = min(self.state.prioritize(pod, found.fitting), key=lambda one: (-one[1], one[0]))
        error = await self.binder.reserve(pod, best)
        if error:
            return Filtered(error=f"cannot reserve GPUs of node {best} for pod {pod.namespace}/{pod.name}: {error}")
        others = {name: f"the pod is reserved on node {best}" for name in found.fitting if name != best}
        # One node alone: a scheduler that binds by itself must take the one with the reservation.
        return Filtered(fitting=[best], failed={**found.failed, **others}, unresolvable=found.unresolvable)
