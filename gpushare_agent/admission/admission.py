"""Serves the kubelet's admission calls: which container is the call for, on which GPU is it placed, are the IDs right.

Decides and commits without an await between, so two Allocates can never allocate the same share. The allocation cache
has two writers, never at once: this service during calls, garbage collection between them.

State owned, by admission/pending.py: the plans whose Allocate has not come yet, the containers that the pod under
admission has got so far, and the pods that were refused; here the edits of the last container. PreStartContainer is served
by admission/container_starts.py.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol, cast

import structlog
from msgspec import Struct, field

from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.decisions import plan as decide
from gpushare_agent.admission.decisions.container_edits import EditPolicy, edits_for, isolation_of
from gpushare_agent.admission.decisions.explain import Explanation, explain
from gpushare_agent.admission.decisions.hints import hinted_gpus
from gpushare_agent.admission.decisions.identity import Call, Target
from gpushare_agent.admission.decisions.ledger import Ledger, Offer, Policy, free_ids, offer_accounts
from gpushare_agent.admission.decisions.plan import Plan
from gpushare_agent.admission.identification import Identification, InsideLister
from gpushare_agent.admission.outcomes import OutcomeReporter
from gpushare_agent.admission.pending import PendingAdmissions, PendingPlan, RefusedPods
from gpushare_agent.model.allocations import Allocation, ContainerEdits, ContainerKey
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.gpus import Gpu, GpuInventory
from gpushare_agent.model.isolation import Sharing
from gpushare_agent.model.names import DeviceId, GpuUuid, PodUid
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.model.requests import request_of
from gpushare_agent.model.resources import ResourceKind
from gpushare_agent.model.units import GpuUnits, terms_of, units_of
from gpushare_agent.node import Pods

RELEASE_WAIT_S = 0.5
"""How long a GetPreferredAllocation waits in all for allocations of pods that are ending."""

_CURED_BY_A_RELEASE = frozenset(
    {
        RefusalReason.DEVICE_IN_USE,
        RefusalReason.FRAGMENTED,
        RefusalReason.NOT_ENOUGH_CORES,
        RefusalReason.NOT_ENOUGH_MEMORY,
    }
)


_EditsQuestion = tuple[Target, tuple[Gpu, ...], EditPolicy, GpuUnits | None]


class AdmissionGate(Protocol):
    """Counts the calls that are open (kubelet/pod_resources_gate.py)."""

    def preferring(self) -> AbstractAsyncContextManager[InsideLister]: ...
    def allocating(self) -> AbstractContextManager[None]: ...


class Admission(Struct, kw_only=True, eq=False):
    """The handler of the device plugins."""

    gate: AdmissionGate
    identification: Identification
    cache: AllocationCache
    pods: Pods
    inventory: Callable[[], GpuInventory]
    policy: Policy
    edits: Callable[[], EditPolicy]
    node_name: str
    refused_pods: RefusedPods
    observer: OutcomeReporter
    wait_for_release: Callable[[], Awaitable[bool]]
    prepare_ahead: Callable[[ContainerKey], None] = lambda _: None
    isolation_unavailable_reason: Callable[[str], str] = lambda _: ""
    clock: Callable[[], float] = time.monotonic
    _pending: PendingAdmissions = field(default_factory=PendingAdmissions)
    _last_edits: tuple[_EditsQuestion, ContainerEdits | Refused] | None = None

    async def preferred(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        """The IDs to prefer. Advice only: a refusal is kept for the Allocate, whose error the kubelet shows to the user.

        1. The container cannot be identified: its refusal is pending, no advice.
        2. It is planned (`_plan`), and the outcome is pending.
        3. Refused for want of free capacity while pods are ending: planned again after each release, for a moment.
        """
        kind = self.policy.names.kind_of(resource)
        async with self.gate.preferring() as inside:
            found = await self.identification.identify(
                Call(resource=resource, kind=kind, size=size, must_include=frozenset(must_include)), inside
            )
            if isinstance(found, Refused):
                plan = PendingPlan(resource=resource, size=size, target=None, outcome=found, planned_at=self.clock())
                self._pending.add(plan)
                return list(must_include)
            offer = Offer(kind=kind, available=available, must_include=must_include, size=size)
            outcome = self._plan(found, resource, offer)
            started_at = self.clock()
            while (
                isinstance(outcome, Refused)
                and outcome.reason in _CURED_BY_A_RELEASE
                and self.clock() - started_at < RELEASE_WAIT_S
                and await self.wait_for_release()  # one was released; several pods may be ending at once
            ):
                outcome = self._plan(found, resource, offer)
        return outcome.ids if isinstance(outcome, Plan) else list(must_include)

    async def allocate(self, resource: str, ids: Sequence[str]) -> ContainerEdits | Refused:
        """Allocate the IDs to their container and return what it gets. Does not wait. In this order:

        | the IDs are | container | done |
        |---|---|---|
        | 1. those of a pending plan | the plan's | allocated (`_carry_out`) |
        | 2. an init container's; the kubelet passes them on unasked | the next one of its pod | allocated |
        | 3. as many as in a pending plan; the kubelet chose others | the plan's | allocated if they pass the check |
        | 4. already one container's, which does not run yet | that one | the same answer again, no change |
        | 5. anything else | unknown | refused |
        """
        kind = self.policy.names.kind_of(resource)
        with self.gate.allocating():
            pending = self._pending.take_exact(resource, ids)
            if pending is None:
                successor = self.identification.successor(resource, ids)
                if successor is not None:
                    return self._allocate(successor, kind, ids, self._initial_gpus(successor.pod.uid))
                pending = self._pending.take_of_size(resource, len(set(ids)))
            if pending is not None:
                return self._carry_out(pending, kind, ids)
            repeated = self._answer_again(kind, ids)
            if repeated is not None:
                return repeated
            refused = _without_plan(resource, ids)
            self.observer.refused(None, resource, refused, None)
            return refused

    def is_between_admissions(self) -> bool:
        """No Allocate is due, and the pod that was under admission has all that it asks for, or was refused."""
        uid = self._pending.pod
        pod = self.pods.get(uid) if uid is not None else None
        if self._pending.is_due(self.clock()):
            return False
        return pod is None or pod.uid in self.refused_pods or not self._is_lacking(pod)

    def _is_lacking(self, pod: Pod) -> bool:
        names = self.policy.names
        has = {container.name: self.cache.get(ContainerKey(pod.uid, container.name)) for container in pod.containers}
        return any(
            names.wanted(container, kind) and ((found := has[container.name]) is None or not found.ids_of(kind))
            for container in pod.containers
            for kind in names.kinds
        )

    def kubelet_restarted(self) -> None:
        """No Allocate will come for what was planned before, and a pod refused just before may be admitted anew."""
        self.refused_pods.clear()
        self._pending.clear()

    def _plan(self, target: Target, resource: str, offer: Offer) -> Plan | Refused:
        """Choose GPU and IDs, and keep the outcome for the Allocate."""
        self._pending.begin(target.pod.uid)
        ledger = self.cache.ledger(self.inventory(), without=target.key)
        free = free_ids(target, offer.kind, offer.available, ledger)
        if len(free) < len(offer.available):
            self.observer.taken_ids_offered(resource, len(offer.available) - len(free))
        is_gpu_mem = request_of(target.container, self.policy.names).units > 0
        hint = hinted_gpus(target.pod.annotations, target.container, self.node_name, is_gpu_mem=is_gpu_mem)
        gpus = offer_accounts(target, offer, free, ledger, self.policy)
        outcome: Plan | Refused = decide.plan(
            target, offer, free=free, ledger=ledger, policy=self.policy, hint=hint, gpus=gpus
        )
        if isinstance(outcome, Plan):
            outcome = self._obstacle(target, outcome, ledger) or outcome
        why = explain(target, offer, ledger, self.policy, hint, gpus, outcome)
        plan = PendingPlan(
            resource=resource, size=offer.size, target=target, outcome=outcome, planned_at=self.clock(), why=why
        )
        self._pending.add(plan)
        return outcome

    def _obstacle(self, target: Target, plan: Plan, ledger: Ledger) -> Refused | None:
        """Why the isolation cannot carry the plan out: known now, the admission ends before anything is allocated."""
        edits = self._edits(target, plan.gpus, plan.ids, ledger.inventory.by_uuid())
        if isinstance(edits, Refused):
            return edits
        units = self._units(target, plan.ids)
        if units is not None:
            is_share = units.sharing in (Sharing.MPS, Sharing.SHARES)
        else:
            is_share = not request_of(target.container, self.policy.names).whole_gpus
        name = isolation_of(target.pod.annotations, units, self.edits())
        if not is_share or isinstance(name, Refused):
            return None
        reason = self.isolation_unavailable_reason(name)
        if not reason:
            return None
        return Refused(
            reason=RefusalReason.NOT_READY,
            detail=f"container {target.container.name} of pod {target.pod.namespace}/{target.pod.name} requests a share "
            f"under isolation {name}, which cannot be had on this node now: {reason}. Nothing was allocated. Create the "
            "pod again once this is cured.",
        )

    def _carry_out(self, pending: PendingPlan, kind: ResourceKind, ids: Sequence[str]) -> ContainerEdits | Refused:
        if pending.target is None or isinstance(pending.outcome, Refused):
            outcome = pending.outcome if isinstance(pending.outcome, Refused) else _without_plan(pending.resource, ids)
            return self._refuse(pending.target, pending.resource, outcome, pending.why)
        return self._allocate(pending.target, kind, ids, pending.outcome.gpus, pending.why)

    def _allocate(
        self,
        target: Target,
        kind: ResourceKind,
        ids: Sequence[str],
        planned: tuple[GpuUuid, ...],
        why: Explanation | None = None,
    ) -> ContainerEdits | Refused:
        """Check the IDs, commit the allocation, report it. Refused, in this order, where

        1. the pod has ended: its end was handled before, so nothing would release the allocation;
        2. the IDs do not pass the check: unknown, allocated to another container, on other GPUs than the plan's;
        3. the isolation cannot keep such a share on these GPUs.

        What the container gets is answered with the resource that binds its GPU, cores or GPUShare's memory.
        """
        _bind_to_log(target)
        resource = self.policy.names.name_in(target.container, kind)
        pod = self.pods.get(target.pod.uid)
        if pod is None or pod.is_terminal:
            return self._refuse(target, resource, _deleted(target))
        ledger = self.cache.ledger(self.inventory(), without=target.key)
        gpus = decide.check(target, kind, ids, ledger, self.policy, planned)
        if isinstance(gpus, Refused):
            return self._refuse(target, resource, gpus, why)
        edits = self._edits(target, gpus, ids, ledger.inventory.by_uuid())
        if isinstance(edits, Refused):
            return self._refuse(target, resource, edits, why)
        is_first = self.cache.get(target.key) is None
        allocation = self._allocation(target, kind, ids, gpus)
        self.cache.put(allocation)
        self._pending.add_allocated(target.key)
        self.prepare_ahead(target.key)
        self.observer.allocated(target, allocation, resource, why if is_first else None)
        return edits if kind.binds_gpu else ContainerEdits()

    def _allocation(
        self, target: Target, kind: ResourceKind, ids: Sequence[str], gpus: tuple[GpuUuid, ...]
    ) -> Allocation:
        """The container's allocation with these IDs of one resource and those that it has of the others."""
        old = self.cache.get(target.key)
        return Allocation(
            key=target.key,
            namespace=target.pod.namespace,
            pod_name=target.pod.name,
            kind=target.container.kind,
            gpus=gpus,
            ids={**(old.ids if old is not None else {}), kind: frozenset(DeviceId(device) for device in ids)},
            is_whole=all(terms_of(device).is_whole for device in ids)
            if kind.is_part
            else request_of(target.container, self.policy.names).whole_gpus > 0,
            allocated_at=self.clock(),
            gpu_resource=self.policy.names.name_in(target.container, kind) if kind.is_part else "",
        )

    def _edits(
        self, target: Target, gpus: Sequence[GpuUuid], ids: Sequence[str], known: Mapping[GpuUuid, Gpu]
    ) -> ContainerEdits | Refused:
        """The calls of one container ask for the same thing up to four times, so the last answer is kept. `ids` count where
        they are units under NVIDIA's names."""
        question = (target, tuple(known[gpu] for gpu in gpus), self.edits(), self._units(target, ids))
        if self._last_edits is None or self._last_edits[0] != question:
            self._last_edits = question, edits_for(target.pod, target.container, *question[1:])
        return self._last_edits[1]

    def _units(self, target: Target, ids: Sequence[str]) -> GpuUnits | None:
        """None where the container asks for no unit under NVIDIA's names."""
        is_unit = self.policy.names.part_kind(target.container) is not None
        return units_of(cast(Sequence[DeviceId], ids)) if is_unit else None

    def _refuse(
        self, target: Target | None, resource: str, refused: Refused, why: Explanation | None = None
    ) -> Refused:
        """Release what this admission has allocated to the pod: the kubelet frees all of it, and calls for none of it."""
        if target is not None:
            _bind_to_log(target)
            for key in self._pending.take_allocated(target.pod.uid):
                self.cache.release(key)
            if not target.pod.has_started and self.pods.get(target.pod.uid) is not None:
                self.refused_pods.add(target.pod.uid)
        self.observer.refused(target, resource, refused, why)
        return refused

    def _answer_again(self, kind: ResourceKind, ids: Sequence[str]) -> ContainerEdits | Refused | None:
        """The same answer as before for the IDs of exactly one container; nothing changes."""
        wanted = frozenset(DeviceId(device) for device in ids)
        keys = self.cache.holders(kind).get(next(iter(wanted)), frozenset()) if wanted else frozenset()
        allocation = self.cache.get(next(iter(keys))) if len(keys) == 1 else None
        if allocation is None or allocation.ids_of(kind) != wanted:
            return None
        pod = self.pods.get(allocation.key.pod_uid)
        container = pod.container(allocation.key.container) if pod is not None else None
        if pod is None or container is None or container.name in pod.running:
            return None  # a container that runs needs nothing: the call is for another one
        if not kind.binds_gpu:
            return ContainerEdits()
        known = self.inventory().by_uuid()
        target = Target(pod=pod, container=container)
        return self._edits(target, [gpu for gpu in allocation.gpus if gpu in known], ids, known)

    def _initial_gpus(self, uid: PodUid) -> tuple[GpuUuid, ...]:
        return next((a.gpus for a in self.cache.of_pod(uid) if a.kind is ContainerKind.INIT and a.gpus), ())


def _bind_to_log(target: Target) -> None:
    """The log line of the device plugin for this call then names the container."""
    structlog.contextvars.bind_contextvars(
        namespace=target.pod.namespace, pod=target.pod.name, pod_uid=target.pod.uid, container=target.container.name
    )


def _deleted(target: Target) -> Refused:
    return Refused(
        reason=RefusalReason.POD_UNKNOWN,
        detail=f"pod {target.pod.namespace}/{target.pod.name} was deleted during its admission. Nothing was allocated.",
    )


def _without_plan(resource: str, ids: Sequence[str]) -> Refused:
    return Refused(
        reason=RefusalReason.NOT_READY,
        detail=f"{len(ids)} units of {resource} were allocated without asking for a preference first, and they are no init "
        "container's of a known pod. This happens when the agent restarts during a pod's admission. Nothing was "
        "allocated. Create the pod again.",
    )
