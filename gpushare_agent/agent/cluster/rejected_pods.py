"""Deletes pods that the kubelet rejected over our resources and that their controller has long replaced.

A ReplicaSet replaces a rejected pod at once, about ten a second and without back-off, and the Failed pods stay: hundreds
of objects that hide the reason instead of showing it. The newest few per controller stay for a person to read. Only pods of
controllers that replace pods and do not count failures are deleted: a Job counts them, and a DaemonSet's or StatefulSet's
controller deletes failed pods itself (StatefulSet is in the default for clusters whose controller lags). A setting turns
it off. State owned: the times of the latest deletions.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, NoReturn

import structlog
from msgspec import Struct, field

from gpushare_agent.agent.cluster.pod_store import PodStore
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.model.errors import AgentError, Conflict, NotFound
from gpushare_agent.core.model.pods import Pod, PodPhase, version_number

if TYPE_CHECKING:
    from gpushare_agent.agent.observability.metrics.agent import AgentMetrics

log = structlog.get_logger(__name__)

REPLACING_CONTROLLERS = ("ReplicaSet", "StatefulSet")
ADMISSION_REASON = "UnexpectedAdmissionError"
"""The kubelet's reason for a pod whose devices it could not get."""
MINUTE_S = 60.0


class RejectedPods(Struct, kw_only=True, eq=False):
    """Every `period_s` deletes what `plan_deletions` names, at most `per_minute` in any minute."""

    pods: PodStore
    resources: Collection[str]
    per_minute: int = 30
    metrics: AgentMetrics
    period_s: float = 5.0
    clock: Callable[[], float] = time.monotonic
    _deleted_at: deque[float] = field(default_factory=deque)

    async def run(self, api: KubeApi) -> NoReturn:
        """Clean up until cancelled."""
        while True:
            try:
                # On the store's pods, not on a list: nothing is asked of the API server as long as nothing is to be
                # deleted.
                await self._clean(api)
            except AgentError as e:
                log.warning("rejected_pods_not_deleted", error=str(e), then="tried again")
            await asyncio.sleep(self.period_s)

    async def _clean(self, api: KubeApi) -> None:
        for pod in plan_deletions(self.pods.pods(), resources=self.resources):
            while self._deleted_at and self.clock() - self._deleted_at[0] >= MINUTE_S:
                self._deleted_at.popleft()
            if len(self._deleted_at) >= self.per_minute:
                return
            # Before the request: one without an answer may have deleted the pod.
            self._deleted_at.append(self.clock())
            try:
                # By UID: the name may be a new pod's by now.
                await api.delete_pod(pod.namespace, pod.name, pod.uid)
            except (NotFound, Conflict):
                continue  # deleted already, or another pod has the name now
            self.metrics.rejected_pod_deleted()
            log.info("rejected_pod_deleted", pod=f"{pod.namespace}/{pod.name}", uid=pod.uid, message=pod.message)


def plan_deletions(pods: Iterable[Pod], *, resources: Collection[str], keep: int = 3) -> list[Pod]:
    """The rejected pods to delete, the oldest first: all but the newest `keep` of each controller."""
    groups: defaultdict[tuple[str, str, str], list[Pod]] = defaultdict(list)
    for pod in pods:
        # A pod that is being deleted is no longer there to be read, so it does not count among the newest.
        if pod.controller_kind in REPLACING_CONTROLLERS and is_rejected_over(pod, resources) and not pod.is_deleting:
            # A pod's name is its controller's with a suffix, which is all that the group needs.
            groups[pod.namespace, pod.controller_kind, pod.name.rpartition("-")[0]].append(pod)
    spare = [pod for group in groups.values() for pod in sorted(group, key=_age)[: max(len(group) - keep, 0)]]
    return sorted(spare, key=_age)


def is_rejected_over(pod: Pod, resources: Collection[str]) -> bool:
    """Whether the kubelet rejected the pod for want of one of these resources.

    The kubelet names the resource where it decided itself, and quotes the plugin ("rpc error") where the plugin did. A
    pod that asks for another plugin's devices too and was rejected by that one is not distinguished.
    """
    return (
        pod.phase is PodPhase.FAILED
        and pod.reason == ADMISSION_REASON
        and any(pod.requests_any(resource) for resource in resources)
        # `rpc error: code = …` is how the kubelet quotes what a device plugin refused.
        and ("rpc" in pod.message or any(resource in pod.message for resource in resources))
    )


def _age(pod: Pod) -> tuple[int, str, str]:
    """Old before new: a rejected pod's resourceVersion is that of its rejection."""
    return (version_number(pod.resource_version), pod.namespace, pod.name)
