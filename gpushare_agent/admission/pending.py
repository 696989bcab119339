"""What the admission keeps between the kubelet's calls: plans, the pod under admission, and the pods that were refused."""

from __future__ import annotations

from collections.abc import Sequence

from gpushare_agent.admission.decisions.plan import Decision
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod

PLAN_LIFETIME_S = 15.0
"""An Allocate follows its GetPreferredAllocation within milliseconds; an older plan is of a kubelet that stopped."""


class PendingAdmissions:
    """State owned: the pending plans, oldest first; the pod under admission and its containers that have an allocation."""

    def __init__(self) -> None:
        self._plans: list[Decision] = []
        self._pod: PodUid | None = None
        self._allocated: list[ContainerKey] = []

    def add(self, plan: Decision) -> None:
        """In place of an earlier plan for the same container and resource; plans whose Allocate never came are dropped."""
        oldest_at = plan.at - PLAN_LIFETIME_S
        self._plans = [
            p for p in self._plans if p.at > oldest_at and (p.resource, _key(p)) != (plan.resource, _key(plan))
        ]
        self._plans.append(plan)

    def take_exact(self, resource: str, ids: Sequence[str]) -> Decision | None:
        """The newest plan for exactly these IDs. It is pending no more."""
        wanted = set(ids)
        return self._take([p for p in self._plans if p.resource == resource and _planned_ids(p) == wanted])

    def take_of_size(self, resource: str, size: int) -> Decision | None:
        """The newest plan for so many IDs, for a kubelet that chose others. It is pending no more.

        Admissions are serial: several plans are pending only while a container restarts beside an admission.
        """
        return self._take([p for p in self._plans if p.resource == resource and p.size == size])

    def is_due(self, now: float) -> bool:
        """An Allocate is still to come for a plan."""
        return any(plan.at > now - PLAN_LIFETIME_S for plan in self._plans)

    @property
    def pod(self) -> PodUid | None:
        """The pod that was under admission last."""
        return self._pod

    def begin(self, uid: PodUid) -> None:
        """A call for this pod: the admission of any other pod is over."""
        if self._pod != uid:
            self._pod = uid
            self._allocated.clear()

    def add_allocated(self, key: ContainerKey) -> None:
        self.begin(key.pod_uid)
        self._allocated.append(key)

    def take_allocated(self, uid: PodUid) -> tuple[ContainerKey, ...]:
        """The containers to which the pod's present admission has allocated, forgotten here; none for another pod."""
        if self._pod != uid:
            return ()
        allocated = tuple(self._allocated)
        self._allocated.clear()
        return allocated

    def clear(self) -> None:
        self._plans.clear()
        self._pod = None
        self._allocated.clear()

    def _take(self, matches: Sequence[Decision]) -> Decision | None:
        if not matches:
            return None
        self._plans.remove(matches[-1])
        return matches[-1]


class RefusedPods:
    """Pods whose admission was refused: kubelets up to 1.33 go on listing them, so a call is never for one of these.

    State owned: their UIDs, until the pod is deleted or the kubelet restarts. The admission adds, identification reads.
    """

    def __init__(self) -> None:
        self._uids: set[PodUid] = set()

    def __contains__(self, uid: object) -> bool:
        return uid in self._uids

    def add(self, uid: PodUid) -> None:
        self._uids.add(uid)

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """For PodStore.subscribe."""
        if new is None and old is not None:
            self._uids.discard(old.uid)

    def clear(self) -> None:
        self._uids.clear()

    def take_over(self, earlier: RefusedPods) -> None:
        """What an earlier life of the agent refused."""
        self._uids |= earlier._uids


def _planned_ids(plan: Decision) -> set[str] | None:
    return set(plan.ids) if plan.refused is None else None


def _key(plan: Decision) -> ContainerKey | None:
    return plan.target.key if plan.target is not None else None
