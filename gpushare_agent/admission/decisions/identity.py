"""Whom is this call for? Finds the container that a GetPreferredAllocation serves. Pure.

The device-plugin API names no pod. The kubelet admits one pod at a time, and its PodResources answer, taken inside
GetPreferredAllocation, already lists the pod under admission with what it has got so far. So the container served is the
first one, in spec order, that wants the resource by its spec and does not have it yet; exactly one listed pod has such a
container of the right size once terminal pods and the ones we refused are set aside. What was measured of the kubelet is
in docs/architecture.md.

Ordinary init containers are never listed, so for them our own cache tells what they have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames


class ListedHoldings(Protocol):
    """A pod in a PodResources answer; reading its devices may cost, so it is asked only where needed."""

    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    def count_ids(self, resource: str) -> int:
        """Roughly how many IDs of the resource the pod holds: exact where each ID has an entry of its own."""

    def holds(self, resource: str) -> Mapping[str, int]:
        """IDs of the resource by container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The container that a call is for."""

    pod: Pod
    container: ContainerSpec

    @property
    def key(self) -> ContainerKey:
        return ContainerKey(self.pod.uid, self.container.name)


class Doubt(Enum):
    NOBODY = "nobody"
    SEVERAL = "several"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unresolved:
    """No container, or several. `unknown` are listed pods to fetch first; `suspects` those to read again."""

    doubt: Doubt
    candidates: tuple[Target, ...] = ()
    unknown: tuple[tuple[str, str], ...] = ()
    suspects: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A GetPreferredAllocation: which resource, how many IDs in all, and those that must be among them."""

    kind: ResourceKind
    size: int
    must_include: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the agent knows when it decides: pods by (namespace, name), the cache, pods that it has refused.

    `verified` are the names that the API server has told about since the call came: what the pod store says of the others
    may be older than what the kubelet sees.
    """

    pods: Mapping[tuple[str, str], Pod]
    allocations: Mapping[ContainerKey, Allocation]
    refused: Collection[PodUid]
    names: ResourceNames
    verified: Collection[tuple[str, str]] = ()


def identify(call: Call, listed: Sequence[ListedHoldings], known: Known) -> Target | Unresolved:
    """The container that the call serves, or why it cannot be told."""
    candidates: list[Target] = []
    unknown: list[tuple[str, str]] = []
    suspects: list[tuple[str, str]] = []
    for entry in listed:
        pod = known.pods.get((entry.namespace, entry.name))
        if pod is None:
            if not entry.count_ids(known.names.name(call.kind)):
                unknown.append((entry.namespace, entry.name))
            continue
        if _is_explained(pod, entry, call, known):
            continue
        if _is_out(pod, known):
            suspects.append((entry.namespace, entry.name))
            continue
        target = _lacking(pod, entry, call, known)
        if (entry.namespace, entry.name) not in known.verified and _is_doubtful(pod, target, call, known):
            unknown.append((entry.namespace, entry.name))
        elif target is None:
            suspects.append((entry.namespace, entry.name))
        else:
            candidates.append(target)
    candidates = _narrow(candidates, call, known)
    if len(candidates) == 1 and not unknown:
        return candidates[0]
    return Unresolved(
        doubt=Doubt.SEVERAL if candidates else Doubt.NOBODY,
        candidates=tuple(candidates),
        unknown=tuple(sorted(unknown)),
        suspects=tuple(sorted(suspects)) if not candidates else (),
    )


def lacks(pod: Pod, container: ContainerSpec, kind: ResourceKind, known: Known) -> bool:
    """By our cache, the container wants the resource and has none of it yet."""
    if not known.names.wanted(container, kind):
        return False
    held = known.allocations.get(ContainerKey(pod.uid, container.name))
    if held is None:
        return True
    return not held.ids(kind)


def reusing(
    ids: Collection[str], kind: ResourceKind, pod_of: Callable[[PodUid], Pod | None], known: Known
) -> Target | None:
    """The container of an Allocate that had no GetPreferredAllocation.

    The kubelet skips it when an init container's IDs cover the whole request; the IDs then tell the pod, and the first
    container that lacks the resource is the one. None where the IDs are not all an init container's of one pod.
    """
    wanted = set(ids)
    owners = {
        key.pod_uid
        for key, allocation in known.allocations.items()
        if allocation.kind is ContainerKind.INIT and wanted & allocation.ids(kind)
    }
    if len(owners) != 1:
        return None
    pod = pod_of(next(iter(owners)))
    if pod is None or not wanted <= initial_ids(pod.uid, kind, known.allocations):
        return None
    container = next((c for c in pod.containers if lacks(pod, c, kind, known)), None)
    if container is None or known.names.wanted(container, kind) != len(wanted):
        return None
    return Target(pod=pod, container=container)


def initial_ids(uid: PodUid, kind: ResourceKind, allocations: Mapping[ContainerKey, Allocation]) -> frozenset[str]:
    """The IDs that the pod's ordinary init containers hold: the kubelet gives them to its later containers."""
    return frozenset(
        device
        for key, allocation in allocations.items()
        if key.pod_uid == uid and allocation.kind is ContainerKind.INIT
        for device in allocation.ids(kind)
    )


def _is_explained(pod: Pod, entry: ListedHoldings, call: Call, known: Known) -> bool:
    """Nothing of this resource is owed to the pod. Cheap: most pods of a node end here."""
    resource = known.names.name(call.kind)
    is_wanted = False
    expected = 0
    for container in pod.containers:
        if not container.requests.get(resource):
            continue
        is_wanted = True
        held = known.allocations.get(ContainerKey(pod.uid, container.name))
        count = 0 if held is None else len(held.ids(call.kind))
        if not count:
            return False
        if container.kind is not ContainerKind.INIT:
            expected += count
    return not is_wanted or (expected > 0 and entry.count_ids(resource) == expected)


def _is_out(pod: Pod, known: Known) -> bool:
    """Old kubelets go on listing pods that ended and pods that were refused; they are served no more."""
    return pod.is_terminal or (pod.uid in known.refused and not pod.has_started)


def _is_doubtful(pod: Pod, target: Target | None, call: Call, known: Known) -> bool:
    """By what we know the kubelet should list the pod with devices. Either it lost them, or the name is a new pod's, of
    which the watch has not told yet: then this ledger and this UID are the old one's."""
    return (
        pod.has_started
        or pod.is_deleting
        or (target is not None and not lacks(pod, target.container, call.kind, known))
    )


def _lacking(pod: Pod, entry: ListedHoldings, call: Call, known: Known) -> Target | None:
    holds = entry.holds(known.names.name(call.kind))
    for container in pod.containers:
        wanted = known.names.wanted(container, call.kind)
        if not wanted:
            continue
        if container.kind is ContainerKind.INIT:
            # A pod that has started is called for again only when a container restarts; its init containers are over.
            if pod.has_started or not lacks(pod, container, call.kind, known):
                continue
        elif holds.get(container.name) or container.name in pod.running:
            continue  # a container that runs needs nothing: one admitted before the resource was known runs without
        if wanted == call.size:
            return Target(pod=pod, container=container)
        if not pod.has_started:
            return None
    return None


def _narrow(candidates: list[Target], call: Call, known: Known) -> list[Target]:
    """IDs that must be included are an init container's: they point at its pod."""
    if len(candidates) < 2 or not call.must_include:
        return candidates
    pointed = [s for s in candidates if call.must_include <= initial_ids(s.pod.uid, call.kind, known.allocations)]
    return pointed or candidates
