"""Serves the kubelet's admission calls: finds the container of a call, places it on a GPU, checks the IDs.

There is no await between decision and commit, so two Allocates can never allocate the same share. The allocation cache
has two writers, never at once: this service during calls, garbage collection between them.

State owned, between the kubelet's calls: the plans whose Allocate has not come yet, the containers that the pod under
admission has got so far (`PendingAdmissions`), and the pods that were refused (`RefusedPods`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.container_edits import EditPolicy, renumbered
from gpushare_agent.agent.admission.decisions.decide import Decision, check, decide, edits_for_ids
from gpushare_agent.agent.admission.decisions.former_devices import texts
from gpushare_agent.agent.admission.decisions.identity import Call, Target
from gpushare_agent.agent.admission.decisions.ledger import Case, Policy
from gpushare_agent.agent.admission.decisions.recovery import adopt
from gpushare_agent.agent.admission.garbage_collection import GarbageCollection
from gpushare_agent.agent.admission.identification import Identification
from gpushare_agent.agent.admission.outcomes import OutcomeReporter
from gpushare_agent.agent.isolation.isolations import Isolations
from gpushare_agent.agent.kubelet.pod_resources import PodResourcesGate
from gpushare_agent.agent.kubelet.records import KubeletCheckpoint, is_former
from gpushare_agent.agent.node import Node
from gpushare_agent.core.model.allocations import Allocation, ContainerEdits, ContainerKey
from gpushare_agent.core.model.errors import AgentError, RefusalReason, Refused
from gpushare_agent.core.model.names import DeviceId, GpuUuid, PodUid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.resources import ResourceKind, replica_layout, request_of

log = structlog.get_logger(__name__)

RELEASE_WAIT_S = 0.5
"""How long a GetPreferredAllocation waits for the allocations of ending pods, all waits together."""
PLAN_LIFETIME_S = 15.0
"""An Allocate follows its GetPreferredAllocation within milliseconds; an older plan is of a kubelet that stopped."""
_REMEDIED_BY_A_RELEASE = frozenset(
    {
        RefusalReason.DEVICE_IN_USE,
        RefusalReason.FRAGMENTED,
        RefusalReason.NOT_ENOUGH_CORES,
        RefusalReason.NOT_ENOUGH_MEMORY,
    }
)


class PendingAdmissions:
    """State owned: the pending plans, oldest first; the pod under admission and its containers that have an allocation."""

    def __init__(self) -> None:
        self._plans: list[Decision] = []
        self.pod: PodUid | None = None
        """The pod that was under admission last."""
        self._allocated: list[ContainerKey] = []

    def add(self, plan: Decision) -> None:
        """Adds a plan in place of an older one for the same container and resource; plans whose Allocate never came are
        dropped."""
        oldest_at = plan.at - PLAN_LIFETIME_S
        self._plans = [
            p for p in self._plans if p.at > oldest_at and (p.resource, _key(p)) != (plan.resource, _key(plan))
        ]
        self._plans.append(plan)

    def take_exact(self, resource: str, ids: Sequence[DeviceId]) -> Decision | None:
        """Removes and returns the newest pending plan for exactly these IDs."""
        requested = set(ids)
        # A refused plan has no IDs: the kubelet chose by itself, and `take_of_size` finds it.
        planned = [p for p in self._plans if p.resource == resource and p.refused is None]
        return self._take([p for p in planned if set(p.ids) == requested])

    def take_of_size(self, resource: str, size: int) -> Decision | None:
        """Removes and returns the newest pending plan for so many IDs: the kubelet chose others.

        Admissions are serial: several plans are pending only while a container restarts during an admission.
        """
        return self._take([p for p in self._plans if p.resource == resource and p.size == size])

    def is_due(self, now: float) -> bool:
        """An Allocate for a plan has still to come."""
        return any(plan.at > now - PLAN_LIFETIME_S for plan in self._plans)

    def begin(self, uid: PodUid) -> None:
        """A call for this pod: the admission of any other pod is over."""
        if self.pod != uid:
            self.pod = uid
            self._allocated.clear()

    def add_allocated(self, key: ContainerKey) -> None:
        self.begin(key.pod_uid)
        self._allocated.append(key)

    def take_allocated(self, uid: PodUid) -> tuple[ContainerKey, ...]:
        """The containers to which the pod's present admission has allocated, forgotten here; none for another pod."""
        if self.pod != uid:
            return ()
        allocated = tuple(self._allocated)
        self._allocated.clear()
        return allocated

    def clear(self) -> None:
        self._plans.clear()
        self.pod = None
        self._allocated.clear()

    def _take(self, matches: Sequence[Decision]) -> Decision | None:
        if not matches:
            return None
        self._plans.remove(matches[-1])
        return matches[-1]


def _key(plan: Decision) -> ContainerKey | None:
    return plan.target.key if plan.target is not None else None


class RefusedPods(set[PodUid]):
    """Pods whose admission was refused: kubelets up to 1.33 go on listing them, so a call is never for one of these.

    State owned: their UIDs, until the pod is deleted or the kubelet restarts. The admission adds, identification reads.
    """

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """Forgets a pod that is gone. For PodStore.subscribe."""
        if new is None and old is not None:
            self.discard(old.uid)


class Admission(Struct, kw_only=True, eq=False):
    """The handler of the device plugins."""

    node: Node
    gate: PodResourcesGate
    identification: Identification
    policy: Policy
    edits: Callable[[], EditPolicy]
    refused_pods: RefusedPods
    observer: OutcomeReporter
    records: KubeletCheckpoint
    isolation: Isolations
    garbage: GarbageCollection
    clock: Callable[[], float] = time.monotonic
    _pending: PendingAdmissions = field(default_factory=PendingAdmissions)

    async def preferred(
        self, resource: str, available: Collection[DeviceId], must_include: Sequence[DeviceId], size: int
    ) -> Sequence[DeviceId]:
        """The IDs to prefer. Advice only: a refusal is held back for the Allocate, whose error the kubelet shows to the
        user.

        1. The container cannot be identified: its refusal is pending, no advice.
        2. Else `_decide` decides, and the decision is pending.
        3. If capacity lacks while pods are ending, it decides again after each release, for a moment.
        """
        kind = self.node.names.by_name[resource]
        async with self.gate.preferring() as inside:
            found = await self.identification.identify(
                Call(resource=resource, kind=kind, size=size, must_include=frozenset(must_include)), inside
            )
            if isinstance(found, Refused):
                self._pending.add(Decision(resource=resource, size=size, refused=found, at=self.clock()))
                return list(must_include)
            decision = self._decide(found, resource, available, must_include)
            started_at = self.clock()
            while (
                decision.refused is not None
                and decision.refused.reason in _REMEDIED_BY_A_RELEASE
                and self.clock() - started_at < RELEASE_WAIT_S
                and await self.garbage.wait_for_release()  # one was released; several pods may be ending at once
            ):
                decision = self._decide(found, resource, available, must_include)
        return decision.ids if decision.refused is None else list(must_include)

    async def allocate(self, resource: str, ids: Sequence[DeviceId]) -> ContainerEdits | Refused:
        """Allocate the IDs to their container and return what it gets. Does not wait. In this order:

        | the IDs are | container | done |
        |---|---|---|
        | 1. those of a pending plan | the plan's | allocated, or its refusal returned |
        | 2. an init container's; the kubelet passes them on unasked | the next one of its pod | allocated |
        | 3. as many as in a pending plan; the kubelet chose others | the plan's | allocated if they pass the check |
        | 4. already one container's, which does not run yet | that one | the same answer again, no change |
        | 5. anything else | unknown | refused |
        """
        kind = self.node.names.by_name[resource]
        with self.gate.allocating():
            # The plan first: the kubelet was asked for its container, which is better than anything
            # concluded from IDs.
            pending = self._pending.take_exact(resource, ids)
            if pending is None:
                next_container = self.identification.next_container(resource, ids)
                if next_container is not None:
                    # Its cores may be on another GPU than the init container's: of those a sidecar may have them by now.
                    self._decide(next_container, resource, ids, ids)
                pending = self._pending.take_of_size(resource, len(set(ids)))
            if pending is not None:
                # Without a target GetPreferredAllocation could not say whose call it was: the refusal says why, and nothing
                # is allocated on the guess that this Allocate is the same container's.
                if pending.target is None or pending.refused is not None:
                    return self._refuse(pending, pending.refused or _without_plan(resource, ids))
                return self._allocate(pending.target, pending, kind, ids)
            repeated = self._answer_again(kind, ids)
            if repeated is not None:
                return repeated
            refused = _without_plan(resource, ids)
            self.observer.refused(Decision(resource=resource), refused)
            return refused

    def is_between_admissions(self) -> bool:
        """No Allocate is due, and the pod that was last under admission has all that it asks for, or was refused."""
        uid = self._pending.pod
        pod = self.node.pods.get(uid) if uid is not None else None
        if self._pending.is_due(self.clock()):
            return False
        # A pod that is gone or was refused gets no more calls, even if it lacks something.
        return pod is None or pod.uid in self.refused_pods or not self._is_lacking(pod)

    def _is_lacking(self, pod: Pod) -> bool:
        for container in pod.containers:
            asked = self.node.names.asked(container)
            found = self.node.cache.get(ContainerKey(pod.uid, container.name)) if asked else None
            if asked and (found is None or not asked.keys() <= found.ids.keys()):
                return True
        return False

    def kubelet_restarted(self) -> None:
        """No Allocate will come for what was planned before, and a pod refused just before may be admitted again."""
        self.refused_pods.clear()
        self._pending.clear()

    def _decide(
        self, target: Target, resource: str, available: Collection[DeviceId], must_include: Sequence[DeviceId]
    ) -> Decision:
        """Choose GPU, IDs and edits, and keep the decision for the Allocate."""
        # The kubelet admits one pod at a time: a call for another pod ends the admission of the one before.
        self._pending.begin(target.pod.uid)
        ledger = self.node.cache.ledger(self.node.plugins_gpus(), without=target.key)
        case = Case(target, self.node.names.by_name[resource], available, ledger, self.policy, must_include)
        decision = decide(case, self.edits(), self.isolation.unavailable_reason)
        decision = replace(decision, resource=resource, at=self.clock())
        if decision.taken_ids:
            self.node.metrics.taken_ids_offered(resource, count=decision.taken_ids)
        self._pending.add(decision)
        return decision

    def _allocate(
        self, target: Target, decision: Decision, kind: ResourceKind, ids: Sequence[DeviceId]
    ) -> ContainerEdits | Refused:
        """Check the IDs, commit the allocation, report it. Refused, in this order, where

        1. the pod has ended: its end was handled before, so nothing would release the allocation;
        2. the IDs do not pass the check: unknown, allocated to another container, on other GPUs than the plan's;
        3. the isolation cannot keep such a share on these GPUs.

        What the container gets is answered with the resource that binds its GPU, cores or GPUShare's memory.
        """
        _bind_to_log(target)
        pod = self.node.pods.get(target.pod.uid)
        # No await between here and the commit: two Allocates cannot both see the same IDs free.
        if pod is None or pod.is_terminal:
            deleted = Refused(
                RefusalReason.POD_UNKNOWN,
                f"pod {target.pod.namespace}/{target.pod.name} was deleted during its admission. Nothing was "
                "allocated.",
            )
            return self._refuse(Decision(target=target, resource=decision.resource), deleted)
        ledger = self.node.cache.ledger(self.node.plugins_gpus(), without=target.key)
        gpus = check(Case(target, kind, ids, ledger, self.policy), decision.gpus)
        if isinstance(gpus, Refused):
            return self._refuse(decision, gpus)
        edits: ContainerEdits | Refused = decision.edits
        if gpus != decision.gpus or set(ids) != set(decision.ids):  # the kubelet did not follow the preference
            edits = edits_for_ids(target, gpus, ids, ledger.inventory, self.edits())
        if isinstance(edits, Refused):
            return self._refuse(decision, edits)
        if self.node.cache.get(target.key) is not None:  # a further resource: where it goes was decided with the first
            decision = Decision(target=target, resource=decision.resource)
        allocation = self._allocation(target, kind, ids, gpus)
        if kind.binds_gpu:
            allocation = replace(allocation, gpu_names=edits.gpu_names)
        self.node.cache.put(allocation)
        # If a later container of the pod is refused, the kubelet frees this one's IDs without a call.
        self._pending.add_allocated(target.key)
        # Begun now, awaited in PreStartContainer: the answer need not wait for files on the host. Once the container has all
        # that it asks for: what was prepared for a part of it would be prepared again.
        if self.node.names.asked(target.container).keys() <= allocation.ids.keys():
            self.isolation.prepare_ahead(target.key)
        self.observer.allocated(decision, allocation)
        # The kubelet asks for both resources of a container: what it gets is in one of the two answers.
        return edits if kind.binds_gpu else ContainerEdits()

    def _allocation(
        self, target: Target, kind: ResourceKind, ids: Sequence[DeviceId], gpus: tuple[GpuUuid, ...]
    ) -> Allocation:
        """The container's allocation with these IDs of one resource and those that it has of the others."""
        old = self.node.cache.get(target.key)
        return Allocation(
            key=target.key,
            namespace=target.pod.namespace,
            pod_name=target.pod.name,
            kind=target.container.kind,
            gpus=gpus,
            ids={**(old.ids if old is not None else {}), kind: frozenset(ids)},
            is_whole=all(replica_layout(device).is_whole for device in ids)
            if kind.is_part
            else request_of(target.container, self.node.names).whole_gpus > 0,
            allocated_at=self.clock(),
            gpu_names=old.gpu_names if old is not None else None,
            gpu_resource=self.node.names.name_in(target.container, kind) if kind.is_part else "",
        )

    def _refuse(self, decision: Decision, refused: Refused) -> Refused:
        """Release what this admission has allocated to the pod: the kubelet frees all of it and makes no call for it."""
        if (target := decision.target) is not None:
            _bind_to_log(target)
            for key in self._pending.take_allocated(target.pod.uid):
                self.node.cache.release(key)
            # A pod that has started is not at its admission: one of its containers restarts, and will be asked for again.
            if not target.pod.has_started and self.node.pods.get(target.pod.uid) is not None:
                self.refused_pods.add(target.pod.uid)
        self.observer.refused(decision, refused)
        return refused

    def _answer_again(self, kind: ResourceKind, ids: Sequence[DeviceId]) -> ContainerEdits | Refused | None:
        """The same answer as before for the IDs of exactly one container; nothing changes."""
        requested = frozenset(ids)
        keys = self.node.cache.holders(kind).get(next(iter(requested)), frozenset()) if requested else frozenset()
        allocation = self.node.cache.get(next(iter(keys))) if len(keys) == 1 else None
        if allocation is None or allocation.ids_of(kind) != requested:
            return None
        target = self._target(allocation.key)
        if target is None or target.container.name in target.pod.running:
            return None  # a container that runs needs nothing: the call is for another one
        if not kind.binds_gpu:
            return ContainerEdits()
        return edits_for_ids(target, allocation.gpus, ids, self.node.plugins_gpus(), self.edits())

    # --- PreStartContainer ---

    async def pre_start(self, resource: str, ids: Sequence[DeviceId]) -> Refused | None:
        """Check that the container about to start holds these IDs, and that its answer still names its GPU; prepare its
        isolation. An allocation that the cache has lost is read from the kubelet's checkpoint. The kubelet calls it at each
        start of a container, also long after the admission."""
        kind = self.node.names.by_name[resource]
        requested = frozenset(ids)
        held = self._allocations_with(kind, requested)
        refused = None
        # A restarted agent may have rebuilt its ledger before the kubelet wrote this container's entry.
        if not held or any(one.gpu_names is None for one in held):
            refused = await self._adopt(kind, requested)
        if not self.node.inventory.is_read:
            refused = refused or Refused(
                RefusalReason.NOT_READY, "the driver has not listed the GPUs yet. The kubelet tries again."
            )
        held = self._allocations_with(kind, requested)
        if refused is None:
            gpus, extra = self.node.gpus().by_uuid(), self.edits().devices.extra
            # What says the GPU of a container that another program started is the number that it has now.
            own = (one for one in held if not one.started_by)
            refused = next(filter(None, (renumbered(one, gpus, extra) for one in own)), None)
        if refused is None:
            refused = await self.isolation.prepare([one.key for one in held])
        if refused is not None:
            self.observer.start_refused(self._target(held[-1].key) if held else None, resource, refused)
        return refused

    async def _adopt(self, kind: ResourceKind, requested: frozenset[DeviceId]) -> Refused | None:
        try:
            entries = self.records.ours(await self.records.read())
        except AgentError as e:
            log.warning("kubelet_checkpoint_unreadable", error=str(e))
            entries = []
        adopted = adopt(
            entries, kind, requested, self.node.cache.view(), self.node.names, self.node.plugins_gpus(), self.clock()
        )
        if isinstance(adopted, Refused):
            if self._allocations_with(kind, requested):
                return None  # they need no record, or were allocated during the read
            log.warning("pre_start_refused", reason=adopted.reason.value, detail=adopted.detail)
            return adopted
        for allocation in adopted:
            known = self.node.cache.get(allocation.key)
            if known is None:
                self.node.cache.put(allocation)
                log.info("allocation_adopted", pod_uid=allocation.key.pod_uid, container=allocation.key.container)
            elif known.gpu_names is None:
                self.node.cache.put(replace(known, gpu_names=allocation.gpu_names))
        return None

    def _allocations_with(self, kind: ResourceKind, ids: frozenset[DeviceId]) -> list[Allocation]:
        """Those of exactly these IDs, by container: several where an init container's IDs were passed on."""
        if not ids:
            return []
        cache = self.node.cache
        if is_former(ids):  # the kubelet's text has no GPU in it
            return sorted((one for one in cache if texts(one.ids_of(kind)) == ids), key=lambda one: one.key)
        found = map(cache.get, sorted(cache.holders(kind).get(next(iter(ids)), frozenset())))
        return [one for one in found if one is not None and one.ids_of(kind) == ids]

    def _target(self, key: ContainerKey) -> Target | None:
        pod = self.node.pods.get(key.pod_uid)
        container = pod.container(key.container) if pod is not None else None
        return Target(pod=pod, container=container) if pod is not None and container is not None else None


def _bind_to_log(target: Target) -> None:
    """The log line of the device plugin for this call then names the container."""
    structlog.contextvars.bind_contextvars(
        namespace=target.pod.namespace, pod=target.pod.name, pod_uid=target.pod.uid, container=target.container.name
    )


def _without_plan(resource: str, ids: Sequence[DeviceId]) -> Refused:
    return Refused(
        RefusalReason.NOT_READY,
        f"{len(ids)} units of {resource} were allocated without asking for a preference first, and they are no init "
        "container's of a known pod. This happens when the agent restarts during a pod's admission. Nothing was "
        "allocated. Create the pod again.",
    )
