"""Keeps a handler's objects of one kind equal to the API server's: list, then watch, until cancelled.

The agent has one for the pods of its node (handler: pod_store.py), the extender three: nodes, pods and its ConfigMap. The
handler gets the objects one by one, while pages come in, so that a list of fifty thousand never stands still; what a list
lacks is removed at its end. Whatever the server does (gone for minutes, half-open, cut or garbage streams, 410), the last
state stays and the loop comes back with a jittered back-off. An object that cannot be read never stops the others.

The mutable state is: the version to watch from, the keys that the handler has, when the server last sent something, since
when it does not answer, and how many lists were asked for and done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import NoReturn, Protocol

import structlog
from msgspec import Raw, Struct

from gpushare_agent.cluster.kube.lists import KubeLists, Watched, WatchEvent
from gpushare_agent.cluster.kube.objects import object_meta
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.errors import AgentError, Conflict, Corrupt, Rejected
from gpushare_agent.model.pods import version_number

log = structlog.get_logger(__name__)

HEALTHY_S = 10.0
"""A watch that lasted so long proves the connection: the next one starts at once."""


class Handler(Protocol):
    """Where the objects go, as undecoded JSON; subclass it. Corrupt means: unreadable, its last readable state stays."""

    def key(self, raw: Raw) -> str: ...

    def put(self, raw: Raw) -> bool:
        """Whether the object is of interest; one that no longer is will be removed."""
        ...

    def remove(self, key: str) -> None: ...

    def list_begins(self) -> None:
        """The API server has not been asked yet: what is known now by other ways, and not listed then, is gone."""
        return

    def list_ended(self, keys: Collection[str], missing: Collection[str], version: str) -> None:
        """The list as of `version` has these keys; the `missing` were put earlier and are not in it."""
        for key in missing:
            self.remove(key)


class CountsInforming(Protocol):
    def listed(self, kind: str, duration_s: float) -> None: ...

    def watch_ended(self, kind: str, outcome: str) -> None: ...

    def unreadable(self, kind: str) -> None: ...


class Lost(Struct, frozen=True, kw_only=True):
    """`since` is by the monotonic clock."""

    since: float
    why: str


class _Cycle(Struct, kw_only=True):
    """One list, where needed, and one watch."""

    began_at: float = float("inf")
    """The watch's begin; it never began where this is infinite."""
    has_listed: bool = False
    events: int = 0
    error: AgentError | None = None


class Informer:
    """`run` once; `refresh` at any time while it runs. `kind` names the objects in logs and metrics."""

    def __init__(
        self,
        *,
        kind: str,
        watched: Watched,
        handler: Handler,
        metrics: CountsInforming,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind = kind
        self._watched = watched
        self._handler = handler
        self._metrics = metrics
        self._backoff = backoff or Backoff(base_s=0.5, cap_s=30.0)
        self._clock = clock
        self._version = ""
        self._known: set[str] = set()
        self._lists_requested = 0
        # Below the requests, of which there are none yet: the first list is made without being asked for.
        self._lists_done = -1
        self._is_listed = asyncio.Event()
        self._scope: asyncio.Timeout | None = None
        self.last_message_at: float | None = None
        """When a list or an event last came from the API server, by the monotonic clock."""
        self.lost: Lost | None = None
        """Since when nothing could be listed or watched, and why; None once a watch is under way."""

    @property
    def has_listed(self) -> bool:
        """Whether at least one list is complete."""
        return self._lists_done >= 0

    @property
    def count(self) -> int:
        """Objects of interest."""
        return len(self._known)

    async def refresh(self) -> None:
        """List anew; returns once a list that began after this call is complete. May be cancelled.

        A new leader must not decide on what it received before.
        """
        self._lists_requested += 1
        # A list that has begun already may have been answered before this call: only one with this number counts.
        mine = self._lists_requested
        if self._scope is not None and not self._scope.expired():
            # Ends the watch, or the pause after a failure, at once: a new leader waits for it.
            self._scope.reschedule(asyncio.get_running_loop().time())
        # A list may fail and be made again: the caller bounds the wait by being cancelled.
        while self._lists_done < mine:
            self._is_listed.clear()
            await self._is_listed.wait()

    async def run(self, api: KubeLists) -> NoReturn:
        """List and watch until cancelled."""
        failures = 0
        while True:
            try:
                # No limit of its own: it is there for `refresh` to end.
                async with asyncio.timeout(None) as self._scope:
                    failures = await self._cycle_and_pause(api, failures)
            except TimeoutError:
                failures = 0  # `refresh` set the time
            finally:
                self._scope = None

    async def _cycle_and_pause(self, api: KubeLists, failures: int) -> int:
        """How many cycles failed in a row, this one included.

        | the watch                          | failures    | pause                       |
        | ---------------------------------- | ----------- | --------------------------- |
        | lasted HEALTHY_S and ended cleanly | 1           | none                        |
        | lasted HEALTHY_S and broke         | 1           | the first step of back-off  |
        | ended cleanly after an event       | 1           | the first step of back-off  |
        | gone (410) where it went on        | 1           | the first step of back-off  |
        | any other, and a failed list       | one more    | the next step               |
        """
        cycle = _Cycle()
        await self._run_cycle(api, cycle)
        is_healthy = self._clock() - cycle.began_at >= HEALTHY_S
        # An API server that was away, and cannot continue the watch, is back: its list is what all others wait for.
        is_back = isinstance(cycle.error, Conflict) and not cycle.has_listed
        failures = 1 if is_healthy or is_back or (cycle.events and cycle.error is None) else failures + 1
        delay_s = 0.0 if is_healthy and cycle.error is None else self._backoff.delay_s(failures)
        # Before the pause, so that the log says when it goes on.
        self._report(cycle.error, delay_s)
        await asyncio.sleep(delay_s)
        return failures

    async def _run_cycle(self, api: KubeLists, cycle: _Cycle) -> None:
        try:
            # Otherwise the watch goes on where it ended: a list of a large cluster is not made for a connection that
            # broke.
            if not self._version or self._lists_done < self._lists_requested:
                cycle.has_listed = True
                await self._list(api)
            async with api.watch_all(self._watched, self._version) as stream:
                cycle.began_at = self._clock()
                self.lost = None
                # The stream has its own limits (lists.py): a silent one ends as Unavailable.
                async for event in stream:
                    cycle.events += 1
                    self.last_message_at = self._clock()
                    self._apply(event)
        except AgentError as e:
            cycle.error = e
            # The error of now; the time is that of the first one.
            self.lost = Lost(since=self.lost.since if self.lost is not None else self._clock(), why=str(e))
            # Versions are numbers in every API server that is known: another one may be why the watch is refused.
            is_version_odd = isinstance(e, Rejected) and not version_number(self._version)
            if isinstance(e, Conflict | Corrupt) or is_version_odd:
                self._version = ""  # too old, unreadable from here on, or no version at all: only a new list helps

    async def _list(self, api: KubeLists) -> None:
        # Before the first page: a `refresh` during the list needs another one.
        requested, began_at = self._lists_requested, self._clock()
        self._handler.list_begins()
        keys, version = await api.list_all(self._watched, self._put_listed)
        listed = set(keys)
        # Sorted, so that handlers see the same order for the same cluster.
        missing = sorted(self._known - listed)
        self._known &= listed
        # The handler removes them, for it may know better: the node's pods compare their versions.
        self._handler.list_ended(listed, missing, version)
        self._version = version
        self._lists_done = requested
        self._is_listed.set()
        self.last_message_at = self._clock()
        self._metrics.listed(self.kind, self.last_message_at - began_at)
        log.info("listed", kind=self.kind, objects=len(listed), kept=len(self._known), version=version)

    def _put_listed(self, raw: Raw) -> str:
        self._put(raw)
        try:
            # An unreadable object that has a key is listed all the same: its last readable state stays.
            return self._handler.key(raw)
        except Corrupt:
            return ""

    def _apply(self, event: WatchEvent) -> None:
        if event.type == "DELETED":
            # By the key alone: what a deleted object asks for may be unreadable.
            self._remove(self._handler.key(event.object))
        elif event.type in ("ADDED", "MODIFIED"):
            self._put(event.object)
        elif event.type != "BOOKMARK":
            raise Corrupt(f"cannot watch {self._watched.what}: unknown event type {event.type[:80]!r}")
        # Every event moves the place to go on from, bookmarks above all: they are sent for that.
        self._version = object_meta(event.object, self.kind).version or self._version

    def _put(self, raw: Raw) -> None:
        try:
            key = self._handler.key(raw)
            if self._handler.put(raw):
                self._known.add(key)
            else:
                self._remove(key)
        except Corrupt as e:
            self._metrics.unreadable(self.kind)
            log.warning("object_unreadable", kind=self.kind, error=str(e), then="its last readable state stays")

    def _remove(self, key: str) -> None:
        # Deleted objects that never were of interest are not the handler's.
        if key in self._known:
            self._known.discard(key)
            self._handler.remove(key)

    def _report(self, error: AgentError | None, delay_s: float) -> None:
        outcome = "ended" if error is None else type(error).__name__.lower()
        self._metrics.watch_ended(self.kind, outcome)
        if error is None:
            # The API server ends each watch after some minutes: nothing has happened.
            log.debug("watch_ended", kind=self.kind, retry_in_s=round(delay_s, 2))
            return
        # A missing right does not mend itself: a person is needed.
        write = log.error if isinstance(error, Rejected) else log.warning
        then = "objects stay as they were"
        write(
            "watch_failed", kind=self.kind, outcome=outcome, error=str(error), retry_in_s=round(delay_s, 2), then=then
        )
