"""Serves the kubelet's admission calls: whom is it for, where does it go, is what was allocated right.

State, all changed synchronously: the plans of GetPreferredAllocations whose Allocate has not come yet, the containers
committed for the pod that is being admitted, and the pods that were refused. What containers hold is in the allocation
cache (admission/allocation_cache.py); this service is its only writer during admissions, and garbage collection
between them.

Decide and commit happen without an await between, so two Allocates can never book the same share.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.decisions import plan as decide
from gpushare_agent.admission.decisions.container_edits import EditPolicy, edits_for
from gpushare_agent.admission.decisions.explain import Explanation, explain
from gpushare_agent.admission.decisions.hints import hinted_gpus
from gpushare_agent.admission.decisions.identity import Call, Known, Target, reusing
from gpushare_agent.admission.decisions.isolation_choice import choose_isolation
from gpushare_agent.admission.decisions.ledger import Ledger, Offer, Policy, free_ids
from gpushare_agent.admission.decisions.plan import Plan
from gpushare_agent.admission.decisions.recovery import adopt
from gpushare_agent.isolation import ISOLATIONS
from gpushare_agent.kubelet.pod_resources_gate import InsideList, PodResourcesGate
from gpushare_agent.kubelet.records import CheckpointEntry
from gpushare_agent.model.allocations import Allocation, ContainerEdits, ContainerKey
from gpushare_agent.model.errors import AgentError, RefusalReason, Refused
from gpushare_agent.model.gpus import Gpu, GpuInventory
from gpushare_agent.model.names import CORES_PER_GPU, DeviceId, GpuUuid, PodUid
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.model.resources import ResourceKind

log = structlog.get_logger(__name__)

SETTLE_S = 0.5
"""How long a call waits in all for shares that are about to be freed, and for one more of them."""
PLAN_LIFETIME_S = 15.0
"""An Allocate follows its GetPreferredAllocation within milliseconds; a plan this old belongs to a kubelet that went."""


_MAY_PASS = frozenset(
    {
        RefusalReason.DEVICE_IN_USE,
        RefusalReason.FRAGMENTED,
        RefusalReason.NOT_ENOUGH_CORES,
        RefusalReason.NOT_ENOUGH_MEMORY,
    }
)
"""Refusals that the end of another pod, of which we are about to hear, would cure."""


class Identifier(Protocol):
    async def serve(self, call: Call, inside: InsideList) -> Target | Refused: ...
    def known(self) -> Known: ...


class KubeletRecords(Protocol):
    async def read(self) -> Sequence[CheckpointEntry]:
        """The kubelet's own checkpoint. Raises Unavailable, Corrupt."""


class PodsByUid(Protocol):
    def get(self, uid: PodUid) -> Pod | None: ...


class AdmissionObserver(Protocol):
    """Told of each outcome, synchronously; must not block."""

    def allocated(self, target: Target, allocation: Allocation, kind: ResourceKind, why: Explanation | None) -> None:
        """`why` is None where nothing was decided now: an init container's IDs are handed on, or a further resource of a
        container comes to those that it has."""

    def refused(self, target: Target | None, kind: ResourceKind, refused: Refused, why: Explanation | None) -> None: ...
    def start_refused(self, target: Target | None, kind: ResourceKind, refused: Refused) -> None:
        """A container that was admitted may not start."""

    def taken_ids_offered(self, kind: ResourceKind, count: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A GetPreferredAllocation that was answered; its Allocate is to come."""

    kind: ResourceKind
    size: int
    target: Target | None
    outcome: Plan | Refused
    planned_at: float
    why: Explanation | None = None


class Admission:
    """The handler of both device plugins."""

    def __init__(  # noqa: PLR0913 - the composition hands in every collaborator by name
        self,
        *,
        gate: PodResourcesGate,
        identification: Identifier,
        cache: AllocationCache,
        pods: PodsByUid,
        inventory: Callable[[], GpuInventory],
        policy: Policy,
        edits: Callable[[], EditPolicy],
        node_name: str,
        refused_pods: set[PodUid],
        observer: AdmissionObserver,
        records: KubeletRecords,
        settle: Callable[[], Awaitable[bool]],
        prepare: Callable[[Collection[ContainerKey]], Awaitable[Refused | None]],
        daemon_trouble: Callable[[], str] = lambda: "",
        clock: Callable[[], float],
    ) -> None:
        self._gate = gate
        self._identification = identification
        self._cache = cache
        self._pods = pods
        self._inventory = inventory
        self._policy = policy
        self._edit_policy = edits
        self._node_name = node_name
        self._refused_pods = refused_pods
        self._observer = observer
        self._records = records
        self._settle = settle
        self._prepare = prepare
        self._daemon_trouble = daemon_trouble
        self._clock = clock
        self._pending: list[_Pending] = []
        self._current: PodUid | None = None
        self._committed: list[ContainerKey] = []

    async def preferred(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        """The IDs to prefer. Advice only: a refusal is kept for the Allocate, whose error reaches the user."""
        kind = self._kind(resource)
        async with self._gate.preferring() as inside:
            found = await self._identification.serve(
                Call(kind=kind, size=size, must_include=frozenset(must_include)), inside
            )
            if isinstance(found, Refused):
                self._expect(_Pending(kind=kind, size=size, target=None, outcome=found, planned_at=self._clock()))
                return list(must_include)
            offer = Offer(kind=kind, available=available, must_include=must_include, size=size)
            outcome = self._plan(found, offer)
            started_at = self._clock()
            while (
                isinstance(outcome, Refused)
                and outcome.reason in _MAY_PASS
                and self._clock() - started_at < SETTLE_S
                and await self._settle()  # one share was freed; several pods may be ending at once
            ):
                outcome = self._plan(found, offer)
        return outcome.ids if isinstance(outcome, Plan) else list(must_include)

    async def allocate(self, resource: str, ids: Sequence[str]) -> ContainerEdits | Refused:
        """Book the IDs for the container that they were planned for, and say what it gets. Does not wait."""
        kind = self._kind(resource)
        with self._gate.allocating():
            pending = self._take_pending(kind, ids, exactly=True)
            if pending is None:
                # Without a GetPreferredAllocation of its own: an init container's IDs are handed on.
                successor = reusing(ids, kind, self._pods.get, self._identification.known())
                if successor is not None:
                    return self._book(successor, kind, ids, self._initial_gpus(successor.pod.uid))
                pending = self._take_pending(kind, ids, exactly=False)
            if pending is None:
                repeated = self._answer_again(kind, ids)
                return repeated if repeated is not None else self._refuse(None, kind, _without_plan(kind, ids))
            if isinstance(pending.outcome, Refused) or pending.target is None:
                outcome = pending.outcome if isinstance(pending.outcome, Refused) else _without_plan(kind, ids)
                return self._refuse(pending.target, kind, outcome, pending.why)
            return self._book(pending.target, kind, ids, pending.outcome.gpus, pending.why)

    async def pre_start(self, resource: str, ids: Sequence[str]) -> Refused | None:
        """Check that the container about to start holds these IDs, and prepare what its isolation needs on the host.

        What the cache has lost is taken over from the kubelet's checkpoint. The kubelet calls this at each start of a
        container, also long after its admission.
        """
        wanted = frozenset(DeviceId(device) for device in ids)
        kind = self._kind(resource)
        refused = await self._take_over(kind, wanted) if not self._holders_of(kind, wanted) else None
        if refused is None:
            refused = await self._prepare(self._holders_of(kind, wanted))
        if refused is not None:
            self._observer.start_refused(self._target_of(self._holders_of(kind, wanted)), kind, refused)
        return refused

    async def _take_over(self, kind: ResourceKind, wanted: frozenset[DeviceId]) -> Refused | None:
        """Put what the kubelet's checkpoint says of these IDs into the cache."""
        try:
            entries = await self._records.read()
        except AgentError as e:
            log.warning("kubelet_checkpoint_unreadable", error=str(e))
            entries = ()
        if self._holders_of(kind, wanted):
            return None
        adopted = adopt(entries, kind, wanted, self._cache.view(), self._policy.names, self._inventory(), self._clock())
        if isinstance(adopted, Refused):
            log.warning("pre_start_refused", reason=adopted.reason.value, detail=adopted.detail)
            return adopted
        for allocation in adopted:
            self._cache.put(allocation)
        log.info("allocation_taken_over", pod_uid=adopted[0].key.pod_uid, container=adopted[0].key.container)
        return None

    def kubelet_restarted(self) -> None:
        """No Allocate will come for what was planned before, and a pod refused just before may be admitted anew."""
        self._refused_pods.clear()
        self._pending.clear()
        self._current = None
        self._committed.clear()

    def _plan(self, target: Target, offer: Offer) -> Plan | Refused:
        if self._current != target.pod.uid:
            self._current = target.pod.uid
            self._committed.clear()
        ledger = self._ledger(target)
        free = free_ids(target, offer.kind, offer.available, ledger)
        if len(free) < len(offer.available):
            self._observer.taken_ids_offered(offer.kind, len(offer.available) - len(free))
        is_gpu_mem = self._policy.names.wanted(target.container, ResourceKind.GPU_MEM) > 0
        hint = hinted_gpus(target.pod.annotations, target.container, self._node_name, is_gpu_mem=is_gpu_mem)
        outcome: Plan | Refused = decide.plan(target, offer, free, ledger, self._policy, hint)
        if isinstance(outcome, Plan):
            outcome = self._obstacle(target, outcome, ledger) or outcome
        why = explain(target, offer, free, ledger, self._policy, hint, outcome)
        self._expect(
            _Pending(
                kind=offer.kind, size=offer.size, target=target, outcome=outcome, planned_at=self._clock(), why=why
            )
        )
        return outcome

    def _obstacle(self, target: Target, plan: Plan, ledger: Ledger) -> Refused | None:
        """What the isolation has against the plan: known now, the admission ends before anything is booked."""
        edits = self._edits(target, [ledger.inventory.by_uuid()[gpu] for gpu in plan.gpus])
        if isinstance(edits, Refused):
            return edits
        is_share = self._policy.names.wanted(target.container, ResourceKind.VCORE) < CORES_PER_GPU
        policy = self._edit_policy()
        name = choose_isolation(target.pod.annotations, policy.isolation, policy.allowed)
        if not is_share or isinstance(name, Refused) or not ISOLATIONS[name].needs_daemon:
            return None
        trouble = self._daemon_trouble()
        if not trouble:
            return None
        return Refused(
            reason=RefusalReason.NOT_READY,
            detail=f"{_who(target)} wants a share under isolation {name}, whose daemon cannot serve it: {trouble}. "
            "Nothing was allocated. Create the pod again once the daemon answers.",
        )

    def _expect(self, pending: _Pending) -> None:
        """Remember a plan; older ones of the same container, and those whose Allocate never came, go."""
        oldest = pending.planned_at - PLAN_LIFETIME_S
        key = pending.target.key if pending.target is not None else None
        self._pending = [
            p
            for p in self._pending
            if p.planned_at > oldest and (p.kind, p.target.key if p.target is not None else None) != (pending.kind, key)
        ]
        self._pending.append(pending)

    def _take_pending(self, kind: ResourceKind, ids: Sequence[str], *, exactly: bool) -> _Pending | None:
        """The newest plan for exactly these IDs, or, where the kubelet chose others, the newest of this size.

        Admissions are serial, so more than one can only wait when a container restarts beside an admission.
        """
        wanted = set(ids)
        matches = [
            p
            for p in self._pending
            if p.kind is kind
            and p.size == len(wanted)
            and (not exactly or (isinstance(p.outcome, Plan) and set(p.outcome.ids) == wanted))
        ]
        if matches:
            self._pending.remove(matches[-1])
        return matches[-1] if matches else None

    def _book(
        self,
        target: Target,
        kind: ResourceKind,
        ids: Sequence[str],
        planned: tuple[GpuUuid, ...],
        why: Explanation | None = None,
    ) -> ContainerEdits | Refused:
        _name_in_log(target)
        pod = self._pods.get(target.pod.uid)
        if pod is None or pod.is_terminal:
            return self._refuse(target, kind, _deleted(target))  # its end has been told: nobody would free the share
        ledger = self._ledger(target)
        gpus = decide.check(target, kind, ids, ledger, self._policy, planned)
        if isinstance(gpus, Refused):
            return self._refuse(target, kind, gpus, why)
        edits = self._edits(target, [ledger.inventory.by_uuid()[gpu] for gpu in gpus])
        if isinstance(edits, Refused):
            return self._refuse(target, kind, edits, why)
        old = self._cache.get(target.key)
        own = frozenset(DeviceId(device) for device in ids)
        allocation = Allocation(
            key=target.key,
            namespace=target.pod.namespace,
            pod_name=target.pod.name,
            kind=target.container.kind,
            gpus=gpus,
            vcore_ids=old.vcore_ids if old is not None else frozenset(),
            vmemory_ids=old.vmemory_ids if old is not None else frozenset(),
            is_whole=self._policy.names.wanted(target.container, ResourceKind.VCORE) >= CORES_PER_GPU,
            allocated_at=self._clock(),
        ).with_ids(kind, own)
        self._cache.put(allocation)
        if self._current != target.pod.uid:
            self._current = target.pod.uid
            self._committed.clear()
        self._committed.append(target.key)
        self._observer.allocated(target, allocation, kind, why if old is None else None)
        return edits if kind.binds_gpu else ContainerEdits()

    def _edits(self, target: Target, gpus: Sequence[Gpu]) -> ContainerEdits | Refused:
        return edits_for(target.pod, target.container, gpus, self._edit_policy())

    def _refuse(
        self, target: Target | None, kind: ResourceKind, refused: Refused, why: Explanation | None = None
    ) -> Refused:
        """Undo what this admission has booked for the pod: the kubelet frees all of it without a word."""
        if target is not None:
            _name_in_log(target)
            if self._current == target.pod.uid:
                for key in self._committed:
                    self._cache.release(key)
                self._committed.clear()
            if not target.pod.has_started and self._pods.get(target.pod.uid) is not None:
                self._refused_pods.add(target.pod.uid)
        self._observer.refused(target, kind, refused, why)
        return refused

    def _ledger(self, target: Target) -> Ledger:
        return Ledger(
            inventory=self._inventory(),
            used_cores=self._cache.used_cores(without=target.key),
            used_blocks=self._cache.used_blocks(without=target.key),
            used_gpu_mem=self._cache.used_gpu_mem(without=target.key),
            holders={kind: self._cache.holders(kind) for kind in ResourceKind},
            allocations=self._cache.view(),
        )

    def _answer_again(self, kind: ResourceKind, ids: Sequence[str]) -> ContainerEdits | Refused | None:
        """The same answer as before for IDs that exactly one container holds; nothing changes."""
        wanted = frozenset(DeviceId(device) for device in ids)
        keys = self._cache.holders(kind).get(next(iter(wanted)), frozenset()) if wanted else frozenset()
        held = self._cache.get(next(iter(keys))) if len(keys) == 1 else None
        if held is None or held.ids(kind) != wanted:
            return None
        pod = self._pods.get(held.key.pod_uid)
        container = pod.container(held.key.container) if pod is not None else None
        if pod is None or container is None or held.key.container in pod.running:
            return None  # whoever this is for, it is not a container that runs
        known = self._inventory().by_uuid()
        if not kind.binds_gpu:
            return ContainerEdits()
        gpus = [known[gpu] for gpu in held.gpus if gpu in known]
        return self._edits(Target(pod=pod, container=container), gpus)

    def _initial_gpus(self, uid: PodUid) -> tuple[GpuUuid, ...]:
        return next((a.gpus for a in self._cache.of_pod(uid) if a.kind is ContainerKind.INIT and a.gpus), ())

    def _holders_of(self, kind: ResourceKind, ids: frozenset[DeviceId]) -> list[ContainerKey]:
        """The containers that hold exactly these: several where an init container's IDs were handed on."""
        if not ids:
            return []
        keys = self._cache.holders(kind).get(next(iter(ids)), frozenset())
        return sorted(key for key in keys if (held := self._cache.get(key)) is not None and held.ids(kind) == ids)

    def _target_of(self, keys: Sequence[ContainerKey]) -> Target | None:
        """The last of the containers: those before it handed their IDs on."""
        pod = self._pods.get(keys[-1].pod_uid) if keys else None
        container = pod.container(keys[-1].container) if pod is not None else None
        return Target(pod=pod, container=container) if pod is not None and container is not None else None

    def _kind(self, resource: str) -> ResourceKind:
        kind = self._policy.names.kind(resource)
        if kind is None:
            raise AssertionError(f"a plugin serves {resource!r}, which is no resource of the settings")
        return kind


def _who(target: Target) -> str:
    return f"container {target.container.name} of pod {target.pod.namespace}/{target.pod.name}"


def _name_in_log(target: Target) -> None:
    """The line that the device plugin writes for this call then says whom it was for."""
    structlog.contextvars.bind_contextvars(
        namespace=target.pod.namespace, pod=target.pod.name, pod_uid=target.pod.uid, container=target.container.name
    )


def _deleted(target: Target) -> Refused:
    return Refused(
        reason=RefusalReason.POD_UNKNOWN,
        detail=f"pod {target.pod.namespace}/{target.pod.name} was deleted during its admission. Nothing was allocated.",
    )


def _without_plan(kind: ResourceKind, ids: Sequence[str]) -> Refused:
    return Refused(
        reason=RefusalReason.NOT_READY,
        detail=f"{len(ids)} {kind} units were allocated without asking for a preference first, and they are no init "
        "container's of a known pod. This happens when the agent restarts during a pod's admission. Nothing was "
        "allocated. Create the pod again.",
    )
