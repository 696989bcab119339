"""Who uses the claims that are prepared on this node, and which of their allocations a container sees as one share.

Plain functions find both; `ClaimPods` knows of whom to ask them. Pure: the module is in pyproject.toml's list.

State owned: the claims with allocations and the pods by the names of claims, and the shares as they were made last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce

from msgspec.structs import replace

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.cluster.pod_store import PodStore
from gpushare_agent.core.model.allocations import Allocation, Charge, ContainerKey, ShareSize
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import ClaimUser, ContainerSpec, Pod


def claim_users(allocations: Iterable[Allocation], pods: Iterable[Pod]) -> dict[ContainerKey, list[ClaimUser]]:
    """The containers that use each claim's allocation, by its key, in the order of the pods."""
    of_claims: dict[tuple[str, str], list[Allocation]] = {}
    for allocation in allocations:
        if allocation.claim is not None:
            of_claims.setdefault((allocation.claim.ref.namespace, allocation.claim.ref.name), []).append(allocation)
    found: dict[ContainerKey, list[ClaimUser]] = {}
    if not of_claims:
        return found
    for pod in pods:
        for container, key in _uses(pod, of_claims):
            found.setdefault(key, []).append((pod, container))
    return found


def _uses(
    pod: Pod, of_claims: Mapping[tuple[str, str], Sequence[Allocation]]
) -> Iterator[tuple[ContainerSpec, ContainerKey]]:
    for container in pod.containers if pod.claims else ():
        for name, requests in pod.used_claims(container).items():
            for allocation in of_claims.get((pod.namespace, name), ()):
                if allocation.claim is not None and {"", allocation.claim.request} & requests:
                    yield container, allocation.key


def parts_of_views(allocations: Iterable[Allocation]) -> dict[ContainerKey, list[Allocation]]:
    """The claims' allocations that a container uses together, by the key of their view. The key's own is the first."""
    found: dict[ContainerKey, list[Allocation]] = {}
    for one in allocations:
        if one.claim is not None:
            key = ContainerKey(one.key.pod_uid, one.claim.view or one.key.container)
            parts = found.setdefault(key, [])
            parts.insert(0 if one.key == key else len(parts), one)
    return {key: parts for key, parts in found.items() if parts[0].key == key}


def by_view(
    allocations: Mapping[ContainerKey, Allocation], parts_of: Mapping[ContainerKey, Sequence[Allocation]]
) -> Mapping[ContainerKey, Allocation]:
    """The allocations as containers see them. Claims' allocations that a container uses together are one, under the key of
    their view."""
    found = {key: one for key, one in allocations.items() if one.claim is None or one.claim.view in ("", key.container)}
    return found | {key: _joined(parts) for key, parts in parts_of.items() if len(parts) > 1}


def _joined(parts: Sequence[Allocation]) -> Allocation:
    sizes = [one.size for one in parts]
    claims = [one.claim for one in parts if one.claim is not None]
    return replace(
        parts[0],
        claim=replace(claims[0], core_limit=max(claim.core_limit for claim in claims)),
        gpus=tuple(dict.fromkeys(gpu for one in parts for gpu in one.gpus)),
        charge=reduce(Charge.plus, (one.charge for one in parts)),
        is_whole=all(one.is_whole for one in parts),
        resized_to=ShareSize(cores=sum(size.cores for size in sizes), memory=sum(size.memory for size in sizes)),
    )


Users = Mapping[ContainerKey, Sequence[ClaimUser]]
_UidsOfClaim = dict[tuple[str, str], dict[PodUid, None]]
"""By the namespace and name of a claim."""


class ClaimPods:
    def __init__(self, store: PodStore, cache: AllocationCache) -> None:
        self._store = store
        self._cache = cache
        self._made_of = -1
        self._shares: Mapping[ContainerKey, Allocation] = {}
        self._claims: _UidsOfClaim = {}
        self._pods: _UidsOfClaim = {}
        for allocation in cache:
            self._allocation_changed(None, allocation)
        for pod in store.pods():
            self._pod_changed(None, pod)
        cache.subscribe(self._allocation_changed)
        store.subscribe(self._pod_changed)

    @property
    def is_synced(self) -> bool:
        return self._store.is_synced

    @property
    def users(self) -> Users:
        """The containers that use each claim's allocation."""
        uids = {uid: None for of_name in self._claims.values() for uid in of_name}
        return {key: pairs for uid in uids for key, pairs in self._users_of(uid).items()}

    def claims_of_containers(self) -> dict[ContainerKey, tuple[ContainerKey, ...]]:
        """The keys of the claims' allocations that each container uses."""
        found: dict[ContainerKey, tuple[ContainerKey, ...]] = {}
        for key, pairs in self.users.items():
            for pod, container in pairs:
                user = ContainerKey(pod.uid, container.name)
                found[user] = (*found.get(user, ()), key)
        return found

    def shares(self) -> Mapping[ContainerKey, Allocation]:
        """What isolations keep: an allocation for each container and one for each view of a claim; valid until the next
        change."""
        if not self._claims:
            return self._cache.view()
        if self._made_of != self._cache.version:
            self._made_of, self._shares = self._cache.version, by_view(self._cache.view(), parts_of_views(self._cache))
        return self._shares

    def shares_of(self, uid: PodUid) -> Mapping[ContainerKey, Allocation]:
        """Those of one pod or claim."""
        own = self._cache.of_pod(uid)
        return by_view({one.key: one for one in own}, parts_of_views(own))

    def parts(self, key: ContainerKey) -> Sequence[Allocation]:
        """The allocations behind one of `shares`: for a claim, every result that a container uses together with others."""
        if (parts := parts_of_views(self._cache.of_pod(key.pod_uid)).get(key)) is not None:
            return parts
        allocation = self._cache.get(key)
        return (allocation,) if allocation is not None else ()

    def sharers(self, key: ContainerKey) -> Mapping[ContainerKey, str] | None:
        """The containers that use a claim's allocation, with the runtime's IDs, empty for one that does not run. None if
        `key` is a container's own."""
        if (allocation := self._cache.get(key)) is None or allocation.claim is None:
            return None
        users = self._users_of(key.pod_uid).get(key, ())
        return {ContainerKey(pod.uid, one.name): pod.container_ids.get(one.name, "") for pod, one in users}

    def using(self, uid: PodUid) -> tuple[Pod, ...]:
        """The pods that use a claim. For a pod's own UID: that pod."""
        if (pod := self._store.get(uid)) is not None:
            return (pod,)
        found = {pod.uid: pod for pairs in self._users_of(uid).values() for pod, _ in pairs}
        return tuple(found[one] for one in sorted(found))

    def subjects(self, pod: Pod) -> set[PodUid]:
        """The UIDs under which there may be allocations that the pod uses: its own, and those of its claims."""
        return {pod.uid, *(uid for name in _claim_names(pod) for uid in self._claims.get(name, ()))}

    def get(self, uid: PodUid) -> Pod | None:
        """A pod; a claim is none."""
        return self._store.get(uid)

    def instance(self, key: ContainerKey) -> str:
        """The runtime's ID of the container that has the allocation, empty where it is not known. Of a claim where it has
        one result and one user: what several containers run as has no ID."""
        if (sharers := self.sharers(key)) is not None:
            return next(iter(sharers.values())) if len(sharers) == len(self._cache.of_pod(key.pod_uid)) == 1 else ""
        pod = self._store.get(key.pod_uid)
        return pod.container_ids.get(key.container, "") if pod is not None else ""

    def _users_of(self, uid: PodUid) -> Users:
        own = [one for one in self._cache.of_pod(uid) if one.claim is not None]
        uids = {pod: None for one in own for pod in self._pods.get(_name_of(one), ())}
        pods = filter(None, map(self._store.get, uids))
        return claim_users(own, sorted(pods, key=lambda pod: (pod.namespace, pod.name, pod.uid)))

    def _allocation_changed(self, old: Allocation | None, new: Allocation | None) -> None:
        if (one := new or old) is not None and one.claim is not None:
            _note(self._claims, _name_of(one), one.key.pod_uid, is_there=bool(self._cache.of_pod(one.key.pod_uid)))

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        for pod in filter(None, (old, new)):
            for name in _claim_names(pod):
                _note(self._pods, name, pod.uid, is_there=pod is new)


def _note(uids: _UidsOfClaim, name: tuple[str, str], uid: PodUid, *, is_there: bool) -> None:
    own = uids.setdefault(name, {})
    own[uid] = None
    if not is_there:
        del own[uid]
    if not own:
        del uids[name]


def _name_of(allocation: Allocation) -> tuple[str, str]:
    return allocation.claim.ref[:2] if allocation.claim is not None else ("", "")


def _claim_names(pod: Pod) -> set[tuple[str, str]]:
    return {(pod.namespace, name) for name in pod.claims.values()}
