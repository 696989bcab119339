"""Finds the container that a GetPreferredAllocation serves, asking the kubelet and, where needed, the API server.

Not for deciding: that is admission/decisions/identity.py. Bounded in time: the whole node waits for the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from gpushare_agent.admission.decisions.identity import Call, Doubt, Known, ListedHoldings, Target, Unresolved, identify
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.errors import AgentError, NotFound, RefusalReason, Refused, Rejected, Unavailable
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod, version_number
from gpushare_agent.model.resources import ResourceNames

log = structlog.get_logger(__name__)

MAX_FETCHES = 16
"""Pods fetched at once."""
MAX_FETCHES_IN_ALL = 64
"""Pods fetched for one call; a kubelet that lists more strangers than this is waited for, not chased."""
RETRY_S = 0.1
"""After a fetch that found the API server away, while there is time left."""


class InsideLister(Protocol):
    async def list_entries(self) -> Sequence[ListedHoldings]: ...


class Pods(Protocol):
    @property
    def version(self) -> int: ...
    def pods(self) -> tuple[Pod, ...]: ...
    async def wait_change(self, since: int) -> int: ...


class PodFetcher(Protocol):
    async def fetch(self, namespace: str, name: str, *, timeout_s: float) -> Pod | None: ...


class KubeletFacts(Protocol):
    async def wait_lists_inside(self, *, timeout_s: float) -> bool:
        """Whether a List inside GetPreferredAllocation is safe on this kubelet. Raises Unavailable while unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds: for asking the API server about a pod in all, for looking again in doubt, between two looks."""

    lookup_s: float = 2.0
    look_again_s: float = 0.4
    pause_s: float = 0.03


class Identification:
    """Holds no state of its own; reads the pod store and the cache. `on_identified` is told by which method it was."""

    def __init__(  # noqa: PLR0913 - the composition hands in every collaborator by name
        self,
        *,
        pods: Pods,
        fetcher: PodFetcher,
        kubelet: KubeletFacts,
        allocations: Callable[[], Mapping[ContainerKey, Allocation]],
        refused: Collection[PodUid],
        names: ResourceNames,
        clock: Callable[[], float],
        timeouts: Timeouts,
        on_identified: Callable[[str], None] = lambda method: None,
    ) -> None:
        self._pods = pods
        self._fetcher = fetcher
        self._kubelet = kubelet
        self._allocations = allocations
        self._refused = refused
        self._names = names
        self._clock = clock
        self._timeouts = timeouts
        self._on_identified = on_identified

    def known(self, verified: Collection[tuple[str, str]] = ()) -> Known:
        """What is known now. Of several pods of one name the live one counts, then the newest."""
        by_name: dict[tuple[str, str], Pod] = {}
        for pod in self._pods.pods():
            other = by_name.get((pod.namespace, pod.name))
            if other is None or _liveliness(pod) >= _liveliness(other):
                by_name[pod.namespace, pod.name] = pod
        return Known(
            pods=by_name,
            allocations=self._allocations(),
            refused=self._refused,
            names=self._names,
            verified=verified,
        )

    async def serve(self, call: Call, inside: InsideLister) -> Target | Refused:
        """The container of the call, or a refusal that says why it cannot be told. Never raises for outside faults."""
        try:
            return await self._serve(call, inside)
        except AgentError as e:
            return Refused(
                reason=RefusalReason.NOT_READY,
                detail=f"The kubelet could not be asked which pod it is admitting: {e}. Nothing was allocated. "
                "Create the pod again; if it persists, see `gpushare-agent check` on this node.",
            )

    async def _serve(self, call: Call, inside: InsideLister) -> Target | Refused:
        """Raises Unavailable, Corrupt: what the kubelet lists cannot be had or read, as a whole or of one pod."""
        started_at = self._clock()
        fetched: set[tuple[str, str]] = set()
        count = 0
        is_second_look = False
        while True:
            listed = await self._listed(inside, self._left(started_at))
            result = identify(call, listed, self.known(fetched))
            failed: Refused | None = None
            while (
                isinstance(result, Unresolved)
                and count < MAX_FETCHES_IN_ALL
                and self._clock() - started_at < self._timeouts.lookup_s
                and (unattributed := _to_fetch(result, fetched))
            ):
                count += len(unattributed)
                failed = await self._fetch(unattributed, self._left(started_at))
                if failed is not None:
                    break
                fetched.update(unattributed)
                result = identify(call, listed, self.known(fetched))
            if failed is not None:
                if self._clock() - started_at + RETRY_S >= self._timeouts.lookup_s:
                    return failed
                await asyncio.sleep(RETRY_S)
                continue
            if isinstance(result, Unresolved) and is_second_look:
                result = _settle(result, fetched)
            if isinstance(result, Target):
                self._on_identified(_method(listed, is_fetched=count > 0, is_second_look=is_second_look))
                return result
            if self._clock() - started_at >= self._timeouts.look_again_s:
                log.warning("pod_not_identified", doubt=result.doubt.value, candidates=_texts(result))
                return _refusal(result, call, self._names)
            # A pod that was refused elsewhere turns Failed within milliseconds, and then one candidate is left.
            fetched.clear()
            is_second_look = True
            await self._pause()
            await self._refresh(result, self._left(started_at))

    async def _listed(self, inside: InsideLister, timeout_s: float) -> Sequence[ListedHoldings]:
        if await self._kubelet.wait_lists_inside(timeout_s=timeout_s):
            return await inside.list_entries()
        known = self.known()
        return [_Believed(pod, known) for pod in self._pods.pods() if not pod.is_terminal and not pod.has_started]

    async def _fetch(self, unattributed: Sequence[tuple[str, str]], timeout_s: float) -> Refused | None:
        failures: list[str] = []

        async def fetch(namespace: str, name: str) -> None:
            try:
                await self._fetcher.fetch(namespace, name, timeout_s=timeout_s)
            except NotFound:
                pass
            except (Unavailable, Rejected) as e:
                failures.append(f"pod {namespace}/{name}: {e}")
            except AgentError as e:
                log.warning("pod_unreadable", namespace=namespace, pod=name, error=str(e))

        async with asyncio.TaskGroup() as group:
            for namespace, name in unattributed:
                group.create_task(fetch(namespace, name), name=f"fetch {namespace}/{name}")
        if not failures:
            return None
        return Refused(
            reason=RefusalReason.POD_UNKNOWN,
            detail="The kubelet admits a pod that this agent has not heard of, and the API server did not tell about it "
            f"within {self._timeouts.lookup_s:g} s ({sorted(failures)[0]}). Nothing was allocated. Create the pod again "
            "when the API server answers.",
        )

    async def _refresh(self, result: Unresolved, timeout_s: float) -> None:
        """Read the doubtful pods again: one of them may have ended."""
        names = sorted({(s.pod.namespace, s.pod.name) for s in result.candidates})[:MAX_FETCHES]
        if names:
            await self._fetch(names, timeout_s)

    def _left(self, started_at: float) -> float:
        return max(0.05, self._timeouts.lookup_s - (self._clock() - started_at))

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._timeouts.pause_s):
                await self._pods.wait_change(self._pods.version)
        except TimeoutError:
            pass


class _Believed:
    """A pod as our own ledger has it, for a kubelet that must not be asked."""

    def __init__(self, pod: Pod, known: Known) -> None:
        self.namespace = pod.namespace
        self.name = pod.name
        self._pod = pod
        self._known = known

    def count_ids(self, resource: str) -> int:
        return sum(self.holds(resource).values())

    def holds(self, resource: str) -> Mapping[str, int]:
        kind = self._known.names.kind(resource)
        held = {c.name: self._known.allocations.get(ContainerKey(self._pod.uid, c.name)) for c in self._pod.containers}
        return {name: len(a.ids(kind)) for name, a in held.items() if a is not None and kind is not None}


def _method(listed: Sequence[ListedHoldings], *, is_fetched: bool, is_second_look: bool) -> str:
    """How a container was found, one word for the metrics: each is a step slower or less sure than the one before."""
    if any(isinstance(entry, _Believed) for entry in listed):
        return "own-books"
    if is_second_look:
        return "looked-again"
    return "fetched" if is_fetched else "listed"


def _liveliness(pod: Pod) -> tuple[bool, bool, int]:
    return (not pod.is_terminal, not pod.is_deleting, version_number(pod.resource_version))


def _to_fetch(result: Unresolved, fetched: set[tuple[str, str]]) -> list[tuple[str, str]]:
    wanted = [name for name in (*result.unknown, *result.suspects) if name not in fetched]
    return wanted[:MAX_FETCHES]


def _settle(result: Unresolved, fetched: set[tuple[str, str]]) -> Target | Unresolved:
    """A listed pod that the API server no longer has is being deleted; it does not stand in a known pod's way."""
    if len(result.candidates) == 1 and set(result.unknown) <= fetched and not result.candidates[0].pod.has_started:
        return result.candidates[0]
    return result


def _texts(result: Unresolved) -> list[str]:
    return sorted(f"{s.pod.namespace}/{s.pod.name}/{s.container.name}" for s in result.candidates)


def _refusal(result: Unresolved, call: Call, names: ResourceNames) -> Refused:
    resource = names.name(call.kind)
    if result.doubt is Doubt.SEVERAL:
        return Refused(
            reason=RefusalReason.POD_AMBIGUOUS,
            detail=f"{call.size} {resource} may be for any of {', '.join(_texts(result))}: they are being admitted at "
            "the same time and ask for the same amount. This agent does not guess. Create the refused pod again.",
        )
    unknown = ", ".join(f"{namespace}/{name}" for namespace, name in result.unknown[:4])
    return Refused(
        reason=RefusalReason.POD_UNKNOWN,
        detail=f"no pod that the kubelet is admitting asks for {call.size} {resource}"
        + (f" (not known to the API server: {unknown})" if unknown else "")
        + ". A pod deleted during its admission ends like this. If the pod still exists, create it again.",
    )
