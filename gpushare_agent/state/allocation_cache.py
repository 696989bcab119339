"""The allocation cache: who holds which device IDs. In memory, changed only by the synchronous methods below.

State: `_allocations` by container, and for each resource the holders of each device ID. An ID may have several holders,
all of one pod: the kubelet hands an init container's IDs to the containers after it without any release (measured,
docs/architecture.md), so use is counted by distinct IDs.

The kubelet's records are the truth; this cache is rebuilt from them at start and reconciled with them afterwards. It
exists because the kubelet may offer an ID that it has forgotten to be taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.names import DeviceId, GpuUuid, PodUid
from gpushare_agent.model.resources import ResourceKind


class AllocationCache:
    """All allocations of the node. Not thread-safe: event loop only."""

    def __init__(self) -> None:
        self._allocations: dict[ContainerKey, Allocation] = {}
        self._pods: dict[PodUid, dict[ContainerKey, None]] = {}
        self._holders: dict[ResourceKind, dict[DeviceId, frozenset[ContainerKey]]] = {kind: {} for kind in ResourceKind}
        self._on_change: list[Callable[[Allocation | None, Allocation | None], None]] = []
        self.version = 0

    def subscribe(self, callback: Callable[[Allocation | None, Allocation | None], None]) -> None:
        """Call `callback(old, new)` synchronously after each change of a container; None stands for nothing held."""
        self._on_change.append(callback)

    def __len__(self) -> int:
        return len(self._allocations)

    def __iter__(self) -> Iterator[Allocation]:
        return iter(sorted(self._allocations.values(), key=lambda a: a.key))

    def get(self, key: ContainerKey) -> Allocation | None:
        return self._allocations.get(key)

    def view(self) -> Mapping[ContainerKey, Allocation]:
        """The present allocations by container; valid until the next change."""
        return self._allocations

    def of_pod(self, uid: PodUid) -> tuple[Allocation, ...]:
        return tuple(self._allocations[key] for key in sorted(self._pods.get(uid, ())))

    def holders(self, kind: ResourceKind) -> Mapping[DeviceId, frozenset[ContainerKey]]:
        """The containers that hold each ID; IDs that nobody holds are absent."""
        return self._holders[kind]

    def put(self, allocation: Allocation) -> None:
        """Record what a container holds now, in place of what it held before."""
        old = self._drop(allocation.key)
        self._allocations[allocation.key] = allocation
        self._pods.setdefault(allocation.key.pod_uid, {})[allocation.key] = None
        for kind, ids in _ids(allocation):
            holders = self._holders[kind]
            for device in ids:
                holders[device] = holders.get(device, frozenset()) | {allocation.key}
        self._changed(old, allocation)

    def release(self, key: ContainerKey) -> Allocation | None:
        """Forget a container; returns what it held, None where it held nothing."""
        old = self._drop(key)
        if old is not None:
            self._changed(old, None)
        return old

    def release_resource(self, key: ContainerKey, kind: ResourceKind) -> None:
        """Forget one resource of a container, and the container with its last one."""
        old = self._allocations.get(key)
        if old is None:
            return
        none: frozenset[DeviceId] = frozenset()
        new = replace(old, vcore_ids=none) if kind is ResourceKind.VCORE else replace(old, vmemory_ids=none)
        if new.vcore_ids or new.vmemory_ids:
            self.put(new)
        else:
            self.release(key)

    def release_pod(self, uid: PodUid) -> tuple[Allocation, ...]:
        return tuple(old for key in sorted(self._pods.get(uid, ())) if (old := self.release(key)) is not None)

    def replace_all(self, allocations: Iterable[Allocation]) -> None:
        """Start over with what the kubelet's records say."""
        for key in list(self._allocations):
            self.release(key)
        for allocation in allocations:
            self.put(allocation)

    def used_cores(self, *, without: ContainerKey | None = None) -> dict[GpuUuid, int]:
        """Distinct vcore IDs held on each card, those that only `without` holds left out."""
        used: dict[GpuUuid, int] = {}
        alone = frozenset({without}) if without is not None else None
        for device, keys in self._holders[ResourceKind.VCORE].items():
            if keys != alone:
                card = GpuUuid(device.partition("::")[0])
                used[card] = used.get(card, 0) + 1
        return used

    def used_blocks(self, *, without: ContainerKey | None = None) -> dict[GpuUuid, int]:
        """Memory blocks charged to each card that is shared: distinct vmemory IDs of the containers on it."""
        charged: dict[GpuUuid, set[DeviceId]] = {}
        for key, allocation in self._allocations.items():
            if key != without and not allocation.is_whole and allocation.cards:
                charged.setdefault(allocation.cards[0], set()).update(allocation.vmemory_ids)
        return {card: len(ids) for card, ids in charged.items()}

    def _drop(self, key: ContainerKey) -> Allocation | None:
        old = self._allocations.pop(key, None)
        if old is None:
            return None
        keys = self._pods[key.pod_uid]
        del keys[key]
        if not keys:
            del self._pods[key.pod_uid]
        for kind, ids in _ids(old):
            holders = self._holders[kind]
            for device in ids:
                left = holders[device] - {key}
                if left:
                    holders[device] = left
                else:
                    del holders[device]
        return old

    def _changed(self, old: Allocation | None, new: Allocation | None) -> None:
        self.version += 1
        for callback in self._on_change:
            callback(old, new)


def _ids(allocation: Allocation) -> tuple[tuple[ResourceKind, frozenset[DeviceId]], ...]:
    return ((ResourceKind.VCORE, allocation.vcore_ids), (ResourceKind.VMEMORY, allocation.vmemory_ids))
