"""Keeps the pod store equal to the API server's pods of this node: list, then watch, for ever.

The only writer of the pod store. Whatever the server does (gone for minutes, half-open, cut or garbage streams, 410),
the last state stays and the loop comes back, with a jittered back-off. A pod that cannot be read is skipped with a
warning; it never stops the others. Protocol: Kubernetes API, "Efficient detection of changes".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

import structlog

from gpushare_agent.cluster.kube.pods import parse_pod, pod_uid, resource_version
from gpushare_agent.cluster.kube.slot import ApiSlot
from gpushare_agent.cluster.pod_store import PodStore
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.errors import AgentError, Conflict, Corrupt, NotFound, Rejected, Unavailable
from gpushare_agent.model.pods import Pod, version_number

log = structlog.get_logger(__name__)

T = TypeVar("T")


class ReadsPods(Protocol):
    """The part of the API server that is needed here (cluster/kube/client.py)."""

    async def list_pods(self, node_name: str, read: Callable[[dict[str, Any]], T | None]) -> tuple[list[T], str]: ...

    def watch_pods(
        self, node_name: str, resource_version: str
    ) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]: ...

    async def get_pod(self, namespace: str, name: str, *, timeout_s: float) -> dict[str, Any]: ...


class CountsWatching(Protocol):
    def pods_listed(self) -> None: ...

    def pod_watch_ended(self, outcome: str) -> None: ...

    def pod_unreadable(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPace:
    """A watch that lasted `healthy_s` proves the connection: the next one starts at once. After a shorter one the loop
    waits for the first step of `backoff`, and for the next step each time that one brought nothing."""

    backoff: Backoff = field(default_factory=lambda: Backoff(base_s=0.5, cap_s=30.0))
    healthy_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched:
    events: int = 0
    lasted_s: float = 0.0
    error: AgentError | None = None


class PodInformer:
    """`run` is the loop; `fetch` reads one pod now, for an admission that cannot wait for the watch."""

    def __init__(
        self,
        *,
        store: PodStore,
        node_name: str,
        api: ReadsPods | None = None,
        resources: Collection[str] | None = None,
        metrics: CountsWatching | None = None,
        pace: WatchPace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._node_name = node_name
        self._api: ApiSlot[ReadsPods] = ApiSlot(api)
        self._resources = resources
        self._metrics = metrics
        self._pace = pace or WatchPace()
        self._clock = clock
        self._version = ""

    def attach(self, api: ReadsPods) -> None:
        """The API server's client, once it is open."""
        self._api.put(api)

    async def run(self) -> NoReturn:
        """List and watch until cancelled."""
        api = await self._api.get()
        failures = 0
        while True:
            watched = await self._listen(api)
            is_healthy = watched.lasted_s >= self._pace.healthy_s
            failures = 1 if is_healthy or (watched.events and watched.error is None) else failures + 1
            delay_s = 0.0 if is_healthy and watched.error is None else self._pace.backoff.delay_s(failures)
            self._report(watched.error, delay_s)
            await asyncio.sleep(delay_s)

    async def fetch(self, namespace: str, name: str, *, timeout_s: float) -> Pod | None:
        """The pod as the API server has it now, also put into the store; None where this node has no such pod, and then
        the store forgets the pods that it knew by that name.

        Raises:
            Unavailable: no answer within `timeout_s`, the text says why.
            Rejected: the API server does not let us read pods.
            Corrupt: the API server has the pod, but what it asks for cannot be read.
        """
        former = [p.uid for p in self._store.pods() if (p.namespace, p.name) == (namespace, name)]
        try:
            async with asyncio.timeout(timeout_s):
                api = await self._api.get()
                pod = parse_pod(await api.get_pod(namespace, name, timeout_s=timeout_s), resources=self._resources)
        except NotFound:
            for uid in former:  # known before the question: a pod that came after the answer is not among them
                self._store.remove(uid)
            return None
        except TimeoutError as e:
            raise Unavailable(
                f"cannot get pod {namespace}/{name}: no connection to the API server within {timeout_s:g} s"
            ) from e
        except Conflict as e:
            raise Unavailable(str(e)) from e
        if pod.node_name != self._node_name:
            return None
        self._store.upsert(pod)
        # The watch may have told more meanwhile: a later state, or the pod's deletion.
        return self._store.get(pod.uid)

    async def _listen(self, api: ReadsPods) -> _Watched:
        """One list, where needed, and one watch."""
        events, began_at, error = 0, None, None
        try:
            if not self._version:
                await self._list(api)
            async with api.watch_pods(self._node_name, self._version) as stream:
                began_at = self._clock()
                async for raw_event in stream:
                    events += 1
                    self._apply(raw_event)
        except AgentError as e:
            error = e
            is_version_odd = isinstance(e, Rejected) and not version_number(self._version)
            if isinstance(e, Conflict | Corrupt) or is_version_odd:
                self._version = ""  # too old, unreadable from here on, or no version at all: only a new list helps
        lasted_s = 0.0 if began_at is None else self._clock() - began_at
        return _Watched(events=events, lasted_s=lasted_s, error=error)

    async def _list(self, api: ReadsPods) -> None:
        pods, version = await api.list_pods(self._node_name, self._read)
        self._store.replace_all(pods, resource_version=version)
        self._version = version
        if self._metrics is not None:
            self._metrics.pods_listed()
        log.info("pods_listed", node=self._node_name, pods=len(pods), resource_version=version)

    def _apply(self, raw_event: dict[str, Any]) -> None:
        kind, raw_object = raw_event.get("type"), raw_event["object"]
        if kind == "BOOKMARK":
            self._store.touch()
        elif kind == "DELETED":
            self._store.remove(pod_uid(raw_object))
        elif kind in ("ADDED", "MODIFIED"):
            pod = self._read(raw_object)
            if pod is not None:
                self._store.upsert(pod)
        else:
            raise Corrupt(f"cannot watch the pods of node {self._node_name}: unknown event type {str(kind)[:80]!r}")
        self._version = resource_version(raw_object) or self._version

    def _read(self, raw_pod: dict[str, Any]) -> Pod | None:
        """The pod; its last readable state where the present one is not; None for another node's."""
        try:
            pod = parse_pod(raw_pod, resources=self._resources)
        except Corrupt as e:
            log.warning(
                "pod_unreadable", error=str(e), then="its last readable state stays; without one it gets no GPU"
            )
            if self._metrics is not None:
                self._metrics.pod_unreadable()
            return self._last_readable(raw_pod)
        return pod if pod.node_name == self._node_name else None

    def _last_readable(self, raw_pod: dict[str, Any]) -> Pod | None:
        try:
            return self._store.get(pod_uid(raw_pod))
        except Corrupt:
            return None

    def _report(self, error: AgentError | None, delay_s: float) -> None:
        outcome = "ended" if error is None else type(error).__name__.lower()
        if self._metrics is not None:
            self._metrics.pod_watch_ended(outcome)
        if error is None:
            log.debug("pod_watch_ended", node=self._node_name, again_in_s=round(delay_s, 2))
        elif isinstance(error, Rejected):
            log.error("pod_watch_rejected", error=str(error), again_in_s=round(delay_s, 2))
        else:
            log.warning("pod_watch_lost", error=str(error), again_in_s=round(delay_s, 2), pods="kept as they were")
