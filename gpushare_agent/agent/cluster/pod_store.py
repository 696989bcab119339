"""The pods of this node as the API server last reported them, and what keeps them so. Memory only.

`PodStore` is synchronous but for `wait_synced`. Readers may call at any time: nothing that changes it awaits, so a method
never leaves it half changed. The mutable state is: the pods by UID and by name, the UIDs deleted lately, `changes`,
`is_synced`.

`NodePods` is its only writer: the informer's handler, and the read of one pod now. An admission cannot wait for the watch:
`fetch` reads the pod by name and stores it, and what the watch reports meanwhile wins. Its state is the pods of a list that
is under way. An answer to a GET may be newer than the watch, or older than a deletion that the watch has already reported.
So an older resourceVersion of a pod is ignored, and a deleted object's UID never comes back (UIDs are not used twice).

A static pod is here under the kubelet's UID, from the kubelet's list of pods or as its mirror pod: one pod. Without a mirror
pod it is not in the API server's list and watch; what the kubelet lists counts (`put_static`): at its admission the API
server has nothing of it, or an earlier one of that name. The kubelet names them `<name>-<node>`, so only pods with such a
name are searched in its own list.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import structlog
from msgspec import Raw, Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.kubelet.static_pods import StaticPods
from gpushare_agent.core.kit.supervision import ChangeSignal, ReportOnce, bounded
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.kube.informer import Handler
from gpushare_agent.core.kube.objects import pod_uid
from gpushare_agent.core.kube.pods import pod_of_node, static_pod
from gpushare_agent.core.model.errors import AgentError, Conflict, Corrupt, NotFound, Unavailable
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import Pod, version_number

PodChange = Callable[[Pod | None, Pod | None], None]
"""Called with (old, new) after the store has changed: (None, pod) is new, (pod, None) is gone."""

PodName = tuple[str, str]
"""Namespace and name."""

GONE_REMEMBERED_S = 600.0
"""A request that began before a deletion is answered long before this."""
MAX_GONE = 2048


class PodStore:
    """`is_synced` is False until the first list; `changes` wakes after every change. Times are monotonic seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pods: dict[PodUid, Pod] = {}
        self._named: dict[PodName, dict[PodUid, Pod]] = {}
        self._newest: dict[PodName, Pod] = {}
        self._gone: dict[PodUid, float] = {}
        self._subscribers: list[PodChange] = []
        self._sorted: tuple[Pod, ...] | None = None
        self.changes = ChangeSignal()
        self.is_synced = False

    async def wait_synced(self) -> None:
        """The API server has listed this node's pods."""
        await self.changes.wait_until(lambda: self.is_synced)

    def replace_all(self, pods: Iterable[Pod], *, resource_version: str = "") -> None:
        """LISTED: these are the pods as of `resource_version`; the rest are gone.

        A list may come from a lagging cache. A pod that is newer than the list stays, because the list cannot know it and
        the watch that follows will report its end.
        """
        listed = {pod.uid: pod for pod in pods}
        changes: list[tuple[Pod | None, Pod | None]] = [
            (pod, None)
            for uid, pod in sorted(self._pods.items())
            # A static pod without a mirror pod is in no list of the API server.
            if uid not in listed and pod.object_uid and not _is_newer(pod.resource_version, resource_version)
        ]
        changes += [(self._pods.get(uid), pod) for uid, pod in listed.items() if self._is_newer_state(pod)]
        # The first list is a change even if it is empty: admissions wait for it.
        is_first, self.is_synced = not self.is_synced, True
        self._apply(changes, always=is_first)

    def upsert(self, pod: Pod) -> None:
        """Take a pod from a watch event or a GET, unless a later state of it is known.

        A name belongs to one pod at a time: an older pod of this name is gone, though the watch has not reported it yet.
        """
        if not self._is_newer_state(pod):
            return
        former = [
            other
            for other in self._named.get((pod.namespace, pod.name), {}).values()
            if other.uid != pod.uid and _is_newer(pod.resource_version, other.resource_version)
        ]
        for other in former:
            # Its deletion is certain, so an answer to an older GET must not bring it back.
            self._gone[other.object_uid or other.uid] = self._clock()
        self._apply([*((other, None) for other in former), (self._pods.get(pod.uid), pod)])

    def remove(self, object_uid: PodUid) -> None:
        """The API server reported that this pod is deleted."""
        now = self._clock()
        self._gone[object_uid] = now
        self._forget_gone(now)
        if (old := self.get_object(object_uid)) is not None:
            self._apply([(old, None)])

    def put_static(self, pods: Iterable[Pod]) -> None:
        """These are the kubelet's static pods. The state of their mirror pods is newer."""
        static = {pod.uid: pod for pod in pods}
        changes: list[tuple[Pod | None, Pod | None]] = [
            (pod, None) for uid, pod in sorted(self._pods.items()) if uid not in static and not pod.object_uid
        ]
        changes += [
            (old, pod)
            for uid, pod in sorted(static.items())
            # With a mirror pod the API server's state is newer: it has the pod's status.
            if (old := self._pods.get(uid)) is None or not (old.mirror_uid or old == pod)
        ]
        self._apply(changes)

    def forget_versions(self) -> None:
        """All that comes from now on counts as newer than what is known."""
        self._gone.clear()
        for pod in self.pods():
            self._put(pod, replace(pod, resource_version=""))
        self._sorted = None

    def get(self, uid: PodUid) -> Pod | None:
        return self._pods.get(uid)

    def get_object(self, object_uid: PodUid) -> Pod | None:
        """The pod with this UID in the API server."""
        pod = self._pods.get(object_uid)
        if pod is not None and pod.object_uid == object_uid:
            return pod
        # A mirror pod is stored under the kubelet's UID; a node has few, so a search will do.
        return next((pod for pod in self._pods.values() if pod.mirror_uid == object_uid), None)

    def pods(self) -> tuple[Pod, ...]:
        """All pods, by namespace, name and UID."""
        if self._sorted is None:
            self._sorted = tuple(sorted(self._pods.values(), key=lambda pod: (pod.namespace, pod.name, pod.uid)))
        return self._sorted

    def by_name(self) -> Mapping[PodName, Pod]:
        """The pod of this name, of several the live one, then the newest; valid until the next change."""
        return self._newest

    def subscribe(self, callback: PodChange) -> None:
        """Call `callback` after every change, in order. It must not raise and must not change the store."""
        self._subscribers.append(callback)

    def _is_newer_state(self, pod: Pod) -> bool:
        """Also of the same pod: a mirror pod of another name that claims its UID is a forged one."""
        if pod.object_uid in self._gone:
            return False
        old = self._pods.get(pod.uid)
        return old is None or (
            old != pod
            and (old.namespace, old.name) == (pod.namespace, pod.name)
            and not _is_newer(old.resource_version, pod.resource_version)
        )

    def _put(self, old: Pod | None, new: Pod | None) -> None:
        if old is not None:
            del self._pods[old.uid]
            self._named[old.namespace, old.name].pop(old.uid)
        if new is not None:
            self._pods[new.uid] = new
            self._named.setdefault((new.namespace, new.name), {})[new.uid] = new
        for name in {(pod.namespace, pod.name) for pod in (old, new) if pod is not None}:
            if pods := self._named[name]:
                # Several of one name for a moment: a StatefulSet's next pod, and one that is ending.
                self._newest[name] = max(pods.values(), key=liveliness)
            else:
                del self._named[name], self._newest[name]

    def _apply(self, changes: Sequence[tuple[Pod | None, Pod | None]], *, always: bool = False) -> None:
        for old, new in changes:
            self._put(old, new)
        if not changes and not always:
            return
        self._sorted = None
        self.changes.notify()
        for old, new in changes:
            for callback in self._subscribers:
                callback(old, new)

    def _forget_gone(self, now: float) -> None:
        for uid, gone_at in list(self._gone.items()):
            # In the order of insertion, so the first young one ends the search.
            if len(self._gone) <= MAX_GONE and now - gone_at <= GONE_REMEMBERED_S:
                return
            del self._gone[uid]


def liveliness(pod: Pod) -> tuple[bool, bool, bool, int, PodUid]:
    """The key by which, of pods of one name, the greatest counts. A static pod without a mirror pod is newer than the
    mirror pod of its name: its file was changed."""
    is_newest = pod.object_uid is None
    return not pod.is_terminal, not pod.is_deleting, is_newest, version_number(pod.resource_version), pod.uid


def _is_newer(resource_version: str, than: str) -> bool:
    """Whether the first is surely the newer one: both are numbers. Opaque ones cannot be compared: then the later
    message counts."""
    first, second = version_number(resource_version), version_number(than)
    return second > 0 and first > second


log = structlog.get_logger(__name__)

NO_STATIC_PODS = (
    "it may be a static pod, which the API server does not know at its admission: the agent finds these in the kubelet's "
    "own list of pods, where manifests/components/static-pods lets it"
)


class NodePods(Handler, Struct, kw_only=True, eq=False):
    """`attach` when the API server can be reached; `fetch` at any time, it waits for that within its bound. `kubelet` is
    None where the kubelet's list of pods is not to be read."""

    store: PodStore
    node_name: str
    resources: Collection[str]
    kubelet: StaticPods | None = None
    _unreadable: ReportOnce = field(default_factory=ReportOnce)
    _api: KubeApi | None = None
    _is_attached: asyncio.Event = field(default_factory=asyncio.Event)
    _listed: dict[str, Pod] | None = None
    """None: no list is under way."""

    def attach(self, api: KubeApi) -> None:
        self._api = api
        self._is_attached.set()

    def key(self, raw: Raw) -> str:
        return pod_uid(raw)

    def put(self, raw: Raw) -> bool:
        pod = pod_of_node(raw, self.resources)
        # The selector asks for this node's pods alone: whatever else a server sends is not stored.
        if pod.node_name != self.node_name:
            return False
        # A list replaces all pods in one change: page by page, half a list would look like deletions.
        if self._listed is not None:
            self._listed[pod_uid(raw)] = pod
        else:
            self.store.upsert(pod)
        return True

    def remove(self, key: str) -> None:
        self.store.remove(PodUid(key))

    def list_begins(self) -> None:
        self._listed = {}

    def went_back(self) -> None:
        self.store.forget_versions()

    def list_ended(self, keys: Collection[str], missing: Collection[str], version: str) -> None:
        """One change of the store, which decides what of the `missing` is newer than the list."""
        listed, self._listed = self._listed or {}, None
        # An unreadable pod is listed by its key: its last readable state stays.
        present = (listed.get(key) or self.store.get_object(PodUid(key)) for key in sorted(keys))
        self.store.replace_all([pod for pod in present if pod is not None], resource_version=version)

    async def fetch(self, namespace: str, name: str, *, timeout_s: float) -> Pod | None:
        """The pod as the kubelet or the API server has it now, also put into the store; None where this node has no such
        pod, and then the store forgets the pods that it knew by that name.

        Raises:
            NotFound: as None, but it may be a static pod; why that cannot be known.
            Unavailable: no answer within `timeout_s`, the text says why.
            Rejected: the API server does not let us read pods.
            Corrupt: the API server has the pod, but what it asks for cannot be read.
        """
        # The kubelet's list is read for no other pod: it costs a request to the kubelet.
        if not name.endswith(f"-{self.node_name.lower()}"):
            return await self._fetch_object(namespace, name, timeout_s)
        why_not = NO_STATIC_PODS
        if self.kubelet is not None:
            try:
                # Half of the time each, so that a slow kubelet leaves the API server its chance.
                static, why_not = await self._read_static(self.kubelet, timeout_s / 2)
            except AgentError as e:
                why_not = str(e)
            else:
                found = next((p for p in static if (p.namespace, p.name) == (namespace, name)), None)
                if found is not None:
                    return found
        try:
            # An ordinary pod may be named so as well.
            pod = await self._fetch_object(namespace, name, timeout_s / 2)
        except Unavailable as e:
            raise Unavailable(f"{e}; {why_not}" if why_not else str(e)) from e
        if why_not and (pod is None or pod.is_static):  # its file may have changed: this is the former one's mirror pod
            raise NotFound(f"pod {namespace}/{name}: {why_not}")
        return pod

    async def refresh_static(self, *, timeout_s: float) -> None:
        """Read the kubelet's static pods, where that can be done: for those without a mirror pod no event comes."""
        if self.kubelet is None:
            return
        try:
            _, problem = await self._read_static(self.kubelet, timeout_s)
        except AgentError as e:
            problem = str(e)
        if not problem:
            if self._unreadable.is_over():
                log.info("static_pods_readable")
        elif self._unreadable.is_new(problem):
            log.warning("static_pods_unreadable", error=problem, then="they stay as they were last seen")

    async def _read_static(self, kubelet: StaticPods, timeout_s: float) -> tuple[list[Pod], str]:
        """The static pods as the store has them then, and why one of them cannot be read, empty where all can. Raises what
        `StaticPods.read` raises."""
        found, problem = [], ""
        for raw in await kubelet.read(timeout_s=timeout_s):
            try:
                found.append(static_pod(raw, self.resources))
            except Corrupt as e:
                problem = str(e)
        self.store.put_static(found)
        return [self.store.get(pod.uid) or pod for pod in found], problem

    async def _fetch_object(self, namespace: str, name: str, timeout_s: float) -> Pod | None:
        former = [
            p.object_uid
            for p in self.store.pods()
            if (p.namespace, p.name) == (namespace, name) and p.object_uid is not None
        ]
        late = f"cannot get pod {namespace}/{name}: no connection to the API server within {timeout_s:g} s"
        try:
            async with bounded(timeout_s, late):
                # The client is loaded after the agent has registered: an admission may come first.
                while self._api is None:
                    await self._is_attached.wait()
                raw_pod = await self._api.get_pod(namespace, name, timeout_s=timeout_s)
            pod = pod_of_node(raw_pod, self.resources)
        except NotFound:
            for uid in former:  # known before the question: a pod that came after the answer is not among them
                self.store.remove(uid)
            return None
        except Conflict as e:
            # 409 and 410 are answers to writes and watches: for a read they mean no more than that it failed.
            raise Unavailable(str(e)) from e
        if pod.node_name != self.node_name:
            return None
        self.store.upsert(pod)
        # The watch may have reported more meanwhile: a later state, or the pod's deletion.
        return self.store.get(pod.uid)
