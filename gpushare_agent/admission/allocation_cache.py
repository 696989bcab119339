"""The allocation cache: which device IDs each container has. In memory, changed only by the synchronous methods below.

State owned: `_allocations` by container, and for each resource the holders of each device ID. An ID may have several
holders, all of one pod: the kubelet passes an init container's IDs on to the containers after it without any release
(measured, docs/architecture.md), so use is counted by distinct IDs. The counts by GPU are kept too, because every admission
call reads them and a node has thousands of IDs.

The kubelet's records are the truth; this cache is rebuilt from them at start and reconciled with them afterwards. It
exists because the kubelet may offer an ID that it has forgotten to be taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from gpushare_agent.admission.decisions.ledger import Ledger
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import DeviceId, GpuUuid, PodUid
from gpushare_agent.model.resources import ResourceKind

K = TypeVar("K", GpuUuid, DeviceId)


class AllocationCache:
    """All allocations of the node. Not thread-safe: event loop only."""

    def __init__(self) -> None:
        self._allocations: dict[ContainerKey, Allocation] = {}
        self._pods: dict[PodUid, dict[ContainerKey, None]] = {}
        self._holders: dict[ResourceKind, dict[DeviceId, frozenset[ContainerKey]]] = {kind: {} for kind in ResourceKind}
        self._on_gpu: dict[ResourceKind, dict[GpuUuid, int]] = {kind: {} for kind in ResourceKind if kind.binds_gpu}
        self._charges: dict[GpuUuid, dict[DeviceId, int]] = {}
        self._on_change: list[Callable[[Allocation | None, Allocation | None], None]] = []
        self.version = 0

    def subscribe(self, callback: Callable[[Allocation | None, Allocation | None], None]) -> None:
        """Call `callback(old, new)` synchronously after each change of a container; None stands for no allocation."""
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
        """The containers that have each ID; free IDs are absent."""
        return self._holders[kind]

    def put(self, allocation: Allocation) -> None:
        """Record a container's allocation in place of the one it had."""
        old = self._drop(allocation.key)
        self._allocations[allocation.key] = allocation
        self._pods.setdefault(allocation.key.pod_uid, {})[allocation.key] = None
        own = frozenset({allocation.key})
        for kind, ids in _ids(allocation):
            holders = self._holders[kind]
            for device in ids:
                others = holders.get(device)
                holders[device] = own if others is None else others | own
                if others is None and kind.binds_gpu:
                    _add(self._on_gpu[kind], _gpu(device), 1)
        self._charge(allocation, 1)
        self._changed(old, allocation)

    def release(self, key: ContainerKey) -> Allocation | None:
        """Forget a container; returns its allocation, None where it had none."""
        old = self._drop(key)
        if old is not None:
            self._changed(old, None)
        return old

    def release_pod(self, uid: PodUid) -> tuple[Allocation, ...]:
        return tuple(old for key in sorted(self._pods.get(uid, ())) if (old := self.release(key)) is not None)

    def replace_all(self, allocations: Iterable[Allocation]) -> None:
        """Start over with the allocations that the kubelet's records show."""
        for key in list(self._allocations):
            self.release(key)
        for allocation in allocations:
            self.put(allocation)

    def used_cores(self, *, without: ContainerKey | None = None) -> dict[GpuUuid, int]:
        """Distinct allocated vcore IDs on each GPU, less those that only `without` has."""
        return self._used(ResourceKind.VCORE, without)

    def used_gpu_mem(self, *, without: ContainerKey | None = None) -> dict[GpuUuid, int]:
        """The same of gpu-mem units."""
        return self._used(ResourceKind.GPU_MEM, without)

    def _used(self, kind: ResourceKind, without: ContainerKey | None) -> dict[GpuUuid, int]:
        used = dict(self._on_gpu[kind])
        left_out = self._allocations.get(without) if without is not None else None
        for device in left_out.ids(kind) if left_out is not None else ():
            if len(self._holders[kind][device]) == 1:
                _add(used, _gpu(device), -1)
        return used

    def used_blocks(self, *, without: ContainerKey | None = None) -> dict[GpuUuid, int]:
        """Memory blocks charged to each GPU that is shared: distinct vmemory IDs of the containers on it."""
        used = {gpu: len(charges) for gpu, charges in self._charges.items()}
        left_out = self._allocations.get(without) if without is not None else None
        if left_out is not None and (gpu := _charged_gpu(left_out)) is not None:
            charges = self._charges[gpu]
            _add(used, gpu, -sum(charges[device] == 1 for device in left_out.vmemory_ids))
        return used

    def ledger(self, inventory: GpuInventory, *, without: ContainerKey | None = None) -> Ledger:
        """What is allocated, less what only `without` has; valid until the next change."""
        return Ledger(
            inventory=inventory,
            used_cores=self.used_cores(without=without),
            used_blocks=self.used_blocks(without=without),
            used_gpu_mem=self.used_gpu_mem(without=without),
            holders=self._holders,
            allocations=self._allocations,
        )

    def _charge(self, allocation: Allocation, by: int) -> None:
        gpu = _charged_gpu(allocation)
        if gpu is None:
            return
        charges = self._charges.setdefault(gpu, {})
        for device in allocation.vmemory_ids:
            _add(charges, device, by)
        if not charges:
            del self._charges[gpu]

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
                    continue
                del holders[device]
                if kind.binds_gpu:
                    _add(self._on_gpu[kind], _gpu(device), -1)
        self._charge(old, -1)
        return old

    def _changed(self, old: Allocation | None, new: Allocation | None) -> None:
        self.version += 1
        for callback in self._on_change:
            callback(old, new)


def _ids(allocation: Allocation) -> tuple[tuple[ResourceKind, frozenset[DeviceId]], ...]:
    return tuple((kind, allocation.ids(kind)) for kind in ResourceKind)


def _gpu(device: DeviceId) -> GpuUuid:
    return GpuUuid(device.partition("::")[0])


def _charged_gpu(allocation: Allocation) -> GpuUuid | None:
    """The GPU to which its memory is charged block by block; None for whole GPUs, which come with all of it."""
    has_charge = allocation.gpus and allocation.vmemory_ids and not allocation.is_whole
    return allocation.gpus[0] if has_charge else None


def _add(counts: dict[K, int], key: K, by: int) -> None:
    """Entries of zero are removed."""
    count = counts.get(key, 0) + by
    if count:
        counts[key] = count
    else:
        counts.pop(key, None)
