"""Wakes pods whose claims the kubelet could not prepare: it tries again at once when anything of the pod object changes.

Without it such a pod waits for the kubelet's next full sync, 60 to 90 s (measured on 1.36). Three causes: an error of ours,
and what fails before the kubelet calls any driver: the API server does not know yet that the claim is of a pod on this node,
or the driver has not registered yet. So a pod is woken while it is scheduled here, none of its containers has started, and a
claim of it that is allocated by this driver has no final answer for this pod: after `FIRST_S`, then less and less often.

State owned: the pods that wait, and when each is next due.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn

import structlog
from msgspec import Struct, field

from gpushare_agent.agent.dra.claims import Claims
from gpushare_agent.core.kit.supervision import wait_for
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.model.errors import AgentError, Conflict, Corrupt, NotFound
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import Pod

log = structlog.get_logger(__name__)

ANNOTATION = "gpushare-agent/claims-retry-at"
"""Unix time in nanoseconds: only that it changes matters."""
FIRST_S = 1.5
"""The kubelet's first call comes within a second of the pod's binding."""
GROWTH = 2.0
MOST_S = 30.0
PER_SECOND = 20.0
POLL_S = 0.5


class _Waiting(Struct):
    due_at: float
    pause_s: float = FIRST_S


class PodWaker(Struct, kw_only=True, eq=False):
    """`pod_changed` for PodStore.subscribe; `run` once."""

    claims: Claims
    clock: Callable[[], float] = time.monotonic
    _waiting: dict[PodUid, _Waiting] = field(default_factory=dict)
    _has_waiting: asyncio.Event = field(default_factory=asyncio.Event)

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        pod = new or old
        if pod is None or not pod.claims:
            return
        if new is None or new.is_terminal or new.is_deleting or new.has_started:
            self._waiting.pop(pod.uid, None)
        # Its own annotation changes the pod: it must not put off when it is due again.
        elif new.uid not in self._waiting:
            self._waiting[new.uid] = _Waiting(self.clock() + FIRST_S)
            self._has_waiting.set()

    async def run(self, api: KubeApi) -> NoReturn:
        """Wakes the pods that are due, until cancelled."""
        while True:
            if not self._waiting:
                self._has_waiting.clear()
                await wait_for(self._has_waiting, None)
            for uid in [uid for uid, one in self._waiting.items() if one.due_at <= self.clock()]:
                await self._consider(api, uid)
            await asyncio.sleep(POLL_S)

    async def _consider(self, api: KubeApi, uid: PodUid) -> None:
        pod, one = self.claims.node.pods.get(uid), self._waiting.get(uid)
        if pod is None or one is None:
            self._waiting.pop(uid, None)
            return
        # Moved on before the calls: one that fails waits longer too.
        one.pause_s = min(MOST_S, one.pause_s * GROWTH)
        one.due_at = self.clock() + one.pause_s
        try:
            if await self._needs_call(api, pod):
                await api.patch_pod_annotations(pod.namespace, pod.name, pod.uid, {ANNOTATION: str(time.time_ns())})
                log.debug("pod_woken", namespace=pod.namespace, pod=pod.name)
                # Each wake is a write to the API server, and a burst of pods makes many.
                await asyncio.sleep(1 / PER_SECOND)
        # The pod is gone, or another one has its name: there is nobody to wake.
        except (NotFound, Conflict):
            self._waiting.pop(uid, None)
        except AgentError as e:
            log.debug("pod_not_woken", namespace=pod.namespace, pod=pod.name, error=str(e))

    async def _needs_call(self, api: KubeApi, pod: Pod) -> bool:
        """A claim of only another driver is not ours to hurry. One that is prepared for the pod is not read: in a burst most
        pods start long after their claims are prepared."""
        prepared = {
            one.ref.name: one.users for one in self.claims.prepared.values() if one.ref.namespace == pod.namespace
        }
        for name in sorted(set(pod.claims.values())):
            if name in prepared:
                # The kubelet calls once for all pods of a claim and names none: of several, another may have failed.
                if prepared[name] != (pod.uid,):
                    return True
                continue
            raw = await api.get_claim(pod.namespace, name)
            try:
                claim = self.claims.read(raw)
            except Corrupt:
                continue
            if not self.claims.is_answered(claim.ref.uid):
                return True
        return False
