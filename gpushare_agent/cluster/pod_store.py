"""The pods of this node as last heard from the API server. Memory only, synchronous, changed by its one writer.

The writer is the pod informer (and the API reads made on its behalf). Readers may call at any time: a method never
leaves the store half changed, for nothing here awaits. The mutable state is: the pods by UID, the UIDs deleted of late,
`version`, `is_synced`, `synced_at`, `last_event_at`.

An answer to a GET may be newer than the watch, or older than a deletion that the watch has already told. So an older
resourceVersion of a pod is ignored, and a deleted UID never comes back (UIDs are not used twice).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod, version_number

PodChange = Callable[[Pod | None, Pod | None], None]
"""Told (old, new) after the store has changed: (None, pod) is new, (pod, None) is gone."""

GONE_KEPT_S = 600.0
"""A request that began before a deletion is answered long before this."""
GONE_KEPT = 2048


class PodStore:
    """`is_synced` is False until the first list; `version` grows with every change. Times are monotonic seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pods: dict[PodUid, Pod] = {}
        self._order: dict[PodUid, int] = {}
        self._seen = 0
        self._gone: dict[PodUid, float] = {}
        self._subscribers: list[PodChange] = []
        self._changed = asyncio.Event()
        self._sorted: tuple[Pod, ...] | None = None
        self.version = 0
        self.is_synced = False
        self.synced_at: float | None = None
        self.last_event_at: float | None = None

    def replace_all(self, pods: Iterable[Pod], *, resource_version: str = "") -> None:
        """LISTED: these are the pods as of `resource_version`; the rest are gone.

        A list may come from a lagging cache. A pod that is newer than the list is kept, for the list cannot know it and
        the watch that follows will tell its end.
        """
        listed = {pod.uid: pod for pod in pods}
        changes: list[tuple[Pod | None, Pod | None]] = [
            (pod, None)
            for uid, pod in sorted(self._pods.items())
            if uid not in listed and not _is_newer(pod.resource_version, resource_version)
        ]
        changes += [(self._pods.get(uid), pod) for uid, pod in listed.items() if self._is_news(pod)]
        for old, new in changes:
            self._put(old, new)
        is_first, self.is_synced = not self.is_synced, True
        self.synced_at = self.last_event_at = self._clock()
        self._publish(changes, always=is_first)

    def upsert(self, pod: Pod) -> None:
        """Take a pod from a watch event or a GET, unless a later state of it is known.

        A name has one bearer at a time: an older pod of this name is gone, though the watch has not told of it yet.
        """
        self.last_event_at = self._clock()
        if not self._is_news(pod):
            return
        former = [
            other
            for other in self._pods.values()
            if (other.name, other.namespace) == (pod.name, pod.namespace)
            and other.uid != pod.uid
            and _is_newer(pod.resource_version, other.resource_version)
        ]
        old = self._pods.get(pod.uid)
        changes = [*((other, None) for other in former), (old, pod)]
        for other in former:
            self._gone[other.uid] = self.last_event_at
        for before, after in changes:
            self._put(before, after)
        self._publish(changes)

    def remove(self, uid: PodUid, *, gone_at: float | None = None) -> None:
        """The API server said that this pod is deleted, at `gone_at` (now, if not given)."""
        gone_at = self._clock() if gone_at is None else gone_at
        self.last_event_at = gone_at
        self._gone[uid] = gone_at
        self._forget_gone(gone_at)
        old = self._pods.get(uid)
        if old is not None:
            self._put(old, None)
            self._publish([(old, None)])

    def touch(self) -> None:
        """The API server was heard (a bookmark) and nothing changed."""
        self.last_event_at = self._clock()

    def get(self, uid: PodUid) -> Pod | None:
        return self._pods.get(uid)

    def by_name(self, namespace: str, name: str) -> Pod | None:
        """The newest pod of that name: an older one may still be here until its deletion is told."""
        named = [pod for pod in self._pods.values() if pod.name == name and pod.namespace == namespace]
        return max(named, key=self._age_rank, default=None)

    def pods(self) -> tuple[Pod, ...]:
        """All pods, by namespace, name and UID."""
        if self._sorted is None:
            self._sorted = tuple(sorted(self._pods.values(), key=lambda pod: (pod.namespace, pod.name, pod.uid)))
        return self._sorted

    def gone_at(self, uid: PodUid) -> float | None:
        """When this UID was deleted, None where no deletion was told in the last GONE_KEPT_S."""
        return self._gone.get(uid)

    async def wait_change(self, since: int) -> int:
        """Wait until `version` is not `since`; the new version. Bound it with asyncio.timeout."""
        while self.version == since:
            await self._changed.wait()
        return self.version

    def subscribe(self, callback: PodChange) -> None:
        """Call `callback` after every change, in order. It must not raise and must not change the store."""
        self._subscribers.append(callback)

    def _is_news(self, pod: Pod) -> bool:
        if pod.uid in self._gone:
            return False
        old = self._pods.get(pod.uid)
        return old is None or (old != pod and not _is_newer(old.resource_version, pod.resource_version))

    def _put(self, old: Pod | None, new: Pod | None) -> None:
        if new is not None:
            if old is None:
                self._seen += 1
                self._order[new.uid] = self._seen
            self._pods[new.uid] = new
        elif old is not None:
            del self._pods[old.uid]
            del self._order[old.uid]

    def _publish(self, changes: list[tuple[Pod | None, Pod | None]], *, always: bool = False) -> None:
        if not changes and not always:
            return
        self._sorted = None
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()
        for old, new in changes:
            for callback in self._subscribers:
                callback(old, new)

    def _age_rank(self, pod: Pod) -> tuple[int, int]:
        """A name is free only when its former bearer is gone: the higher resourceVersion is the later pod."""
        return (version_number(pod.resource_version), self._order[pod.uid])

    def _forget_gone(self, now: float) -> None:
        for uid, gone_at in list(self._gone.items()):
            if len(self._gone) <= GONE_KEPT and now - gone_at <= GONE_KEPT_S:
                return
            del self._gone[uid]


def _is_newer(resource_version: str, than: str) -> bool:
    """Whether the first is surely the newer one: both are numbers. Opaque ones cannot be compared: then the later
    message counts."""
    first, second = version_number(resource_version), version_number(than)
    return second > 0 and first > second
