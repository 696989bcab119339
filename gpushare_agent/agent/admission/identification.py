"""Finds the container that a GetPreferredAllocation is for, by the kubelet's List and, where needed, the API server.

The decision itself is admission/decisions/identity.py. Bounded in time: the whole node waits for the answer. State owned,
for speed: which listed pods were found to have all that they request of a resource (`_settled`).
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Container, Mapping, Sequence

import structlog
from msgspec import Struct, field

from gpushare_agent.agent.admission.decisions.identity import (
    Call,
    Known,
    ListedDevices,
    Target,
    Unresolved,
    identify,
    is_accounted_for,
    next_container_of,
)
from gpushare_agent.agent.cluster.pod_store import NodePods, liveliness
from gpushare_agent.agent.cluster.runtime_classes import RuntimeClasses
from gpushare_agent.agent.kubelet.pod_resources import KubeletFacts, pod_key
from gpushare_agent.agent.node import Node
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import AgentError, NotFound, RefusalReason, Refused, Rejected, Unavailable
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import Pod

log = structlog.get_logger(__name__)

MAX_FETCHES = 16
"""Pods that are fetched at once."""
MAX_FETCHES_IN_ALL = 64
"""Pods that are fetched for one call; any more come by the watch of the API server."""
RETRY_S = 0.1
"""The pause between two fetches from an API server that does not answer, while there is time left."""
POLL_PAUSE_S = 0.03
LEAST_S = 0.5
"""The time for the first fetch of a pod if the kubelet took all the time to list it."""


_STATIC_CHARS = 900
_STATIC_AGAIN = "The kubelet tries a static pod again when its file changes, and when the kubelet starts."
_DELETED = "A pod deleted during its admission ends like this. If the pod still exists, create it again."


ListInside = Callable[[str, Mapping[bytes, int]], Awaitable[Sequence[ListedDevices]]]
"""The right to a PodResources List that an open GetPreferredAllocation gives: `list_entries` of kubelet/pod_resources.py."""


class _Lookup(Struct, kw_only=True):
    """How far the identification of one call is. `verified` are the pods fetched since the last List, `unanswered` is the
    refusal where the API server did not answer the last fetch. `unverifiable` are possible static pods that
    the kubelet could not be asked about, with the reason: the pod store may have a former pod by that name."""

    started_at: float
    fetches: int = 0
    unanswered: Refused | None = None
    verified: set[tuple[str, str]] = field(default_factory=set)
    unverifiable: dict[tuple[str, str], str] = field(default_factory=dict)
    is_first_poll: bool = True


class Identification(Struct, kw_only=True, eq=False):
    """`lookup_s` bounds all questions to the API server about a pod and its RuntimeClass. In doubt the kubelet is polled
    again for `poll_again_s`."""

    node: Node
    fetcher: NodePods
    kubelet: KubeletFacts
    runtime_classes: RuntimeClasses
    refused: Container[PodUid]
    clock: Callable[[], float] = time.monotonic
    lookup_s: float = 2.0
    poll_again_s: float = 0.4
    _settled: dict[str, dict[bytes, int]] = field(default_factory=lambda: defaultdict(dict))
    """By resource and `pod_key`, how many IDs a pod is listed with that has all it requests; until it or an allocation of it
    changes."""

    def next_container(self, resource: str, ids: Sequence[str]) -> Target | None:
        """The container of an Allocate without a GetPreferredAllocation: its IDs are an init container's."""
        return next_container_of(ids, resource, self.node.pods.get, self._known())

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """For PodStore.subscribe."""
        for pod in (old, new):
            if pod is not None:
                for counts in self._settled.values():
                    counts.pop(pod_key(pod.namespace, pod.name), None)

    def allocation_changed(self, old: Allocation | None, new: Allocation | None) -> None:
        """For AllocationCache.subscribe."""
        if (either := new or old) is not None:
            self.pod_changed(None, self.node.pods.get(either.key.pod_uid))

    async def identify(self, call: Call, list_inside: ListInside) -> Target | Refused:
        """The container of the call, or a refusal with the reason. Its RuntimeClass is known then. Never raises for outside
        faults."""
        try:
            return await self._identify(call, list_inside)
        except AgentError as e:
            return Refused(
                RefusalReason.NOT_READY,
                f"The kubelet could not be asked which pod it is admitting: {e}. Nothing was allocated. "
                "Create the pod again; if it persists, see `gpushare-agent check` on this node.",
            )

    async def _identify(self, call: Call, list_inside: ListInside) -> Target | Refused:
        """One poll per round: list, fetch what is unknown, decide. Then, in this order:

        1. The API server did not answer a fetch: polled again shortly, or refused when the time for lookups is over.
        2. From the second poll on, a listed pod that the API server no longer has is ignored (`_without_deleted`).
        3. One container: it is the target.
        4. None or several, for longer than `poll_again_s`: refused. Never guessed.
        5. Else the doubtful pods are fetched again, and the kubelet is polled again: a pod that was refused elsewhere turns
           Failed within milliseconds, and then one candidate is left.

        Raises Unavailable, Corrupt: the kubelet's list, or one pod of it, cannot be got or read.
        """
        lookup = _Lookup(started_at=self.clock())
        while True:
            listed = await self._list(call.resource, list_inside, self._left_s(lookup))
            result = await self._decide(call, listed, lookup)
            if isinstance(result, Refused):
                # Refused a little early: an answer must reach the kubelet within the bound that the node waits.
                if self.clock() - lookup.started_at + RETRY_S >= self.lookup_s:
                    return result
                await asyncio.sleep(RETRY_S)
                continue
            # Not at the first poll: one answer without the pod may be of an API server that lags behind the kubelet.
            if isinstance(result, Unresolved) and not lookup.is_first_poll:
                result = _without_deleted(result, lookup.verified)
            if isinstance(result, Target):
                self.node.metrics.identified(_method(listed, lookup))
                left_s = self.lookup_s - (self.clock() - lookup.started_at)
                await self.runtime_classes.learn([result.pod], left_s)
                return result
            if self.clock() - lookup.started_at >= self.poll_again_s:
                doubt = "several" if result.candidates else "none"
                log.warning("pod_not_identified", doubt=doubt, candidates=_texts(result))
                return _refusal(result, call, lookup.unverifiable)
            # What was fetched before the next List may be older than that List.
            lookup.verified.clear()
            lookup.is_first_poll = False
            await self._pause()
            await self._refresh(result, lookup)

    async def _decide(
        self, call: Call, listed: Sequence[ListedDevices], lookup: _Lookup
    ) -> Target | Unresolved | Refused:
        """Decide on one List, fetching the pods that the decision needs from the API server until it needs none."""
        known = self._known(lookup.verified, lookup.unverifiable)
        # Most of a node's pods: without this each admission would compare all of them again.
        listed = self._not_accounted_for(call, listed, known)
        result = identify(call, listed, known)
        while (
            isinstance(result, Unresolved)
            # Tenants can create pods faster than they can be fetched: the whole node waits for this call.
            and lookup.fetches < MAX_FETCHES_IN_ALL
            # The first fetch always: a kubelet that took all the time for its List must not make the API server's
            # answer impossible.
            and (not lookup.fetches or self.clock() - lookup.started_at < self.lookup_s)
            and (names := _to_fetch(result, lookup.verified))
        ):
            lookup.fetches += len(names)
            lookup.unanswered = await self._fetch(names, lookup)
            if lookup.unanswered is not None:
                return lookup.unanswered
            lookup.verified.update(names)
            result = identify(call, listed, self._known(lookup.verified, lookup.unverifiable))
        if isinstance(result, Unresolved) and lookup.unanswered is not None:
            return lookup.unanswered  # the time was over before it could be asked again: it is still the reason
        return result

    def _known(
        self, verified: Collection[tuple[str, str]] = (), unverifiable: Collection[tuple[str, str]] = ()
    ) -> Known:
        """What is known now."""
        pods = self.node.pods.by_name()
        if unverifiable:
            known = [p for p in self.node.pods.pods() if not p.is_static or (p.namespace, p.name) not in unverifiable]
            pods = {(pod.namespace, pod.name): pod for pod in sorted(known, key=liveliness)}
        return Known(
            pods=pods,
            allocations=self.node.cache.view(),
            refused=self.refused,
            names=self.node.names,
            verified=verified,
        )

    def _not_accounted_for(self, call: Call, listed: Sequence[ListedDevices], known: Known) -> list[ListedDevices]:
        """The listed pods except those, most of a node, that have everything of the resource. They are not looked at again
        before something of them changes. Static pods stay, because their files may have changed without an event."""
        left, settled = [], self._settled[call.resource]
        # Of two of one name, one of which ends, the greater number counts: fewer would hide that another pod has lost IDs.
        for entry in sorted(listed, key=lambda one: one.count_ids(call.resource)):
            name = (entry.namespace, entry.name)
            settled.pop(pod_key(*name), None)  # listed with another number of IDs
            pod = known.pods.get(name)
            if pod is None or pod.is_static or not is_accounted_for(pod, entry, call.resource, call, known):
                left.append(entry)
            # Another pod may have the name, one that could not be verified in this call.
            elif pod is self.node.pods.by_name().get(name):
                settled[pod_key(*name)] = entry.count_ids(call.resource)
        return left

    async def _list(self, resource: str, list_inside: ListInside, timeout_s: float) -> Sequence[ListedDevices]:
        """What the kubelet lists; if its PodResources is not mounted, the pending pods of the pod store."""
        if not self.kubelet.has_pod_resources:
            known = self._known()
            return [
                _Unlisted(pod, known) for pod in self.node.pods.pods() if not pod.is_terminal and not pod.has_started
            ]
        # Raises while the version is unknown: a List in a 1.29 kubelet could end it, and with it the whole node's
        # admissions.
        await self.kubelet.wait_known(timeout_s=timeout_s)
        return await list_inside(resource, self._settled[resource])

    async def _fetch(self, names: Sequence[tuple[str, str]], lookup: _Lookup) -> Refused | None:
        failures: list[str] = []
        timeout_s = self._left_s(lookup)

        async def fetch(namespace: str, name: str) -> None:
            try:
                await self.fetcher.fetch(namespace, name, timeout_s=timeout_s)
                lookup.unverifiable.pop((namespace, name), None)
            except NotFound as e:
                lookup.unverifiable[namespace, name] = str(e)
            # Neither is an answer about the pod: refusing it now is better than guessing.
            except (Unavailable, Rejected) as e:
                failures.append(f"pod {namespace}/{name}: {e}")
            except AgentError as e:
                log.warning("pod_unreadable", namespace=namespace, pod=name, error=str(e))

        async with asyncio.TaskGroup() as group:
            for namespace, name in names:
                group.create_task(fetch(namespace, name), name=f"fetch {namespace}/{name}")
        if not failures:
            return None
        return Refused(
            RefusalReason.POD_UNKNOWN,
            "The kubelet admits a pod that this agent does not know, and the API server did not answer for it within "
            f"{self.lookup_s:g} s ({sorted(failures)[0]}). Nothing was allocated. Create the pod again when the "
            "API server answers.",
        )

    async def _refresh(self, result: Unresolved, lookup: _Lookup) -> None:
        """Fetch the candidates again: one of them may have ended."""
        # Of several candidates all but one were perhaps refused or deleted since: only the API server knows.
        names = sorted({(s.pod.namespace, s.pod.name) for s in result.candidates})[:MAX_FETCHES]
        if names:
            await self._fetch(names, lookup)

    def _left_s(self, lookup: _Lookup) -> float:
        return max(LEAST_S, self.lookup_s - (self.clock() - lookup.started_at))

    async def _pause(self) -> None:
        await self.node.pods.changes.wait_next(POLL_PAUSE_S)


class _Unlisted:
    """A pod as pod store and allocation cache have it, instead of a List's entry."""

    def __init__(self, pod: Pod, known: Known) -> None:
        self.namespace = pod.namespace
        self.name = pod.name
        self._pod = pod
        self._known = known

    def count_ids(self, resource: str) -> int:
        return sum(self.count_by_container(resource).values())

    def count_by_container(self, resource: str) -> Mapping[str, int]:
        kind = self._known.names.by_name.get(resource)
        found = {c.name: self._known.allocations.get(ContainerKey(self._pod.uid, c.name)) for c in self._pod.containers}
        asks = {c.name for c in self._pod.containers if c.requests.get(resource)}
        return {
            name: len(a.ids_of(kind))
            for name, a in found.items()
            if a is not None and kind is not None and name in asks
        }


def _method(listed: Sequence[ListedDevices], lookup: _Lookup) -> str:
    """How the container was found, the metric's label."""
    if listed and isinstance(listed[0], _Unlisted):  # then all are
        return "pod-store"
    if not lookup.is_first_poll:
        return "repeated"
    return "fetched" if lookup.fetches else "listed"


def _to_fetch(result: Unresolved, verified: set[tuple[str, str]]) -> list[tuple[str, str]]:
    requested = [name for name in (*result.unknown, *result.to_recheck) if name not in verified]
    return requested[:MAX_FETCHES]


def _without_deleted(result: Unresolved, verified: set[tuple[str, str]]) -> Target | Unresolved:
    """A listed pod that the API server no longer has is being deleted: the call is for the one candidate that it has."""
    if len(result.candidates) == 1 and set(result.unknown) <= verified and not result.candidates[0].pod.has_started:
        return result.candidates[0]
    return result


def _texts(result: Unresolved) -> list[str]:
    return sorted(f"{s.pod.namespace}/{s.pod.name}/{s.container.name}" for s in result.candidates)


def _refusal(result: Unresolved, call: Call, unverifiable: Mapping[tuple[str, str], str]) -> Refused:
    resource = call.resource
    if result.candidates:
        return Refused(
            RefusalReason.POD_AMBIGUOUS,
            f"{call.size} {resource} may be for any of {', '.join(_texts(result))}: they are being admitted at "
            "the same time and ask for the same amount. This agent does not guess. Create the refused pod again.",
        )
    unknown = ", ".join(f"{namespace}/{name}" for namespace, name in result.unknown[:4])
    static = next((unverifiable[name] for name in sorted(unverifiable)), "")
    return Refused(
        RefusalReason.POD_UNKNOWN,
        f"no pod that the kubelet is admitting asks for {call.size} {resource}"
        + (f" (not known to the API server: {unknown})" if unknown else "")
        + (f". {static[:_STATIC_CHARS]}. {_STATIC_AGAIN}" if static else f". {_DELETED}"),
    )
