"""Objects of the embedded API server, with one version counter and a bounded history of changes.

State owned: the objects, the counter, the history. Objects are replaced, never changed in place: whoever reads one may
keep it. Not for HTTP, defaults or rules of a resource: see api_server, pod_manifest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gpushare_agent.model.errors import Conflict, NotFound
from gpushare_agent.sandbox.change_signal import ChangeSignal

RawObject = dict[str, Any]
ObjectKey = tuple[str, str]
"""Namespace (empty for cluster-wide resources) and name."""

KINDS = {"pods": "Pod", "nodes": "Node", "events": "Event", "configmaps": "ConfigMap", "leases": "Lease"}
"""The resources served."""
GROUPS = {"leases": "coordination.k8s.io/v1"}
"""Group and version of those that are not of core/v1."""
CLUSTER_WIDE = frozenset({"nodes"})


class AlreadyExists(Conflict):
    """An object of that name is there (HTTP 409 AlreadyExists)."""


class Expired(Conflict):
    """The history no longer reaches back that far (HTTP 410)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One step of the history. `before` is None for a creation, `after` for a removal."""

    version: int
    resource: str
    before: RawObject | None
    after: RawObject | None


def group_version(resource: str) -> str:
    return GROUPS.get(resource, "v1")


def base_path(resource: str) -> str:
    """Of its group: `/api/v1`, `/apis/coordination.k8s.io/v1`."""
    return f"/apis/{GROUPS[resource]}" if resource in GROUPS else "/api/v1"


def key_of(raw: RawObject) -> ObjectKey:
    metadata = raw["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


class ObjectStore:
    """Synchronous; every change is visible to readers and watchers at the same version. `on_change` hears of it before
    those that wait."""

    def __init__(
        self, *, signal: ChangeSignal, history_limit: int, on_change: Callable[[Change], None] = lambda change: None
    ) -> None:
        self.version = 1
        self.signal = signal
        self.signals = {resource: ChangeSignal() for resource in KINDS}
        """Of one kind of objects: a watch need not wake up for all of them."""
        self._objects: dict[str, dict[ObjectKey, RawObject]] = {resource: {} for resource in KINDS}
        self._history: deque[Change] = deque()
        self._history_limit = history_limit
        self._on_change = on_change
        self._oldest = self.version

    def all(self, resource: str) -> list[RawObject]:
        """Sorted by namespace and name."""
        return [raw for _, raw in sorted(self._objects[resource].items(), key=lambda item: item[0])]

    def in_creation_order(self, resource: str) -> list[RawObject]:
        return list(self._objects[resource].values())

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
        if raw == before:
            return before
        return self._commit(resource, before, raw)

    def remove(self, resource: str, key: ObjectKey) -> RawObject:
        before = self.get(resource, key)
        self._commit(resource, before, None)
        return before

    def changes_since(self, version: int) -> Iterable[Change]:
        """Raises Expired where the history was cut after `version`."""
        if version < self._oldest:
            raise Expired(f"too old resource version: {version} ({self._oldest})")
        newest_first = list(islice(reversed(self._history), max(0, self.version - version)))
        return newest_first[::-1]

    def compact(self) -> None:
        self._history.clear()
        self._oldest = self.version

    def _commit(self, resource: str, before: RawObject | None, after: RawObject | None) -> RawObject:
        self.version += 1
        raw = after if after is not None else before
        assert raw is not None  # noqa: S101 - one of the two is always given
        raw = {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(self.version)}}
        if after is not None:
            self._objects[resource][key_of(raw)] = raw
            change = Change(version=self.version, resource=resource, before=before, after=raw)
        else:
            del self._objects[resource][key_of(raw)]
            change = Change(version=self.version, resource=resource, before=raw, after=None)
        self._history.append(change)
        while len(self._history) > self._history_limit:
            self._oldest = self._history.popleft().version
        self._on_change(change)
        self.signals[resource].notify()
        self.signal.notify()
        return raw
