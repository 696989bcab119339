"""Keeps a handler's objects of one kind equal to the API server's: list, then watch, until cancelled.

The agent has one for the pods of its node (handler: agent/cluster/pod_store.py), the extender three: nodes, pods and
its ConfigMap. The handler gets the objects one by one, while pages come in, so that a list of fifty thousand never
stands still; what a list lacks is removed at its end. Whatever the server does (gone for minutes, half-open, cut or
garbage streams, 410), the last state stays and the loop comes back with a jittered back-off. An object that cannot be
read never stops the others.

The mutable state is: the version to watch from, the keys that the handler has, when the server last sent something, since
when it does not answer, and how many lists were asked for and done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import NoReturn, Protocol

import structlog
from msgspec import Raw, Struct, field

from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.supervision import ChangeSignal
from gpushare_agent.core.kube.objects import object_meta
from gpushare_agent.core.kube.session import KubeLists, Watched, WatchEvent, WentBack
from gpushare_agent.core.model.errors import AgentError, Conflict, Corrupt, Rejected
from gpushare_agent.core.model.pods import version_number

log = structlog.get_logger(__name__)

WATCH_OUTCOMES = ("conflict", "corrupt", "ended", "notfound", "rejected", "throttled", "unavailable")
HEALTHY_S = 10.0
"""A watch that lasted so long proves the connection: the next one starts at once."""


class Handler:
    """Where the objects go, as undecoded JSON; subclass it. Corrupt means: unreadable, its last readable state stays."""

    def key(self, raw: Raw) -> str:
        raise NotImplementedError

    def put(self, raw: Raw) -> bool:
        """Whether the object is of interest; one that no longer is will be removed."""
        raise NotImplementedError

    def remove(self, key: str) -> None:
        raise NotImplementedError

    def list_begins(self) -> None:
        """The API server has not been asked yet: what is known now by other ways, and not listed then, is gone."""

    def went_back(self) -> None:
        """The versions known so far say nothing of what comes now (`WentBack`)."""

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


class Informer(Struct, kw_only=True, eq=False):
    """`run` once; `refresh` at any time while it runs. `kind` names the objects in logs and metrics."""

    kind: str
    watched: Watched
    handler: Handler
    metrics: CountsInforming
    backoff: Backoff = Backoff(base_s=0.5, cap_s=30.0)
    clock: Callable[[], float] = time.monotonic
    _version: str = ""
    _known: set[str] = field(default_factory=set)
    _lists_requested: int = 0
    # Below the number of requests, which is 0 so far: the first list is made without being asked for.
    _lists_done: int = -1
    _lists: ChangeSignal = field(default_factory=ChangeSignal)
    _scope: asyncio.Timeout | None = None
    last_message_at: float | None = None
    """When a list or an event last came from the API server, or a healthy watch ended, by the monotonic clock."""
    lost: Lost | None = None
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
        """List again; returns once a list that began after this call is complete. May be cancelled.

        A new leader must not decide on what it received before.
        """
        self._lists_requested += 1
        # A list that has begun already may have been answered before this call: only one with this number counts.
        mine = self._lists_requested
        if self._scope is not None and not self._scope.expired():
            # Ends the watch, or the pause after a failure, at once: a new leader waits for it.
            self._scope.reschedule(asyncio.get_running_loop().time())
        # A list may fail and be made again: the caller bounds the wait by being cancelled.
        await self._lists.wait_until(lambda: self._lists_done >= mine)

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
        | gone or silent where it went on    | 1           | the first step of back-off  |
        | any other, and a failed list       | one more    | the next step               |
        """
        # Infinite: the watch never began.
        began_at, events, has_listed, error = float("inf"), 0, False, None
        try:
            # Otherwise the watch goes on where it ended: a list of a large cluster is not made for a connection that
            # broke.
            if not self._version or self._lists_done < self._lists_requested:
                has_listed = True
                await self._list(api)
            async with api.watch_all(self.watched, self._version) as stream:
                began_at, self.lost = self.clock(), None
                # The stream has its own limits (session.py): a silent one ends, or is Conflict.
                async for event in stream:
                    events += 1
                    self.last_message_at = self.clock()
                    self._apply(event)
        except AgentError as e:
            error = e
            # The error of now; the time is that of the first one.
            self.lost = Lost(since=self.lost.since if self.lost is not None else self.clock(), why=str(e))
            if isinstance(e, WentBack):
                self.handler.went_back()
            # Versions are numbers in every API server that is known: another one may be why the watch is refused.
            is_version_odd = isinstance(e, Rejected) and not version_number(self._version)
            if isinstance(e, Conflict | Corrupt) or is_version_odd:
                self._version = ""  # too old, unreadable from here on, or no version at all: only a new list helps
        is_healthy = (now := self.clock()) - began_at >= HEALTHY_S
        # The server has ended it, or has said that nothing is new. One that ends at once, as by a proxy, says nothing.
        if is_healthy and error is None:
            self.last_message_at = now
        # An API server that was away, and cannot continue the watch, is back: its list is what all others wait for.
        is_back = isinstance(error, Conflict) and not has_listed
        failures = 1 if is_healthy or is_back or (events and error is None) else failures + 1
        delay_s = 0.0 if is_healthy and error is None else self.backoff.delay_s(failures)
        # Before the pause, so that the log says when it goes on.
        self._report(error, delay_s)
        await asyncio.sleep(delay_s)
        return failures

    async def _list(self, api: KubeLists) -> None:
        # Before the first page: a `refresh` during the list needs another one.
        requested, began_at = self._lists_requested, self.clock()
        self.handler.list_begins()
        keys, version = await api.list_all(self.watched, self._put_listed)
        listed = set(keys)
        # Sorted, so that handlers see the same order for the same cluster.
        missing = sorted(self._known - listed)
        self._known &= listed
        # The handler removes them, because it may know better: the node's pods compare their versions.
        self.handler.list_ended(listed, missing, version)
        self._version = version
        self._lists_done = requested
        self._lists.notify()
        self.last_message_at = self.clock()
        self.metrics.listed(self.kind, self.last_message_at - began_at)
        log.info("listed", kind=self.kind, objects=len(listed), kept=len(self._known), version=version)

    def _put_listed(self, raw: Raw) -> str:
        self._put(raw)
        try:
            # An unreadable object that has a key is listed all the same: its last readable state stays.
            return self.handler.key(raw)
        except Corrupt:
            return ""

    def _apply(self, event: WatchEvent) -> None:
        version = object_meta(event.object, self.kind).version
        # An earlier state, which would stay: of a pod that is deleted nothing else will come.
        if 0 < version_number(version) < version_number(self._version):
            raise Conflict(f"cannot watch {self.watched.what}: version {version} came after {self._version}")
        if event.type == "DELETED":
            # By the key alone: what a deleted object asks for may be unreadable.
            self._remove(self.handler.key(event.object))
        elif event.type in ("ADDED", "MODIFIED"):
            self._put(event.object)
        elif event.type != "BOOKMARK":
            raise Corrupt(f"cannot watch {self.watched.what}: unknown event type {event.type[:80]!r}")
        # Every event moves the place to go on from, bookmarks above all: they are sent for that.
        self._version = version or self._version

    def _put(self, raw: Raw) -> None:
        try:
            key = self.handler.key(raw)
            if self.handler.put(raw):
                self._known.add(key)
            else:
                self._remove(key)
        # Whatever a handler raises: what one object holds must not end the informer, and with it the process.
        except Exception as e:  # noqa: BLE001
            self.metrics.unreadable(self.kind)
            error = str(e) if isinstance(e, Corrupt) else repr(e)
            log.warning("object_unreadable", kind=self.kind, error=error, then="its last readable state stays")

    def _remove(self, key: str) -> None:
        # The handler never had deleted objects that were not of interest.
        if key in self._known:
            self._known.discard(key)
            self.handler.remove(key)

    def _report(self, error: AgentError | None, delay_s: float) -> None:
        kinds = (kind.__name__.lower() for kind in type(error).__mro__)
        outcome = "ended" if error is None else next(filter(WATCH_OUTCOMES.__contains__, kinds), "unavailable")
        self.metrics.watch_ended(self.kind, outcome)
        if error is None:
            # The API server ends each watch after some minutes: nothing has happened.
            log.debug("watch_ended", kind=self.kind, retry_in_s=round(delay_s, 2))
            return
        # A missing right stays missing until a person grants it.
        write = log.error if isinstance(error, Rejected) else log.warning
        then = "objects stay as they were"
        write(
            "watch_failed", kind=self.kind, outcome=outcome, error=str(error), retry_in_s=round(delay_s, 2), then=then
        )
