"""Keeps somebody's picture of one kind of objects equal to the API server's: list, then watch, for ever.

The sink takes the objects one by one, while pages come in, so that a list of fifty thousand never stands still; what the
list did not have is removed at its end. Whatever the server does (gone for minutes, cut or garbage streams, 410) the last
state stays. `refresh` lists anew from now on: a new leader must not decide on what it heard before.

The mutable state is: the version to watch from, the keys that the sink was given, and how many lists were wanted and done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn, Protocol

import structlog

from gpushare_agent.cluster.kube.cluster import Watched
from gpushare_agent.cluster.kube.pods import resource_version
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.errors import AgentError, Conflict, Corrupt, Rejected
from gpushare_agent.model.pods import version_number

log = structlog.get_logger(__name__)

HEALTHY_S = 10.0
"""A watch that lasted so long proves the connection: the next one starts at once."""


class ListsAndWatches(Protocol):
    """The part of the API server that is needed here (cluster/kube/cluster.py)."""

    async def list_all(self, watched: Watched, read: Callable[[dict[str, Any]], str]) -> tuple[list[str], str]: ...

    def watch_all(
        self, watched: Watched, resource_version: str
    ) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]: ...


class Sink(Protocol):
    """Where the objects go. Corrupt means: unreadable, its last readable state stays."""

    def key(self, raw: dict[str, Any]) -> str: ...

    def put(self, raw: dict[str, Any]) -> bool:
        """Whether the object is of interest; one that no longer is will be removed."""
        ...

    def remove(self, key: str) -> None: ...


class HearsOfLists(Protocol):
    """Who may know of objects otherwise than from the informer, and learns from a list what is there no more."""

    def list_begins(self) -> None:
        """The API server has not been asked yet: what is known now, and not listed then, is gone."""
        ...

    def list_ended(self, keys: Collection[str]) -> None:
        """Everything was listed; these are the keys."""
        ...


class CountsInforming(Protocol):
    def listed(self, kind: str, duration_s: float) -> None: ...

    def watch_ended(self, kind: str, outcome: str) -> None: ...

    def unreadable(self, kind: str) -> None: ...


class ClusterInformer:
    """`run` once; `refresh` at any time while it runs."""

    def __init__(
        self,
        *,
        kind: str,
        watched: Watched,
        api: ListsAndWatches,
        sink: Sink,
        metrics: CountsInforming,
        lists: HearsOfLists | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self.kind = kind
        self._watched = watched
        self._api = api
        self._sink = sink
        self._metrics = metrics
        self._lists = lists
        self._backoff = backoff or Backoff(base_s=0.5, cap_s=30.0)
        self._clock = time.monotonic
        self._version = ""
        self._known: set[str] = set()
        self._wanted = 0
        self._done = -1
        self._is_listed = asyncio.Event()
        self._scope: asyncio.Timeout | None = None
        self.heard_at = float("-inf")
        """When the API server was last heard, by the monotonic clock."""

    @property
    def has_listed(self) -> bool:
        """At least one list is complete."""
        return self._done >= 0

    @property
    def count(self) -> int:
        """Objects of interest."""
        return len(self._known)

    async def refresh(self) -> None:
        """List anew; returns once a list that began after this call is complete. May be cancelled."""
        self._wanted += 1
        mine = self._wanted
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())
        while self._done < mine:
            self._is_listed.clear()
            await self._is_listed.wait()

    async def run(self) -> NoReturn:
        """List and watch until cancelled."""
        failures = 0
        while True:
            try:
                async with asyncio.timeout(None) as self._scope:
                    failures = await self._cycle(failures)
            except TimeoutError:
                failures = 0  # `refresh` set the time
            finally:
                self._scope = None

    async def _cycle(self, failures: int) -> int:
        """One list, where needed, one watch, and the pause after it; how many failed in a row."""
        began_at, error = self._clock(), None
        try:
            if not self._version or self._done < self._wanted:
                await self._list()
            await self._watch()
        except AgentError as e:
            error = e
            is_version_odd = isinstance(e, Rejected) and not version_number(self._version)
            if isinstance(e, Conflict | Corrupt) or is_version_odd:
                self._version = ""  # too old or unreadable from here on: only a new list helps
        is_healthy = self._clock() - began_at >= HEALTHY_S
        failures = 1 if is_healthy else failures + 1
        delay_s = 0.0 if is_healthy and error is None else self._backoff.delay_s(failures)
        self._report(error, delay_s)
        await asyncio.sleep(delay_s)
        return failures

    async def _list(self) -> None:
        wanted, began_at = self._wanted, self._clock()
        if self._lists is not None:
            self._lists.list_begins()
        keys, version = await self._api.list_all(self._watched, self._listed)
        listed = set(keys)
        for key in sorted(self._known - listed):
            self._forget(key)
        if self._lists is not None:
            self._lists.list_ended(listed)
        self._version = version
        self._done = wanted
        self._is_listed.set()
        self.heard_at = self._clock()
        self._metrics.listed(self.kind, self.heard_at - began_at)
        log.info("cluster_listed", kind=self.kind, objects=len(listed), kept=len(self._known), version=version)

    def _listed(self, raw: dict[str, Any]) -> str:
        self._put(raw)
        try:
            return self._sink.key(raw)
        except Corrupt:
            return ""

    async def _watch(self) -> None:
        async with self._api.watch_all(self._watched, self._version) as stream:
            async for raw_event in stream:
                self.heard_at = self._clock()
                self._apply(raw_event)

    def _apply(self, raw_event: dict[str, Any]) -> None:
        kind, raw_object = raw_event.get("type"), raw_event["object"]
        if kind == "DELETED":
            self._forget(self._sink.key(raw_object))
        elif kind in ("ADDED", "MODIFIED"):
            self._put(raw_object)
        elif kind != "BOOKMARK":
            raise Corrupt(f"cannot watch {self._watched.what}: unknown event type {str(kind)[:80]!r}")
        self._version = resource_version(raw_object) or self._version

    def _put(self, raw: dict[str, Any]) -> None:
        try:
            key = self._sink.key(raw)
            if self._sink.put(raw):
                self._known.add(key)
            else:
                self._forget(key)
        except Corrupt as e:
            self._metrics.unreadable(self.kind)
            log.warning("object_unreadable", kind=self.kind, error=str(e), then="its last readable state stays")

    def _forget(self, key: str) -> None:
        if key in self._known:
            self._known.discard(key)
            self._sink.remove(key)

    def _report(self, error: AgentError | None, delay_s: float) -> None:
        self._metrics.watch_ended(self.kind, "ended" if error is None else type(error).__name__.lower())
        if error is None:
            log.debug("cluster_watch_ended", kind=self.kind, again_in_s=round(delay_s, 2))
        elif isinstance(error, Rejected):
            log.error("cluster_watch_rejected", kind=self.kind, error=str(error), again_in_s=round(delay_s, 2))
        else:
            log.warning(
                "cluster_watch_lost",
                kind=self.kind,
                error=str(error),
                again_in_s=round(delay_s, 2),
                then="kept as it was",
            )
