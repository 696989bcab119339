"""Objects of the embedded API server, with one version counter and a bounded history of changes.

State owned: the objects, the counter, the history, the index of each node's pods. Objects are replaced, never changed in
place: a reader may keep them. Not for HTTP, defaults or rules of a resource: see objects.py, pod_manifest.py.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import islice

from msgspec import Struct

from gpushare_agent.core.kit.supervision import ChangeSignal
from gpushare_agent.core.model.errors import Conflict, NotFound
from gpushare_agent.sandbox.api.kinds import KINDS
from gpushare_agent.sandbox.pod_manifest import RawObject, is_mirror

ObjectKey = tuple[str, str]
"""Namespace (empty for cluster-wide resources) and name."""


class AlreadyExists(Conflict):
    """An object of that name is there (HTTP 409 AlreadyExists)."""


class Expired(Conflict):
    """The history no longer reaches back that far (HTTP 410)."""


class Change(Struct, frozen=True, kw_only=True):
    """One step of the history. `before` is None for a creation, `after` for a removal."""

    version: int
    resource: str
    before: RawObject | None
    after: RawObject | None


def key_of(raw: RawObject) -> ObjectKey:
    metadata = raw["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


class ObjectStore:
    """Synchronous; every change is visible to readers and watchers at the same version."""

    def __init__(self, *, history_limit: int) -> None:
        self.version = 1
        self.signal = ChangeSignal()
        self.pods_by_node = PodsByNode()
        self.signals = {resource: ChangeSignal() for resource in KINDS}
        """By resource: a watch wakes up for its own only."""
        self._objects: dict[str, dict[ObjectKey, RawObject]] = {resource: {} for resource in KINDS}
        self._history: deque[Change] = deque(maxlen=history_limit)
        self._oldest = self.version

    def all(self, resource: str) -> list[RawObject]:
        """The objects, sorted by namespace and name."""
        # By name, as lists of a real API server come from etcd.
        return [raw for _, raw in sorted(self._objects[resource].items(), key=lambda item: item[0])]

    def in_creation_order(self, resource: str) -> list[RawObject]:
        return list(self._objects[resource].values())

    def remove_oldest(self, resource: str, keep: int) -> None:
        """All but the newest `keep`."""
        objects = self._objects[resource]
        for key in list(islice(objects, max(0, len(objects) - keep))):
            self.remove(resource, key)

    def find(self, resource: str, key: ObjectKey) -> RawObject | None:
        return self._objects[resource].get(key)

    def get(self, resource: str, key: ObjectKey) -> RawObject:
        raw = self.find(resource, key)
        if raw is None:
            raise NotFound(f'{resource} "{key[1]}" not found')
        return raw

    def add(self, resource: str, raw: RawObject) -> RawObject:
        if self.find(resource, key_of(raw)) is not None:
            raise AlreadyExists(f'{resource} "{key_of(raw)[1]}" already exists')
        return self._commit(resource, None, raw)

    def replace(self, resource: str, raw: RawObject) -> RawObject:
        """An object equal to the stored one is no change: no version, no event, as in a real API server."""
        before = self.get(resource, key_of(raw))
        # Otherwise a controller that writes the same again would wake itself up without end.
        return before if raw == before else self._commit(resource, before, raw)

    def remove(self, resource: str, key: ObjectKey) -> RawObject:
        before = self.get(resource, key)
        self._commit(resource, before, None)
        return before

    def changes_since(self, version: int) -> Iterable[Change]:
        """Raises Expired where the history was cut after `version`."""
        # A watch that lags too far behind gets 410 and lists again.
        if version < self._oldest:
            raise Expired(f"too old resource version: {version} ({self._oldest})")
        # From the end, because watches are near it: the history may have 20,000 changes.
        return list(islice(reversed(self._history), max(0, self.version - version)))[::-1]

    def compact(self) -> None:
        self._history.clear()
        self._oldest = self.version

    def _commit(self, resource: str, before: RawObject | None, after: RawObject | None) -> RawObject:
        self.version += 1
        shown = after or before or {}
        raw = {**shown, "metadata": {**shown["metadata"], "resourceVersion": str(self.version)}}
        if after is not None:
            self._objects[resource][key_of(raw)] = after = raw
        else:
            del self._objects[resource][key_of(raw)]
            before = raw
        change = Change(version=self.version, resource=resource, before=before, after=after)
        # The version of the dropped change: a watch that has seen it has missed nothing yet.
        if len(self._history) == self._history.maxlen:
            self._oldest = self._history[0].version
        # Before the signals, so that a waiter that wakes up finds it.
        self._history.append(change)
        if resource == "pods":
            self.pods_by_node.note(before, after)
        self.signals[resource].notify()
        self.signal.notify()
        return raw


class PodsByNode:
    """An index with a wake-up for each node: with twenty kubelets not every change is every kubelet's. Without mirror
    pods, which no embedded kubelet runs."""

    def __init__(self) -> None:
        self._pods: defaultdict[str, dict[ObjectKey, RawObject]] = defaultdict(dict)
        self._signals: defaultdict[str, ChangeSignal] = defaultdict(ChangeSignal)

    def of(self, node_name: str) -> list[RawObject]:
        """The pods of a node, in the order in which they were bound."""
        return list(self._pods[node_name].values())

    def signal_of(self, node_name: str) -> ChangeSignal:
        """Its count grows with every change of a pod of the node."""
        return self._signals[node_name]

    def note(self, before: RawObject | None, after: RawObject | None) -> None:
        old, new = _node_name(before), _node_name(after)
        # Deleted, or, as no API server allows it, moved to another node.
        if before is not None and old != new:
            self._pods[old].pop(key_of(before), None)
        # A pod without a node concerns no kubelet.
        if after is not None and new:
            self._pods[new][key_of(after)] = after
        for name in sorted({old, new} - {""}):
            self.signal_of(name).notify()


def _node_name(raw: RawObject | None) -> str:
    return "" if raw is None or is_mirror(raw) else str(raw["spec"].get("nodeName") or "")
