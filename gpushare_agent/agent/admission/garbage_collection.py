"""Releases what ended, and keeps the allocation cache equal to the kubelet's records.

Level, not edge: a pod's end is handled at once when its event comes, and by the next reconcile in any case.

State owned: the deleted pods whose processes may still run, the containers that were missing at the last reconcile,
what the kubelet listed at the start, the pods whose allocations changed since then or since the present reconcile began, and
the pods that agreed with the kubelet's records.

The kubelet is asked by Get where it has it (1.34 and later); else by List, through the gate, between admissions. A List by
any client can give a device ID of another plugin away twice, a Get cannot. The records of a pod that has started change no
more until it ends or the kubelet restarts, so one that agreed with them is asked about again rarely, and the first
reconcile takes those that the ledger was rebuilt from for what a Get would answer.

The kubelet allocates a force-deleted pod's devices again while its processes still run (measured): `Cgroups` says
whether they do. The pod's cgroup directory has its UID in its name whatever the driver, version, QoS class or nesting, and
exists until the kubelet has cleaned up; what counts is whether a process is in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NoReturn

import structlog
from msgspec import Struct, field

from gpushare_agent.agent.admission.decisions.recovery import (
    CorrectionKind,
    Evidence,
    Reconciliation,
    Records,
    rebuild,
    reconcile,
)
from gpushare_agent.agent.cluster.pod_store import NodePods
from gpushare_agent.agent.kubelet.pod_resources import PodResourcesClient, PodResourcesGate
from gpushare_agent.agent.kubelet.records import CheckpointEntry, KubeletCheckpoint, ListedPod
from gpushare_agent.agent.node import Node
from gpushare_agent.agent.runtime.cgroups import Cgroups
from gpushare_agent.core.kit.supervision import Reconciler, ReportOnce, run_together, wait_for
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import AgentError, NotFound, Rejected, Unavailable
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import Pod

log = structlog.get_logger(__name__)

GETS_AT_ONCE = 5
GET_PAUSE_S = 0.1
"""So many Gets, then a pause: the kubelet allows 100 calls a second, ten of them at once, and admissions need theirs.
One at a time they take twice the processor time, because each wakes the process up (docs/reference/measurements.md)."""
RECHECKED_PODS = 5
"""So many of the pods that agreed are asked about in each reconcile, the longest unasked first: 100 pods in ten minutes."""
QUIET_WAIT_S = 10.0
"""How long a reconcile waits for admissions to pause before it leaves it to the next period."""
DELETED_RETRY_S = 1.0
RELEASE_WAIT_S = 0.3
STATIC_PODS_S = 2.0
_LONG_AGO = float("-inf")
"""`allocated_at` of what the kubelet's records show: it is only compared with the last moments."""
TRUST_AFTER_S = 10.0
FRESH_S = 2.0
"""The kubelet records an allocation shortly after our answer; younger ones are not compared with its records."""
REGISTERED_S = 0.3
"""Longer than registering takes where there is a kubelet."""


class GarbageCollection(Struct, kw_only=True, eq=False):
    """One per agent, subscribed to the pod store (`pod_changed`) and the allocation cache (`allocation_changed`).

    `kubelet_age_s` is how long the kubelet has been up, None where it is down; with one younger than
    TRUST_AFTER_S nothing is released, because it lists a pod only after it has admitted it again.
    """

    node: Node
    static_pods: NodePods
    gate: PodResourcesGate
    pod_resources: PodResourcesClient
    checkpoint: KubeletCheckpoint
    cgroups: Cgroups
    kubelet_age_s: Callable[[], float | None]
    clock: Callable[[], float] = time.monotonic
    has_pod_resources: bool = True
    fresh_s: float = FRESH_S
    on_reconciled: Callable[[], None] = lambda: None
    _deleted: set[PodUid] = field(default_factory=set)
    _releases: Reconciler = field(default_factory=Reconciler)
    _has_released: asyncio.Event = field(default_factory=asyncio.Event)
    _processes_unknown: ReportOnce = field(default_factory=ReportOnce)
    _still_running: ReportOnce = field(default_factory=ReportOnce)
    _missing: frozenset[ContainerKey] = frozenset()
    _reconciler: Reconciler = field(default_factory=Reconciler)
    _changed_pods: set[PodUid] = field(default_factory=set)
    _recovered: dict[tuple[str, str], ListedPod] = field(default_factory=dict)
    _agreed: dict[PodUid, tuple[bool, Sequence[Allocation]]] = field(default_factory=dict)
    """Whether they had ended, and what they had; the longest unasked first."""

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """Releases an ended pod's allocations at once. For PodStore.subscribe."""
        if new is not None and new.is_terminal:
            self._release(new.uid, "terminal")
        # Not released at once: a pod that was deleted by force is gone from the API server while its processes still
        # run.
        elif new is None and old is not None and self.node.cache.of_pod(old.uid):
            self._deleted.add(old.uid)
            self._releases.request()

    def allocation_changed(self, old: Allocation | None, new: Allocation | None) -> None:
        """Notes the pod for the next comparison or one that is under way, and wakes those who wait for a release. For
        AllocationCache.subscribe."""
        if (one := new or old) is not None:
            self._changed_pods.add(one.key.pod_uid)
        if new is None:
            self._has_released.set()

    def kubelet_restarted(self) -> None:
        """Its records may be others now."""
        self._agreed.clear()
        self._recovered.clear()

    def request_reconcile(self) -> None:
        """Reconciles as soon as possible, not at the next period: the pod store has listed."""
        self._reconciler.request()

    async def recover(self, registered: asyncio.Event | None = None) -> int:
        """Rebuild the cache from what the kubelet has on record; returns the number of containers. The records are asked
        for at once, and decoded when the plugins are `registered`, or after REGISTERED_S.

        For the start, before the plugins register: no admission of ours can be under way. While the kubelet is down the
        checkpoint is the only record.
        """
        checkpoint = await self._read_checkpoint()
        listed: list[ListedPod] = []
        try:
            if self.has_pod_resources:
                async with self.gate.quiet_list("recovery", wait_s=1.0) as entries:
                    pass
                # A full node's records hold the loop for half a second, and the kubelet rejects pods until it has plugins.
                if registered is not None:
                    await wait_for(registered, REGISTERED_S)
                listed = [entry.decoded() for entry in entries]
        except AgentError as e:
            log.warning("pod_resources_unavailable", purpose="recovery", error=str(e))
        records = Records(listed=listed, checkpoint=self.checkpoint.ours(checkpoint), pods=self._known_pods())
        # _LONG_AGO: what was recovered is not fresh, so the first reconcile may correct it.
        self.node.cache.replace_all(rebuild(records, self.node.names, self.node.gpus(), _LONG_AGO))
        self._recovered = {(pod.namespace, pod.name): pod for pod in listed}
        self._changed_pods.clear()
        return len(self.node.cache)

    async def run(self) -> NoReturn:
        """Releases deleted pods when their event comes, and reconciles every period, until cancelled."""
        release = partial(self._releases.run, self.release_deleted, lambda: DELETED_RETRY_S if self._deleted else None)
        period_s = self.node.settings.allocation.check_period_s
        reconcile = partial(self._reconciler.run, self.reconcile, lambda: period_s)
        # Two tasks: an admission may wait for a release, and a reconcile waits for admissions to pause.
        await run_together({"release deleted pods": release, "reconcile": reconcile})

    async def release_deleted(self) -> None:
        """Release the deleted pods, unless their processes still run."""
        for uid in sorted(self._deleted):
            # The pod may be back: a watch that began again can deliver a pod's deletion and the pod again.
            if self.node.pods.get(uid) is None and await self._may_have_processes(uid):
                continue
            self._deleted.discard(uid)
            self._still_running.is_over(uid)
            # Asked again after the await.
            if self.node.pods.get(uid) is None:
                self._release(uid, "deleted")

    async def _may_have_processes(self, uid: PodUid) -> bool:
        try:
            has_processes = await self.cgroups.has_processes_in_thread(uid)
        except Unavailable as e:
            if self._processes_unknown.is_new("unavailable"):  # of whichever pod: it is one file system
                log.warning("share_kept", pod_uid=uid, because="its processes cannot be read", error=str(e))
            return True
        self._processes_unknown.is_over()
        if has_processes and self._still_running.is_new("", uid):
            log.info("share_kept", pod_uid=uid, because="processes of the deleted pod still run")
        return bool(has_processes)

    async def wait_for_release(self) -> bool:
        """Wait a moment for allocations of pods that are ending; True when one was released."""
        is_ending = any((pod := self.node.pods.get(a.key.pod_uid)) is None or pod.is_deleting for a in self.node.cache)
        if not is_ending and not self._deleted:
            return False
        # Cleared before the request: a release that it causes must not be lost.
        self._has_released.clear()
        self._releases.request()
        return await wait_for(self._has_released, RELEASE_WAIT_S)

    async def reconcile(self) -> None:
        """Compare the cache with the kubelet and correct it. A kubelet that cannot be asked changes nothing."""
        # Before the checkpoint and the List: what they show is compared with pods that are at least as old.
        if self.node.pods.is_synced and self._may_lack_static_pods():
            await self.static_pods.refresh_static(timeout_s=STATIC_PODS_S)
        if not self.has_pod_resources:
            # Like an empty List, which releases nothing: recovered pods get their names, those that end are freed.
            self._apply(self._decide([], await self._read_checkpoint(), None))
            return
        try:
            # None counts as having it: trying is how it becomes known.
            if self.pod_resources.has_get is False or not await self._reconcile_by_get():
                checkpoint = await self._read_checkpoint()
                async with self.gate.quiet_list("reconcile", wait_s=QUIET_WAIT_S) as entries:
                    self._apply(self._decide([entry.decoded() for entry in entries], checkpoint, None))
        except AgentError as e:
            log.warning("reconcile_failed", error=str(e))
        finally:
            self._recovered = {}

    def _may_lack_static_pods(self) -> bool:
        """Whether a static pod may be missed: of one without a mirror pod no event comes, neither its end nor, after the
        agent's start, that it is there."""
        return any(pod.object_uid is None for pod in self.node.pods.pods()) or any(
            self.node.pods.get(allocation.key.pod_uid) is None for allocation in self.node.cache
        )

    async def _reconcile_by_get(self) -> bool:
        """False if the kubelet has no Get. Pods with allocations that change meanwhile are left for the next time."""
        if not self.node.pods.is_synced:
            return False
        # The records of a container that has started, and whose allocation is still what was read from them, are the same.
        known = {
            pod.uid: record
            for pod in (self.node.pods.pods() if self._recovered else ())
            if pod.has_started and pod.uid not in self._changed_pods and self.node.cache.of_pod(pod.uid)
            if (record := self._recovered.get((pod.namespace, pod.name))) is not None
        }
        self._changed_pods.clear()
        listed = list(known.values())
        asked = self._pods_to_ask()
        # Also of pods that are gone: the kubelet may answer with one of them, by the name of a pod that is there now.
        others = {pod.uid for pod in self.node.pods.pods()}.difference(pod.uid for pod in asked)
        checkpoint = await self._read_checkpoint(others)
        for number, pod in enumerate([pod for pod in asked if pod.uid not in known], start=1):
            try:
                listed.append((await self.pod_resources.get_pod(pod.namespace, pod.name, timeout_s=2.0)).decoded())
            # That is an answer: the kubelet has no such pod, so nothing is listed of it.
            except NotFound:
                pass
            except Rejected:
                return False
            # The kubelet allows 100 calls a second to all its clients together, and an admission's List is one of them.
            if number % GETS_AT_ONCE == 0:
                await asyncio.sleep(GET_PAUSE_S)
        # No await from here on: what is compared is of one moment.
        if not self.gate.is_idle:
            return True  # an admission is under way: cache and kubelet may differ for a moment
        deleted = {a.key.pod_uid for a in self.node.cache if self.node.pods.get(a.key.pod_uid) is None}
        scope = ({pod.uid for pod in asked} - self._changed_pods) | deleted
        in_scope = {(p.namespace, p.name) for uid in scope if (p := self.node.pods.get(uid)) is not None}
        result = self._decide([p for p in listed if (p.namespace, p.name) in in_scope], checkpoint, scope)
        self._apply(result)
        self._note_agreed(scope, result)
        return True

    def _pods_to_ask(self) -> Sequence[Pod]:
        """The pods that may differ from the kubelet's records, and some of those that agreed with them."""
        pods = [p for p in self.node.pods.pods() if self.node.names.wants_any(p) or self.node.cache.of_pod(p.uid)]
        agree = {p.uid for p in pods if self._agreed.get(p.uid) == (p.is_terminal, self.node.cache.of_pod(p.uid))}
        self._agreed = {uid: agreed for uid, agreed in self._agreed.items() if uid in agree}
        # A dict keeps the order of insertion: the first are those that were not asked about for longest.
        left = agree - set(list(self._agreed)[:RECHECKED_PODS])
        return [pod for pod in pods if pod.uid not in left]

    def _note_agreed(self, scope: set[PodUid], result: Reconciliation) -> None:
        """Notes the pods that agreed, unless the kubelet has just started, the pod has not started yet, or the records may
        lag."""
        differ = {c.key.pod_uid for c in result.corrections} | {key.pod_uid for key in result.missing}
        age_s = self.kubelet_age_s()
        is_trusted = age_s is not None and age_s >= TRUST_AFTER_S
        for uid in sorted(scope):
            self._agreed.pop(uid, None)
            pod, allocations = self.node.pods.get(uid), self.node.cache.of_pod(uid)
            if uid in differ or pod is None or not (pod.has_started or pod.is_terminal):
                continue
            if is_trusted and not any(self._is_fresh(allocation) for allocation in allocations):
                self._agreed[uid] = pod.is_terminal, allocations

    def _decide(
        self, listed: Sequence[ListedPod], checkpoint: Sequence[CheckpointEntry], scope: set[PodUid] | None
    ) -> Reconciliation:
        pods = self._known_pods()
        age_s = self.kubelet_age_s()
        # The checkpoint has all pods: those that were not asked about would look as if they were not listed.
        entries = self.checkpoint.ours(e for e in checkpoint if scope is None or e.pod_uid in scope)
        records = Records(listed=listed, checkpoint=entries, pods=pods)
        evidence = Evidence(
            listed=listed,
            rebuilt=rebuild(records, self.node.names, self.node.gpus(), _LONG_AGO),
            pods=None if pods is None else {pod.uid: pod for pod in pods},
            scope=scope,
            is_trusted=age_s is not None and age_s >= TRUST_AFTER_S,
            missing_before=self._missing,
            fresh={a.key for a in self.node.cache if self._is_fresh(a)},
        )
        return reconcile(self.node.cache.view(), evidence)

    def _is_fresh(self, allocation: Allocation) -> bool:
        return self.clock() - allocation.allocated_at < self.fresh_s

    def _apply(self, result: Reconciliation) -> None:
        for correction in result.corrections:
            if correction.kind is not CorrectionKind.NAMED:  # every restart brings these
                self.node.metrics.reconcile_corrected(correction.kind.value)
                log.warning(
                    "allocation_corrected",
                    kind=correction.kind.value,
                    pod_uid=correction.key.pod_uid,
                    container=correction.key.container,
                )
            if correction.allocation is not None:
                self.node.cache.put(correction.allocation)
            else:
                self.node.cache.release(correction.key)
        self._changed_pods.clear()
        # All of it, even if it is empty: only two polls in a row count.
        self._missing = result.missing
        self._deleted |= result.deleted
        if result.deleted:
            self._releases.request()
        self.on_reconciled()

    def _release(self, uid: PodUid, reason: str) -> None:
        for old in self.node.cache.release_pod(uid):
            log.info(
                "share_freed",
                reason=reason,
                pod_uid=uid,  # the kubelet's checkpoint, which may be all that is known, has no names
                namespace=old.namespace,
                pod=old.pod_name,
                container=old.key.container,
                gpus=list(old.gpus),
                resources={
                    (old.gpu_resource if kind.is_part else self.node.names.name(kind)) or kind.value: len(ids)
                    for kind, ids in old.ids.items()
                },
            )

    def _known_pods(self) -> tuple[Pod, ...] | None:
        return self.node.pods.pods() if self.node.pods.is_synced else None

    async def _read_checkpoint(self, without: Collection[PodUid] = ()) -> Sequence[CheckpointEntry]:
        try:
            return await self.checkpoint.read(without)
        except AgentError as e:
            log.debug("kubelet_checkpoint_unreadable", error=str(e))
            return ()
