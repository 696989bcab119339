"""The pods of this node and, beside them, the claims that are prepared on it, each as a pod, for services that know pods.

State owned: the claims' pods as they were shown last, made anew where an allocation or a pod has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.decisions.claim_users import by_view, claim_as_pod, claim_users, parts_of_views
from gpushare_agent.cluster.pod_store import PodStore
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import ContainerSpec, Pod

Users = Mapping[ContainerKey, Sequence[tuple[Pod, ContainerSpec]]]


class ClaimPods:
    def __init__(self, store: PodStore, cache: AllocationCache) -> None:
        self._store = store
        self._cache = cache
        self._made_of: tuple[int, int] | None = None
        self._users: Users = {}
        self._pods: dict[PodUid, Pod] = {}
        self._shares: Mapping[ContainerKey, Allocation] = {}
        self._parts: Mapping[ContainerKey, Sequence[Allocation]] = {}

    @property
    def is_synced(self) -> bool:
        return self._store.is_synced

    @property
    def version(self) -> tuple[int, int]:
        """Another one after every change of an allocation or a pod."""
        return self._cache.version, self._store.version

    @property
    def users(self) -> Users:
        """Of each claim's allocation, the containers that use it; valid until the next change."""
        self._refresh()
        return self._users

    def claims_of_containers(self) -> dict[ContainerKey, tuple[ContainerKey, ...]]:
        """By container, the keys of the claims' allocations that it uses."""
        found: dict[ContainerKey, tuple[ContainerKey, ...]] = {}
        for key, pairs in self.users.items():
            for pod, container in pairs:
                user = ContainerKey(pod.uid, container.name)
                found[user] = (*found.get(user, ()), key)
        return found

    def containers_of(self, key: ContainerKey) -> list[tuple[str | None, PodUid]]:
        """The runtime's IDs and the pods of the containers that use a claim's allocation; None where an ID is not known."""
        return [(pod.container_ids.get(container.name), pod.uid) for pod, container in self.users.get(key, ())]

    def running(self) -> dict[ContainerKey, str]:
        """Of each claim's allocation that one container runs with: the runtime's ID of it."""
        found = {key: {one for one, _ in self.containers_of(key) if one is not None} for key in self.users}
        return {key: next(iter(ids)) for key, ids in found.items() if len(ids) == 1}

    def shares(self) -> Mapping[ContainerKey, Allocation]:
        """What isolations keep: each container's allocation, and for each view of a claim one; valid until the next
        change."""
        self._refresh()
        return self._shares or self._cache.view()

    def parts(self, key: ContainerKey) -> Sequence[Allocation]:
        """What stands behind one of `shares`: of a claim each result that a container uses together with the others."""
        self._refresh()
        if (parts := self._parts.get(key)) is not None:
            return parts
        allocation = self._cache.get(key)
        return (allocation,) if allocation is not None else ()

    def sharers(self, key: ContainerKey) -> Mapping[ContainerKey, str] | None:
        """The containers that use a claim's allocation, with the runtime's ID, empty where one does not run; None where
        `key` is a container's own."""
        if (allocation := self._cache.get(key)) is None or allocation.claim is None:
            return None
        users = self.users.get(key, ())
        return {ContainerKey(pod.uid, one.name): pod.container_ids.get(one.name, "") for pod, one in users}

    def using(self, uid: PodUid) -> tuple[Pod, ...]:
        """The pods that use a claim; of a pod's own UID that pod."""
        if (pod := self._store.get(uid)) is not None:
            return (pod,)
        users = self.users
        found = {pod.uid: pod for one in self._cache.of_pod(uid) for pod, _ in users.get(one.key, ())}
        return tuple(found[one] for one in sorted(found))

    def get(self, uid: PodUid) -> Pod | None:
        return self._store.get(uid) or self._of_claim(uid)

    def pods(self) -> tuple[Pod, ...]:
        self._refresh()
        return (*self._store.pods(), *self._pods.values())

    def _of_claim(self, uid: PodUid) -> Pod | None:
        self._refresh()
        return self._pods.get(uid)

    def _refresh(self) -> None:
        made_of = self.version
        if made_of == self._made_of:
            return
        self._made_of = made_of
        by_claim: dict[PodUid, list[Allocation]] = {}
        for allocation in self._cache:
            if allocation.claim is not None:
                by_claim.setdefault(allocation.key.pod_uid, []).append(allocation)
        shares = [one for allocations in by_claim.values() for one in allocations]
        self._users = claim_users(shares, self._store.pods()) if shares else {}
        self._parts = parts_of_views(shares)
        self._shares = by_view(self._cache.view(), self._parts) if shares else {}
        self._pods = {}
        for uid, allocations in by_claim.items():
            users = [pair for one in allocations for pair in self._users.get(one.key, ())]
            if (share := allocations[0].claim) is not None:
                self._pods[uid] = claim_as_pod(share.ref, allocations, users)
