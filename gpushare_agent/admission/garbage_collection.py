"""Frees what ended, and keeps the allocation cache equal to the kubelet's records.

Level, not edge: a pod's end is noticed by its event at once, and by the next reconcile in any case. State: the pods that
are gone but may still have processes, the containers that the last reconcile missed, and the pods whose books changed
since the present one began.

The kubelet is asked by Get where it has it (1.34 and later); else by List, through the gate, between admissions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import structlog

from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.decisions.garbage import Evidence, Reconciliation, reconcile
from gpushare_agent.admission.decisions.recovery import Records, rebuild
from gpushare_agent.kit.supervision import forever
from gpushare_agent.kubelet.pod_resources import PodListing, PodResourcesClient
from gpushare_agent.kubelet.pod_resources_gate import PodResourcesGate
from gpushare_agent.kubelet.records import CheckpointEntry, ListedPod
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.errors import AgentError, NotFound, Rejected, Unavailable
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames

log = structlog.get_logger(__name__)

GETS_AT_ONCE = 5
GET_PAUSE_S = 0.1
"""So many Gets, then a pause: the kubelet allows 100 calls a second, ten of them at once, and admissions need theirs.
One at a time they would take twice the processor time, for each wakes the process up anew (docs/measurements.md)."""
QUIET_WAIT_S = 10.0
"""How long a reconcile waits for admissions to pause before it leaves it to the next period."""
GONE_RETRY_S = 1.0
_LONG_AGO = float("-inf")
"""When what the kubelet has on record was allocated: not in the last moment, which is all that is asked."""
FRESH_S = 2.0
"""The kubelet writes an allocation down shortly after our answer; younger ones are not compared with its records."""


class Pods(Protocol):
    @property
    def is_synced(self) -> bool: ...
    def get(self, uid: PodUid) -> Pod | None: ...
    def pods(self) -> tuple[Pod, ...]: ...


class Checkpoint(Protocol):
    async def read(self) -> Sequence[CheckpointEntry]: ...


class Processes(Protocol):
    async def are_running(self, uid: PodUid) -> bool | None: ...


class GarbageCollection:
    """Run one per agent. `kubelet_age_s` tells how long the kubelet has been up, None where it is down."""

    def __init__(  # noqa: PLR0913 - the composition hands in every collaborator by name
        self,
        *,
        cache: AllocationCache,
        pods: Pods,
        gate: PodResourcesGate,
        pod_resources: PodResourcesClient,
        checkpoint: Checkpoint,
        processes: Processes,
        names: ResourceNames,
        inventory: Callable[[], GpuInventory],
        kubelet_age_s: Callable[[], float | None],
        clock: Callable[[], float],
        period_s: float,
        trust_after_s: float = 10.0,
        fresh_s: float = FRESH_S,
        on_correction: Callable[[str], None] = lambda kind: None,
    ) -> None:
        self._cache = cache
        self._pods = pods
        self._gate = gate
        self._pod_resources = pod_resources
        self._checkpoint = checkpoint
        self._processes = processes
        self._names = names
        self._inventory = inventory
        self._kubelet_age_s = kubelet_age_s
        self._clock = clock
        self._period_s = period_s
        self._trust_after_s = trust_after_s
        self._fresh_s = fresh_s
        self._on_correction = on_correction
        self._gone: set[PodUid] = set()
        self._is_blind = False
        self._missing: frozenset[ContainerKey] = frozenset()
        self._wake = asyncio.Event()
        self._freed = asyncio.Event()
        self._touched: set[PodUid] = set()
        self._due = asyncio.Event()
        self._is_listing = False
        cache.subscribe(self._cache_changed)

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """For PodStore.subscribe: frees an ended pod's share at once."""
        if new is not None and new.is_terminal:
            self._release(new.uid, "terminal")
        elif new is None and old is not None and self._cache.of_pod(old.uid):
            self._gone.add(old.uid)
            self._wake.set()

    def look_now(self) -> None:
        """Reconcile as soon as possible: the pod store has listed, or the kubelet is back."""
        self._due.set()

    async def recover(self) -> int:
        """Rebuild the cache from what the kubelet has on record; returns the number of containers.

        For the start, before the plugins register: no admission of ours can be under way. A kubelet that is down leaves
        the checkpoint alone to tell.
        """
        checkpoint = await self._read_checkpoint()
        listed: list[ListedPod] = []
        try:
            async with self._gate.quiet_list("recovery", wait_s=1.0) as entries:
                listed = [entry.decoded() for entry in entries]
        except AgentError as e:
            log.warning("pod_resources_unavailable", purpose="recovery", error=str(e))
        records = Records(listed=listed, checkpoint=checkpoint, pods=self._known_pods())
        self._cache.replace_all(rebuild(records, self._names, self._inventory(), _LONG_AGO))
        return len(self._cache)

    async def run(self) -> NoReturn:
        """Until cancelled: collect what ended when told, reconcile every period."""
        async with asyncio.TaskGroup() as group:
            # Two tasks: an admission may wait for what is gone to be freed, and a reconcile waits for admissions to pause.
            group.create_task(forever("collecting", self._collect_when_reported), name="collect what is gone")
            group.create_task(forever("reconciling", self._reconcile_when_due), name="reconcile")
        raise AssertionError("unreachable: neither task ends")

    async def _collect_when_reported(self) -> NoReturn:
        while True:
            try:
                async with asyncio.timeout(GONE_RETRY_S if self._gone else None):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await self.collect_gone()

    async def _reconcile_when_due(self) -> NoReturn:
        while True:
            try:
                async with asyncio.timeout(self._period_s):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._due.clear()
            await self.reconcile()

    async def collect_gone(self) -> None:
        """Free the pods that are gone, unless their processes run on."""
        for uid in sorted(self._gone):
            if self._pods.get(uid) is None and await self._runs_on(uid):
                continue
            self._gone.discard(uid)
            if self._pods.get(uid) is None:
                self._release(uid, "deleted")

    async def _runs_on(self, uid: PodUid) -> bool:
        """Whether the gone pod's share must be kept: while its processes run, or while that is not told."""
        try:
            runs = await self._processes.are_running(uid)
        except Unavailable as e:
            if not self._is_blind:  # asked every second, told once
                log.warning("share_kept", pod_uid=uid, because="its processes cannot be looked for", error=str(e))
            self._is_blind = True
            return True
        self._is_blind = False
        if runs:
            log.info("share_kept", pod_uid=uid, because="processes of the deleted pod still run")
        return bool(runs)

    async def settle(self, at_most_s: float = 0.3) -> bool:
        """Wait a moment for shares that are about to be freed; True when one was."""
        ending = [a for a in self._cache if (pod := self._pods.get(a.key.pod_uid)) is None or pod.is_deleting]
        if not ending and not self._gone:
            return False
        self._freed.clear()
        self._wake.set()
        try:
            async with asyncio.timeout(at_most_s):
                await self._freed.wait()
        except TimeoutError:
            return False
        return True

    async def reconcile(self) -> None:
        """Compare the cache with the kubelet and correct it. A kubelet that cannot be asked changes nothing."""
        checkpoint = await self._read_checkpoint()
        try:
            if self._pod_resources.has_get is False or not await self._reconcile_by_get(checkpoint):
                async with self._gate.quiet_list("reconcile", wait_s=QUIET_WAIT_S) as entries:
                    self._apply(self._decide([entry.decoded() for entry in entries], checkpoint, None))
        except AgentError as e:
            log.warning("reconcile_failed", error=str(e))

    async def _reconcile_by_get(self, checkpoint: Sequence[CheckpointEntry]) -> bool:
        """False where the kubelet has no Get. Pods whose books change meanwhile are left for the next time."""
        if not self._pods.is_synced:
            return False
        self._touched.clear()
        self._is_listing = True
        try:
            return await self._get_and_compare(checkpoint)
        finally:
            self._is_listing = False

    async def _get_and_compare(self, checkpoint: Sequence[CheckpointEntry]) -> bool:
        listed: list[ListedPod] = []
        asked: set[PodUid] = set()
        for pod in self._pods.pods():
            if not self._names.wants_any(pod) and not self._cache.of_pod(pod.uid):
                continue
            asked.add(pod.uid)
            try:
                entry: PodListing = await self._pod_resources.get_pod(pod.namespace, pod.name, timeout_s=2.0)
                listed.append(entry.decoded())
            except NotFound:
                pass
            except Rejected:
                return False
            if len(asked) % GETS_AT_ONCE == 0:
                await asyncio.sleep(GET_PAUSE_S)
        if not self._gate.is_idle:
            return True  # an admission is under way: the ledger and the kubelet may differ for a moment
        gone = {a.key.pod_uid for a in self._cache if self._pods.get(a.key.pod_uid) is None}
        scope = (asked - self._touched) | gone
        in_scope = {(p.namespace, p.name) for uid in scope if (p := self._pods.get(uid)) is not None}
        kept = [p for p in listed if (p.namespace, p.name) in in_scope]
        self._apply(self._decide(kept, checkpoint, scope))
        return True

    def _decide(
        self, listed: Sequence[ListedPod], checkpoint: Sequence[CheckpointEntry], scope: set[PodUid] | None
    ) -> Reconciliation:
        pods = self._known_pods()
        age_s = self._kubelet_age_s()
        entries = [e for e in checkpoint if scope is None or e.pod_uid in scope]
        records = Records(listed=listed, checkpoint=entries, pods=pods)
        evidence = Evidence(
            listed=listed,
            rebuilt=rebuild(records, self._names, self._inventory(), _LONG_AGO),
            pods=None if pods is None else {pod.uid: pod for pod in pods},
            scope=scope,
            is_trusted=age_s is not None and age_s >= self._trust_after_s,
            missing_before=self._missing,
            fresh={a.key for a in self._cache if self._clock() - a.allocated_at < self._fresh_s},
        )
        return reconcile(self._cache.view(), evidence)

    def _apply(self, result: Reconciliation) -> None:
        for correction in result.corrections:
            if correction.kind != "named":  # what every restart brings is no correction
                self._on_correction(correction.kind)
                log.warning(
                    "allocation_corrected",
                    kind=correction.kind,
                    pod_uid=correction.key.pod_uid,
                    container=correction.key.container,
                )
            if correction.allocation is not None:
                self._cache.put(correction.allocation)
            else:
                self._cache.release(correction.key)
        self._missing = result.missing
        self._gone |= result.gone
        if result.gone:
            self._wake.set()

    def _release(self, uid: PodUid, reason: str) -> None:
        for old in self._cache.release_pod(uid):
            log.info(
                "share_freed",
                reason=reason,
                namespace=old.namespace,
                pod=old.pod_name,
                container=old.key.container,
                cores=old.cores,
                memory_blocks=old.memory_blocks,
            )

    def _cache_changed(self, old: Allocation | None, new: Allocation | None) -> None:
        if self._is_listing:
            self._touched.update(a.key.pod_uid for a in (old, new) if a is not None)
        if new is None:
            self._freed.set()

    def _known_pods(self) -> tuple[Pod, ...] | None:
        return self._pods.pods() if self._pods.is_synced else None

    async def _read_checkpoint(self) -> Sequence[CheckpointEntry]:
        try:
            return await self._checkpoint.read()
        except AgentError as e:
            log.debug("kubelet_checkpoint_unreadable", error=str(e))
            return ()
