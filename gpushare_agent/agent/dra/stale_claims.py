"""Ends claims that neither the API server nor the kubelet knows any more.

The kubelet unprepares each claim that it had prepared, also after a restart and after a forced deletion. It does not if
it has lost its own state: the node was reset, or joined another cluster. A claim is stale when its object is gone, no
pod of the node uses it and, once it was prepared, its pods are known to have no process, at two polls in a row.

State owned: the claims that were missing at the last poll, and the pods seen to use a claim since it was prepared.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

import structlog

from gpushare_agent.agent.dra.claims import Claims
from gpushare_agent.agent.runtime.cgroups import Cgroups
from gpushare_agent.core.claims.claim import claim_ref
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.model.allocations import ClaimRef
from gpushare_agent.core.model.errors import AgentError, NotFound
from gpushare_agent.core.model.names import PodUid

log = structlog.get_logger(__name__)

PERIOD_S = 60.0
"""The kubelet's own reconciliation, after which it unprepares what it missed, has the same."""


class StaleClaims:
    """`run` once."""

    def __init__(self, claims: Claims, cgroups: Cgroups) -> None:
        self._claims = claims
        self._cgroups = cgroups
        self._missing: set[str] = set()
        self._users: dict[str, set[PodUid]] = {}

    async def run(self, api: KubeApi) -> NoReturn:
        """Polls every PERIOD_S until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.poll(api)

    async def poll(self, api: KubeApi) -> None:
        """Each claim once. What cannot be read now is read at the next poll."""
        # Without the list every claim would look as if no pod used it.
        if not self._claims.node.pods.is_synced:
            return
        missing = set()
        prepared = dict(self._claims.prepared)
        self._users = {uid: self._users.get(uid, set(claim.users)) for uid, claim in prepared.items()}
        refs = {**self._claims.asked, **{uid: claim.ref for uid, claim in prepared.items()}}
        for uid, ref in refs.items():
            try:
                if not await self._is_missing(api, ref):
                    continue
                missing.add(uid)
                # At the second poll in a row: a claim may be prepared a moment before the watch delivers its pod.
                if uid in self._missing:
                    await self._claims.unprepare(ref)
                    log.warning("stale_claim_released", namespace=ref.namespace, claim=ref.name, claim_uid=uid)
            except AgentError as e:
                log.debug("claim_not_polled", claim_uid=uid, error=str(e))
        self._missing = missing

    async def _is_missing(self, api: KubeApi, ref: ClaimRef) -> bool:
        users = self._users.get(ref.uid)
        using = {
            pod.uid
            for pod in self._claims.node.pods.pods()
            if pod.namespace == ref.namespace and ref.name in pod.claims.values()
        }
        if using:
            if users is not None:
                users |= using
            return False
        try:
            raw = await api.get_claim(ref.namespace, ref.name)
            # Another UID is another claim of the same name: ours is gone.
            if claim_ref(raw).uid == ref.uid:
                return False
        except NotFound:
            pass
        if users is None:
            return True  # never prepared: no process has it
        # Without a known user nothing says whose processes to look for, so the claim stays. None is no answer either.
        return bool(users) and all([await self._cgroups.has_processes_in_thread(user) is False for user in users])
