"""Finds the container that a GetPreferredAllocation is for. Pure.

The device-plugin API names no pod. The kubelet admits one pod at a time, and its PodResources answer, taken inside
GetPreferredAllocation, already lists the pod under admission with the devices that it has got so far. So the target is the
first container, in spec order, that requests the resource and does not have it yet; exactly one listed pod has such a
container of the right size once terminal pods and those that this agent refused are excluded. What was measured of the
kubelet is in docs/explanation/architecture.md.

Ordinary init containers are never listed; the allocation cache has theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import cached_property
from typing import Protocol

from msgspec import Struct

from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.names import DeviceId, PodUid
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames


class ListedDevices(Protocol):
    """A pod in a PodResources answer; its devices are decoded only where they are read."""

    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    def count_ids(self, resource: str) -> int:
        """Roughly how many IDs of the resource the pod has; exact if each ID has an entry of its own."""

    def count_by_container(self, resource: str) -> Mapping[str, int]:
        """IDs of the resource by container."""


class Target(Struct, frozen=True, kw_only=True, dict=True):
    """The container that a call is for."""

    pod: Pod
    container: ContainerSpec

    @cached_property
    def key(self) -> ContainerKey:
        return ContainerKey(self.pod.uid, self.container.name)


class Unresolved(Struct, frozen=True, kw_only=True):
    """No container, or several. `unknown` are listed pods to fetch first, `to_recheck` those to fetch again."""

    candidates: tuple[Target, ...] = ()
    unknown: tuple[tuple[str, str], ...] = ()
    to_recheck: tuple[tuple[str, str], ...] = ()


class Call(Struct, frozen=True, kw_only=True):
    """A GetPreferredAllocation: which resource, how many IDs in all, and those that must be among them."""

    resource: str
    kind: ResourceKind
    size: int
    must_include: frozenset[str] = frozenset()


class Known(Struct, frozen=True, kw_only=True):
    """What the agent knows when it decides: pods by (namespace, name), the cache, pods that it has refused.

    `verified` are the names that were fetched from the API server since the call came: what the pod store has of
    other pods may be older than what the kubelet has.
    """

    pods: Mapping[tuple[str, str], Pod]
    allocations: Mapping[ContainerKey, Allocation]
    refused: Container[PodUid]
    names: ResourceNames
    verified: Collection[tuple[str, str]] = ()


def identify(call: Call, listed: Sequence[ListedDevices], known: Known) -> Target | Unresolved:
    """The container that the call is for, or why it cannot be determined. A listed pod is, in this order:

    | pod | counts as |
    |---|---|
    | 1. not in the pod store, has IDs of the resource | served already, ignored |
    | 2. not in the pod store | unknown, to be fetched |
    | 3. has everything of the resource that it requests | ignored; a static pod is rechecked: its file may be another |
    | 4. ended, or refused by this agent (`_is_out`) | to be rechecked: a new pod may have its name |
    | 5. pod store or cache contradict the List, and the pod was not fetched yet (`_is_doubtful`) | unknown |
    | 6. lacks nothing of this size (`_lacking`) | rechecked |
    | 7. lacks the resource | candidate |

    Candidates are then narrowed by the IDs that must be included. One candidate and no unknown pod: that is the target.
    """
    candidates: list[Target] = []
    unknown: list[tuple[str, str]] = []
    to_recheck: list[tuple[str, str]] = []
    resource = call.resource
    for entry in listed:
        pod = known.pods.get((entry.namespace, entry.name))
        if pod is None:
            # Unknown, and it has IDs already: it was served before the agent knew it. A pod without any may be the one.
            if not entry.count_ids(resource):
                unknown.append((entry.namespace, entry.name))
            continue
        # First, because it is cheap and true of nearly all.
        if is_accounted_for(pod, entry, resource, call, known):
            if pod.is_static:
                to_recheck.append((entry.namespace, entry.name))
            continue
        if _is_out(pod, known):
            to_recheck.append((entry.namespace, entry.name))
            continue
        target = _lacking(pod, entry, call, known)
        if (entry.namespace, entry.name) not in known.verified and _is_doubtful(pod, target, call, known):
            unknown.append((entry.namespace, entry.name))
        elif target is None:
            to_recheck.append((entry.namespace, entry.name))
        elif target not in candidates:  # a pod that ends may be listed next to the next one of its name
            candidates.append(target)
    candidates = _narrow(candidates, call, known)
    # If there is also an unknown pod, the one candidate is a guess: that pod may ask for the same.
    if len(candidates) == 1 and not unknown:
        return candidates[0]
    return Unresolved(
        candidates=tuple(candidates),
        unknown=tuple(sorted(unknown)),
        # Where there are candidates the call is for one of them; fetching the others would only take time.
        to_recheck=tuple(sorted(to_recheck)) if not candidates else (),
    )


def lacks(pod: Pod, container: ContainerSpec, resource: str, kind: ResourceKind, known: Known) -> bool:
    """True if the container requests the resource and the allocation cache has none of it yet."""
    if not container.requests.get(resource):
        return False
    allocation = known.allocations.get(ContainerKey(pod.uid, container.name))
    return allocation is None or not allocation.ids_of(kind)


def next_container_of(
    ids: Collection[str], resource: str, pod_of: Callable[[PodUid], Pod | None], known: Known
) -> Target | None:
    """The container of an Allocate that had no GetPreferredAllocation.

    The kubelet skips it when an init container's IDs cover the whole request; the IDs then identify the pod, and the target
    is its first container that lacks the resource. None unless all the IDs are of one pod's init containers.
    """
    requested, kind = set(ids), known.names.by_name[resource]
    owners = {
        key.pod_uid
        for key, allocation in known.allocations.items()
        if allocation.kind is ContainerKind.INIT and requested & allocation.ids_of(kind)
    }
    # Two pods' init containers hold some of these IDs: no kubelet allocates like that, so nothing is concluded.
    if len(owners) != 1:
        return None
    pod = pod_of(next(iter(owners)))
    if pod is None or not requested <= initial_ids(pod, kind, known.allocations):
        return None
    container = next((c for c in pod.containers if lacks(pod, c, resource, kind, known)), None)
    # The kubelet skips the preference only where the passed-on IDs are the whole request.
    if container is None or container.requests.get(resource) != len(requested):
        return None
    return Target(pod=pod, container=container)


def initial_ids(pod: Pod, kind: ResourceKind, allocations: Mapping[ContainerKey, Allocation]) -> frozenset[DeviceId]:
    """The IDs allocated to the pod's ordinary init containers: the kubelet passes them on to its later containers."""
    return frozenset(
        device for allocation in initial_allocations(pod, allocations) for device in allocation.ids_of(kind)
    )


def initial_allocations(pod: Pod, allocations: Mapping[ContainerKey, Allocation]) -> list[Allocation]:
    """The allocations of the pod's ordinary init containers."""
    return [
        allocation
        for container in pod.containers
        if container.kind is ContainerKind.INIT
        and (allocation := allocations.get(ContainerKey(pod.uid, container.name))) is not None
        and allocation.kind is ContainerKind.INIT
    ]


def is_accounted_for(pod: Pod, entry: ListedDevices, resource: str, call: Call, known: Known) -> bool:
    """The pod has everything of this resource that it requests. Cheap: most pods of a node end here."""
    is_requested = False
    expected = 0
    for container in pod.containers:
        if not container.requests.get(resource):
            continue
        is_requested = True
        allocation = known.allocations.get(ContainerKey(pod.uid, container.name))
        count = 0 if allocation is None else len(allocation.ids_of(call.kind))
        if not count:
            return False
        # Ordinary init containers are not listed, so their IDs are not among those that the entry counts.
        if container.kind is not ContainerKind.INIT:
            expected += count
    return not is_requested or (expected > 0 and entry.count_ids(resource) == expected)


def _is_out(pod: Pod, known: Known) -> bool:
    """Kubelets up to 1.33 go on listing pods that ended or were refused; no call is for these."""
    return pod.is_terminal or (pod.uid in known.refused and not pod.has_started)


def _is_doubtful(pod: Pod, target: Target | None, call: Call, known: Known) -> bool:
    """True if, by pod store or cache, the kubelet should list the pod with devices. Either it lost them, or a new pod has
    the name and the watch has not delivered it yet: then this UID and this allocation are the old pod's."""
    return (
        pod.has_started
        or pod.is_deleting
        or (target is not None and not lacks(pod, target.container, call.resource, call.kind, known))
    )


def _lacking(pod: Pod, entry: ListedDevices, call: Call, known: Known) -> Target | None:
    counts = entry.count_by_container(call.resource)
    for container in pod.containers:
        requested = container.requests.get(call.resource)
        if not requested:
            continue
        if container.kind is ContainerKind.INIT:
            # After its start a pod gets calls only when a container restarts; its init containers have ended.
            if pod.has_started or not lacks(pod, container, call.resource, call.kind, known):
                continue
        elif counts.get(container.name) or container.name in pod.running:
            continue  # one that was admitted while the resource was unknown runs without it
        if requested == call.size:
            return Target(pod=pod, container=container)
        # At its admission containers come in spec order: the first that lacks the resource is the one, or none is.
        if not pod.has_started:
            return None
    return None


def _narrow(candidates: list[Target], call: Call, known: Known) -> list[Target]:
    """IDs that must be included are an init container's: they identify its pod."""
    if len(candidates) < 2 or not call.must_include:
        return candidates
    owners = [c for c in candidates if call.must_include <= initial_ids(c.pod, call.kind, known.allocations)]
    # By our ledger nobody owns them. It may have lost the init container, so nothing is ruled out.
    return owners or candidates
