"""The label by which a Service selects the leader: on the leader's own pod, and on no other of its Deployment.

Readiness cannot carry it: an update or a drain waits until every replica is ready, and only one leads. The label is
checked while the process runs, for other clients and late requests may change it. No decision depends on it: a replica
that does not lead refuses every request. State owned: whether this process may have left the label on its pod.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NoReturn

import structlog
from msgspec import Struct

from gpushare_agent.cluster.kube.client import pods
from gpushare_agent.cluster.kube.cluster import ClusterApi
from gpushare_agent.cluster.kube.pods import mapping_or_empty, pod_uid
from gpushare_agent.extender.leader_election import AlwaysLeads, LeaderElection
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.errors import AgentError, Conflict, NotFound
from gpushare_agent.model.names import PodUid

log = structlog.get_logger(__name__)

ROLE_LABEL = "gpushare-agent/role"
LEADER = "leader"
APP_LABEL = "app.kubernetes.io/name"
"""What the pods of one Deployment have in common, and others of the namespace have not."""
CHECK_PERIOD_S = 30.0
ROUND_TIMEOUT_S = 15.0
WITHDRAW_TIMEOUT_S = 2.0
_CURE = "POD_NAME and POD_NAMESPACE must name this pod, and the service account needs get, list and patch on pods"


class LeaderLabel(Struct, kw_only=True, eq=False):
    """`run` once; `withdraw` after it has ended. `namespace` and `name` are those of this process's own pod."""

    api: ClusterApi
    election: LeaderElection | AlwaysLeads
    namespace: str
    name: str
    backoff: Backoff = Backoff(base_s=0.5, cap_s=CHECK_PERIOD_S)
    check_period_s: float = CHECK_PERIOD_S
    _may_be_left: bool = True
    """An earlier container of this pod may have died with it."""

    async def run(self) -> NoReturn:
        """Keep the label on the leader alone, until cancelled."""
        failures = 0
        while True:
            term, is_leading = self.election.term, self.election.leads()
            try:
                async with asyncio.timeout(ROUND_TIMEOUT_S):
                    await (self._claim() if is_leading else self._drop())
                failures, pause_s = 0, self.check_period_s
            except (AgentError, TimeoutError) as e:
                failures += 1
                pause_s = self.backoff.delay_s(failures)
                self._log_failure(is_leading, str(e) or "the API server did not answer in time", pause_s)
            try:
                async with asyncio.timeout(pause_s):
                    await self.election.wait_change(term, is_leading)
            except TimeoutError:
                continue

    async def withdraw(self) -> None:
        """Take the label off before the process ends: the pod may outlive it."""
        try:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self._drop()
        except (AgentError, TimeoutError) as e:
            log.info("leader_label_not_removed", error=str(e), then="the next leader removes it")

    async def _claim(self) -> None:
        """First from the others, then on our own: a moment without a leader's label costs less than two."""
        own = await self.api.get_pod(self.namespace, self.name)
        uid, labels = pod_uid(own), mapping_or_empty(own["metadata"].get("labels"))
        app = labels.get(APP_LABEL)
        if isinstance(app, str) and app:
            await self._strip_others({APP_LABEL: app, ROLE_LABEL: LEADER})
        self._may_be_left = True
        if labels.get(ROLE_LABEL) != LEADER and self.election.leads():
            await self.api.patch_pod_labels(self.namespace, self.name, uid, {ROLE_LABEL: LEADER})
            log.info("leader_labelled", pod=f"{self.namespace}/{self.name}", label=f"{ROLE_LABEL}={LEADER}")

    async def _strip_others(self, labels: Mapping[str, str]) -> None:
        others: dict[str, PodUid] = {}

        def read(raw: dict[str, Any]) -> str:
            uid, name = pod_uid(raw), str(raw["metadata"].get("name", ""))
            if name not in ("", self.name):
                others[name] = uid
            return name

        selector = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
        await self.api.list_all(pods(self.namespace, labels=selector), read)
        for name, uid in sorted(others.items()):
            if not self.election.leads():
                return
            try:
                await self.api.patch_pod_labels(self.namespace, name, uid, {ROLE_LABEL: None})
            except (NotFound, Conflict):
                continue  # gone, and its label with it
            log.info("former_leader_unlabelled", pod=f"{self.namespace}/{name}")

    async def _drop(self) -> None:
        if not self._may_be_left:
            return
        own = await self.api.get_pod(self.namespace, self.name)
        uid = pod_uid(own)
        if ROLE_LABEL in mapping_or_empty(own["metadata"].get("labels")):
            await self.api.patch_pod_labels(self.namespace, self.name, uid, {ROLE_LABEL: None})
        self._may_be_left = False

    def _log_failure(self, is_leading: bool, error: str, pause_s: float) -> None:
        then = "the Service may not find this leader" if is_leading else "the next leader removes the label"
        log.warning(
            "leader_label_not_written",
            pod=f"{self.namespace}/{self.name}",
            error=error,
            then=then,
            cure=_CURE,
            retried_in_s=round(pause_s, 1),
        )
